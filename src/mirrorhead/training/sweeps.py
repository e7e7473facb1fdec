"""Tuning that is fair, and says how it was done.

Every rival gets the same number of learning rates; each is run once, and validation accuracy
alone chooses. The chosen one is run again with every seed, and only these read the test set.
Runs lie in folders named by a hash of their settings: what is done is not run again, and two
sweeps may share a folder.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mirrorhead.files import write_json
from mirrorhead.training.loop import Diverged, evaluate, train
from mirrorhead.training.presets import Preset, Sets, load_sets, preset
from mirrorhead.training.runs import describe_run
from mirrorhead.training.settings import OptimizerSettings, TrainSettings

WAIT = 1.0  # seconds between looks at a run that another sweep has in hand


@dataclass(frozen=True)
class Tuned:
    """One rival: the runs that chose its learning rate, and those with the chosen one."""

    name: str
    chosen: OptimizerSettings | None  # None if every learning rate diverged
    tried: tuple[dict[str, Any], ...]
    final: tuple[dict[str, Any], ...]


def sweep(
    base: str,
    rivals: Mapping[str, Sequence[OptimizerSettings]],
    out: str | Path,
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    epochs: int | None = None,
    jobs: int = 1,
    data: str | Path | None = None,
    partial: bool = False,
) -> list[Tuned]:
    """Tune every rival on validation data, then run the chosen settings with every seed.

    The record, rule included, is written to out/sweep-<hash>.json.

    Args:
        base: name of the preset for everything but the optimizer.
        rivals: for each name, the same optimizer with different learning rates; as many for
            each name.
        out: the folder of all runs.
        seeds: of the final runs. Tuning uses the first.
        epochs: instead of the preset's.
        jobs: processes at once; each run has one thread.
        data, partial: as in `load_sets`.
    """
    _check(rivals, seeds)
    root = Path(out)
    load_sets(preset(base, OptimizerSettings("sgd")), data, partial=partial)  # encode once

    def run_all(pairs: list[tuple[OptimizerSettings, int]], test: bool) -> list[dict[str, Any]]:
        from joblib import Parallel, delayed

        job = delayed(run_one)
        tasks = [
            job(_preset(base, rule, seed, epochs), root, data=data, partial=partial, test=test)
            for rule, seed in pairs
        ]
        return Parallel(n_jobs=jobs)(tasks)  # pyright: ignore[reportReturnType]

    tuning = [(rule, seeds[0]) for rules in rivals.values() for rule in rules]
    done = iter(run_all(tuning, test=False))
    tried = {name: tuple(next(done) for _ in rules) for name, rules in rivals.items()}
    chosen = {name: _best(rivals[name], records) for name, records in tried.items()}
    finals = [(rule, seed) for rule in chosen.values() if rule is not None for seed in seeds]
    done = iter(run_all(finals, test=True))
    result = [
        Tuned(name, rule, tried[name], tuple(next(done) for _ in seeds) if rule else ())
        for name, rule in chosen.items()
    ]
    _record(root, base, rivals, seeds, epochs, result)
    return result


def run_one(
    chosen: Preset,
    root: Path,
    *,
    data: str | Path | None = None,
    partial: bool = False,
    test: bool = False,
) -> dict[str, Any]:
    """One run in root/<hash of its settings>, or what is there of it; a record of what came out.

    A run that diverged is a result too, and is not tried again. With `test`, the weights of the
    best epoch are scored on the test set.
    """
    torch.set_num_threads(1)
    folder = root / run_key(chosen)
    failed, tested = folder / "diverged.json", folder / "test.json"
    record: dict[str, Any] = {"run": folder.name, "seed": chosen.training.seed}
    record |= dataclasses.asdict(chosen.training.optimizer)
    describe_run(folder, chosen)
    if failed.exists():
        return {**record, "diverged": True}
    sets = _sets(dataclasses.replace(chosen, training=TrainSettings()), data, partial)
    torch.manual_seed(chosen.training.seed)
    model = chosen.build()
    while True:
        try:
            outcome = train(model, sets.train, sets.validation, chosen.training, folder)
            break
        except BlockingIOError:  # another sweep is at it: its result will be ours
            time.sleep(WAIT)
        except Diverged as error:
            write_json(failed, {"error": str(error)})
            return {**record, "diverged": True}
    record |= {
        "diverged": False,
        "best_epoch": outcome.best_epoch,
        "validation_accuracy": outcome.best_accuracy,
        "train_accuracy": outcome.epochs[outcome.best_epoch - 1]["train_accuracy"],
    }
    if test:
        if not tested.exists():
            model.load_state_dict(load_file(folder / "best.safetensors"))
            write_json(tested, evaluate(model, sets.test))
        record["test_accuracy"] = json.loads(tested.read_text())["accuracy"]
    return record


@functools.lru_cache(maxsize=1)
def _sets(chosen: Preset, data: str | Path | None, partial: bool) -> Sets:
    """The data of a preset, read once in a process that makes many runs."""
    return load_sets(chosen, data, partial=partial)


def run_key(chosen: Preset) -> str:
    """A name that changes with anything that changes the result.

    >>> run_key(preset("laptop", p=1.1)) == run_key(preset("laptop", p=2.0))
    False
    """
    about = dataclasses.asdict(chosen)
    for name in ("keep", "checkpoint_every"):
        del about["training"][name]
    text = json.dumps(about, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _preset(base: str, rule: OptimizerSettings, seed: int, epochs: int | None) -> Preset:
    found = preset(base, rule)
    changes = {"seed": seed, "epochs": epochs or found.training.epochs}
    return dataclasses.replace(found, training=dataclasses.replace(found.training, **changes))


def _best(
    rules: Sequence[OptimizerSettings], records: Sequence[dict[str, Any]]
) -> OptimizerSettings | None:
    """The settings with the best validation accuracy; of equals, the smaller learning rate."""
    alive = [
        (-record["validation_accuracy"], rule.lr, i)
        for i, (rule, record) in enumerate(zip(rules, records, strict=True))
        if not record["diverged"]
    ]
    return rules[min(alive)[2]] if alive else None


def _check(rivals: Mapping[str, Sequence[OptimizerSettings]], seeds: Sequence[int]) -> None:
    counts = {name: len(rules) for name, rules in rivals.items()}
    if not counts or not all(counts.values()) or len(set(counts.values())) != 1:
        raise ValueError(
            f"rivals must have the same number of learning rates, at least 1 each, got {counts}"
        )
    for name, rules in rivals.items():
        if len({rule.lr for rule in rules}) != len(rules):
            raise ValueError(f"rivals[{name!r}] has a learning rate twice")
        if len({dataclasses.replace(rule, lr=1.0) for rule in rules}) != 1:
            raise ValueError(f"rivals[{name!r}] must differ in lr alone")
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, got {list(seeds)}")


def _record(
    root: Path,
    base: str,
    rivals: Mapping[str, Sequence[OptimizerSettings]],
    seeds: Sequence[int],
    epochs: int | None,
    result: Sequence[Tuned],
) -> None:
    asked = {
        "preset": base,
        "epochs": epochs,
        "seeds": list(seeds),
        "rivals": {name: [dataclasses.asdict(r) for r in rules] for name, rules in rivals.items()},
    }
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    rule = (
        f"{len(next(iter(rivals.values())))} learning rates for each rival, each run once with"
        f" seed {seeds[0]}; the best validation accuracy chooses, of equals the smaller rate;"
        " the chosen one is run with every seed, and only these read the test set"
    )
    tuned = [dataclasses.asdict(one) for one in result]
    write_json(root / f"sweep-{name}.json", {"asked": asked, "rule": rule, "tuned": tuned})
