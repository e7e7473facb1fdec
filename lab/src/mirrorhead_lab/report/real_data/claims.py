"""What the paper, and we, claim on real data, judged by `RULE` and `RULE_OF_BOTH`.

Claims are judged as those of every study (`mirrorhead_lab.studies.claims`). Claims of the paper
about larger models or longer training, if they are not as claimed, are not seen at this scale.

Table 1 and Figures 8 and 9 are judged in two regimes: stopped early, where validation chose the
epoch, and trained to the end of the paper's training, 99.5 % training accuracy. At equal training
accuracy test accuracies are secondary, and interpolated (`Measures.test_accuracy_at`). A level that
a run did not reach is left out, and the text says so. Test accuracy may fall on the way to 99.5 %,
which favours runs that end below it.

Table 1 itself is the best test accuracy of all epochs. No run chose an epoch by test data, so this
is compared where weights of several epochs were kept, as a secondary measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mirrorhead_lab.evaluation.large_weights import counted
from mirrorhead_lab.evaluation.results import KINDS, ComparisonResults
from mirrorhead_lab.findings.finding import Finding
from mirrorhead_lab.studies.claims import (
    MARGIN,
    Claim,
    Comparison,
    Measure,
    judge_comparisons,
    with_remark,
)
from mirrorhead_lab.training.presets import PRESETS

#: Training accuracies at which test accuracies are compared; training to the end stops at the last.
LEVELS = (0.95, 0.975, 0.995)
END = LEVELS[-1]

RULE = (
    "Each comparison is between means over seeds. It is as claimed if Welch's 95 % interval of the"
    " difference lies entirely on the claimed side. A claim holds if all its comparisons are as"
    " claimed, and holds with a remark if every primary one is but a secondary one is not."
    " Otherwise a claim of the paper about a larger model or longer training is not seen at this"
    " scale. A claim about what was run here does not hold if a primary comparison is the other way"
    " with its whole interval, and is not decided if none is."
    f" About as accurate means less than {100 * MARGIN:g} point below."
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

_TEXT_MODEL = (
    "It sees 256 tokens of a review instead of 512, and 20,185 training reviews instead of 25,000."
    " It has ReLU instead of GELU, and a LayerNorm and dropout after the embeddings, which the"
    " paper's model has not; that one has dropout of attention weights, this one has none."
)

#: How what was run differs from what the paper ran, by preset.
DIFFERENCES = {
    "laptop": (
        "The paper trains models of 384 dimensions with 3, 4 and 6 layers, at a constant rate,"
        " until 99.5 % of the training reviews are right. This model has 64 dimensions and one"
        " layer, and was trained for {epochs} epochs with a cosine schedule; validation chose the"
        f" epoch. {_TEXT_MODEL}"
    ),
    "laptop-to-the-end": (
        "The paper trains models of 384 dimensions with 3, 4 and 6 layers. This model has 64"
        " dimensions and one layer. Like the paper's, it was trained at a constant rate until 99.5"
        " % of the training reviews were right, but for at most {epochs} epochs, with batches of"
        f" 32 instead of 100 and gradients clipped at 1. {_TEXT_MODEL}"
    ),
    "laptop-vit": (
        "The paper trains a ViT of 512 dimensions with 6 layers for 1,000 epochs, on images that"
        " are cropped and flipped at random, to about 82 %, and compares it with Adam. This one"
        " has 64 dimensions and 2 layers, was trained for {epochs} epochs with a cosine schedule"
        " on the images as they are, and is compared with AdamW."
    ),
}
#: How models of the paper's own sizes differ. They are what a claim is about, so this is a remark.
DETAILS = {
    **dict.fromkeys(
        ("paper-3", "paper-4", "paper-6"),
        "The model has the paper's size, but ReLU instead of GELU, dropout after the embeddings,"
        " which the paper's model has not, and 20,185 training reviews instead of 25,000;"
        " validation chose the epoch.",
    ),
    "vit-paper": (
        "The model has the paper's size, but was trained on the images as they are, where the"
        " paper's are cropped and flipped at random, and is compared with AdamW instead of Adam."
    ),
}
#: What is said of a preset that is not among `DIFFERENCES` and was cut short.
CUT_SHORT = "The paper trains its models to the end. Here preset {preset} ran for {epochs} epochs."


@dataclass(frozen=True, kw_only=True)
class ClassifierClaim(Claim):
    """A claim on a comparison of classifiers.

    of_the_paper: whether the paper claims it, of its own models; else it is about these runs.
    early: the claim's name in the comparison that was stopped early; see `judge_both`.
    """

    study: str
    of_the_paper: bool = True
    early: str = ""


def judge_claim(study: ComparisonResults, claim: ClassifierClaim) -> Finding:
    """Judge a claim for the report; one that lacks runs is not finished."""
    seeds = " or ".join(map(str, sorted({len(one.runs) for one in study.trained})))
    left_out = _left_out(study, claim)
    found = judge_comparisons(
        claim,
        partial(_values, study),
        command=study.command,
        docs=(f"evidence/{study.name}", "verdicts"),
        about=f"{seeds} seeds for each optimizer. To make the runs:",
        differs=_differs(study) if claim.of_the_paper else "",
    )
    short = _short_of_the_end(study, claim) if study.to_the_end else ""
    details = DETAILS.get(study.preset, "") if claim.of_the_paper else ""
    # Means without the runs that diverged flatter.
    remark = " ".join(words for words in (left_out.strip(), short, details) if words)
    if found.verdict is None or not remark:
        return found
    return replace(found, verdict=with_remark(found.verdict, remark))


def claims_of(study: ComparisonResults) -> list[ClassifierClaim]:
    """The claims on this study's data set."""
    return [claim for claim in CLAIMS if claim.study == study.name]


