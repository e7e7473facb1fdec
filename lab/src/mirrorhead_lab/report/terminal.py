"""Verdicts in a terminal: one line each, or one line for each group of claims."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mirrorhead_lab.findings.finding import WORDS, Finding
from mirrorhead_lab.report.page import grouped, verdict_counts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

COLOURS = dict(zip(WORDS, ("green", "yellow", "blue", "cyan", "red", "magenta"), strict=True))
#: Shorter words, so that a line of counts fits into a terminal of 80 columns.
SHORT = {
    "holds with a remark": "with a remark",
    "not decided": "undecided",
    "not seen at this scale": "not seen",
    "does not hold": "fails",
    "not finished": "unfinished",
}
OPENERS = {"darwin": "open", "win32": "start"}


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print one line for each claim: its name, its verdict, and as much of its title as fits."""
    from rich.text import Text

    width = max((len(finding.name) for finding in findings), default=0)
    words = max((len(finding.word) for finding in findings), default=0)
    for finding in findings:
        verdict = (finding.word.ljust(words), COLOURS[finding.word])
        line = Text.assemble(f"{finding.name:{width}}  ", verdict, "  ", (finding.title, "dim"))
        console.print(line, no_wrap=True, overflow="ellipsis")


def print_summary(computed: Sequence[Finding], stored: Sequence[Finding], console: Console) -> None:
    """Print one line for each group that was computed, and one for all stored results."""
    from rich.text import Text

    lines = [*grouped(computed), ("Stored results", stored)]
    width = max(len(name) for name, _ in lines)
    for name, findings in lines:
        if findings:
            line = Text.assemble(f"{name:{width}}  ", _counts(findings))
            console.print(line, no_wrap=True, overflow="ellipsis")


def print_place(page: Path) -> None:
    """Print how to open the report and, on the last line, where it is."""
    opener = OPENERS.get(sys.platform, "xdg-open")
    print(f"to open it: {opener} {page}\nreport: {page}")


def _counts(findings: Sequence[Finding]) -> Text:
    from rich.text import Text

    counts = verdict_counts(findings)
    words = (Text(f"{n} {SHORT.get(word, word)}", COLOURS[word]) for word, n in counts)
    return Text(", ").join(words)
