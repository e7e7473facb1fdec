"""What the paper, and we, claim on real data, judged by one rule.

A claim is a list of comparisons, each "this optimizer is above that one in this measure": the
difference of their means over seeds, with Welch's 95 % interval. A comparison is as claimed if the
whole interval is on the claimed side, the other way if the whole interval is on the other side, and
otherwise not distinguishable. Comparisons are primary or secondary:

    holds                   all comparisons are as claimed
    holds with a remark     all primary ones are; the remark names the others
    not seen at this scale  a primary one is not, but the claim is the paper's and was not run at
                            the paper's size; the remark names the difference
    does not hold           a primary one is not; if none is the other way, the remark says that
                            the claim is not refuted

"About as accurate" allows `MARGIN` below the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from mirrorhead.lab.evaluation.results import KINDS, ComparisonResults, RunResults
from mirrorhead.lab.report.findings import Finding
from mirrorhead.lab.report.real_data.statistics import Difference, Outcome, outcome, welch
from mirrorhead.lab.report.table import Cell, Table, number, word
from mirrorhead.lab.verdicts import Verdict, judge

#: What "about as accurate" allows: a point of accuracy.
MARGIN = 0.01

RULE = (
    "Each comparison is between means over seeds. It is as claimed if Welch's 95 % interval of the"
    " difference lies entirely on the claimed side. A claim holds if all its comparisons are as"
    " claimed, and holds with a remark if every primary one is but a secondary one is not."
    " Otherwise a claim of the paper about a larger model or longer training is not seen at this"
    " scale, and a claim about what was run here does not hold."
    f" About as accurate means less than {100 * MARGIN:g} point below."
)

#: How what was run differs from what the paper ran, by preset.
DIFFERENCES = {
    "laptop": (
        "The paper trains models of 384 dimensions with 3, 4 and 6 layers, at a constant rate,"
        " until 99.5 % of the training reviews are right. This model has 64 dimensions and one"
        " layer, and was trained for {epochs} epochs with a cosine schedule; validation chose the"
        " epoch."
    ),
    "laptop-vit": (
        "The paper trains a ViT of 512 dimensions with 6 layers for 1,000 epochs, to about 82 %."
        " This one has 64 dimensions and 2 layers, and was trained for {epochs} epochs."
    ),
}


@dataclass(frozen=True)
class Measure:
    """A number of a run, how to write it, and whether the claim is that it is higher."""

    name: str
    of: Callable[[RunResults], float | None]
    digits: int = 3
    scale: float = 1.0
    unit: str = ""
    higher: bool = True


@dataclass(frozen=True)
class Comparison:
    """The claim that optimizer `one` is above `two` in a measure; it may be `margin` below.

    primary: whether the claim it belongs to fails with it.
    """

    measure: Measure
    one: str
    two: str
    primary: bool = True
    margin: float = 0.0


@dataclass(frozen=True)
class Claim:
    """A claim on the runs of a study, and what it compares.

    of_the_paper: whether the paper claims it, of its own models; else it is about these runs.
    """

    name: str
    study: str
    title: str
    text: str
    comparisons: tuple[Comparison, ...]
    of_the_paper: bool = True


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


def compare(study: ComparisonResults, asked: Comparison) -> Compared:
    """Compute a comparison; a ValueError says why it cannot be."""
    one, two = (_values(study, name, asked.measure) for name in (asked.one, asked.two))
    difference = welch(one, two)
    claimed = difference if asked.measure.higher else welch(two, one)
    found = outcome(claimed, asked.margin)
    return Compared(asked, fmean(one), fmean(two), difference, found)


def rule(compared: Sequence[Compared], measured: str, differs: str = "") -> Verdict:
    """Return the verdict on a claim from its comparisons.

    differs: how the runs differ from those that the claim is about.
    """
    missed = [c for c in compared if c.outcome != "as claimed"]
    primary = [c for c in missed if c.asked.primary]
    if any(c.outcome == "the other way" for c in primary):
        return judge(measured, False, differs=differs)
    if primary:
        same = "These runs do not refute it: the seeds do not distinguish the optimizers."
        return judge(measured, False, same, differs=differs)
    named = [
        f"{c.asked.measure.name}, {c.asked.one} and {c.asked.two}, {c.outcome}" for c in missed
    ]
    return judge(measured, True, f"Not as claimed: {'; '.join(named)}." if named else "")


def judge_claim(study: ComparisonResults, claim: Claim) -> Finding:
    """Judge a claim for the report; one that lacks runs is not finished."""
    seeds = " or ".join(
        str(n) for n in sorted({len(optimizer.runs) for optimizer in study.trained})
    )
    open_finding = Finding(
        name=claim.name,
        title=claim.title,
        claim=claim.text,
        command=study.command,
        docs=("results", {"cifar10": "cifar-10"}.get(study.name, study.name)),
        about=f"{seeds} seeds for each optimizer. To make the runs:",
    )
    try:
        compared = [compare(study, comparison) for comparison in claim.comparisons]
    except ValueError as error:
        return replace(open_finding, failure=f"cannot be judged: {error}")
    measured = _measured(compared) + _left_out(study, claim)
    differs = DIFFERENCES.get(study.preset, "") if claim.of_the_paper else ""
    verdict = rule(compared, measured, differs.format(epochs=study.epochs))
    return replace(open_finding, verdict=verdict, comparisons=_table(claim, compared))


def claims_of(study: ComparisonResults) -> list[Claim]:
    """The claims on this study's data set."""
    return [claim for claim in CLAIMS if claim.study == study.name]


