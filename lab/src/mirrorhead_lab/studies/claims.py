"""Claims on the runs of a study, and the rule that judges them.

A claim is a list of comparisons, each "this method is above that one in this measure": the
difference of their means over seeds, with Welch's 95 % interval. A comparison is as claimed if the
whole interval is on the claimed side, the other way if the whole interval is on the other side, and
otherwise not distinguishable. A claim does not hold if a primary comparison is the other way. It is
not decided if none is, but not all are as claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_args

from mirrorhead_lab.findings.finding import Finding
from mirrorhead_lab.findings.intervals import Interval, intervals_figure
from mirrorhead_lab.findings.statistics import (
    NOT_DECIDED,
    Difference,
    Outcome,
    outcome,
    welch,
)
from mirrorhead_lab.findings.table import Cell, Table, number, word
from mirrorhead_lab.verdicts import Verdict, Word, judge

if TYPE_CHECKING:
    from mirrorhead_lab.studies.study import Rows

#: What "about as accurate" allows: a point of accuracy.
MARGIN = 0.01
#: The rule of studies in which what was run is what the claims are about.
PLAIN_RULE = (
    "Each comparison is between means over seeds. It is as claimed if Welch's 95 % interval of the"
    " difference lies entirely on the claimed side. A claim holds if all its comparisons are as"
    " claimed, and holds with a remark if every primary one is but a secondary one is not. It does"
    " not hold if a primary one is the other way with its whole interval, and is otherwise not"
    " decided."
)


@dataclass(frozen=True)
class Measure:
    """A number of a run, how to write it, and whether the claim is that it is higher.

    may_lack: whether runs may lack it; a comparison is then left out, and named.
    """

    name: str
    of: Callable[[Any], Any]
    digits: int = 3
    scale: float = 1.0
    unit: str = ""
    higher: bool = True
    may_lack: bool = False

    def signed(self, *values: float) -> tuple[str, ...]:
        """Write differences in the measure's unit."""
        return tuple(
            f"{self.scale * value:+,.{self.digits}f}".replace("-", "−") for value in values
        )


@dataclass(frozen=True)
class Comparison:
    """The claim that method `one` is above `two` in a measure; it may be `margin` below.

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

    remark: what qualifies the verdict besides, as it follows from the rows; "" if nothing does.
    differs: how the runs differ from those that the claim is about; "" if they do not.
    """

    name: str
    title: str
    text: str
    comparisons: tuple[Comparison, ...]
    remark: Callable[[Rows[Any]], str] = lambda rows: ""
    differs: str = ""

    @property
    def sides(self) -> list[str]:
        """The names of what it compares, each once."""
        return list(dict.fromkeys(side for c in self.comparisons for side in (c.one, c.two)))


@dataclass(frozen=True)
class Compared:
    """A comparison with its numbers; `difference` is one - two as it is, whatever is claimed."""

    asked: Comparison
    one: float
    two: float
    difference: Difference
    outcome: Outcome

    @property
    def interval(self) -> Interval:
        """The comparison as a row of the claim's figure."""
        asked, found = self.asked, self.difference
        label = f"{asked.measure.name}: {asked.one} − {asked.two}"
        numbers = (found.low, found.value, found.high)
        return Interval(label, *numbers, asked.measure.higher, self.outcome)

    def __str__(self) -> str:
        """The measure and its difference, in words."""
        measure, found = self.asked.measure, self.difference
        value, low, high = measure.signed(found.value, found.low, found.high)
        return f"{measure.name} {value}{measure.unit} ({low} to {high}), {self.outcome}"


def compare(asked: Comparison, one: Sequence[float], two: Sequence[float]) -> Compared:
    """Compute a comparison from the values of the runs."""
    difference = welch(one, two)
    claimed = difference if asked.measure.higher else welch(two, one)
    found = outcome(claimed, asked.margin)
    return Compared(asked, fmean(one), fmean(two), difference, found)


def rule(compared: Sequence[Compared], measured: str, differs: str = "") -> Verdict:
    """Return the verdict on a claim from its comparisons.

    differs: how the runs differ from those that the claim is about.
    """
    missed = [c for c in compared if c.outcome != "as claimed"]
    primary = [c.outcome for c in missed if c.asked.primary]
    if primary:
        if "the other way" in primary:
            return judge(measured, False, differs=differs)
        return judge(measured, None, NOT_DECIDED, differs=differs)
    named = [
        f"{c.asked.measure.name}, {c.asked.one} and {c.asked.two}, {c.outcome}" for c in missed
    ]
    return judge(measured, True, f"Not as claimed: {'; '.join(named)}." if named else "")


