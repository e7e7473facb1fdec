"""What the report shows: findings, and studies with claims, figures and tables.

A finding is one claim, with what was measured, its figure and the verdict.
"""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mirrorhead._files import write_atomically
from mirrorhead_lab import verdicts
from mirrorhead_lab.experiments import NAMES, load, storage
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.experiments.runner import Run
from mirrorhead_lab.report.figures import PartFigure
from mirrorhead_lab.report.table import Table
from mirrorhead_lab.verdicts import Verdict

#: The words of all verdicts, and of a claim that has none.
WORDS: tuple[str, ...] = (*verdicts.WORDS, "not finished")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim in the report; verdict and figure are None where it did not finish.

    An experiment has settings, an equation and the values of its figure; a claim on real data has
    the comparisons that decided it, and a word about the runs. docs: page and section of the docs.
    """

    name: str
    title: str
    claim: str
    command: str
    docs: tuple[str, str]
    equation: str = ""
    settings: TrialSettings | None = None
    seconds: float = 0.0
    verdict: Verdict | None = None
    figure: Markup | None = None
    values: Table | None = None
    failure: str = ""
    comparisons: Table | None = None
    about: str = ""

    @property
    def word(self) -> str:
        """The verdict in a few words."""
        return self.verdict.word if self.verdict else "not finished"

    @property
    def is_stored(self) -> bool:
        """Whether its numbers are stored results; those of experiments were computed for it."""
        return self.settings is None

    @property
    def rank(self) -> int:
        """The place when sorted by verdict: what fails comes first."""
        return len(WORDS) - 1 - WORDS.index(self.word)


@dataclass(frozen=True)
class Part:
    """A study, which has a section of the report.

    about: what was trained on what; tuning: how settings were chosen, without a full stop;
    verdict_rule: how its claims are judged; command: what makes the runs.
    """

    name: str
    title: str
    about: str
    tuning: str
    verdict_rule: str
    command: str
    findings: tuple[Finding, ...] = ()
    figures: tuple[PartFigure, ...] = ()
    tables: tuple[Table, ...] = ()


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
    about = {key: getattr(experiment, key) for key in ("name", "title", "claim", "equation")}
    docs = ("paper", experiment.name)
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
