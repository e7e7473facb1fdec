"""Fine-tuning a pretrained encoder without a center: is MirrorAdam as accurate, and prunable?

all-MiniLM-L6-v2 (6 layers, 12 heads, 384 wide) on IMDb: 1,500 reviews of at most 128 tokens, two
epochs, batches of 32. The method trains the 36 matrices of the encoder, from the pretrained weights
and without a center; AdamW trains the new head. Three learning rates of each method are compared
with seed 0, by the accuracy on 1,000 validation reviews after the last epoch. Three seeds of the
chosen rate are scored once on 1,000 test reviews, whole and with the smallest weights of each
encoder matrix set to 0. Attention is that of [CLS], over all layers and heads, on the first 200
test reviews. The seed draws the training reviews and their order: there is no dropout and the head
starts at 0, so nothing else depends on it. Training reviews whose text is also in the test set are
left out.

The claims and the rule that judges them were written before the first run.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from torch.optim import AdamW, Optimizer

from mirrorhead.optim import MirrorAdam
from mirrorhead_lab.datasets import Splits, Texts, load_imdb
from mirrorhead_lab.datasets.texts import without
from mirrorhead_lab.evaluation.attention_reading import normalized_entropy
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, word
from mirrorhead_lab.models import attention_maps
from mirrorhead_lab.models.pretrained import PretrainedClassifier, accuracy, default_encoder
from mirrorhead_lab.runtime.errors import Diverged
from mirrorhead_lab.studies.claims import MARGIN, Claim, Comparison, Measure
from mirrorhead_lab.studies.study import Drawing, Method, Rows, Study, Trial
from mirrorhead_lab.studies.tables import (
    EDGE,
    PLUS_MINUS,
    Columns,
    draw_pruning,
    over_seeds,
    seeds_column,
)
from mirrorhead_lab.training.tuning import TuneSets, TuneSettings, fine_tune

RATES = (3e-5, 1e-4, 3e-4)
#: `how` is the exponent of MirrorAdam; AdamW has none.
METHODS = {
    name: Method(tuple({"lr": lr} for lr in RATES), p)
    for name, p in (("AdamW", None), ("MirrorAdam p=1.5", 1.5), ("MirrorAdam p=1.1", 1.1))
}
SEEDS = (0, 1, 2)
#: Shares of each encoder matrix that are set to 0.
SHARES = (0.2, 0.4, 0.6, 0.8)
#: Reviews to train on; reviews of the validation set, and of the test set.
TEXTS, HELD_OUT = 1_500, 1_000

Share = Annotated[float, Meta(ge=0, le=1)]


class AttentionSummary(Struct, frozen=True):
    """Normalized entropy and largest weight of [CLS]'s attention, mean over layers and heads."""

    entropy: Share
    one_hot: Share


