"""The study of fine-tuning: which runs it has, what is measured in each, and its file.

all-MiniLM-L6-v2 (6 layers, 12 heads, 384 wide) on IMDb: 1,500 reviews of at most 128 tokens, two
epochs, batches of 32. The method trains the 36 matrices of the encoder, from the pretrained weights
and without a center; AdamW trains the new head. Three learning rates of each method are compared
with seed 0, by the accuracy on 1,000 validation reviews after the last epoch; of equals, the
smaller one is chosen. Three seeds of the chosen rate are scored once on 1,000 test reviews, whole
and with the smallest weights of each encoder matrix set to 0. Attention is that of [CLS], over all
layers and heads, on the first 200 test reviews. The seed draws the training reviews and their
order: there is no dropout and the head starts at 0, so nothing else depends on it. Training reviews
whose text is also in the test set are left out.

The file has one line of JSON per run. A run that diverges is a line without accuracies; its rate is
not chosen. The claims and the rule that judges them, in `mirrorhead_lab.report.fine_tuning`, were
written before the first run.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta, Struct
from torch.optim import AdamW, Optimizer

from mirrorhead.optim import MirrorAdam
from mirrorhead_lab.datasets import LabelledTexts, Sentences, load_imdb, without
from mirrorhead_lab.evaluation.attention_reading import normalized_entropy
from mirrorhead_lab.models import attention_maps
from mirrorhead_lab.models.pretrained import PretrainedClassifier, accuracy, default_encoder
from mirrorhead_lab.runtime.errors import Diverged, RunError
from mirrorhead_lab.runtime.json_files import append_json_line, read_json_lines
from mirrorhead_lab.training.tuning import TuneSets, TuneSettings, fine_tune

FILE = "fine_tuning.jsonl"
#: Exponents of MirrorAdam; AdamW has none.
METHODS: dict[str, float | None] = {
    "AdamW": None,
    "MirrorAdam p=1.5": 1.5,
    "MirrorAdam p=1.1": 1.1,
}
RATES = (3e-5, 1e-4, 3e-4)
SEEDS = (0, 1, 2)
TOTAL = len(METHODS) * (len(RATES) + len(SEEDS))
#: Shares of each encoder matrix that are set to 0.
SHARES = (0.2, 0.4, 0.6, 0.8)
#: Reviews to train on; reviews of the validation set, and of the test set.
TEXTS, HELD_OUT = 1_500, 1_000

Share = Annotated[float, Meta(ge=0, le=1)]


class Key(NamedTuple):
    """What distinguishes a run; a final run reads the test set."""

    method: str
    lr: float
    seed: int
    final: bool

    def __str__(self) -> str:
        return f"{self.method}, lr {self.lr:g}, seed {self.seed}{', final' * self.final}"


class AttentionSummary(Struct, frozen=True):
    """Normalized entropy and largest weight of [CLS]'s attention, mean over layers and heads."""

    entropy: Share
    one_hot: Share


class FineTuningRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run. One that diverged has no accuracies, one of tuning those of validation alone.

    loss: of training in the last epoch; pruned: test accuracy by share of zeros.
    """

    method: str
    lr: Annotated[float, Meta(gt=0)]
    seed: Annotated[int, Meta(ge=0)]
    final: bool
    texts: Annotated[int, Meta(ge=1)]
    held_out: Annotated[int, Meta(ge=1)]
    loss: Annotated[float, Meta(ge=0)] | None
    validation: Share | None
    test: Share | None = None
    pruned: dict[float, Share] = {}
    attention: AttentionSummary | None = None
    largest_weight: Annotated[float, Meta(ge=0)] | None = None
    cpu_seconds: float

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        scores = self.test, self.attention, self.largest_weight
        there = {score is not None for score in scores} | {set(self.pruned) == set(SHARES)}
        if there != {self.final and not self.diverged}:
            raise ValueError("a run has test scores exactly if it is final and did not diverge")

    @property
    def diverged(self) -> bool:
        return self.validation is None

    @property
    def key(self) -> Key:
        """What distinguishes it from the other runs."""
        return Key(self.method, self.lr, self.seed, self.final)


Runs = Mapping[Key, FineTuningRun]


def missing(runs: Runs) -> Iterator[Key]:
    """Yield the runs that are not there yet; final ones follow when all rates were compared."""
    wanted = [Key(name, lr, SEEDS[0], False) for name in METHODS for lr in RATES]
    rates = {name: chosen_rate(runs, name) for name in METHODS}
    wanted += [Key(name, lr, seed, True) for seed in SEEDS for name, lr in rates.items() if lr]
    yield from (key for key in wanted if key not in runs)


def chosen_rate(runs: Runs, name: str) -> float | None:
    """Return the rate that tuning chose, or None if it is not finished or all rates diverged."""
    tried = [runs.get(Key(name, lr, SEEDS[0], False)) for lr in RATES]
    scored = [(-run.validation, run.lr) for run in tried if run and run.validation is not None]
    return min(scored)[1] if None not in tried and scored else None


def load_runs(path: Path) -> dict[Key, FineTuningRun]:
    """Read a file of runs, none if it is not there; runs that do not fit each other are refused."""
    runs: dict[Key, FineTuningRun] = {}
    for number, run in enumerate(read_json_lines(path, FineTuningRun), start=1):
        if run.key in runs:
            raise RunError(f"{path} has the run {run.key} twice, again in line {number}")
        if (run.texts, run.held_out) != (TEXTS, HELD_OUT):
            raise RunError(f"{path}: the run in line {number} has other numbers of reviews")
        runs[run.key] = run
    return runs


def append_run(path: Path, run: FineTuningRun) -> None:
    """Add a run to a file that `load_runs` reads."""
    append_json_line(path, msgspec.to_builtins(run, str_keys=True))


@functools.lru_cache(maxsize=1)
def reviews(folder: Path | None = None, held_out: int = HELD_OUT) -> Sentences:
    """Reviews in random order: validation and a pool for training from train, test from test."""
    parts = {split: load_imdb(split, folder) for split in ("train", "test")}
    parts["train"] = parts["train"].take(without(parts["train"], parts["test"].texts))
    drawn = {s: LabelledTexts(part.texts, part.labels).sample(None) for s, part in parts.items()}

    def cut(split: str, start: int | None, end: int | None) -> LabelledTexts:
        there = drawn[split]
        return LabelledTexts(there.texts[start:end], there.labels[start:end])

    sets = cut("train", held_out, None), cut("train", None, held_out), cut("test", None, held_out)
    return Sentences("imdb", ("negative", "positive"), *sets)


def compute(
    key: Key, data: Sentences, base: Path | None = None, texts: int | None = TEXTS
) -> FineTuningRun:
    """Train on `texts` reviews, or all, and measure.

    base: the folder of the Hugging Face encoder; None: all-MiniLM-L6-v2.
    """
    began = time.process_time()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all that is read
    folder = default_encoder() if base is None else base
    settings = TuneSettings(texts=texts, max_length=128, seed=key.seed)
    sets = TuneSets.of(data, folder, settings)
    torch.manual_seed(key.seed)
    model = PretrainedClassifier(folder, 2)
    about: dict[str, Any] = {**key._asdict(), "loss": None, "validation": None}
    about |= {"texts": len(sets.train), "held_out": len(sets.validation)}
    try:
        result = fine_tune(model, sets, settings, _optimizer(key, model))
    except (Diverged, RuntimeError) as error:  # MirrorAdam refuses gradients that are not finite
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not isinstance(error, Diverged) and all(bool(g.isfinite().all()) for g in grads):
            raise
    else:
        about |= {"loss": result.losses[-1], "validation": result.validation[-1]}
        about |= _scores(model, sets) if key.final else {}
    return FineTuningRun(cpu_seconds=round(time.process_time() - began, 1), **about)


def _optimizer(key: Key, model: PretrainedClassifier) -> Optimizer:
    matrices, p = list(model.train_matrices().values()), METHODS[key.method]
    if p is None:
        return AdamW(matrices, key.lr, weight_decay=0.01)
    return MirrorAdam(matrices, key.lr, p)


def _scores(model: PretrainedClassifier, sets: TuneSets) -> dict[str, Any]:
    """What is measured in a final run."""
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
