"""The examples of the margin pages run, and say what the pages say."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_example_1_shows_both_readings(capsys):
    runpy.run_path(str(ROOT / "examples" / "example1.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if line.startswith("  p =")]
    assert all("W11 0.04000   W21 -0.00000" in line for line in found[:3])
    assert "W11 0.03846   W21 -0.00769   <- the printed one" in found[4]
    assert "W11 0.03672   W21 -0.01642" in found[5]
    assert sum("printed one" in line for line in found) == 1


def test_the_figure_is_drawn(tmp_path):
    out = tmp_path / "margin.svg"
    subprocess.run(
        [sys.executable, ROOT / "examples" / "margin_figure.py", out],
        check=True,
        env={**os.environ, "MPLBACKEND": "agg"},
    )
    assert out.read_text().startswith("<?xml")
