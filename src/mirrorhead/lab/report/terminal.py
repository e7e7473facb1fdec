"""The verdicts in a terminal, and where the report is."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mirrorhead.lab.report.findings import WORDS, Finding

if TYPE_CHECKING:
    from rich.console import Console

COLOURS: dict[str, str] = dict(
    zip(WORDS, ("green", "yellow", "cyan", "red", "magenta"), strict=True)
)
OPENERS = {"darwin": "open", "win32": "start"}


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print a line for each claim and how many have which verdict; it fits 80 columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), expand=False)
    for no_wrap in (True, True, False):
        table.add_column(no_wrap=no_wrap, overflow="fold")
    for finding in findings:
        verdict = Text(finding.word, style=COLOURS[finding.word])
        table.add_row(Text(finding.name), verdict, Text(finding.title, style="dim"))
    console.print(table)
    counts = Counter(finding.word for finding in findings)
    words = [Text(f"{word}: {counts[word]}", style=COLOURS[word]) for word in WORDS if counts[word]]
    console.print(Text(", ").join(words))


def print_place(page: Path) -> None:
    """Print how to open the report and, on the last line, where it is."""
    opener = OPENERS.get(sys.platform, "xdg-open")
    print(f"in a browser: {page.resolve().as_uri()}\nto open it: {opener} {page}\nreport: {page}")
