"""What the paper, and we, claim on real data, judged by one rule.

A claim is a list of comparisons, each "this rival is above that one in this measure": the
difference of their means over seeds, with Welch's 95 % interval. It is as claimed if the whole
interval is on the claimed side, the other way if the whole interval is on the other, and else
not told apart.

    holds                 all comparisons are as claimed
    holds with a remark   those that the claim rests on are; the remark names the others
    does not hold         one that it rests on is not as claimed; if none is the other way, the
                          remark says that the claim is not refuted

"About as accurate" is: above the other less `MARGIN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from mirrorhead.lab.report.entry import Entry
from mirrorhead.lab.report.real_data.results import KINDS, Run, Study
from mirrorhead.lab.report.real_data.statistics import Difference, Outcome, outcome, welch
from mirrorhead.lab.report.tables import Cell, Table, number, word
from mirrorhead.lab.verdicts import Verdict, Word

#: What "about as accurate" allows: a point of accuracy.
MARGIN = 0.01

RULE = (
    "A comparison is of means over seeds. It is as claimed if Welch's 95 % interval of the"
    " difference lies wholly on the claimed side. The claim holds if all its comparisons are as"
    " claimed, with a remark if only those are that it rests on, and else does not hold."
    f" About as accurate: less than {100 * MARGIN:g} point below."
)


@dataclass(frozen=True)
class Measure:
    """A number of a run, how to write it, and whether the claim is that it is higher."""

    name: str
    of: Callable[[Run], float | None]
    digits: int = 3
    scale: float = 1.0
    unit: str = ""
    higher: bool = True


@dataclass(frozen=True)
class Comparison:
    """The claim that rival `one` is above `two` in a measure; it may be `margin` below.

    rests: whether the claim it belongs to rests on it.
    """

    measure: Measure
    one: str
    two: str
    rests: bool = True
    margin: float = 0.0


@dataclass(frozen=True)
class Claim:
    """A claim on the runs of a study, and what it compares."""

    name: str
    study: str
    title: str
    text: str
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True)
class Compared:
    """A comparison with its numbers; `difference` is one - two as it is, whatever is claimed."""

    asked: Comparison
    one: float
    two: float
    difference: Difference
    outcome: Outcome

    def __str__(self) -> str:
        """The measure and its difference, in words."""
        measure, difference = self.asked.measure, self.difference
        value, low, high = (
            _signed(measure.scale * x, measure.digits)
            for x in (difference.value, difference.low, difference.high)
        )
        return f"{measure.name} {value}{measure.unit} ({low} to {high}), {self.outcome}"


def compare(study: Study, asked: Comparison) -> Compared:
    """Compute a comparison; a ValueError says why it cannot be."""
    one, two = (_values(study, name, asked.measure) for name in (asked.one, asked.two))
    difference = welch(one, two)
    claimed = difference if asked.measure.higher else welch(two, one)
    found = outcome(claimed, asked.margin)
    return Compared(asked, fmean(one), fmean(two), difference, found)


def rule(compared: Sequence[Compared]) -> tuple[Word, str]:
    """The verdict of a claim from its comparisons, and the remark."""
    missed = [c for c in compared if c.outcome != "as claimed"]
    resting = [c for c in missed if c.asked.rests]
    if any(c.outcome == "the other way" for c in resting):
        return "does not hold", ""
    if resting:
        return "does not hold", "It is not refuted: the seeds do not tell the rivals apart."
    if missed:
        named = [
            f"{c.asked.measure.name}, {c.asked.one} and {c.asked.two}, {c.outcome}" for c in missed
        ]
        return "holds with a remark", f"Not as claimed: {'; '.join(named)}."
    return "holds", ""


def judge_claim(study: Study, claim: Claim) -> Entry:
    """The claim in the report; one that lacks runs is not finished."""
    seeds = " or ".join(str(n) for n in sorted({len(rival.runs) for rival in study.trained}))
    about = f"{seeds} seeds for each rival. The runs come from"
    try:
        compared = [compare(study, comparison) for comparison in claim.comparisons]
    except ValueError as error:
        failure = f"cannot be judged: {error}"
        return Entry(
            claim.name, claim.title, claim.text, None, study.command, failure=failure, about=about
        )
    holds, remark = rule(compared)
    measured = _measured(compared) + _left_out(study, claim)
    verdict = Verdict(measured, holds, remark)
    return Entry(
        claim.name, claim.title, claim.text, None, study.command, verdict=verdict,
        table=_table(claim, compared), about=about,
    )  # fmt: skip


def claims_of(study: Study) -> list[Claim]:
    """The claims on this study's data set."""
    return [claim for claim in CLAIMS if claim.study == study.name]