_OUTCOMES: tuple[Outcome, ...] = ("as claimed", "not distinguishable", "the other way")


def _values(study: ComparisonResults, name: str, measure: Measure) -> list[float]:
    """Return the measure of each run of an optimizer; a ValueError says what is missing."""
    optimizer = next((optimizer for optimizer in study.optimizers if optimizer.name == name), None)
    if optimizer is None:
        raise ValueError(f"{study.name} has no runs of {name}")
    if optimizer.chosen is None:
        raise ValueError(f"{name} has no runs: every learning rate diverged")
    if len(optimizer.runs) < 2:
        raise ValueError(f"an interval needs at least 2 runs, {name} has {len(optimizer.runs)}")
    values = [value for value in optimizer.values(measure.of) if value is not None]
    if len(values) < len(optimizer.runs):
        raise ValueError(f"{measure.name}: a run of {name} has none, for all its weights are 0")
    return values


def _left_out(study: ComparisonResults, claim: Claim) -> str:
    """Say which seeds diverged: they are not in the means."""
    names = {name for c in claim.comparisons for name in (c.one, c.two)}
    optimizers = [
        optimizer
        for optimizer in study.optimizers
        if optimizer.name in names and optimizer.diverged
    ]
    return "".join(
        f" Left out because they diverged: seeds {', '.join(map(str, optimizer.diverged))} of"
        f" {optimizer.name}."
        for optimizer in optimizers
    )


def _measured(compared: Sequence[Compared]) -> str:
    """Say what was measured: all of a few comparisons; of many, the primary and the failed ones."""
    few = len(compared) <= 4
    shown = [c for c in compared if few or c.asked.primary or c.outcome != "as claimed"]
    pairs = dict.fromkeys((c.asked.one, c.asked.two) for c in shown)
    lines = [
        f"{one} minus {two}: "
        + "; ".join(str(c) for c in shown if (c.asked.one, c.asked.two) == (one, two))
        for one, two in pairs
    ]
    left = len(compared) - len(shown)
    lines += [f"{left} further comparison{'s' * (left > 1)} as claimed"] if left else []
    return ". ".join(lines) + "."


def _table(claim: Claim, compared: Sequence[Compared]) -> Table:
    rows = tuple(_row(c) for c in compared)
    columns = ("Measure", "Claimed", "First", "Second", "Difference", "95 % interval", "Outcome")
    note = "The outcome of a secondary comparison is in brackets."
    if all(c.asked.primary for c in compared):
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
        Cell(c.outcome if c.asked.primary else f"({c.outcome})", _OUTCOMES.index(c.outcome)),
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
        Comparison(ACCURACY, middle, last, primary=False),
    )


def _selects(one: str, *others: str) -> tuple[Comparison, ...]:
    first = (_eraser("test"), _cad("test", "auprc"))
    second = (_eraser("val"), _cad("dev", "auprc"), _cad("test", "mass"))
    measures = [*((m, True) for m in first), *((m, False) for m in second)]
    return tuple(Comparison(m, one, two, primary) for two in others for m, primary in measures)


