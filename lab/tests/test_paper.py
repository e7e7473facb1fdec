"""The paper row by row: everything that a row names exists, and the page is what the files say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from mirrorhead_lab.experiments import NAMES
from mirrorhead_lab.report import paper
from mirrorhead_lab.report.markdown import fill

ROOT = Path(__file__).parents[2]


def exists(name: str) -> bool:
    """Whether a file, or a module, class or function with its attributes, is there."""
    if "/" in name:
        return (ROOT / name).is_file()
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            if not hasattr(thing, attribute):
                return False
            thing = getattr(thing, attribute)
        return True
    return False


@pytest.mark.parametrize("row", paper.rows(), ids=lambda row: row.place)
def test_the_code_of_a_row_exists(row: paper.Row) -> None:
    assert row.place and row.says and row.verdict
    assert all(exists(name) for name in row.where.split())
    assert row.where or row.verdict.startswith("not ")
    numbers = map(int, re.findall(r"\d+", row.verdict if "errat" in row.verdict else ""))
    assert all(1 <= number <= len(paper.errata()) for number in numbers)


@pytest.mark.parametrize("check", sorted({one.check for one in [*paper.rows(), *paper.errata()]}))
def test_what_checks_a_row_exists(check: str) -> None:
    file, _, test = check.partition("::")
    if test:
        text = (ROOT / f"tests/library/{file}.py").read_text()
        assert re.search(rf"^def {test}\b", text, flags=re.M)
    elif check not in NAMES and check:
        program, name = check.split()[:2]
        assert program == "mirrorhead" or (ROOT / name).is_file()


def test_every_experiment_of_the_paper_has_a_row() -> None:
    ours = {"acceleration"} | {name for name in NAMES if name.startswith(("bias", "choose-g"))}
    assert set(NAMES) - {row.check for row in paper.rows()} <= ours
    assert len(paper.rows()) >= 94


def test_the_page_is_what_the_files_say() -> None:
    text = (ROOT / "docs/paper.md").read_text()
    assert fill(text, paper.blocks()) == text


def test_what_does_not_exist_is_noticed() -> None:
    assert exists("mirrorhead.PNorm.norm") and exists("docs/paper.md")
    assert not exists("mirrorhead.PNorm.nothing") and not exists("docs/nothing.md")
    assert not exists("nothing.at.all")