class Scores(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a run measures; one that diverged has nothing, one of tuning no test scores.

    loss: of training in the last epoch; pruned: test accuracy by share of zeros.
    """

    loss: Annotated[float, Meta(ge=0)] | None = None
    validation: Share | None = None
    test: Share | None = None
    pruned: dict[float, Share] = {}
    attention: AttentionSummary | None = None
    largest_weight: Annotated[float, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        scores = self.test, self.attention, self.largest_weight
        there = {score is not None for score in scores} | {set(self.pruned) == set(SHARES)}
        if len(there) > 1:
            raise ValueError("a run has either all test scores or none")


def load(task: str, folder: Path | None, held_out: int = HELD_OUT) -> tuple[Path, Splits[Texts]]:
    """Return the encoder's folder, and reviews in random order.

    Validation and a pool for training are from train, test from test.
    """
    encoder = default_encoder()
    parts = {split: load_imdb(split, folder) for split in ("train", "test")}
    parts["train"] = parts["train"].take(without(parts["train"], parts["test"].texts))
    drawn = {s: Texts(part.texts, part.labels).sample(None) for s, part in parts.items()}

    def cut(split: str, start: int | None, end: int | None) -> Texts:
        there = drawn[split]
        return Texts(there.texts[start:end], there.labels[start:end])

    sets = cut("train", held_out, None), cut("train", None, held_out), cut("test", None, held_out)
    return encoder, Splits("imdb", ("negative", "positive"), *sets)


def run(trial: Trial, data: tuple[Path, Splits[Texts]], folder: Path, texts: int = TEXTS) -> Scores:
    """Train on `texts` reviews and measure."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all that is read
    encoder, reviews = data
    settings = TuneSettings(texts=texts, max_length=128, seed=trial.seed)
    sets = TuneSets.of(reviews, encoder, settings)
    torch.manual_seed(trial.seed)
    model = PretrainedClassifier(encoder, 2)
    try:
        result = fine_tune(model, sets, settings, _optimizer(trial, model))
    except (Diverged, RuntimeError) as error:  # MirrorAdam refuses gradients that are not finite
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not isinstance(error, Diverged) and all(bool(g.isfinite().all()) for g in grads):
            raise
        return Scores()
    more = _test_scores(model, sets) if trial.final else {}
    return Scores(loss=result.losses[-1], validation=result.validation[-1], **more)


def _optimizer(trial: Trial, model: PretrainedClassifier) -> Optimizer:
    matrices, p = list(model.train_matrices().values()), METHODS[trial.method].how
    if p is None:
        return AdamW(matrices, trial.setting["lr"], weight_decay=0.01)
    return MirrorAdam(matrices, trial.setting["lr"], p)


def _test_scores(model: PretrainedClassifier, sets: TuneSets) -> dict[str, Any]:
    matrices = model.train_matrices().values()
    return {
        "test": accuracy(model, sets.test),
        "pruned": {share: accuracy(without_smallest(model, share), sets.test) for share in SHARES},
        "attention": attention(model, sets),
        "largest_weight": max(float(matrix.detach().abs().max()) for matrix in matrices),
    }


def without_smallest(model: PretrainedClassifier, share: float) -> PretrainedClassifier:
    """Return a copy in which the smallest weights of each encoder matrix are 0."""
    lighter = copy.deepcopy(model)
    with torch.no_grad():
        for matrix in lighter.train_matrices().values():
            count = round(share * matrix.numel())
            if count:
                least = matrix.abs().flatten().kthvalue(count).values
                matrix[matrix.abs() <= least] = 0
    return lighter


def attention(model: PretrainedClassifier, sets: TuneSets, texts: int = 200) -> AttentionSummary:
    """Read [CLS]'s attention on the first test reviews."""
    entropy, largest, count = 0.0, 0.0, min(texts, len(sets.test))
    for start in range(0, count, 20):
        ids, mask, _ = sets.test.batch(range(start, min(start + 20, count)))
        maps = attention_maps(model, ids, mask)
        rows = torch.stack([layer[:, :, 0] for layer in maps]).double()  # (layers, b, heads, T)
        seen = (mask > 0)[:, None]
        entropy += float(normalized_entropy(rows, seen).mean(dim=(0, 2)).sum())
        largest += float(rows.amax(dim=-1).mean(dim=(0, 2)).sum())
    return AttentionSummary(entropy / count, largest / count)


def score(measured: Scores) -> float | None:
    return measured.validation


def about(rows: Rows[Scores]) -> str:
    return (
        f"{len(METHODS)} methods fine-tune the 36 matrices of all-MiniLM-L6-v2 (6 layers, 12"
        f" heads) on {TEXTS:,} IMDb reviews of at most 128 tokens for two epochs;"
        f" {HELD_OUT:,} reviews are the validation set and {HELD_OUT:,} the test set."
        f" Runs: {len(rows)}."
    )


def _results(rows: Rows[Scores]) -> Table:
    final = partial(over_seeds, rows)

    def pruned(share: float) -> Callable[[str], Cell]:
        return final(lambda run: run.pruned[share], 1, 100)

    columns: Columns = {
        "Method": word,
        "Test %": final(lambda run: run.test, 1, 100),
        **{f"{100 * share:g} % pruned": pruned(share) for share in SHARES},
        "Entropy": final(lambda run: run.attention.entropy),
        "One-hot": final(lambda run: run.attention.one_hot),
        "Largest weight": final(lambda run: run.largest_weight, 2),
        "Seeds": seeds_column(rows),
    }
    note = (
        "Test accuracy in %, whole and with the smallest weights of every encoder matrix set to 0,"
        " without retraining. Entropy is the normalized entropy of [CLS]'s attention, one-hot its"
        f" largest weight, both over all layers and heads. {PLUS_MINUS}"
    )
    return Table.of("fine-tuning-results", "Results at the chosen rates", columns, METHODS, note)


def _tuning(rows: Rows[Scores]) -> Table:
    def at(k: int, name: str) -> Cell:
        trial = rows.study.tuning_trials(name)[k]
        row = rows.get(trial)
        if row is None or row.measured.validation is None:
            return Cell("diverged", -1.0) if row else NOTHING
        edge = "**" if RATES[k] in (min(RATES), max(RATES)) else "*"
        star = f" {edge}" if rows.chosen(name) == trial.setting else ""
        return Cell(f"{100 * row.measured.validation:.1f}{star}", row.measured.validation)

    columns: Columns = {"Method": word}
    columns |= {f"lr {lr:g}": partial(at, k) for k, lr in enumerate(RATES)}
    note = f"Validation accuracy in % of each learning rate, with one seed; {EDGE}"
    return Table.of("fine-tuning-tuning", "What tuning saw", columns, METHODS, note)


TEST = Measure("test accuracy", lambda run: run.test, digits=1, scale=100, unit=" points")


def _after(share: float) -> Measure:
    name = f"accuracy with {100 * share:g} % pruned"
    return Measure(name, lambda run: run.pruned[share], digits=1, scale=100, unit=" points")


def _claim(p: float) -> Claim:
    method = f"MirrorAdam p={p:g}"
    return Claim(
        f"fine-tuning-{f'{p:g}'.replace('.', '-')}",
        f"Fine-tuning without a center: p = {p:g}",
        f"A pretrained encoder fine-tuned with MirrorAdam, $p = {p:g}$, is about as accurate as one"
        " fine-tuned with AdamW, and more accurate when the smallest 40 % and 60 % of every encoder"
        " matrix are set to 0, without retraining. (Not in the paper.)",
        (
            Comparison(TEST, method, "AdamW", margin=MARGIN),
            *(Comparison(_after(share), method, "AdamW") for share in (0.4, 0.6)),
        ),
    )


STUDY = Study(
    name="fine-tuning",
    title="Fine-tuning a pretrained encoder",
    methods=METHODS,
    seeds=SEEDS,
    measured=Scores,
    load=load,
    run=run,
    score=score,
    seconds=150,
    about=about,
    tuning=(
        f"{len(RATES)} learning rates for each method, each run once with seed {SEEDS[0]}; the best"
        " validation accuracy after the last epoch chooses, of equals the smaller rate; the chosen"
        f" one is run with {len(SEEDS)} seeds, and only these read the test set"
    ),
    verdict_rule=(
        "Each comparison is between means over seeds. It is as claimed if Welch's 95 % interval of"
        " the difference lies entirely on the claimed side. A claim holds if all its comparisons"
        " are as claimed. It does not hold if one is the other way with its whole interval, and is"
        " otherwise not decided. About as accurate means less than"
        f" {100 * MARGIN:g} point below. A run that diverged counts with the accuracy of a guess,"
        " 50 %."
    ),
    claims=tuple(_claim(p) for p in (1.5, 1.1)),
    guess=0.5,  # both labels are equally likely
    figures=(
        Drawing(
            "pruned",
            "Test accuracy against the share of each encoder matrix set to 0, without retraining:"
            " mean, and where the middle 80 % of the seeds are.",
            partial(
                draw_pruning,
                shares=SHARES,
                scale=100,
                height=3.8,
                xlabel="share of each encoder matrix set to 0",
                ylabel="test accuracy, %",
            ),
        ),
    ),
    tables=lambda rows: (_results(rows), _tuning(rows)),
    docs=("evidence/fine-tuning", "verdicts"),
)
