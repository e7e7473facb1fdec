"""A sweep's results in one small file: how each rival was tuned, and the measures of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mirrorhead._files import write_json
from mirrorhead.lab.evaluation.measures import Material, check_parts, measure
from mirrorhead.lab.runtime.errors import RunError
from mirrorhead.lab.runtime.jobs import worker_processes
from mirrorhead.lab.runtime.json_files import read_json
from mirrorhead.lab.training.loggers import read_log
from mirrorhead.lab.training.presets import load_sets, preset
from mirrorhead.lab.training.run_folder import load_run
from mirrorhead.lab.training.settings import OptimizerSettings
from mirrorhead.lab.training.studies import STUDIES


def collect(
    sweep: str | Path,
    out: str | Path,
    *,
    jobs: int = 1,
    data: str | Path | None = None,
    partial: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Measure the final runs of a sweep and write them to `out` with how they were tuned.

    Every part of `measure` but test accuracy, which the sweep has read. Measures are kept in the
    folders of the runs, and not computed again.

    Args:
        sweep: the folder of all runs, or the record in it, sweep-<hash>.json.
        out: a JSON file.
        jobs: processes at once, of one thread each.
        data, partial: as in `load_sets`.
        show: a progress bar, if this is a terminal.
    """
    _check_free(Path(out))
    path = find_record(sweep)
    record = _read(path)
    base = preset(record["asked"]["preset"], OptimizerSettings("sgd"))
    sets = load_sets(base, data, partial=partial)
    sizes = {"train": len(sets.train), "validation": len(sets.validation), "test": len(sets.test)}
    names = [run["run"] for one in record["tuned"] for run in one["final"] if not run["diverged"]]
    folders = [path.parent / name for name in dict.fromkeys(names)]
    found = dict(zip(folders, _measures(folders, jobs, data, partial, show), strict=True))
    study = _study(record["asked"]["preset"], base.data)
    results = {
        "study": study,
        "preset": record["asked"]["preset"],
        "epochs": record["asked"]["epochs"] or base.training.epochs,
        "batch_size": base.training.batch_size,
        "rule": record["rule"],
        "command": _command(study, record["asked"]),
        "sizes": sizes,
        "rivals": [_rival(one, path.parent, found) for one in record["tuned"]],
    }
    if base.data == "imdb":
        results["baselines"] = {"random": _random(list(found.values()))}
    write_json(Path(out), results)
    return results


def _check_free(path: Path) -> None:
    """Refuse to overwrite a file that is not a file of results."""
    if path.exists():
        there = read_json(path, dict[str, Any]) if path.is_file() else {}
        if "study" not in there:
            raise RunError(f"{path} is not a file of results: choose another name")


def find_record(sweep: str | Path) -> Path:
    """The record of the sweep in a folder."""
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


def _read(path: Path) -> dict[str, Any]:
    record = read_json(path, dict[str, Any])
    if isinstance(record.get("asked"), dict) and isinstance(record.get("tuned"), list):
        return record
    raise RunError(f"{path} is not the record of a sweep")


def _study(name: str, data: str) -> str:
    return next((study for study, about in STUDIES.items() if about.preset == name), data)


def _command(study: str, asked: dict[str, Any]) -> str:
    """What makes these runs again."""
    about = STUDIES[study]
    rivals = {name: [asdict(rule) for rule in rules] for name, rules in about.rivals.items()}
    words = ["mirrorhead", "sweep", study]
    if asked["preset"] != about.preset:
        words += ["--preset", asked["preset"]]
    if asked["rivals"] != rivals:
        words += ["--rival", "..."]  # the record has them all
    if tuple(asked["seeds"]) != about.seeds:
        words += ["--seeds", *map(str, asked["seeds"])]
    if asked["epochs"] is not None:
        words += ["--epochs", str(asked["epochs"])]
    return " ".join(words)


def _rival(one: dict[str, Any], root: Path, found: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    tried = [
        {"lr": run["lr"], "diverged": run["diverged"]}
        | {key: run.get(key) for key in ("validation_accuracy", "best_epoch")}
        for run in one["tried"]
    ]
    about = ("best_epoch", "train_accuracy", "validation_accuracy", "test_accuracy")
    runs = [
        {"seed": run["seed"], "diverged": run["diverged"]}
        | {key: run.get(key) for key in about}
        | {"measures": found.get(root / run["run"])}
        | {"seconds_per_epoch": _seconds(root / run["run"])}
        for run in one["final"]
    ]
    return {"name": one["name"], "chosen": one["chosen"], "tried": tried, "runs": runs}


def _seconds(folder: Path) -> float | None:
    """Of the fastest epoch, as other work on a machine can only add; from the run's log."""
    events = [event for _, event in read_log(folder / "log.jsonl")]
    seconds = [event["seconds"] for event in events if event["kind"] == "epoch"]
    return min(seconds) if seconds else None


def _random(measures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Scores at random. Those that ask the model (comprehensiveness) are means over the runs."""

    def over_runs(part: str, split: str, key: str) -> float:
        values = [one[part][split]["random"][key] for one in measures]
        return values[0] if len(set(values)) == 1 else statistics.fmean(values)

    return {
        part: {
            split: {key: over_runs(part, split, key) for key in scores["random"]}
            for split, scores in measures[0][part].items()
        }
        for part in ("eraser", "cad")
        if measures
    }


def _measures(
    folders: Sequence[Path], jobs: int, data: str | Path | None, partial: bool, show: bool
) -> Iterator[dict[str, Any]]:
    """Of each folder, in that order, with a progress bar."""
    from joblib import delayed
    from rich.console import Console
    from rich.progress import track

    job = delayed(_measure_one)
    tasks = [job(folder, data, partial) for folder in folders]
    console = Console(stderr=True)
    found: Any = worker_processes(jobs, return_as="generator")(tasks)
    return iter(
        track(
            found,
            "measuring runs",
            total=len(folders),
            console=console,
            disable=not (show and console.is_terminal),
        )
    )


def _measure_one(folder: Path, data: str | Path | None, partial: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    run = load_run(folder)
    parts = [part for part in check_parts(run) if part != "test"]
    return measure(run, _material(Material.of(run, data, partial=partial)), parts)


@lru_cache(maxsize=1)
def _material(wanted: Material) -> Material:
    """The same data, read once in a process that measures many runs."""
    return wanted
