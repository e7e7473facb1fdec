"""`mirrorhead report`: of what is there, with a word on what is not; and the page in docs/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mirrorhead_lab import studies
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.experiments import NAMES
from mirrorhead_lab.report.markdown import MARK, blocks, fill
from mirrorhead_lab.runtime.errors import UserError
from results_cases import made_up, write_rows

ROOT = Path(__file__).parents[2]
CLASSIFIERS = ("imdb", "imdb-to-the-end", "cifar10")
PAGES = [page for page in (ROOT / "docs").rglob("*.md") if MARK.search(page.read_text())]


def report(folder: Path, *arguments: str) -> int:
    places = ["--out", str(folder / "out"), "--results", str(folder / "results")]
    return main(["report", *places, *arguments])


@pytest.mark.slow
def test_from_nothing_to_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out", tmp_path / "out" / "report.html"
    # Nothing is there: it says how to get it, and writes nothing.
    assert report(tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith("mirrorhead: there is nothing to report: ") and error.count("\n") == 1
    assert f"mirrorhead reproduce --out {out}" in error and "(--results)" in error
    assert not list(tmp_path.iterdir())
    # Experiments alone.
    places = ["--out", str(out), "--results", str(tmp_path / "results")]
    assert main(["reproduce", "--jobs", "1", "--only", "example-1", *places]) == 0
    capsys.readouterr()
    assert report(tmp_path) == 0
    told = capsys.readouterr().err
    assert f"There is no folder {tmp_path / 'results'} with studies" in told and "sweep" not in told
    (tmp_path / "results").mkdir()
    assert report(tmp_path) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith(f"report: {page}\n") and "example-1" in printed.out
    made = f"mirrorhead study cifar10 --results {tmp_path}/results"
    assert f"cifar10.jsonl is not there. To make the runs: {made}" in printed.err
    rest = ",".join(name for name in NAMES if name != "example-1")
    again = f"mirrorhead reproduce --only {rest} --out {out}"
    assert again in printed.err and again in page.read_text()
    assert 'id="example-1"' in page.read_text() and 'id="imdb"' not in page.read_text()
    # Experiments, and one study.
    write_rows(tmp_path / "results", made_up("cifar10"))
    assert report(tmp_path) == 0
    printed = capsys.readouterr()
    assert "figure-11" in printed.out and "cifar10.jsonl" not in printed.err
    text = page.read_text()
    assert 'id="example-1"' in text and 'id="cifar10"' in text and 'id="imdb"' not in text
    assert "imdb.jsonl is not there" in text


@pytest.mark.slow
def test_reproduce_shows_real_data_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    monkeypatch.setattr("mirrorhead_lab.cli.reproduce.NAMES", ("toy_experiment",))
    command = ["reproduce", "--jobs", "1", "--out", str(out), "--results", str(results)]
    write_rows(results, made_up("cifar10"))
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "Beyond the paper  1 holds" in printed
    assert "Stored results" in printed
    assert max(map(len, printed.split("to open it:")[0].splitlines())) <= 80
    assert printed.endswith(f"report: {out / 'report.html'}\n")
    assert len(printed.splitlines()) <= 6
    page = (out / "report.html").read_text()
    assert 'id="toy"' in page and 'id="cifar10"' in page
    # A damaged file is named before anything is computed.
    (results / "cifar10.jsonl").write_text("{\n")
    assert main([*command, "--trials", "12"]) == 2
    assert "cifar10.jsonl" in capsys.readouterr().err
    assert len(list((out / "toy").glob("*.npz"))) == 3
    # A part of it does not read the studies at all.
    assert main([*command, "--only", "toy_experiment"]) == 0
    printed = capsys.readouterr().out
    assert "toy  holds  A toy" in printed
    page = (out / "report.html").read_text()
    assert 'id="toy"' in page and 'id="cifar10"' not in page


@pytest.mark.slow
def test_real_data_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in CLASSIFIERS:
        write_rows(tmp_path / "results", made_up(name))
    assert report(tmp_path) == 0
    printed = capsys.readouterr()
    assert "table-1-momentum" in printed.out and "imdb-pruning" in printed.out
    assert "table-1-to-the-end" in printed.out
    first, *others = printed.err.splitlines()
    assert "no complete results of experiments" in first
    assert [line.split("mirrorhead ")[1].split(" --")[0] for line in others] == [
        "study heads", "study patches", "study optimizers", "study language-model",
        "study fine-tuning",
    ]  # fmt: skip
    text = (tmp_path / "out" / "report.html").read_text()
    assert 'id="imdb"' in text and 'id="cifar10"' in text and 'id="example-1"' not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 100
    assert set(re.findall(r'(?:href="#|url\(#|labelledby=")([^")]+)', text)) <= set(ids)


@pytest.mark.slow
def test_wrong_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    results.mkdir()
    (results / "imdb.jsonl").write_text('{"trial": "imdb"}\n')
    assert report(tmp_path) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"mirrorhead: {results / 'imdb.jsonl'} is damaged")
    assert told.count("\n") == 1
    assert not out.exists()
    (results / "imdb.jsonl").unlink()
    write_rows(results, made_up("cifar10"))
    assert report(tmp_path, "--markdown", str(tmp_path / "none.md")) == 2
    assert "none.md cannot be read" in capsys.readouterr().err
    (tmp_path / "bad.md").write_text("<!-- begin mnist-accuracy -->\n<!-- end -->\n")
    assert report(tmp_path, "--markdown", str(tmp_path / "bad.md")) == 2
    assert "bad.md: there is nothing for mnist-accuracy; there are" in capsys.readouterr().err
    assert not out.exists()
    out.mkdir()
    (out / "report.html").write_text("my thesis")
    assert report(tmp_path) == 2
    assert "is not a report of mirrorhead" in capsys.readouterr().err
    assert (out / "report.html").read_text() == "my thesis"


@pytest.mark.slow
def test_a_page_is_filled_between_its_marks(tmp_path: Path) -> None:
    write_rows(tmp_path / "results", made_up("cifar10"))
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    marks = "cifar10-accuracy", "cifar10-accuracy-figure", "imdb-accuracy"
    text = "".join(f"Mine.\n\n<!-- begin {m} -->\nold\n<!-- end -->\n\n" for m in marks)
    page.write_text(text)
    assert report(tmp_path, "--markdown", str(page)) == 0
    filled = page.read_text()
    assert filled.count("Mine.") == 3 and filled.count("old") == 1  # imdb is not there: it stays
    assert "| MD p=1.1 | 0.1 |" in filled
    (image,) = (page.parent / "images").iterdir()
    assert f"(images/{image.name})" in filled and image.read_text().startswith("<?xml")
    before = image.read_bytes()
    assert report(tmp_path, "--markdown", str(page)) == 0
    assert page.read_text() == filled and image.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "<!-- begin x -->",
        "<!-- end -->",
        "<!-- end -->\n<!-- begin x -->",
        "<!-- begin x -->\n<!-- begin x -->\n<!-- end -->",
    ],
)
def test_marks_come_in_pairs(text: str) -> None:
    with pytest.raises(UserError, match="needs an <!-- end --> after it"):
        fill(text, {"x": "new"})


def test_the_docs_have_what_the_results_give() -> None:
    """Tables on the pages of the docs are those of the files in results/, to the letter."""
    written = blocks(studies.parts(ROOT / "results"))
    for page in PAGES:
        text = page.read_text()
        assert fill(text, written, str(page)) == text
        for image in re.findall(r"\]\((images/[^)]+)\)", text):
            there = (page.parent / image).exists()
            assert there, f"{image}: run mirrorhead report --markdown {page}"


def test_the_docs_leave_nothing_out(tmp_path: Path) -> None:
    for name in CLASSIFIERS:
        write_rows(tmp_path, made_up(name))
    marks = {mark[2] for page in PAGES for mark in MARK.finditer(page.read_text()) if mark[2]}
    assert marks >= set(blocks(studies.parts(tmp_path)))
