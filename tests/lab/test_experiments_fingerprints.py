"""Fingerprints: kept results are refused when what they depend on changed, and only then."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

import mirrorhead
import toy_experiment
from mirrorhead.lab.experiments import NAMES, load
from mirrorhead.lab.runtime.fingerprints import code_of, digest

PACKAGE = Path(mirrorhead.__file__).parent
TOY = Path(toy_experiment.__file__ or "")
Edit = tuple[Path, str, str]


def edited(*edits: Edit) -> Callable[[Path], str]:
    """How to read sources in which some text is replaced."""

    def read(path: Path) -> str:
        text = path.read_text("utf-8")
        for target, old, new in edits:
            if path == target:
                assert old in text, f"{old!r} is not in {path}"
                text = text.replace(old, new)
        return text

    return read


def changed(name: str, *edits: Edit) -> set[str]:
    """The modules and files whose part of the fingerprint these edits change."""
    parts = load(name).run, type(load(name).quick)
    before, after = code_of(*parts), code_of(*parts, read=edited(*edits))
    return {key for key in {**before, **after} if before.get(key) != after.get(key)}


def lab(name: str) -> Path:
    return PACKAGE / "lab" / name


@pytest.mark.parametrize(
    ("path", "old", "new", "module"),
    [
        (
            "lab/experiments/figure_4.py",
            "FAIR, AUTHORS, ZERO = range(3)",
            "FAIR, AUTHORS, ZERO = 2, 1, 0",
            "mirrorhead.lab.experiments.figure_4",
        ),
        (
            "lab/experiments/figure_4.py",
            "scale: float = 1.0",
            "scale: float = 2.0",
            "mirrorhead.lab.experiments.figure_4",
        ),
        (
            "lab/experiments/convergence.py",
            "length *= 2",
            "length *= 3",
            "mirrorhead.lab.experiments.convergence",
        ),
        (
            "lab/experiments/experiment.py",
            "range(self.first, self.first + self.trials)",
            "range(self.first + 1, self.first + 1 + self.trials)",
            "mirrorhead.lab.experiments.experiment",
        ),
        ("synthetic.py", "generator", "generator_", "mirrorhead.synthetic"),
        ("problem.py", "def loss", "def lost", "mirrorhead.problem"),
        ("potentials.py", "def mirror", "def mirrored", "mirrorhead.potentials"),
    ],
)
def test_what_figure_4_is_computed_from_refuses_it(
    path: str, old: str, new: str, module: str
) -> None:
    assert changed("figure-4", (PACKAGE / path, old, new)) >= {module}


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        # Drawing, judging and describing it.
        ("lab/experiments/figure_4.py", "columns=4", "columns=2"),
        ("lab/experiments/figure_4.py", "(fall <= 0.5)", "(fall <= 0.4)"),
        ("lab/experiments/figure_4.py", "Settings(trials=40)", "Settings(trials=41)"),
        ("lab/experiments/figure_4.py", 'title="Figure 4', 'title="The fourth figure'),
        # Comments, docstrings, annotations.
        ("lab/experiments/figure_4.py", "# The lp-AttSVM of", "# Solutions of"),
        ("lab/experiments/convergence.py", "Repeat a problem along", "Copy a problem along"),
        ("lab/experiments/convergence.py", "path: Path, patience: int", "path: Any, patience: Any"),
        # Other rooms of the house.
        ("lab/plots.py", "alpha=0.15", "alpha=0.2"),
        ("lab/verdicts.py", "if as_claimed:", "if not as_claimed:"),
        ("lab/runtime/jobs.py", "import shutil", "import shutil as s"),
        ("lab/experiments/storage.py", "FORMAT = 2", "FORMAT = 3"),
        ("lab/experiments/theorem_1.py", "tol=1e-12", "tol=1e-10"),
    ],
)
def test_unrelated_edits_keep_it(path: str, old: str, new: str) -> None:
    assert not changed("figure-4", (PACKAGE / path, old, new))


@pytest.mark.parametrize("name", NAMES)
def test_no_experiment_depends_on_rooms_it_does_not_use(name: str) -> None:
    """Nothing of data sets, models, training, report or drawing; each on itself and on problems."""
    found = code_of(load(name).run)
    assert load(name).module in found and "mirrorhead.problem" in found
    for module in found:
        assert not module.startswith(
            tuple(
                f"mirrorhead.{part}"
                for part in (
                    "optim",
                    "lab.cli",
                    "lab.report",
                    "lab.plots",
                    "lab.verdicts",
                    "lab.training",
                    "lab.datasets",
                    "lab.models",
                    "lab.evaluation",
                    "lab.runtime",
                    "lab.experiments.storage",
                    "lab.experiments.runner",
                )
            )
        ), module


def test_every_module_that_a_run_imports_is_followed() -> None:
    """An independent look: all modules that figure_4's imports load, but for what draws it."""
    tree = ast.parse(lab("experiments/figure_4.py").read_text())
    imported = {
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mirrorhead")
    }
    packages = {"mirrorhead.margin"}  # only re-exports: their modules are followed instead
    rest = imported - {"mirrorhead.lab.plots", "mirrorhead.lab.verdicts"} - packages
    experiment = load("figure-4")
    assert rest <= code_of(experiment.run, type(experiment.quick)).keys()