_OUTCOMES: tuple[Outcome, ...] = ("as claimed", "not distinguishable", "the other way")


def _values(study: Study, name: str, measure: Measure) -> list[float]:
    """The measure of each run of a rival; a ValueError says what is missing."""
    rival = next((rival for rival in study.rivals if rival.name == name), None)
    if rival is None:
        raise ValueError(f"{study.name} has no rival {name}")
    if rival.chosen is None:
        raise ValueError(f"{name} has no runs: every learning rate diverged")
    if len(rival.runs) < 2:
        raise ValueError(f"an interval needs at least 2 runs, {name} has {len(rival.runs)}")
    values = [value for value in rival.values(measure.of) if value is not None]
    if len(values) < len(rival.runs):
        raise ValueError(f"{measure.name}: there is none in a run of {name}, all weights are 0")
    return values


def _left_out(study: Study, claim: Claim) -> str:
    """Seeds that diverged are not in the means: that must be said."""
    names = {name for c in claim.comparisons for name in (c.one, c.two)}
    rivals = [rival for rival in study.rivals if rival.name in names and rival.diverged]
    return "".join(
        f" Left out, for they diverged: seeds {', '.join(map(str, rival.diverged))} of"
        f" {rival.name}."
        for rival in rivals
    )


def _measured(compared: Sequence[Compared]) -> str:
    """What decided, in words: all of a few comparisons, and of many what matters most."""
    few = len(compared) <= 4
    shown = [c for c in compared if few or c.asked.rests or c.outcome != "as claimed"]
    pairs = dict.fromkeys((c.asked.one, c.asked.two) for c in shown)
    lines = [
        f"{one} less {two}: "
        + "; ".join(str(c) for c in shown if (c.asked.one, c.asked.two) == (one, two))
        for one, two in pairs
    ]
    left = len(compared) - len(shown)
    lines += [f"{left} further comparison{'s' * (left > 1)} as claimed"] if left else []
    return ". ".join(lines) + "."


def _table(claim: Claim, compared: Sequence[Compared]) -> Table:
    rows = tuple(_row(c) for c in compared)
    columns = ("Measure", "Claimed", "First", "Second", "Difference", "95 % interval", "Outcome")
    note = "Where the claim does not rest on a comparison, its outcome is in brackets."
    if all(c.asked.rests for c in compared):
        note = ""
    return Table(f"{claim.name}-comparisons", "Comparisons", columns, rows, note)


def _row(c: Compared) -> tuple[Cell, ...]:
    measure, scale, digits = c.asked.measure, c.asked.measure.scale, c.asked.measure.digits
    sign = ">" if measure.higher else "<"
    claimed = f"{c.asked.one} {sign} {c.asked.two}"
    if c.asked.margin:
        claimed += f" − {scale * c.asked.margin:g}"
    low, high = (_signed(scale * x, digits) for x in (c.difference.low, c.difference.high))
    value = scale * c.difference.value
    return (
        word(measure.name),
        word(claimed),
        number(scale * c.one, digits),
        number(scale * c.two, digits),
        Cell(_signed(value, digits), value),
        Cell(f"{low} to {high}", scale * c.difference.low),
        Cell(c.outcome if c.asked.rests else f"({c.outcome})", _OUTCOMES.index(c.outcome)),
    )


def _signed(value: float, digits: int) -> str:
    return f"{value:+,.{digits}f}".replace("-", "−")


def _pruned(share: float) -> Measure:
    name = f"accuracy with {100 * share:g} % pruned"
    return Measure(
        name, lambda run: run.measures.pruned[share], digits=2, scale=100, unit=" points"
    )


def _weights(index: str, kind: str, *, higher: bool = True) -> Measure:
    names = {"large": "weights ≥ 0.06", "gini": "Gini index", "hoyer": "Hoyer index"}
    return Measure(
        f"{names[index]} of {kind[0].upper()}",
        lambda run: getattr(run.measures.weights[kind], index),
        digits=0 if index == "large" else 3,
        higher=higher,
    )


def _eraser(split: str) -> Measure:
    name = f"ERASER {split}, AUPRC of attention"
    return Measure(name, lambda run: run.measures.eraser[split]["attention"].auprc)


def _cad(split: str, index: str) -> Measure:
    words = {"auprc": "AUPRC of attention", "mass": "attention on edits"}
    return Measure(
        f"counterfactual edits {split}, {words[index]}",
        lambda run: float(getattr(run.measures.cad[split]["attention"], index)),
    )


ACCURACY = Measure(
    "test accuracy", lambda run: run.test_accuracy, digits=2, scale=100, unit=" points"
)


