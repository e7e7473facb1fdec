"""The paper, row by row, and its errata: two tables in docs/paper.md, from the CSV files beside.

A row names the place in the paper, what it says, where that is in the code, the verdict, and what
checks it: an experiment, a test, or another command.
"""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import NamedTuple

from mirrorhead_lab.experiments import NAMES
from mirrorhead_lab.findings.table import Table, markdown, word


class Row(NamedTuple):
    """where: names and files, with spaces between them; check: an experiment, test or command."""

    place: str
    says: str
    where: str
    verdict: str
    check: str


class Erratum(NamedTuple):
    """printed: what the paper has; right: what it should have; check: what shows it."""

    place: str
    printed: str
    right: str
    check: str


def rows() -> list[Row]:
    """Every checkable row of the paper, in its order."""
    return [Row(*cells) for cells in _cells("paper_rows.csv")]


def errata() -> list[Erratum]:
    """What is wrong in print."""
    return [Erratum(*cells) for cells in _cells("paper_errata.csv")]


def command(check: str) -> str:
    """What to run for a check.

    >>> command("figure-4"), command("test_theory::test_lemma_2")
    ('mirrorhead reproduce --only figure-4', 'pytest tests/library/test_theory.py -k test_lemma_2')
    """
    if check in NAMES:
        return f"mirrorhead reproduce --only {check}"
    file, _, test = check.partition("::")
    return f"pytest tests/library/{file}.py -k {test}" if test else check


def blocks() -> dict[str, str]:
    """The two tables in Markdown, by the names of their marks."""

    def code(text: str) -> str:
        return f"`{text}`" if text else "–"

    found = [
        (str(k), row.place, row.says, " ".join(map(code, row.where.split())) or "–", row.verdict,
         code(command(row.check)))
        for k, row in enumerate(rows(), 1)
    ]  # fmt: skip
    wrong = [
        (str(k), one.place, one.printed, one.right, code(command(one.check)))
        for k, one in enumerate(errata(), 1)
    ]
    return {
        "paper-rows": _table(("row", "place", "the paper", "code", "verdict", "check"), found),
        "paper-errata": _table(("erratum", "place", "in print", "right", "shown by"), wrong),
    }


def _table(columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    return markdown(Table("paper", "", columns, tuple(tuple(map(word, line)) for line in lines)))


def _cells(name: str) -> list[list[str]]:
    text = (files("mirrorhead_lab.report") / name).read_text("utf-8")
    lines = csv.reader(
        text.splitlines()[1:], delimiter="|", quoting=csv.QUOTE_NONE, escapechar="\\"
    )
    return list(lines)
