"""The results of a sweep or of a single run, collected into the schema of `results`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mirrorhead_lab.evaluation.measures import (
    MEASURES,
    TEXTS_ONLY,
    EvaluationData,
    check_parts,
    measure,
)
from mirrorhead_lab.evaluation.results import (
    RUN_RESULTS,
    ComparisonResults,
    Measures,
    OptimizerResults,
    RandomScores,
    RunResults,
    Sizes,
    TriedRate,
    check_free,
    write_results,
)
from mirrorhead_lab.runtime.errors import RunError
from mirrorhead_lab.runtime.folders import check_writable
from mirrorhead_lab.runtime.jobs import worker_processes
from mirrorhead_lab.runtime.json_files import from_plain, read_json
from mirrorhead_lab.runtime.progress import ProgressBars
from mirrorhead_lab.training.loggers import read_log
from mirrorhead_lab.training.presets import (
    COMPARISONS,
    PRESETS,
    Preset,
    Sets,
    candidate_name,
    load_sets,
)
from mirrorhead_lab.training.run_folder import Run, load_run, read_outcome, read_score
from mirrorhead_lab.training.settings import OptimizerSettings
from mirrorhead_lab.training.sweeps import Asked


@dataclass(frozen=True)
class _Final:
    """A final run in the record of a sweep; one that diverged has no accuracies."""

    run: str
    seed: int
    diverged: bool
    best_epoch: int | None = None
    train_accuracy: float | None = None
    validation_accuracy: float | None = None
    test_accuracy: float | None = None


@dataclass(frozen=True)
class _Tuned:
    name: str
    chosen: OptimizerSettings | None
    tried: list[TriedRate]
    final: list[_Final]


@dataclass(frozen=True)
class _Record:
    """sweep-<hash>.json."""

    asked: Asked
    rule: str
    tuned: list[_Tuned]


def collect(
    sweep: str | Path,
    out: str | Path,
    *,
    jobs: int = 1,
    data: str | Path | None = None,
    partial: bool = False,
) -> ComparisonResults:
    """Measure the final runs of a sweep and write them to `out` with how they were tuned.

    Every part of `measure` but test accuracy, which the sweep has read. Measures are kept in the
    folders of the runs, and not computed again.

    Args:
        sweep: the folder of all runs, or the record in it, sweep-<hash>.json.
        out: a JSON file, new or of results.
        jobs: processes at once, of one thread each.
        data, partial: as in `load_sets`.
    """
    check_free(Path(out))
    check_writable(Path(out).parent)
    path = find_record(sweep)
    record = read_json(path, _Record)
    asked = record.asked
    base = asked.run(OptimizerSettings("sgd"), seed=0)
    parts = [part for part in MEASURES if base.data == "imdb" or part not in TEXTS_ONLY]
    EvaluationData(base.data, folder=data).require(parts)
    sets = load_sets(base, data, partial=partial)
    names = [run.run for one in record.tuned for run in one.final if not run.diverged]
    folders = [path.parent / name for name in dict.fromkeys(names)]
    found = dict(zip(folders, _measures(folders, jobs, data, partial), strict=True))
    about: dict[str, Any] = {"rule": record.rule}
    about["command"] = _command(_study(asked.preset, base.data), asked)
    about["optimizers"] = tuple(_optimizer(one, path, found) for one in record.tuned)
    return _write(Path(out), asked.preset, base, sets, list(found.values()), **about)


def _write(
    path: Path, name: str, base: Preset, sets: Sets, measures: list[dict[str, Any]], **about: Any
) -> ComparisonResults:
    """Write the results of runs with a preset, by its name, to a file."""
    results = ComparisonResults(
        name=_study(name, base.data),
        preset=name,
        epochs=base.training.epochs,
        batch_size=base.training.batch_size,
        sizes=Sizes(len(sets.train), len(sets.validation), len(sets.test)),
        baselines=_baselines(measures),
        **about,
    )
    write_results(path, results)
    return results


def write_run_results(
    run: Run, measures: dict[str, Any], data: str | Path | None, *, partial: bool
) -> Path | None:
    """Write the results of one evaluated run to results.json in its folder, for the report.

    None if a part is missing, or if the run has not finished.
    """
    outcome, score = read_outcome(run.folder), read_score(run.folder)
    if not set(check_parts(run)) <= {*measures} or outcome is None or score is None:
        return None
    training = run.preset.training
    result = RunResults(
        seed=training.seed,
        best_epoch=outcome.best_epoch,
        train_accuracy=outcome.epochs[outcome.best_epoch - 1]["train_accuracy"],
        validation_accuracy=outcome.best_accuracy,
        test_accuracy=score.accuracy,
        measures=from_plain(measures, Measures, str(run.folder / "measures.json")),
        seconds_per_epoch=_seconds(run.folder),
    )
    rule = training.optimizer
    about: dict[str, Any] = {"rule": "a single run; no learning rate was tuned"}
    about["command"] = f"mirrorhead evaluate {run.folder}"
    about["optimizers"] = (OptimizerResults(candidate_name(rule), rule, (), (result,)),)
    sets = load_sets(run.preset, data, partial=partial)
    _write(run.folder / RUN_RESULTS, _preset_name(run), run.preset, sets, [measures], **about)
    return run.folder / RUN_RESULTS


def final_runs(sweep: str | Path) -> dict[str, Path]:
    """Return the folders of a sweep's final runs that did not diverge, by study, name and seed."""
    path = find_record(sweep)
    record = read_json(path, _Record)
    asked = record.asked
    study = _study(asked.preset, asked.run(OptimizerSettings("sgd"), seed=0).data)
    final = [(one.name, run) for one in record.tuned for run in one.final if not run.diverged]
    names = (f"{study} {name} seed{run.seed}".replace("=", "") for name, run in final)
    plain = (re.sub(r"[^\w.]+", "-", name) for name in names)
    return {name: path.parent / run.run for name, (_, run) in zip(plain, final, strict=True)}


