"""Findings of experiments: their results, drawn and judged."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mirrorhead._files import write_atomically
from mirrorhead_lab.experiments import NAMES, load, storage
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.experiments.runner import Run
from mirrorhead_lab.findings.figures import PartFigure
from mirrorhead_lab.findings.finding import Finding


def finding_of(run: Run, out: Path) -> Finding:
    """Draw and judge a run; an experiment that fails in that must not stop the others."""
    experiment = run.experiment
    details = out / experiment.name / "failures.txt"
    details.unlink(missing_ok=True)
    command = _command(experiment, run.settings, out)
    if run.result is None:
        texts = [f"{task}: {why.message}\n{why.details}" for task, why in run.failures]
        write_atomically(details, "\n".join(texts).encode())
        lines = "\n".join(f"{task}: {why.message}" for task, why in run.failures)
        return unfinished(experiment, run.settings, command, lines)
    try:
        return judged(experiment, run.result, command)
    except Exception as error:
        write_atomically(details, traceback.format_exc().encode())
        message = f"computed, but not drawn or judged: {type(error).__name__}: {error}"
        print(f"failed: {experiment.name}: {message}", file=sys.stderr)
        return unfinished(experiment, run.settings, command, message)


def with_stored(findings: Sequence[Finding], out: Path) -> list[Finding]:
    """Return these, and what earlier commands left complete in `out`, in the report's order."""
    found = {finding.name: finding for finding in findings}
    for name in NAMES:
        if name not in found and (out / name).exists():
            experiment = load(name)
            result = storage.stored(out, experiment)
            if result is not None:
                found[name] = finding_of(Run(experiment, result.settings, [result]), out)
    order = [name for name in NAMES if name in found]
    return [found.pop(name) for name in order] + list(found.values())


def judged(experiment: Experiment[Any], result: Result[Any], command: str) -> Finding:
    """Draw and judge a result."""
    verdict = experiment.judge(result)
    caption = f"{experiment.title}. Measured: {verdict.measured}"
    drawing = PartFigure(f"figure-of-{experiment.name}", caption, partial(experiment.draw, result))
    _, svg, values = drawing.inline()
    found = unfinished(experiment, result.settings, command, "")
    return replace(found, seconds=result.seconds, verdict=verdict, figure=svg, values=values)


def unfinished(
    experiment: Experiment[Any], settings: TrialSettings, command: str, failure: str
) -> Finding:
    """Return the finding of an experiment that has no result, and why."""
    about = {
        key: getattr(experiment, key) for key in ("name", "title", "claim", "equation", "group")
    }
    page = "evidence/bias" if experiment.name.startswith("bias-") else "evidence/paper"
    docs = (page, experiment.name) if experiment.name in NAMES else ("", "")
    return Finding(**about, settings=settings, command=command, docs=docs, failure=failure)


def _command(experiment: Experiment[Any], settings: TrialSettings, out: Path) -> str:
    """Return the command line that runs this experiment alone, with these settings."""
    words = ["mirrorhead", "reproduce", "--only"]
    words.append(experiment.name if experiment.name in NAMES else experiment.module)
    base = experiment.quick
    if replace(base, trials=settings.trials) != settings:
        base = experiment.full
        words.append("--full")
    if base.trials != settings.trials:
        words += ["--trials", str(settings.trials)]
    return shlex.join([*words, "--out", str(out)])
