"""A claim in the report: what it says, what was measured, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mirrorhead.lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead.lab.plots import style
from mirrorhead.lab.report.figure import inline_svg
from mirrorhead.lab.report.tables import Table
from mirrorhead.lab.verdicts import WORDS as VERDICTS
from mirrorhead.lab.verdicts import Verdict

WORDS = (*VERDICTS, "not finished")


@dataclass(frozen=True)
class Entry:
    """One claim in the report; verdict and figure are None where it did not finish.

    An experiment has its settings; a claim on real data has none, but the comparisons that
    decided it, as a table, and a word about the runs.
    """

    name: str
    title: str
    claim: str
    settings: TrialSettings | None
    command: str
    seconds: float = 0.0
    verdict: Verdict | None = None
    figure: Markup | None = None
    failure: str = ""
    table: Table | None = None
    about: str = ""

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return self.verdict.word if self.verdict else "not finished"

    @property
    def rank(self) -> int:
        """What fails comes first when sorted by verdict."""
        return ("not finished", *reversed(VERDICTS)).index(self.word)


def judged(experiment: Experiment[Any], result: Result[Any], command: str) -> Entry:
    """Draw and judge a result."""
    import matplotlib

    with matplotlib.rc_context(style()):
        verdict = experiment.verdict(result)
        figure = experiment.draw(result)
        alt = f"{experiment.title}. Measured: {verdict.measured}"
        svg = inline_svg(figure, f"figure-of-{experiment.name}", alt)
    return Entry(
        experiment.name,
        experiment.title,
        experiment.claim,
        result.settings,
        command,
        result.seconds,
        verdict,
        svg,
    )


def unfinished(
    experiment: Experiment[Any], settings: TrialSettings, command: str, failure: str
) -> Entry:
    """An experiment that has no result, and why."""
    return Entry(
        experiment.name, experiment.title, experiment.claim, settings, command, failure=failure
    )