def judge_study(
    study: ComparisonResults, studies: Sequence[ComparisonResults] = ()
) -> list[Finding]:
    """Judge all claims on a study; those on training to the end together with `studies`."""
    found = []
    for claim in claims_of(study):
        finding = judge_claim(study, claim)
        other = next((s for s in studies if claim.early and s.name == study.data), None)
        if finding.verdict is not None and claim.early and other is None:
            finding = replace(finding, verdict=with_remark(finding.verdict, END_ALONE))
        if other is not None:
            early = next(c for c in claims_of(other) if c.name == claim.early)
            finding = judge_both(judge_claim(other, early), finding)
        found.append(finding)
    return found


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


def _differs(study: ComparisonResults) -> str:
    """Say how the runs differ from the paper's; the paper's own settings do not, run in full."""
    text = DIFFERENCES.get(study.preset, "")
    whole = PRESETS[study.preset].training.epochs if study.preset in PRESETS else math.inf
    if not text and study.epochs < whole:
        text = CUT_SHORT
    return text.format(preset=study.preset, epochs=study.epochs)


def _values(study: ComparisonResults, name: str, measure: Measure) -> list[float]:
    """Return the measure of each run of an optimizer; a ValueError says what is missing."""
    optimizer = next((one for one in study.optimizers if one.name == name), None)
    if optimizer is None:
        raise ValueError(f"{study.name} has no runs of {name}")
    if optimizer.chosen is None:
        raise ValueError(f"{name} has no runs: every learning rate diverged")
    if len(optimizer.runs) < 2:
        raise ValueError(f"an interval needs at least 2 runs, {name} has {len(optimizer.runs)}")
    of = measure.of(study) if measure.of_study else measure.of
    values = [value for value in optimizer.values(of) if value is not None]
    if len(values) < len(optimizer.runs):
        why = "has not come so far" if measure.may_lack else "has none, for all its weights are 0"
        raise ValueError(f"{measure.name}: a run of {name} {why}")
    return values


def _left_out(study: ComparisonResults, claim: Claim) -> str:
    """Say which seeds diverged: they are not in the means."""
    return "".join(
        f"Left out because they diverged: seeds {', '.join(map(str, one.diverged))} of {one.name}. "
        for one in study.optimizers
        if one.name in claim.sides and one.diverged
    )


