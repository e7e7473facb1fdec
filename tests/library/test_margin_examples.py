"""The examples of the margin pages run, and say what the pages say."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_example_1_shows_both_readings(capsys):
    runpy.run_path(str(ROOT / "examples" / "example1.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if line.startswith("  p =")]
    assert all("W11 0.04000   W21 -0.00000" in line for line in found[:3])
    assert "W11 0.03846   W21 -0.00769   <- the printed one" in found[4]
    assert "W11 0.03672   W21 -0.01642" in found[5]
    assert sum("printed one" in line for line in found) == 1


@pytest.mark.slow
def test_the_figure_is_drawn(tmp_path, monkeypatch):
    out = tmp_path / "margin.svg"
    script = str(ROOT / "examples" / "margin_figure.py")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "argv", [script, str(out)])
    runpy.run_path(script, run_name="__main__")
    assert out.read_text().startswith("<?xml")
