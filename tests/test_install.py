"""What an installation gives: light imports, a library without extras, a wheel that works."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mirrorhead

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "numpy", "scipy", "matplotlib", "pandas", "joblib", "jinja2", "tokenizers"}
LIBRARY = ["torch", "numpy", "scipy", "safetensors", "threadpoolctl"]

# One step of each optimizer and one certified solution: what the library is for.
USE_THE_LIBRARY = """
import torch
import mirrorhead as mh

for optimizer_class in (mh.MirrorDescent, mh.MirrorAdam):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.square().sum().backward()
    optimizer_class([weight], lr=0.1, geometry=1.5).step()
    assert (weight < 1).all(), weight
X = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
solution = mh.attention_svm(X, torch.tensor([[1.0, 0.0]]), torch.tensor([0]), geometry=1.5)
assert solution.status == "optimal", solution
print(mh.__version__, mh.__file__)
"""


def run(program: str, *options: str, **more: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter; the caller looks at the exit code."""
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True, text=True, check=False, **more,  # pyright: ignore
    )  # fmt: skip


def test_importing_the_package_imports_nothing_heavy() -> None:
    done = run(f"""
import sys, mirrorhead
assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)
third_party = {{name for name in sys.modules if "." not in name}} - set(sys.stdlib_module_names)
print(*(name for name in third_party if getattr(sys.modules[name], "__version__", None)))
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mirrorhead"]


def test_public_names_are_listed_once_for_each_reader() -> None:
    tree = ast.parse(Path(mirrorhead.__file__).read_text())
    typed = [
        str(alias.asname)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert len(typed) > 20
    assert sorted([*typed, "__version__"]) == sorted(mirrorhead.__all__)
    for name in typed:
        assert name in dir(mirrorhead)
        assert getattr(mirrorhead, name).__name__ == name
        assert getattr(mirrorhead, name).__doc__
    assert mirrorhead.optim.MirrorAdam is mirrorhead.MirrorAdam
    with pytest.raises(AttributeError, match="no attribute 'Mirror'"):
        mirrorhead.Mirror  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_one_version() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited and cited[1] == mirrorhead.__version__
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


def requirements(distribution: str, seen: set[str]) -> set[str]:
    """Return the names of a distribution and of everything it requires, extras left out."""
    name = re.sub(r"[-_.]+", "-", distribution).lower()
    if name in seen:
        return seen
    seen.add(name)
    try:
        required = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return seen  # required on other platforms only
    for requirement in map(Requirement, required):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirements(requirement.name, seen)
    return seen


def blocked_modules() -> set[str]:
    """Return the installed top-level modules that `pip install mirrorhead` would not bring."""
    allowed: set[str] = {"mirrorhead"}
    for distribution in LIBRARY:
        requirements(distribution, allowed)
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", owner).lower() in allowed for owner in owners)
    } - set(sys.stdlib_module_names)


def without_extras(program: str) -> str:
    """Return the program, started where only the library's own requirements are found."""
    return f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {blocked_modules()!r}:
            return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
{program}
"""


@pytest.mark.slow
def test_the_library_needs_no_extra() -> None:
    assert {"tyro", "rich", "joblib", "tokenizers", "matplotlib", "pytest"} <= blocked_modules()
    declared = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("]")[0]
    assert re.findall(r'"([a-z]+)', declared) == LIBRARY
    done = run(without_extras(USE_THE_LIBRARY))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_wheel_works_alone(tmp_path: Path) -> None:
    """The wheel of `pip wheel .`, installed into an empty folder."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    skipped = shutil.ignore_patterns(
        ".*", "out*", "runs", "results", "tests", "lab", "__pycache__", "*.so"
    )
    shutil.copytree(ROOT, source, ignore=skipped)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    for command in (
        [*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)],
        [*pip, "install", "--no-deps", "--no-compile", "--target", str(installed)],
    ):
        wheels = [str(path) for path in tmp_path.glob("mirrorhead-*.whl")]
        done = subprocess.run([*command, *wheels], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("mirrorhead-*.whl")
    assert wheel.name.split("-")[1] == mirrorhead.__version__
    # -S: the development install of this checkout stays out of the way.
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    where = {"cwd": tmp_path, "env": {"PYTHONPATH": ":".join(paths), "HOME": str(tmp_path)}}
    done = run(USE_THE_LIBRARY, "-S", **where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        mirrorhead.__version__,
        str(installed / "mirrorhead" / "__init__.py"),
    ]