def _short_of_the_end(study: ComparisonResults, claim: Claim) -> str:
    """Say which optimizers have runs that end below 99.5 % training accuracy."""
    found = []
    for one in study.trained:
        ends = one.values(lambda run: run.train_accuracy)
        below = [end for end in ends if end < END]
        if one.name in claim.sides and below:
            lowest = f"{100 * min(below):.1f} %"
            found.append(f"{len(below)} of {len(ends)} of {one.name}, the lowest at {lowest}")
    return f"Runs that end below 99.5 % training accuracy: {'; '.join(found)}." if found else ""


#: An accuracy, in points.
_accuracy = partial(Measure, digits=2, scale=100, unit=" points")
ACCURACY = _accuracy("test accuracy", lambda run: run.test_accuracy)


def _pruned(share: float) -> Measure:
    name = f"accuracy with {100 * share:g} % pruned"
    return _accuracy(name, lambda run: run.measures.pruned[share])


def _at_equal_training(share: float) -> Measure:
    name = f"test accuracy at {100 * share:g} % training accuracy"
    return _accuracy(name, lambda run: run.measures.test_accuracy_at(share), may_lack=True)


#: What the paper's Table 1 is of all epochs.
BEST_KEPT = _accuracy("best test accuracy of the kept epochs", lambda run: run.best_kept_accuracy)


def _large_weights(kind: str) -> Measure:
    name = f"large weights of {kind[0].upper()}"
    return Measure(name, lambda study: counted(study, kind), 0, higher=False, of_study=True)


def _sparsity(index: str, kind: str) -> Measure:
    name = f"{index.capitalize()} index of {kind[0].upper()}"
    return Measure(name, lambda run: getattr(run.measures.weights[kind], index))


def _attention(part: str, split: str, index: str = "auprc") -> Measure:
    sets = {"eraser": "ERASER", "cad": "counterfactual edits"}
    indices = {"auprc": "AUPRC of attention", "mass": "attention on edits"}
    return Measure(
        f"{sets[part]} {split}, {indices[index]}",
        lambda run: getattr(getattr(run.measures, part)[split]["attention"], index),
    )


def _order(best: str, middle: str, last: str) -> tuple[Comparison, ...]:
    return (
        Comparison(ACCURACY, best, last),
        Comparison(ACCURACY, best, middle),
        Comparison(ACCURACY, middle, last, primary=False),
    )


def _selects(one: str, *others: str) -> tuple[Comparison, ...]:
    first = (_attention("eraser", "test"), _attention("cad", "test"))
    second = (_attention("eraser", "val"), _attention("cad", "dev"))
    second += (_attention("cad", "test", "mass"),)
    return tuple(
        Comparison(m, one, two, primary=m in first) for two in others for m in (*first, *second)
    )


def _prunes(one: str, two: str, *, primary: bool = True) -> tuple[Comparison, ...]:
    return (
        Comparison(ACCURACY, one, two, primary, MARGIN),
        Comparison(_pruned(0.9), one, two, primary),
        Comparison(_pruned(0.95), one, two, primary=False),
    )


def _claim(study: str, *about: Any, **more: Any) -> ClassifierClaim:
    return ClassifierClaim(*about, study=study, **more)


