"""What an installation of the lab gives: light help, one version, a wheel with the command."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import mirrorhead

LAB = Path(__file__).parents[1]
HEAVY = {"torch", "numpy", "scipy", "matplotlib", "pandas", "joblib", "jinja2", "tokenizers"}


def run(program: str, *options: str, **more: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter; the caller looks at the exit code."""
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True, text=True, check=False, **more,  # pyright: ignore
    )  # fmt: skip


def test_help_imports_nothing_heavy() -> None:
    done = run(f"""
import sys
from mirrorhead_lab.cli.main import COMMANDS, main
for arguments in ([], *([name] for name in COMMANDS)):
    sys.argv = ["mirrorhead", *arguments, "--help"]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0
assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)
""")
    assert done.returncode == 0, done.stderr
    assert "reproduce" in done.stdout and "--only" in done.stdout and "example-1" in done.stdout


def test_both_distributions_have_one_version() -> None:
    declared = (LAB / "pyproject.toml").read_text()
    assert f'\nversion = "{mirrorhead.__version__}"' in declared
    assert f'"mirrorhead=={mirrorhead.__version__}",' in declared


def test_messages_name_extras_that_exist() -> None:
    declared = (LAB / "pyproject.toml").read_text()
    named = {
        extra
        for path in (LAB / "src").rglob("*.py")
        for extras in re.findall(r"mirrorhead-lab\[([\w,]+)\]", path.read_text())
        for extra in extras.split(",")
    }
    assert named == {"cluster", "tensorboard", "tune"}
    for extra in named:
        assert f"\n{extra} = [" in declared, extra


@pytest.mark.slow
def test_the_wheel_has_the_command(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    make = [*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(LAB)]
    done = subprocess.run(make, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("mirrorhead_lab-*.whl")
    put = [*pip, "install", "--no-deps", "--no-compile", "--target", str(installed), str(wheel)]
    done = subprocess.run(put, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # -S: the development install of this checkout stays out of the way.
    library = Path(mirrorhead.__file__).parents[1]
    paths = [installed, library, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    where = {
        "cwd": tmp_path,
        "env": {"PYTHONPATH": ":".join(map(str, paths)), "HOME": str(tmp_path)},
    }
    helped = run(
        "import mirrorhead_lab.cli.main as cli; print(cli.__file__); cli.main(['--help'])",
        "-S", **where,
    )  # fmt: skip
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith(str(installed))
    assert "reproduce" in helped.stdout