def _order(best: str, middle: str, last: str) -> tuple[Comparison, ...]:
    return (
        Comparison(ACCURACY, best, last),
        Comparison(ACCURACY, best, middle),
        Comparison(ACCURACY, middle, last, rests=False),
    )


def _selects(one: str, *others: str) -> tuple[Comparison, ...]:
    resting = (_eraser("test"), _cad("test", "auprc"))
    further = (_eraser("val"), _cad("dev", "auprc"), _cad("test", "mass"))
    measures = [*((m, True) for m in resting), *((m, False) for m in further)]
    return tuple(Comparison(m, one, two, rests) for two in others for m, rests in measures)


def _prunes(one: str, two: str, rests: bool = True) -> tuple[Comparison, ...]:
    return (
        Comparison(ACCURACY, one, two, rests, MARGIN),
        Comparison(_pruned(0.9), one, two, rests),
        Comparison(_pruned(0.95), one, two, rests=False),
    )


CLAIMS = (
    Claim(
        "table-1", "imdb", "Table 1: p = 1.1 generalises best",
        "On IMDb, mirror descent with p = 1.1 is more accurate on test data than gradient descent,"
        " p = 2, and than p = 3 (Section 4, Table 1); and p = 3 more than p = 2 (Table 1 for model"
        " sizes 3 and 4, not 6).",
        _order("MD p=1.1", "MD p=3", "MD p=2"),
    ),
    Claim(
        "table-1-momentum", "imdb", "Table 1, when p = 2 may use momentum",
        "The order of Table 1 stays when gradient descent, p = 2, has momentum 0.9. (The paper"
        " compares without.)",
        _order("MD p=1.1", "MD p=3", "SGD, momentum"),
    ),
    Claim(
        "figure-8", "imdb", "Figure 8: p = 1.1 has sparser weights",
        "Trained on IMDb with p = 1.1, W_K, W_Q and W_V have fewer weights of 0.06 and above than"
        " with p = 2, and are sparser (Appendix H.3, Figure 8).",
        (
            *(Comparison(_weights("large", k, higher=False), "MD p=1.1", "MD p=2") for k in KINDS),
            *(
                Comparison(_weights(index, kind), "MD p=1.1", "MD p=2", rests=False)
                for index in ("gini", "hoyer")
                for kind in KINDS
            ),
        ),
    ),
    Claim(
        "token-selection", "imdb", "Figure 9: p = 1.1 selects the right tokens",
        "Attention trained with p = 1.1 selects the tokens that decide a review better than"
        " attention trained with gradient descent, p = 2 (Section 4 and Appendix H.3, Figure 9:"
        " five sentences). Here: the words that people marked, or edited to flip the label.",
        _selects("MD p=1.1", "MD p=2"),
    ),
    Claim(
        "token-selection-others", "imdb", "Token selection against p = 3 and AdamW",
        "Attention trained with p = 1.1 selects these tokens better than attention trained with"
        " p = 3 and with AdamW. (Not in the paper, which compares with gradient descent.)",
        _selects("MD p=1.1", "MD p=3", "AdamW"),
    ),
    Claim(
        "imdb-pruning", "imdb", "Beyond the paper: weights that can be pruned",
        "On IMDb, MirrorAdam with p = 1.1 is about as accurate as AdamW, and more accurate when"
        " the smallest 90 % of every weight matrix are set to 0, without retraining; p = 1.5 too.",
        (
            *_prunes("MirrorAdam p=1.1", "AdamW"),
            *_prunes("MirrorAdam p=1.5", "AdamW", rests=False),
        ),
    ),
    Claim(
        "figure-11", "cifar10", "ViT: as accurate as Adam, and sparser",
        "On CIFAR-10 a ViT trained by mirror descent with p = 1.1 is about as accurate as with"
        " Adam, and its attention has sparser weights (Figure 11 of the paper's later version).",
        (
            Comparison(ACCURACY, "MD p=1.1", "AdamW", margin=MARGIN),
            *(Comparison(_weights("gini", kind), "MD p=1.1", "AdamW") for kind in KINDS),
            *(Comparison(_weights("hoyer", k), "MD p=1.1", "AdamW", rests=False) for k in KINDS),
        ),
    ),
    Claim(
        "cifar10-pruning", "cifar10", "Beyond the paper: a ViT that can be pruned",
        "On CIFAR-10, MirrorAdam with p = 1.1 is about as accurate as AdamW, and more accurate"
        " when the smallest 90 % of every weight matrix are set to 0, without retraining.",
        _prunes("MirrorAdam p=1.1", "AdamW"),
    ),
)  # fmt: skip
