"""The command line: what it refuses, and how it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mirrorhead
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.experiments import load

TESTS = Path(__file__).parent


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mirrorhead {mirrorhead.__version__}\n"


def reproduce(out: Path, *arguments: str) -> int:
    places = ["--out", str(out), "--results", str(out / "results")]
    return main(["reproduce", "--jobs", "1", *places, *arguments])


@pytest.mark.slow
def test_reproduce_from_the_first_run_to_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert reproduce(out, "--only", "toy_experiment") == 0
    printed = capsys.readouterr()
    assert printed.out.endswith(f"report: {out / 'report.html'}\n") and not printed.err
    assert "toy" in printed.out and "holds" in printed.out
    # Another experiment joins the same folder; the page shows what was asked for.
    assert reproduce(out, "--only", "example-1") == 0
    page = (out / "report.html").read_text()
    assert 'id="example-1"' in page and 'id="toy"' not in page
    assert reproduce(out, "--only", "toy_experiment,example-1", "--trials", "5") == 0
    page = (out / "report.html").read_text()
    assert 'id="example-1"' in page and 'id="toy"' in page
    command = f"mirrorhead reproduce --only toy_experiment --trials 5 --out {out}"
    assert command in page
    assert reproduce(out, "--only", "toy_experiment", "--only", "toy_experiment") == 0
    # `report` shows all registered experiments that are stored there.
    assert main(["report", "--out", str(out), "--results", str(out / "results")]) == 0
    assert 'id="example-1"' in (out / "report.html").read_text()
    capsys.readouterr()
    before = (out / "report.html").read_bytes()
    assert reproduce(out, "--only", "toy_experiment", "--full") == 2
    assert "scale 1.0 there, 2.0 here" in capsys.readouterr().err
    assert (out / "report.html").read_bytes() == before


@pytest.mark.slow
def test_a_failure_is_reported_and_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOY_FAIL", "5")
    assert reproduce(tmp_path, "--only", "example-1,toy_experiment") == 1
    printed = capsys.readouterr()
    assert printed.err == "mirrorhead: toy did not finish\n"
    assert "failed: toy, trials 4 to 7: ArithmeticError: seed 5 is a bad one" in printed.out
    assert "Traceback" in (tmp_path / "toy" / "failures.txt").read_text()
    page = (tmp_path / "report.html").read_text()
    assert "not finished" in page and 'id="example-1"' in page
    monkeypatch.delenv("TOY_FAIL")
    assert reproduce(tmp_path, "--only", "toy_experiment") == 0
    assert "not finished" not in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "toy" / "failures.txt").exists()


@pytest.mark.slow
def test_a_figure_that_fails_takes_nothing_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no ink")

    with monkeypatch.context() as patch:
        patch.setattr("toy_experiment.EXPERIMENT", replace(load("toy_experiment"), draw=broken))
        assert reproduce(tmp_path, "--only", "toy_experiment,example-1") == 1
    assert "computed, but not drawn or judged: RuntimeError: no ink" in capsys.readouterr().err
    assert "no ink" in (tmp_path / "report.html").read_text()
    assert reproduce(tmp_path, "--only", "toy_experiment") == 0
    # Nor does one that an earlier command left in the folder.
    with monkeypatch.context() as patch:
        example = replace(load("example-1"), draw=broken)
        patch.setattr("mirrorhead_lab.experiments.example_1.EXPERIMENT", example)
        assert main(["report", "--out", str(tmp_path), "--results", str(tmp_path / "none")]) == 0
    assert "no ink" in (tmp_path / "report.html").read_text()


def test_somebody_elses_file_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").write_text("my thesis")
    assert reproduce(tmp_path, "--only", "toy_experiment") == 2
    assert "is not a report of mirrorhead" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "my thesis"
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


@pytest.mark.slow
def test_the_console_script_and_the_module(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "mirrorhead_lab", "reproduce", "--only", "figure-99"],
        env=environment, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("mirrorhead: there is no experiment 'figure-99'")
    script = Path(sys.executable).parent / "mirrorhead"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mirrorhead {mirrorhead.__version__}\n"
