"""The example for people's own arrays: it runs, and it refuses what it cannot use."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from mirrorhead.synthetic import example_2

SCRIPT = str(Path(__file__).parents[2] / "examples" / "own_data.py")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, arguments)])
    runpy.run_path(SCRIPT, run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("with_head", [True, False])
def test_arrays_in_certificate_out(
    with_head: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    problem = example_2()
    arrays = {name: getattr(problem, name).numpy() for name in "Xzy"}
    if with_head:
        arrays["v"] = np.array([1.0, 0.5], dtype=np.float32)  # other dtypes are promoted
    np.savez(tmp_path / "mine.npz", **arrays)  # pyright: ignore[reportArgumentType]
    run(monkeypatch, "--data", tmp_path / "mine.npz", "--steps", 500, "--out", tmp_path / "new")
    printed = capsys.readouterr().out
    assert "Check(1 of 1 certified optimal, s" in printed
    assert "LocalOptimality(True)" in printed
    assert (tmp_path / "new" / "own_data.svg").read_text().startswith("<?xml")


def test_files_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    np.savez(tmp_path / "part.npz", X=np.ones((1, 2, 2)))
    with pytest.raises(SystemExit, match="must hold X, z and y; y, z missing"):
        run(monkeypatch, "--data", tmp_path / "part.npz")
    X = np.ones((1, 2, 2))
    np.savez(tmp_path / "labels.npz", X=X, z=X[:, 0], y=np.zeros(1))
    with pytest.raises(ValueError, match=r"y must be \+1 or -1"):
        run(monkeypatch, "--data", tmp_path / "labels.npz")
