"""The study of language models: which runs it has, what is measured in each, and its file.

The file has one line of JSON per run. Each method is tuned by the same rule: four learning rates
with seed 0; the lowest validation loss chooses, of equals the smaller rate. The chosen rate is run
with seeds 1 to 5, and only the test losses of these are compared. At last the other rates are run
with seeds 1 and 2, so that every entry of the table by rate has at least three seeds.

After the study AdamW alone was given two more rates, in case its best one lies between or below
those that all were given. They do not take part in tuning, but can qualify a verdict.

The claims and the rule that judges them, `CLAIMS` and `RULE` of `mirrorhead_lab.report.language`,
were written before the first run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct

from mirrorhead_lab.evaluation.sparsity import pruned
from mirrorhead_lab.runtime.errors import RunError
from mirrorhead_lab.runtime.json_files import append_json_line, read_json_lines
from mirrorhead_lab.training.language_model import Corpus, LanguageSettings, Method, loss_of, train

FILE = "language-model.jsonl"
METHODS: dict[str, Method] = {
    "AdamW": Method(),
    "AdamW, decay 0.1": Method(weight_decay=0.1),
    "MirrorAdam p=1.5": Method(p=1.5),
    "MirrorAdam p=1.25": Method(p=1.25),
    "MirrorAdam p=1.75": Method(p=1.75),
    "MirrorAdam p=1.1": Method(p=1.1),
    "MirrorAdam p=1.1, no knee": Method(p=1.1, knee=None),
}
#: From the most usual to the least, which is the order of the runs.
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
TUNING_SEED = 0
SEEDS = (1, 2, 3, 4, 5)
TABLE_SEEDS = (1, 2)
#: What AdamW alone was given later.
LATER = tuple((name, lr) for lr in (1.7e-3, 3e-4) for name in ("AdamW", "AdamW, decay 0.1"))
TOTAL = len(METHODS) * (len(RATES) + len(SEEDS) + (len(RATES) - 1) * len(TABLE_SEEDS)) + len(
    LATER
) * len(SEEDS)
#: Shares of each weight matrix that are set to 0.
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)

Loss = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class WeightSizes(Struct, frozen=True):
    """Sizes of the weights of all matrices.

    small: the mean over matrices of the share below 1 % of the matrix's largest weight.
    """

    largest: Annotated[float, Meta(ge=0)]
    rms: Annotated[float, Meta(ge=0)]
    small: Share


class LanguageRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run; losses are nats per character. One that diverged has no losses.

    curve: validation loss every `record_every` steps; pruned: test loss by share of zeros.
    """

    method: str
    lr: Annotated[float, Meta(gt=0)]
    seed: Annotated[int, Meta(ge=0)]
    steps: Annotated[int, Meta(ge=1)]
    characters: Annotated[int, Meta(ge=1)]  # trained on, counted with repetition
    curve: tuple[Loss, ...]
    validation: Loss | None
    test: Loss | None
    pruned: dict[float, Loss]
    weights: WeightSizes | None
    cpu_seconds: float

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        missing = {self.validation, self.test, self.weights} & {None}
        if bool(missing) != self.diverged or (not missing and set(self.pruned) != set(SHARES)):
            raise ValueError("a run has either all losses or none")

    @property
    def diverged(self) -> bool:
        return self.validation is None

    @property
    def key(self) -> tuple[str, float, int]:
        """What distinguishes it from the other runs."""
        return self.method, self.lr, self.seed


Runs = Mapping[tuple[str, float, int], LanguageRun]


def compute(
    corpus: Corpus, settings: LanguageSettings, name: str, lr: float, seed: int
) -> LanguageRun:
    """Train one model and measure it."""
    trained = train(corpus, settings, METHODS[name], lr, seed)
    model = trained.model
    shared = {
        "method": name, "lr": lr, "seed": seed, "steps": settings.steps,
        "characters": settings.steps * settings.batch_size * settings.model.length,
        "cpu_seconds": round(trained.cpu_seconds, 1),
    }  # fmt: skip
    validation, test = (loss_of(model, part) for part in (corpus.validation, corpus.test))
    finished = len(trained.curve) == settings.steps // settings.record_every
    if not (finished and math.isfinite(validation) and math.isfinite(test)):
        nothing = {"validation": None, "test": None, "pruned": {}, "weights": None}
        return LanguageRun(curve=(), **shared, **nothing)
    matrices = [p.detach().double().abs() for p in model.parameters() if p.ndim >= 2]
    every = torch.cat([m.flatten() for m in matrices])
    return LanguageRun(
        curve=trained.curve,
        validation=validation,
        test=test,
        pruned={share: loss_of(pruned(model, share), corpus.test) for share in SHARES},
        weights=WeightSizes(
            float(every.max()),
            float(every.square().mean().sqrt()),
            fmean(float((m < 0.01 * m.max()).double().mean()) for m in matrices),
        ),
        **shared,
    )


def chosen_rate(runs: Runs, name: str) -> float | None:
    """Return the rate that tuning chose, or None if it is not finished or all rates diverged."""
    tried = [runs.get((name, lr, TUNING_SEED)) for lr in RATES]
    scored = [(run.validation, run.lr) for run in tried if run and run.validation is not None]
    return min(scored)[1] if None not in tried and scored else None


def missing(runs: Runs) -> Iterator[tuple[str, float, int]]:
    """Yield the runs that are not there yet, the most valuable first; look again after each."""
    main = [name for name, method in METHODS.items() if method.knee is not None]
    for names in (main, [name for name in METHODS if name not in main]):
        wanted = [(name, lr, TUNING_SEED) for lr in RATES for name in names]
        rates = {name: chosen_rate(runs, name) for name in names}
        wanted += [(name, lr, seed) for seed in SEEDS for name, lr in rates.items() if lr]
        wanted += [(name, lr, s) for lr in RATES for s in TABLE_SEEDS for name in names]
        yield from (key for key in wanted if key not in runs)
    later = ((*one, seed) for one in LATER for seed in SEEDS)
    yield from (key for key in later if key not in runs)


def load_runs(path: Path) -> dict[tuple[str, float, int], LanguageRun]:
    """Read a file of runs, none if it is not there; runs that do not fit each other are refused."""
    runs: dict[tuple[str, float, int], LanguageRun] = {}
    for number, run in enumerate(read_json_lines(path, LanguageRun), start=1):
        if run.key in runs:
            raise RunError(f"{path} has the run {run.key} twice, again in line {number}")
        first = next(iter(runs.values()), run)
        if (run.steps, run.characters) != (first.steps, first.characters):
            raise RunError(f"{path}: the run in line {number} has another length than the first")
        runs[run.key] = run
    return runs


def append_run(path: Path, run: LanguageRun) -> None:
    """Add a run to a file that `load_runs` reads."""
    append_json_line(path, msgspec.to_builtins(run, str_keys=True))