_EARLY = (
    _claim(
        "imdb", "table-1", "Table 1: p = 1.1 generalises best",
        "A review classifier trained on IMDb by mirror descent with $p = 1.1$ is more accurate on"
        " test data than one trained with $p = 2$, which is gradient descent, and than one trained"
        " with $p = 3$ (Section 4, Table 1, which has the best test accuracy of all epochs). And"
        " $p = 3$ is better than $p = 2$ (Table 1, models of 3 and 4 layers, not 6).",
        _order("MD p=1.1", "MD p=3", "MD p=2"),
    ),
    _claim(
        "imdb", "table-1-momentum", "Table 1, when p = 2 may use momentum",
        "The order of Table 1 stays the same when gradient descent, $p = 2$, has momentum 0.9."
        " (The paper compares without momentum.)",
        _order("MD p=1.1", "MD p=3", "SGD, momentum"),
    ),
    _claim(
        "imdb", "figure-8", "Figure 8: p = 1.1 has sparser weights",
        "Trained on IMDb with $p = 1.1$, the attention weights $W_K$, $W_Q$ and $W_V$ have fewer"
        " large entries than with $p = 2$, and are sparser (Appendix H.3, Figure 8). Large is 0.06"
        " and above in the paper's models, 384 wide, and this times the root of 384 / width in"
        " others: 0.147 at width 64.",
        (
            *(Comparison(_large_weights(kind), "MD p=1.1", "MD p=2") for kind in KINDS),
            *(
                Comparison(_sparsity(index, kind), "MD p=1.1", "MD p=2", primary=False)
                for index in ("gini", "hoyer")
                for kind in KINDS
            ),
        ),
    ),
    _claim(
        "imdb", "token-selection", "Figure 9: p = 1.1 selects the right tokens",
        "Attention trained with $p = 1.1$ finds the words that decide whether a review is positive"
        " better than attention trained with $p = 2$, gradient descent (Section 4 and Appendix"
        " H.3; Figure 9 shows five sentences). Here these are the words that people marked, or"
        " edited to flip the label.",
        _selects("MD p=1.1", "MD p=2"),
    ),
    _claim(
        "imdb", "token-selection-others", "Token selection against p = 3 and AdamW",
        "Attention trained with $p = 1.1$ finds these words better than attention trained with"
        " $p = 3$ and with AdamW. (Not in the paper, which compares with gradient descent.)",
        _selects("MD p=1.1", "MD p=3", "AdamW"),
        of_the_paper=False,
    ),
    _claim(
        "imdb", "imdb-pruning", "Beyond the paper: weights that can be pruned",
        "On IMDb, MirrorAdam with $p = 1.1$ is about as accurate as AdamW, and more accurate when"
        " the smallest 90 % of every weight matrix are set to 0, without retraining; $p = 1.5$"
        " too.",
        (
            *_prunes("MirrorAdam p=1.1", "AdamW"),
            *_prunes("MirrorAdam p=1.5", "AdamW", primary=False),
        ),
        of_the_paper=False,
    ),
    _claim(
        "cifar10", "figure-11", "ViT: as accurate as Adam, and sparser",
        "On CIFAR-10 a vision transformer (ViT) trained by mirror descent with $p = 1.1$ is about"
        " as accurate as one trained with Adam, and its attention weights are sparser (Figure 11"
        " of the paper's later version).",
        (
            Comparison(ACCURACY, "MD p=1.1", "AdamW", margin=MARGIN),
            *(Comparison(_sparsity("gini", kind), "MD p=1.1", "AdamW") for kind in KINDS),
            *(Comparison(_sparsity("hoyer", k), "MD p=1.1", "AdamW", primary=False) for k in KINDS),
        ),
    ),
    _claim(
        "cifar10", "cifar10-pruning", "Beyond the paper: a ViT that can be pruned",
        "On CIFAR-10, MirrorAdam with $p = 1.1$ is about as accurate as AdamW, and more accurate"
        " when the smallest 90 % of every weight matrix are set to 0, without retraining.",
        _prunes("MirrorAdam p=1.1", "AdamW"),
        of_the_paper=False,
    ),
)  # fmt: skip


def _to_the_end(claim: ClassifierClaim) -> ClassifierClaim:
    """Return the same claim about training to the end.

    For Table 1, test accuracy is also compared at equal training accuracy and at its best.
    """
    others = (BEST_KEPT, *map(_at_equal_training, LEVELS)) if claim.name == "table-1" else ()
    more = [
        Comparison(measure, c.one, c.two, primary=False)
        for measure in others
        for c in claim.comparisons
    ]
    return replace(
        claim,
        name=f"{claim.name}-to-the-end",
        study="imdb-to-the-end",
        title=f"{claim.title}, in both regimes",
        comparisons=(*claim.comparisons, *more),
        early=claim.name,
    )


_AGAIN = ("table-1", "figure-8", "token-selection")
CLAIMS = (*_EARLY, *(_to_the_end(claim) for claim in _EARLY if claim.name in _AGAIN))
