"""What the report shows: findings, and studies with claims, figures and tables.

A finding is one claim, with what was measured, its figure and the verdict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from mirrorhead_lab import verdicts
from mirrorhead_lab.findings.figures import PartFigure
from mirrorhead_lab.findings.table import Table
from mirrorhead_lab.verdicts import Verdict

if TYPE_CHECKING:
    from mirrorhead_lab.experiments.experiment import TrialSettings

#: What a claim is about, in the order of the report.
GROUPS = (
    *("The theory", "The paper's figures", "Bias of optimizers", "Real data"),
    *("Open questions", "Beyond the paper"),
)
#: The words of all verdicts, and of a claim that has none.
WORDS: tuple[str, ...] = (*verdicts.WORDS, "not finished")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim in the report; verdict and figure are None where it did not finish.

    An experiment has settings, an equation and the values of its figure; a claim on real data has
    the comparisons that decided it, and a word about the runs. docs: page and section of the docs;
    group: one of `GROUPS`.
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
    group: str = "Real data"

    @property
    def word(self) -> str:
        """The verdict in a few words."""
        return self.verdict.word if self.verdict else "not finished"

    @property
    def sentence(self) -> str:
        """What was measured in one sentence, or why nothing was."""
        return first_sentence(self.verdict.measured if self.verdict else self.failure)


@dataclass(frozen=True)
class Part:
    """A study, which has a section of the report.

    about: what was trained on what; tuning: how settings were chosen, without a full stop;
    verdict_rule: how its claims are judged; command: what makes the runs; group: of its findings.
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
    group: str = "Real data"


def first_sentence(text: str, words: int = 30) -> str:
    """Return the first sentence of a text; a longer one is cut at a comma, or after `words` words.

    >>> first_sentence("D is 2.4e-3 at p. The next is longer.")
    'D is 2.4e-3 at p.'
    >>> first_sentence("one two three; four five six", words=4)
    'one two three …'
    """
    first = re.split(r"(?<=[^.\s][.!?])\s+(?=[A-Z])", text.strip(), maxsplit=1)[0]
    if len(first.split()) <= words:
        return first
    kept = " ".join(first.split()[:words])
    whole = re.sub(r"[;,][^;,]*$", "", kept)
    return f"{whole if len(whole) > len(kept) / 2 else kept} …"