def _prunes(one: str, two: str, *, primary: bool = True) -> tuple[Comparison, ...]:
    return (
        Comparison(ACCURACY, one, two, primary, MARGIN),
        Comparison(_pruned(0.9), one, two, primary),
        Comparison(_pruned(0.95), one, two, primary=False),
    )


CLAIMS = (
    Claim(
        "table-1", "imdb", "Table 1: p = 1.1 generalises best",
        "A review classifier trained on IMDb by mirror descent with $p = 1.1$ is more accurate on"
        " test data than one trained with $p = 2$, which is gradient descent, and than one trained"
        " with $p = 3$ (Section 4, Table 1). And $p = 3$ is better than $p = 2$ (Table 1, models"
        " of 3 and 4 layers, not 6).",
        _order("MD p=1.1", "MD p=3", "MD p=2"),
    ),
    Claim(
        "table-1-momentum", "imdb", "Table 1, when p = 2 may use momentum",
        "The order of Table 1 stays the same when gradient descent, $p = 2$, has momentum 0.9."
        " (The paper compares without momentum.)",
        _order("MD p=1.1", "MD p=3", "SGD, momentum"),
    ),
    Claim(
        "figure-8", "imdb", "Figure 8: p = 1.1 has sparser weights",
        "Trained on IMDb with $p = 1.1$, the attention weights $W_K$, $W_Q$ and $W_V$ have fewer"
        " entries of size 0.06 and above than with $p = 2$, and are sparser (Appendix H.3,"
        " Figure 8).",
        (
            *(Comparison(_weights("large", k, higher=False), "MD p=1.1", "MD p=2") for k in KINDS),
            *(
                Comparison(_weights(index, kind), "MD p=1.1", "MD p=2", primary=False)
                for index in ("gini", "hoyer")
                for kind in KINDS
            ),
        ),
    ),
    Claim(
        "token-selection", "imdb", "Figure 9: p = 1.1 selects the right tokens",
        "Attention trained with $p = 1.1$ finds the words that decide whether a review is positive"
        " better than attention trained with $p = 2$, gradient descent (Section 4 and Appendix"
        " H.3; Figure 9 shows five sentences). Here these are the words that people marked, or"
        " edited to flip the label.",
        _selects("MD p=1.1", "MD p=2"),
    ),
    Claim(
        "token-selection-others", "imdb", "Token selection against p = 3 and AdamW",
        "Attention trained with $p = 1.1$ finds these words better than attention trained with"
        " $p = 3$ and with AdamW. (Not in the paper, which compares with gradient descent.)",
        _selects("MD p=1.1", "MD p=3", "AdamW"),
        of_the_paper=False,
    ),
    Claim(
        "imdb-pruning", "imdb", "Beyond the paper: weights that can be pruned",
        "On IMDb, MirrorAdam with $p = 1.1$ is about as accurate as AdamW, and more accurate when"
        " the smallest 90 % of every weight matrix are set to 0, without retraining; $p = 1.5$"
        " too.",
        (
            *_prunes("MirrorAdam p=1.1", "AdamW"),
            *_prunes("MirrorAdam p=1.5", "AdamW", primary=False),
        ),
        of_the_paper=False,
    ),
    Claim(
        "figure-11", "cifar10", "ViT: as accurate as Adam, and sparser",
        "On CIFAR-10 a vision transformer (ViT) trained by mirror descent with $p = 1.1$ is about"
        " as accurate as one trained with Adam, and its attention weights are sparser (Figure 11"
        " of the paper's later version).",
        (
            Comparison(ACCURACY, "MD p=1.1", "AdamW", margin=MARGIN),
            *(Comparison(_weights("gini", kind), "MD p=1.1", "AdamW") for kind in KINDS),
            *(Comparison(_weights("hoyer", k), "MD p=1.1", "AdamW", primary=False) for k in KINDS),
        ),
    ),
    Claim(
        "cifar10-pruning", "cifar10", "Beyond the paper: a ViT that can be pruned",
        "On CIFAR-10, MirrorAdam with $p = 1.1$ is about as accurate as AdamW, and more accurate"
        " when the smallest 90 % of every weight matrix are set to 0, without retraining.",
        _prunes("MirrorAdam p=1.1", "AdamW"),
        of_the_paper=False,
    ),
)  # fmt: skip