def find_record(sweep: str | Path) -> Path:
    """Return the record of the sweep in a folder."""
    path = Path(sweep)
    if path.is_file():
        return path
    found = sorted(path.glob("sweep-*.json"))
    if not found:
        raise RunError(f"{path} has no sweep-....json: give the folder of a sweep that has ended")
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        raise RunError(f"{path} has the records of {len(found)} sweeps: give one of {names}")
    return found[0]


def _study(base: str, data: Any) -> Any:
    """Return the comparison that a preset belongs to."""
    return next((name for name, c in COMPARISONS.items() if c.preset == base), data)


def _preset_name(run: Run) -> str:
    """Return the name of the preset whose model the run has, and which epoch it keeps."""
    ours, choose = run.preset.model, run.preset.training.choose
    for name, found in PRESETS.items():
        if (found.model, found.training.choose) == (ours, choose):
            return name
    return "custom"


def _command(name: str, asked: Asked) -> str:
    """Return the command that makes these runs again."""
    usual = COMPARISONS[name]
    words = ["mirrorhead", "sweep", name]
    if asked.preset != usual.preset:
        words += ["--preset", asked.preset]
    if asked.rivals != {name: list(rates) for name, rates in usual.candidates.items()}:
        words += ["--candidate", "..."]  # the record has them all
    if tuple(asked.seeds) != usual.seeds:
        words += ["--seeds", *map(str, asked.seeds)]
    if asked.epochs is not None:
        words += ["--epochs", str(asked.epochs)]
    return " ".join(words)


def _optimizer(one: _Tuned, record: Path, found: dict[Path, dict[str, Any]]) -> OptimizerResults:
    runs = []
    for run in one.final:
        if not run.diverged:
            folder = record.parent / run.run
            more = {"measures": found[folder], "seconds_per_epoch": _seconds(folder)}
            runs.append({**asdict(run), **more})
    diverged = tuple(run.seed for run in one.final if run.diverged)
    done = from_plain(runs, tuple[RunResults, ...], str(record))
    return OptimizerResults(one.name, one.chosen, tuple(one.tried), done, diverged)


def _seconds(folder: Path) -> float | None:
    """Return the seconds of the fastest epoch in the log: other work can only add to them."""
    events = (event for _, event in read_log(folder / "log.jsonl"))
    return min((event["seconds"] for event in events if event["kind"] == "epoch"), default=None)


def _baselines(measures: Sequence[dict[str, Any]]) -> dict[str, RandomScores]:
    """Return random scores, for texts; those that involve the model are means over the runs."""
    if not measures or "eraser" not in measures[0]:
        return {}

    def over_runs(part: str, split: str, key: str) -> float:
        values = [one[part][split]["random"][key] for one in measures]
        return values[0] if len(set(values)) == 1 else statistics.fmean(values)

    random = {
        part: {
            split: {key: over_runs(part, split, key) for key in scores["random"]}
            for split, scores in measures[0][part].items()
        }
        for part in ("eraser", "cad")
    }
    return {"random": from_plain(random, RandomScores, "measures.json")}


def _measures(
    folders: Sequence[Path], jobs: int, data: str | Path | None, partial: bool
) -> Iterator[dict[str, Any]]:
    """Measure each folder, in that order, with a progress bar."""
    from joblib import delayed

    tasks = [delayed(_measure_one)(folder, data, partial) for folder in folders]
    found: Any = worker_processes(jobs, return_as="generator")(tasks)
    with ProgressBars({"measuring": len(folders)}, "runs") as bars:
        for measures in found:
            yield measures
            bars.advance("measuring")


def _measure_one(folder: Path, data: str | Path | None, partial: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    run = load_run(folder)
    parts = [part for part in check_parts(run) if part != "test"]
    return measure(run, _data(EvaluationData.of(run, data, partial=partial)), parts)


@lru_cache(maxsize=1)
def _data(wanted: EvaluationData) -> EvaluationData:
    """Return the same data, read once in a process that measures many runs."""
    return wanted