def judge_rows(rows: Rows[Any], claim: Claim) -> Finding:
    """Judge a claim by the rows of its study; one that lacks runs is not finished."""
    study, guess, gone = rows.study, rows.study.guess, dict[str, None]()
    keys = {key for method in study.methods.values() for one in method.settings for key in one}
    what = "rate" if keys == {"lr"} else "setting"

    def values(side: str, measure: Measure) -> list[float]:
        found = study.side(rows, side)
        alive = [row.measured for row in found if not rows.diverged(row)]
        lost = [f"{side}, seed {row.trial.seed}" for row in found if rows.diverged(row)]
        gone.update(dict.fromkeys(lost))
        values = [measure.of(one) for one in alive]
        if None in values:
            raise ValueError(f"{measure.name}: a run of {side} has none")
        return values if guess is None else [*values, *[guess] * len(lost)]

    found = judge_comparisons(
        claim,
        values,
        lambda: (
            f" Diverged, and counted as {guess:.3g}: {'; '.join(gone)}."
            if gone and guess is not None
            else ""
        ),
        command=study.command,
        docs=study.docs,
        about=f"{len(study.seeds)} seeds for each method at its chosen {what}. To make the runs:",
        differs=claim.differs,
    )
    remarks = [claim.remark(rows)]
    if gone and guess is None:  # means without the runs that diverged flatter
        remarks.insert(0, f"Left out because they diverged: {'; '.join(gone)}.")
    remark = " ".join(filter(None, remarks))
    if found.verdict is None or not remark:
        return found
    return replace(found, verdict=with_remark(found.verdict, remark))


def judge_comparisons(
    claim: Claim,
    values: Callable[[str, Measure], Sequence[float]],
    left_out: Callable[[], str] = lambda: "",
    differs: str = "",
    **about: Any,
) -> Finding:
    """Judge a claim by the rule.

    values: a measure of each run of one side; a ValueError says why there are none.
    left_out: says, in the end, what is not in the means; differs: as in `rule`; about: more of the
    finding.
    """
    finding = Finding(name=claim.name, title=claim.title, claim=claim.text, **about)
    compared, lacking = [], []
    for asked in claim.comparisons:
        try:
            one, two = (values(name, asked.measure) for name in (asked.one, asked.two))
            compared.append(compare(asked, one, two))
        except ValueError as error:
            if not asked.measure.may_lack:
                return replace(finding, failure=f"cannot be judged: {error}")
            lacking.append(f" {str(error)[0].upper()}{str(error)[1:]}.")
    measured = describe(compared) + "".join(dict.fromkeys(lacking)) + left_out()
    verdict = rule(compared, measured, differs)
    title = f"{claim.title}: differences of means and their 95 % intervals"
    figure = intervals_figure(claim.name, title, [c.interval for c in compared])
    table = comparison_table(claim.name, compared)
    return replace(finding, verdict=verdict, figure=figure, comparisons=table)


def with_remark(verdict: Verdict, remark: str) -> Verdict:
    """Return the verdict with one more remark, so that it holds with a remark at best."""
    word: Word = "holds with a remark" if verdict.word == "holds" else verdict.word
    return Verdict(verdict.measured, word, f"{verdict.remark} {remark}".strip())


def describe(compared: Sequence[Compared]) -> str:
    """Say what was measured: all of a few comparisons; of many, the primary and the failed ones."""
    few = len(compared) <= 4
    shown: dict[tuple[str, str], list[Compared]] = {}
    for c in compared:
        if few or c.asked.primary or c.outcome != "as claimed":
            shown.setdefault((c.asked.one, c.asked.two), []).append(c)
    lines = [f"{one} minus {two}: {'; '.join(map(str, cs))}" for (one, two), cs in shown.items()]
    left = len(compared) - sum(map(len, shown.values()))
    lines += [f"{left} further comparison{'s' * (left > 1)} as claimed"] if left else []
    return ". ".join(lines) + "."


def comparison_table(name: str, compared: Sequence[Compared]) -> Table:
    """Return the comparisons of a claim, one per row."""
    columns = ("Measure", "Claimed", "First", "Second", "Difference", "95 % interval", "Outcome")
    secondary = any(not c.asked.primary for c in compared)
    note = "The outcome of a secondary comparison is in brackets." if secondary else ""
    return Table(f"{name}-comparisons", "Comparisons", columns, tuple(map(_row, compared)), note)


def _row(c: Compared) -> tuple[Cell, ...]:
    asked, measure, found = c.asked, c.asked.measure, c.difference
    sign, allowed = (">", "−") if measure.higher else ("<", "+")
    claimed = f"{asked.one} {sign} {asked.two}"
    if asked.margin:
        claimed += f" {allowed} {measure.scale * asked.margin:g}"
    value, low, high = measure.signed(found.value, found.low, found.high)
    said = c.outcome if asked.primary else f"({c.outcome})"
    return (
        word(measure.name),
        word(claimed),
        *(number(measure.scale * mean, measure.digits) for mean in (c.one, c.two)),
        Cell(value, measure.scale * found.value),
        Cell(f"{low} to {high}", measure.scale * found.low),
        Cell(said, get_args(Outcome).index(c.outcome)),
    )
