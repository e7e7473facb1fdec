"""Experiments of a folder as entries of the report: what `reproduce` and `report` share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirrorhead._files import write_atomically
from mirrorhead.lab.experiments import NAMES
from mirrorhead.lab.runtime.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from mirrorhead.lab.experiments.experiment import Experiment, TrialSettings
    from mirrorhead.lab.experiments.runner import Run
    from mirrorhead.lab.report import Entry


def check_matplotlib() -> None:
    """Say how to get matplotlib, before anything is computed."""
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib: pip install 'mirrorhead[lab]'")


def entry_of(run: Run, out: Path) -> Entry:
    """The run in the report. An experiment whose figure fails must not take the others along."""
    import traceback

    from mirrorhead.lab.report import judged, unfinished

    command = _command(run.experiment, run.settings, out)
    details = out / run.experiment.name / "failures.txt"
    details.unlink(missing_ok=True)
    if run.result is None:
        texts = [f"{task}: {why.message}\n{why.details}" for task, why in run.failures]
        write_atomically(details, "\n".join(texts).encode())
        lines = "\n".join(f"{task}: {why.message}" for task, why in run.failures)
        return unfinished(run.experiment, run.settings, command, lines)
    try:
        return judged(run.experiment, run.result, command)
    except Exception as error:
        write_atomically(details, traceback.format_exc().encode())
        message = f"computed, but not drawn or judged: {type(error).__name__}: {error}"
        print(f"failed: {run.experiment.name}: {message}", file=sys.stderr)
        return unfinished(run.experiment, run.settings, command, message)


def with_stored(entries: Sequence[Entry], out: Path) -> list[Entry]:
    """These, and what earlier commands left complete in the folder, in the report's order."""
    from mirrorhead.lab.experiments import load, storage
    from mirrorhead.lab.experiments.runner import Run

    found = {entry.name: entry for entry in entries}
    for name in NAMES:
        if name in found or not (out / name).exists():
            continue
        experiment = load(name)
        result = storage.stored(out, experiment)
        if result is not None:
            found[name] = entry_of(Run(experiment, result.settings, [result]), out)
    order = [name for name in NAMES if name in found]
    return [found.pop(name) for name in order] + list(found.values())


def _command(experiment: Experiment[Any], settings: TrialSettings, out: Path) -> str:
    """The command line that runs this experiment alone, with these settings."""
    words = ["mirrorhead", "reproduce", "--only"]
    words.append(experiment.name if experiment.name in NAMES else experiment.module)
    base = experiment.quick
    if replace(base, trials=settings.trials) != settings:
        base = experiment.full
        words.append("--full")
    if base.trials != settings.trials:
        words += ["--trials", str(settings.trials)]
    return shlex.join([*words, "--out", str(out)])


def print_verdicts(entries: Sequence[Entry], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    colours = {
        "holds": "green",
        "holds with a remark": "yellow",
        "not seen at this scale": "cyan",
        "does not hold": "red",
    }
    table = Table.grid(padding=(0, 2))
    for entry in entries:
        verdict = Text(entry.word, style=colours.get(entry.word, "red"))
        table.add_row(Text(entry.name), verdict, Text(entry.title, style="dim"))
    console.print(table)
