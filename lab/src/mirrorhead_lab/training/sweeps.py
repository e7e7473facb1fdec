"""Fair tuning with a record of how it was done.

Every candidate gets the same number of learning rates; each is run once, and validation accuracy
alone chooses. The chosen one is run again with every seed, and only these runs read the test set.
Each run has a folder named by a hash of its settings: a finished run is not run again, and two
sweeps may share a folder. A second process that wants the same run waits for the first and takes
its result. Between machines this needs a shared file system with locks.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mirrorhead._files import write_atomically, write_json
from mirrorhead_lab.datasets.batches import fingerprint
from mirrorhead_lab.datasets.sources import data_root
from mirrorhead_lab.runtime.errors import Diverged, SweepError
from mirrorhead_lab.runtime.fingerprints import digest
from mirrorhead_lab.runtime.folders import check_folder, check_writable
from mirrorhead_lab.runtime.jobs import Backend, Failure, Work, interrupts, local
from mirrorhead_lab.training import run_folder
from mirrorhead_lab.training.classification import complete_run
from mirrorhead_lab.training.presets import Preset, Sets, load_sets, preset
from mirrorhead_lab.training.run_folder import ARITHMETIC, read_score
from mirrorhead_lab.training.settings import OptimizerSettings, TrainSettings, as_older_runs

Candidates = Mapping[str, Sequence[OptimizerSettings]]

_ONE_AT_A_TIME = threading.Lock()  # torch's random numbers belong to the whole process
DIVERGED = "diverged.json"
#: Files of which a folder of runs has at least one, also after a kill.
OWN = ("sweep-*.json", f"*/{run_folder.LOCK}", f"*/{run_folder.SETTINGS}", f"*/{run_folder.PRESET}")


@dataclass(frozen=True)
class Asked:
    """What a sweep is asked to do, as its record has it: there, candidates are "rivals"."""

    preset: str
    epochs: int | None
    seeds: list[int]
    rivals: dict[str, list[OptimizerSettings]]

    @staticmethod
    def of(base: str, candidates: Candidates, seeds: Sequence[int], epochs: int | None) -> Asked:
        rivals = {name: list(rules) for name, rules in candidates.items()}
        return Asked(base, epochs, list(seeds), rivals)

    def record(self, out: str | Path) -> Path:
        """Return the path of the record, out/sweep-<hash of what is asked>.json."""
        about = dataclasses.asdict(self, dict_factory=as_older_runs)
        return Path(out) / f"sweep-{digest(about)}.json"

    def run(self, rule: OptimizerSettings, seed: int) -> Preset:
        """Return the settings of one run."""
        found = preset(self.preset, rule)
        epochs = found.training.epochs if self.epochs is None else self.epochs
        training = dataclasses.replace(found.training, seed=seed, epochs=epochs)
        return dataclasses.replace(found, training=training)


@dataclass(frozen=True)
class Tuned:
    """One candidate: the runs that chose its learning rate, and those with the chosen one."""

    name: str
    chosen: OptimizerSettings | None  # None if every learning rate diverged
    tried: tuple[dict[str, Any], ...]
    final: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Trial:
    """A run to make: the candidate it belongs to, its settings, the folder of all runs, its data.

    With `test`, the weights of the best epoch are scored on the test set.
    """

    candidate: str
    chosen: Preset
    root: Path
    data: Path | None = None
    partial: bool = False
    test: bool = False

    def __str__(self) -> str:
        training = self.chosen.training
        return f"{self.candidate}, lr {training.optimizer.lr:g}, seed {training.seed}"

    @property
    def folder(self) -> Path:
        return self.root / run_key(self.chosen)


def run_key(chosen: Preset) -> str:
    """Return a name that changes with everything that changes the result.

    >>> from mirrorhead_lab.training import preset
    >>> run_key(preset("laptop", p=1.1)) == run_key(preset("laptop", p=2.0))
    False
    """
    about = {**dataclasses.asdict(chosen), "training": chosen.training.identity()}
    return digest([ARITHMETIC, about])


#: Called after every run: the trial, its record or why there is none, whether it was done before.
Listener = Callable[[Trial, "dict[str, Any] | Failure", bool], None]


def sweep(
    base: str,
    candidates: Candidates,
    out: str | Path,
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    epochs: int | None = None,
    jobs: int = 1,
    backend: Backend | None = None,
    data: str | Path | None = None,
    partial: bool = False,
    listener: Listener | None = None,
) -> list[Tuned]:
    """Tune every candidate on validation data, then run the chosen settings with every seed.

    The record, rule included, is written to `Asked.record`. If a run fails, its candidate is
    left, all others are run, and a SweepError names what failed; the same call resumes there.

    Args:
        base: name of the preset for everything but the optimizer.
        candidates: for each name, the same optimizer with different learning rates; as many for
            each name.
        out: the folder of all runs; on a cluster, on a file system that all machines share.
        seeds: of the final runs. Tuning uses the first.
        epochs: instead of the preset's.
        jobs: processes at once; each run has one thread.
        backend: of `mirrorhead_lab.runtime.jobs`, instead of processes on this machine.
        data, partial: as in `load_sets`.
        listener: called after every run.
    """
    _check(candidates, seeds)
    root, source = Path(out).resolve(), data_root(data).resolve()
    asked = Asked.of(base, candidates, seeds, epochs)
    failures = asked.record(out).with_suffix(".failures.txt")
    first = asked.run(next(iter(candidates.values()))[0], seeds[0])
    check_writable(Path(out))
    check_folder(Path(out), "runs", OWN)
    _, prints = _trial_sets(first, source, partial)  # encode once
    runner = _Runner(backend or local(jobs), prints, listener or (lambda *_: None))

    def trial(name: str, rule: OptimizerSettings, seed: int, test: bool) -> Trial:
        return Trial(name, asked.run(rule, seed), root, source, partial, test)

    tuning = {
        name: [trial(name, rule, seeds[0], test=False) for rule in rules]
        for name, rules in candidates.items()
    }
    tried = runner.run(tuning)
    chosen = {name: _best(candidates[name], tried[name], first.training) for name in tried}
    finals = {
        name: [trial(name, rule, seed, test=True) for seed in seeds] if rule else []
        for name, rule in chosen.items()
    }
    final = runner.run(finals)
    if runner.failed:
        text = "\n".join(f"{trial}: {why.message}\n{why.details}" for trial, why in runner.failed)
        write_atomically(failures, text.encode())
        lines = "".join(f"\n  {trial}: {why.message}" for trial, why in runner.failed)
        runs = "1 run" if len(runner.failed) == 1 else f"{len(runner.failed)} runs"
        raise SweepError(
            f"{runs} failed (more in {failures}); the others are kept, and the"
            f" same sweep resumes from there:{lines}"
        )
    failures.unlink(missing_ok=True)
    result = [Tuned(n, rule, tuple(tried[n]), tuple(final[n])) for n, rule in chosen.items()]
    record = {"asked": dataclasses.asdict(asked), "rule": _rule(asked, first.training)}
    record["tuned"] = [dataclasses.asdict(one) for one in result]
    write_json(asked.record(out), record)
    return result


@dataclass
class _Runner:
    """Makes runs on a backend, and remembers which failed."""

    backend: Backend
    prints: tuple[str, str]
    listener: Listener
    failed: list[tuple[Trial, Failure]] = field(default_factory=list)

    def run(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, list[dict[str, Any]]]:
        """Return the records of all candidates without a failed run, in the order of the trials."""
        work = Work(run_trial, run_trial, functools.partial(find_trial, self.prints))
        records: dict[Trial, dict[str, Any]] = {}
        todo: list[Trial] = []
        for trial in [trial for group in trials.values() for trial in group]:
            if (found := work.find(trial)) is None:
                todo.append(trial)
            else:
                records[trial] = found
                self.listener(trial, found, True)
        with interrupts() as interrupted:
            for trial, outcome in self.backend(work, todo) if todo else ():
                if interrupted():
                    raise KeyboardInterrupt
                if not isinstance(outcome, Failure) and not _arrives(work, trial):
                    why = "is not visible here: is the folder shared by all machines?"
                    outcome = Failure(f"done, but {trial.folder} {why}")
                if isinstance(outcome, Failure):
                    self.failed.append((trial, outcome))
                else:
                    records[trial] = outcome
                self.listener(trial, outcome, False)
        return {
            name: [records[trial] for trial in group]
            for name, group in trials.items()
            if all(trial in records for trial in group)
        }


def _arrives(work: Work[Trial, dict[str, Any]], trial: Trial) -> bool:
    """Whether a run appears in the folder; a network file system may show it late."""
    for pause in (0.1, 0.5, 2.0, 5.0, 0.0):
        if work.find(trial) is not None:
            return True
        time.sleep(pause)
    return False


def _best(
    rules: Sequence[OptimizerSettings], records: Sequence[dict[str, Any]], training: TrainSettings
) -> OptimizerSettings | None:
    """Return the settings with the best validation accuracy; of equals, the smaller rate.

    With milestones, those that passed the most of them come first: a small rate that leaves the
    training set half learnt would otherwise win by stopping early.
    """

    def rank(pair: tuple[OptimizerSettings, dict[str, Any]]) -> tuple[int, float, float]:
        rule, record = pair
        passed = sum(record["train_accuracy"] >= share for share in training.milestones)
        return -passed, -record["validation_accuracy"], rule.lr

    pairs = zip(rules, records, strict=True)
    alive = [pair for pair in pairs if not pair[1]["diverged"]]
    return min(alive, key=rank)[0] if alive else None


def _check(candidates: Candidates, seeds: Sequence[int]) -> None:
    counts = {name: len(rules) for name, rules in candidates.items()}
    if len(set(counts.values())) != 1 or not all(counts.values()):
        raise ValueError(
            f"candidates must have the same number of learning rates, at least 1 each, got {counts}"
        )
    for name, rules in candidates.items():
        if len({rule.lr for rule in rules}) != len(rules):
            raise ValueError(f"candidates[{name!r}] has a learning rate twice")
        if len({dataclasses.replace(rule, lr=1.0) for rule in rules}) != 1:
            raise ValueError(f"candidates[{name!r}] must differ in lr alone")
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(
            f"seeds must be different numbers, none negative, at least one, got {list(seeds)}"
        )


def _rule(asked: Asked, training: TrainSettings) -> str:
    """Say how learning rates were tuned."""
    chooses = "the best validation accuracy chooses"
    if training.milestones:
        shares = ", ".join(f"{100 * share:g}" for share in training.milestones if share)
        chooses = (
            "of the rates whose last epoch passes the most milestones of training accuracy"
            f" ({shares} %), the best validation accuracy after the last epoch chooses"
        )
    return (
        f"{len(next(iter(asked.rivals.values())))} learning rates for each candidate, each run once"
        f" with seed {asked.seeds[0]}; {chooses}, of equals the smaller rate;"
        " the chosen one is run with every seed, and only these read the test set"
    )


def run_trial(trial: Trial) -> dict[str, Any]:
    """Make the run, or what is left of it; return a record of the outcome.

    A run that diverged is a result too, and is not tried again.
    """
    torch.set_num_threads(1)
    folder, chosen = trial.folder, trial.chosen
    with _ONE_AT_A_TIME:
        sets, prints = _trial_sets(chosen, trial.data, trial.partial)
        with run_folder.locked_run(folder, wait=True):  # another process may be at it
            found = find_trial(prints, trial)
        if found is None:
            try:
                complete_run(chosen, sets, folder, test=trial.test, wait=True)
            except Diverged as error:
                write_json(folder / DIVERGED, {"error": str(error)})
            found = find_trial(prints, trial)
        assert found is not None
        return found


def find_trial(prints: tuple[str, str], trial: Trial) -> dict[str, Any] | None:
    """Return the record of a finished run on data with these fingerprints; None if not finished."""
    folder, chosen = trial.folder, trial.chosen
    # A listing asks a network file system again, where a test for one name may be answered from
    # its cache.
    there = set(os.listdir(folder)) if folder.is_dir() else set[str]()
    settings = run_folder.check_run_folder(folder)
    if settings is None or not run_folder.data_matches(settings, prints):
        return None
    training = chosen.training
    record = {"run": folder.name, "seed": training.seed, **dataclasses.asdict(training.optimizer)}
    if DIVERGED in there:
        return {**record, "diverged": True}
    outcome = run_folder.read_outcome(folder)
    score = read_score(folder) if trial.test else None
    if outcome is None or "preset.json" not in there or (trial.test and score is None):
        return None
    record |= {
        "diverged": False,
        "best_epoch": outcome.best_epoch,
        "validation_accuracy": outcome.best_accuracy,
        "train_accuracy": outcome.epochs[outcome.best_epoch - 1]["train_accuracy"],
    }
    if score is not None:
        record["test_accuracy"] = score.accuracy
    return record


def _trial_sets(chosen: Preset, data: Path | None, partial: bool) -> tuple[Sets, tuple[str, str]]:
    """Return a preset's data, read once in a process that makes many runs, and fingerprints."""
    sets = _sets(dataclasses.replace(chosen, training=TrainSettings()), data, partial)
    return sets, (fingerprint(sets.train), fingerprint(sets.validation))


@functools.lru_cache(maxsize=1)
def _sets(chosen: Preset, data: Path | None, partial: bool) -> Sets:
    return load_sets(chosen, data, partial=partial)