def test_c_kernels_and_their_flags_count() -> None:
    """Those of the margin and of the paths, with their header; not those of the optimizers."""
    found = {key for key in code_of(load("figure-4").run) if "/" in key}
    kernels = {"native/margin.c", "native/descent.c"}
    assert found == {*kernels, "native/native.h", "cmake/CMakeLists.txt"}
    for key in kernels:
        assert changed("figure-4", (PACKAGE / key, "double", "float")) == {key}
    comment = (PACKAGE / "native" / "margin.c", "The interior point method of", "As in")
    assert not changed("figure-4", comment)
    flags = PACKAGE.parents[1] / "cmake" / "CMakeLists.txt"
    assert changed("figure-4", (flags, "-mfma", "-mno-fma")) == {"cmake/CMakeLists.txt"}


def test_a_run_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module outside the package: its own statements, and modules that lie beside it."""
    for old, new in (
        ("largest mean {", "the largest {"),  # verdict
        ("axis.legend()", "axis.legend(ncols=2)"),  # draw
        ('title="A toy', "# a comment\n    title='A toy".replace("'", '"')),
        ("from matplotlib.figure import Figure", "import matplotlib"),
        ("quick=Settings(trials=10)", "quick=Settings(trials=9)"),  # settings are kept beside
    ):
        assert not changed("toy_experiment", (TOY, old, new))
    for old, new in (
        ("manual_seed(s)", "manual_seed(s + 1)"),
        ("scale: float = 1.0", "scale: float = 2.0"),  # a class that run reaches
        ("def run(settings", "@cached\ndef run(settings"),
        ("import torch\n", "import cupy as torch\n"),
        ("EXPERIMENT = ", "torch.set_default_dtype(torch.float64)\nEXPERIMENT = "),
    ):
        assert changed("toy_experiment", (TOY, old, new)) == {"toy_experiment"}
    (tmp_path / "helper_of_mine.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "experiment_of_mine.py").write_text(
        "def run(settings):\n    import helper_of_mine\n    return helper_of_mine.half(settings)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import experiment_of_mine  # pyright: ignore[reportMissingImports]

    helper = tmp_path / "helper_of_mine.py"
    before = code_of(experiment_of_mine.run)
    after = code_of(experiment_of_mine.run, read=edited((helper, "/ 2", "/ 3")))
    assert before.keys() == after.keys() == {"experiment_of_mine", "helper_of_mine"}
    assert before["helper_of_mine"] != after["helper_of_mine"]
    assert before["experiment_of_mine"] == after["experiment_of_mine"]


@pytest.mark.parametrize(
    ("name", "start", "call"),
    [("one_name", "from mirrorhead import PNorm", "PNorm(p)"),
     ("the_package", "import mirrorhead as mh", "mh.PNorm(p)")],
)  # fmt: skip
def test_public_names_are_followed_through_the_lazy_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, start: str, call: str
) -> None:
    (tmp_path / f"{name}.py").write_text(f"{start}\n\ndef run(p):\n    return {call}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = code_of(importlib.import_module(name).run)
    assert found.keys() >= {name, "mirrorhead.potentials"}
    assert not any(key.startswith("mirrorhead.lab") for key in found)


def test_digests() -> None:
    assert digest({"a": [1, 2], "b": None}) == digest({"b": None, "a": [1, 2]})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest(float("nan"))
