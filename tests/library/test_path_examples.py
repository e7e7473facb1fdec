"""The examples of the model and regularization pages run, and say what the pages say."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


Run = Callable[..., list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example as a script, in this process; return the lines that it prints."""
    monkeypatch.setenv("MPLBACKEND", "agg")

    def run_example(name: str, *arguments: str) -> list[str]:
        path = str(ROOT / "examples" / name)
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run_example


@pytest.mark.slow
def test_gradient_accuracy(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "gradient.svg"
    lines = run("gradient_accuracy.py", "--out", str(out))
    rows = [line.split() for line in lines[1:-1]]
    assert out.read_text().startswith("<?xml")
    assert all(float(row[3]) < 1e-14 for row in rows)
    assert [row[2] for row in rows[-2:]] == ["underflow"] * 2
    assert all(float(row[2]) > 0.1 for row in rows[-4:-2])
    page = (ROOT / "docs" / "model.md").read_text()
    for norm, size, _, _ in rows:
        assert f"| {int(norm):,} | {size} |" in page


@pytest.mark.slow
def test_key_query(run: Run) -> None:
    rows = [line.split() for line in run("key_query.py", "--trials", "2")[1:]]
    assert len(rows) == 2
    for _, trained, frobenius in rows:
        assert 1 <= float(trained) < 1.03 < float(frobenius)


@pytest.mark.slow
def test_theorem_1(run: Run) -> None:
    lines = run("theorem_1.py", "--trials", "3", "--p", "2", "--starts", "3")
    assert lines[0].startswith("p = 2, 3 trials, ")
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == ["1", "3", "10", "30", "100"]
    assert [row[3] for row in rows[2:]] == ["100%"] * 3
    assert float(rows[-1][1]) < 1e-3


@pytest.mark.slow
def test_theorem_5(run: Run) -> None:
    lines = run("theorem_5.py", "--p", "2")
    text = "\n".join(lines)
    assert re.search(r"\(X11,X21\) +4\.3541 +0\.0052", text)
    assert re.search(r"\(X12,X21\) +4\.3488 +-0\.0052", text)
    assert lines[-1].split()[:2] == ["1000", "(X11,X21)"]
    assert all(float(x) < 1e-4 for x in lines[-1].split()[2:])
