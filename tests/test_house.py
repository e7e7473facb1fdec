"""The plan of the house: who may import whom, and that examples and the package itself run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mirrorhead"


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_imports_follow_the_layers() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_can_be_held_in_the_head() -> None:
    for path in modules():
        assert len(path.read_text().splitlines()) <= 600, path


@pytest.mark.slow
def test_demo_draws_its_figure(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "histograms.py")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "new"), "--steps", "5"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    figure = tmp_path / "new" / "histograms.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip().endswith(f"figure: {figure}")
    assert [path.name for path in figure.parent.iterdir()] == ["histograms.png"]
    bad = subprocess.run([*command, "--steps", "0"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "--steps must be at least 1" in bad.stderr
