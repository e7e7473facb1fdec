"""The study of patches: accuracy against the number of changed weights, one line for each run.

`benchmarks/patches.py` writes results/patches.jsonl, and the report reads it. The settings of each
method are compared by validation accuracy at the small sizes; the chosen one is scored on test data
with several seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from msgspec import Struct

from mirrorhead_lab.runtime.errors import RunError
from mirrorhead_lab.runtime.json_files import read_json_lines

FILE = "patches.jsonl"
TASKS = {"trec": "TREC", "sst2": "SST-2", "subj": "Subj", "cr": "CR", "imdb": "IMDb"}
#: Shares of the weights that a patch changes.
SIZES = (0.1, 0.01, 0.003, 0.001, 0.0003, 0.0001)
#: Where the claim is decided.
SMALL = (0.001, 0.0003)
OURS = "mirror"
#: Settings were screened here, and its test data were read before the last ones were added.
DEVELOPMENT = "trec"
#: Each method was run on these; IMDb confirms the best three.
SENTENCES = ("trec", "sst2", "subj", "cr")


@dataclass(frozen=True)
class PatchMethod:
    """A way to fine-tune.

    per_size: a mask is chosen beforehand, so each size needs training of its own.
    runs: training runs behind one line.
    sized: False if the method itself fixes the size (LoRA, BitFit).
    tasks: what it is run on.
    """

    title: str
    per_size: bool = False
    runs: int = 1
    sized: bool = True
    tasks: tuple[str, ...] = SENTENCES

    @property
    def runs_of_a_curve(self) -> int:
        """Training runs behind accuracy at the two small sizes."""
        return self.runs * (len(SMALL) if self.per_size else 1)


METHODS = {
    OURS: PatchMethod("MirrorAdam, centred", tasks=tuple(TASKS)),
    # The settings of a first comparison on TREC: p = 1.05 and 1.1, reach 0.5 and 1.5.
    "mirror-first": PatchMethod("MirrorAdam, first settings", tasks=("trec",)),
    "adamw": PatchMethod("AdamW, largest changes"),
    "dare": PatchMethod("AdamW, DARE"),
    "proximal": PatchMethod("AdamW, proximal l1", tasks=tuple(TASKS)),
    "soft": PatchMethod("soft threshold (AdaBreg)", tasks=tuple(TASKS)),
    "sinh": PatchMethod("hyperbolic entropy", tasks=("trec",)),
    "lora-1": PatchMethod("LoRA, rank 1", sized=False),
    "lora-4": PatchMethod("LoRA, rank 4", sized=False),
    "lora-16": PatchMethod("LoRA, rank 16", sized=False),
    "bitfit": PatchMethod("BitFit", sized=False),
    "random-mask": PatchMethod("random mask", per_size=True),
    "gradient-mask": PatchMethod("mask of the largest gradients", per_size=True),
    "lt-sft": PatchMethod("LT-SFT", per_size=True, runs=2),
}


def equals(task: str) -> list[str]:
    """The methods whose whole curve on a task comes from one training run, as ours does."""
    return [
        name
        for name, method in METHODS.items()
        if method.sized and not method.per_size and task in method.tasks
        and name not in (OURS, "mirror-first")
    ]  # fmt: skip


class PatchRun(Struct, frozen=True):
    """A line of the file. Scores and bytes are by size: "all", "0.1", ... (see `column`).

    size: for a method with a mask, the share of weights in it.
    final: whether test data were read; otherwise the run compares settings.
    identical: share of the weights with the base's bits, in float32 and in bf16.
    """

    key: str
    task: str
    method: str
    setting: dict[str, float]
    seed: int
    size: float | None
    final: bool
    runs: int
    validation: dict[str, float]
    test: dict[str, float]
    bytes: dict[str, int]
    compressed: dict[str, int]
    identical: dict[str, float]
    seconds: float

    @property
    def tuning_score(self) -> float:
        """Mean validation accuracy at the small sizes, or at the only size that there is."""
        small = [self.validation[column(s)] for s in SMALL if column(s) in self.validation]
        return fmean(small or self.validation.values())


def column(size: float | None) -> str:
    """The name of a size in a line.

    >>> column(0.001), column(None)
    ('0.001', 'all')
    """
    return "all" if size is None else f"{size:g}"


def read_patch_runs(file: Path) -> list[PatchRun]:
    """Read the lines of a study; the last one may be cut short by a stop, and is then ignored."""
    found = read_json_lines(file, PatchRun)
    for k, run in enumerate(found, start=1):
        if run.task not in TASKS or run.method not in METHODS:
            raise RunError(f"{file} is damaged in line {k}: unknown task or method")
    return found


def chosen(runs: Sequence[PatchRun], task: str, method: str, settings: int) -> PatchRun | None:
    """The tuning run with the best validation score, once at least `settings` have one."""
    found = [r for r in runs if (r.task, r.method, r.final) == (task, method, False)]
    return max(found, key=lambda run: run.tuning_score) if len(found) >= settings else None


def tuning_scores(
    runs: Sequence[PatchRun], method: str
) -> list[tuple[dict[str, float], list[float]]]:
    """Each setting that was tried on all sets of sentences, with its validation score on each."""
    tried = [run for run in runs if run.method == method and not run.final]
    found = []
    for k, run in enumerate(tried):
        if any(other.setting == run.setting for other in tried[:k]):
            continue
        same = {r.task: r.tuning_score for r in tried if r.setting == run.setting}
        if all(task in same for task in SENTENCES):
            found.append((run.setting, [same[task] for task in SENTENCES]))
    return found


def best_setting(runs: Sequence[PatchRun], method: str) -> dict[str, float] | None:
    """The setting with the best mean validation score over the sets of sentences."""
    found = tuning_scores(runs, method)
    return max(found, key=lambda one: fmean(one[1]))[0] if found else None


def final_runs(runs: Sequence[PatchRun], task: str, method: str) -> list[PatchRun]:
    """The runs that were scored on test data with the chosen setting.

    A file may have others, of a setting that was the best before more of them were compared.
    """
    best = chosen(runs, task, method, 1)
    found = [r for r in runs if (r.task, r.method, r.final) == (task, method, True)]
    return [r for r in found if best is None or r.setting == best.setting]


def scores_on_test(
    runs: Sequence[PatchRun], task: str, method: str, size: float | None
) -> list[float]:
    """Test accuracy of each seed at a size."""
    found = final_runs(runs, task, method)
    return [run.test[column(size)] for run in found if column(size) in run.test]
