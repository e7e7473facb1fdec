"""IMDb at a constant rate, like the paper's training, until 99.5 % training accuracy.

Table 1 and Figures 8 and 9 are judged again, together with the runs that were stopped early
(`imdb`). At equal training accuracy test accuracies are secondary, and interpolated
(`Measures.test_accuracy_at`). A level that a run did not reach is left out, and the text says so.
Test accuracy may fall on the way to 99.5 %, which favours runs that end below it. Table 1 itself is
the best test accuracy of all epochs. No run chose an epoch by test data, so this is compared where
weights of several epochs were kept, as a secondary measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mirrorhead_lab.evaluation.results import Classified
from mirrorhead_lab.findings.finding import Finding
from mirrorhead_lab.studies import imdb
from mirrorhead_lab.studies.claims import Claim, Comparison, judge_rows, with_remark
from mirrorhead_lab.studies.classifiers import (
    BEST_KEPT,
    RULE,
    Classifier,
    at_equal_training,
    classifier_study,
    rates,
)
from mirrorhead_lab.studies.study import Rows

#: Training accuracies at which test accuracies are compared; training to the end stops at the last.
LEVELS = (0.95, 0.975, 0.995)
END = LEVELS[-1]
ABOUT = Classifier("laptop-to-the-end", "imdb")
METHODS = {
    "MD p=1.1": rates("mirror-descent", 0.03, 0.1, 0.3, p=1.1),
    "MD p=2": rates("mirror-descent", 0.1, 0.3, 1.0, p=2.0),
    "MD p=3": rates("mirror-descent", 3e-3, 0.01, 0.03, p=3.0),
    "AdamW": rates("adamw", 3e-5, 1e-4, 3e-4, weight_decay=0.01),
}
DIFFERENCES = (
    "The paper trains models of 384 dimensions with 3, 4 and 6 layers. This model has 64"
    " dimensions and one layer. Like the paper's, it was trained at a constant rate until 99.5"
    " % of the training reviews were right, but for at most 60 epochs, with batches of"
    f" 32 instead of 100 and gradients clipped at 1. {imdb.TEXT_MODEL}"
)
RULE_OF_BOTH = (
    " The verdicts here rest on these runs and on those that were stopped early: a claim holds if"
    " it holds in both, holds with a remark if it holds at the end of training but not when stopped"
    " early, and is otherwise not seen at this scale. If runs end below 99.5 % training accuracy,"
    " it holds with a remark at best."
)
#: The remark where the runs of one regime are missing.
END_ALONE = (
    "The verdict rests on the end of training alone: results of runs stopped early are missing."
)


def short_of_the_end(sides: list[str], rows: Rows[Classified]) -> str:
    """Say which optimizers have runs that end below 99.5 % training accuracy."""
    found = []
    for name in sides:
        ends = [run.train or 0.0 for run in rows.final(name)]
        if below := [end for end in ends if end < END]:
            lowest = f"{100 * min(below):.1f} %"
            found.append(f"{len(below)} of {len(ends)} of {name}, the lowest at {lowest}")
    return f"Runs that end below 99.5 % training accuracy: {'; '.join(found)}." if found else ""


def _to_the_end(early: Claim) -> Claim:
    """Return the same claim about training to the end.

    For Table 1, test accuracy is also compared at equal training accuracy and at its best.
    """
    others = (BEST_KEPT, *map(at_equal_training, LEVELS)) if early is imdb.TABLE_1 else ()
    more = [
        Comparison(measure, c.one, c.two, primary=False)
        for measure in others
        for c in early.comparisons
    ]
    return replace(
        early,
        name=f"{early.name}-to-the-end",
        title=f"{early.title}, in both regimes",
        comparisons=(*early.comparisons, *more),
        differs=DIFFERENCES,
        remark=partial(short_of_the_end, early.sides),
    )


#: By the claim about runs that were stopped early.
CLAIMS = [
    (early, _to_the_end(early)) for early in (imdb.TABLE_1, imdb.FIGURE_8, imdb.TOKEN_SELECTION)
]


def findings(rows: Rows[Classified]) -> Iterator[Finding]:
    """Judge each claim by both regimes, or by the end alone."""
    stopped = rows.of_study(imdb.STUDY)
    for early, claim in CLAIMS:
        end = judge_rows(rows, claim)
        if len(stopped):
            yield judge_both(judge_rows(stopped, early), end)
        elif end.verdict is not None:
            yield replace(end, verdict=with_remark(end.verdict, END_ALONE))
        else:
            yield end


def judge_both(early: Finding, end: Finding) -> Finding:
    """Return the finding of training to the end, with a verdict that rests on both regimes."""
    if end.verdict is None:
        return end
    if early.verdict is None:
        why = f"cannot be judged in both regimes: stopped early, it {early.failure}"
        return replace(end, verdict=None, failure=why)
    measured = (
        f"To the end: {end.verdict.measured} Verdict: {end.verdict.word}."
        f" Stopped early: {early.verdict.measured} Verdict: {early.verdict.word}."
    )
    verdict = replace(end.verdict, measured=measured)
    if verdict.word.startswith("holds") and not early.verdict.word.startswith("holds"):
        verdict = with_remark(verdict, "As claimed at the end of training only.")
    return replace(end, verdict=verdict)


STUDY = classifier_study(
    ABOUT,
    METHODS,
    name="imdb-to-the-end",
    title="IMDb, trained to 99.5 % training accuracy",
    seeds=imdb.SEEDS,
    seconds=600,
    about=(
        f"{len(METHODS)} optimizers train the same model (preset laptop-to-the-end) for at most"
        " 60 epochs, until 99.5 % training accuracy, with batches of 32, on"
        f" {imdb.SIZES[0]:,} reviews; {imdb.SIZES[1]:,} are the validation set, which chooses"
        " the learning rate; the weights after the last epoch are measured;"
        f" {imdb.SIZES[2]:,} are the test set."
    ),
    verdict_rule=RULE + RULE_OF_BOTH,
    findings=findings,
    docs=("evidence/imdb-to-the-end", "verdicts"),
)
