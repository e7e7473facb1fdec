"""Fingerprints: stored results are refused when the code behind them changed, and only then."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from mirrorhead_lab.experiments import NAMES, load
from mirrorhead_lab.runtime import fingerprints
from mirrorhead_lab.runtime.fingerprints import code_of, digest

EXPERIMENT = """
from helper_of_mine import half

def run(settings):
    return half(settings)

def draw(result):
    return "a figure"
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "helper_of_mine.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "experiment_of_mine.py").write_text(EXPERIMENT)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def fresh() -> dict[str, str]:
    """The fingerprint of the module as a new process sees it."""
    for cached in (fingerprints._hash, fingerprints._imports, fingerprints._file):
        cached.cache_clear()
    module: ModuleType = importlib.reload(importlib.import_module("experiment_of_mine"))
    return code_of(module.run, ("draw",))


def test_an_edit_changes_the_part_it_belongs_to(mine: Path) -> None:
    before = fresh()
    assert before.keys() == {"experiment_of_mine", "helper_of_mine"}
    path = mine / "experiment_of_mine.py"
    path.write_text(EXPERIMENT.replace("a figure", "another figure, drawn well"))
    assert fresh() == before
    path.write_text(EXPERIMENT.replace("half(settings)", "half(half(settings))"))
    after = fresh()
    assert after["helper_of_mine"] == before["helper_of_mine"]
    assert after["experiment_of_mine"] != before["experiment_of_mine"]
    path.write_text(EXPERIMENT)
    (mine / "helper_of_mine.py").write_text("def half(x):\n    return x / 3\n")
    after = fresh()
    assert after["helper_of_mine"] != before["helper_of_mine"]
    assert after["experiment_of_mine"] == before["experiment_of_mine"]


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_depends_on_the_library_and_on_its_folder(name: str) -> None:
    experiment = load(name)
    found = code_of(experiment.run)
    assert experiment.module in found and "mirrorhead.problem" in found
    assert not any(key.startswith("mirrorhead.optim") for key in found)
    for key in found:
        in_lab = key.startswith("mirrorhead_lab")
        assert not in_lab or key.startswith("mirrorhead_lab.experiments."), key


def test_figure_4_depends_on_its_c_kernels() -> None:
    found = code_of(load("figure-4").run)
    assert {"native/margin.c", "native/descent.c", "native/native.h"} <= found.keys()
    assert {"mirrorhead.margin._interior_point", "mirrorhead.paths.descent"} <= found.keys()


@pytest.mark.parametrize(
    ("line", "whole"), [("from mirrorhead import PNorm", False), ("import mirrorhead as mh", True)]
)
def test_public_names_lead_to_their_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, whole: bool
) -> None:
    name = f"uses_{line.split()[0]}"
    (tmp_path / f"{name}.py").write_text(f"{line}\n\ndef run(p):\n    return p\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = code_of(importlib.import_module(name).run)
    assert found.keys() >= {name, "mirrorhead.geometry.pnorm"}
    assert ("mirrorhead.paths.descent" in found) is whole
    assert not any(key.startswith("mirrorhead_lab") for key in found)


def test_digests() -> None:
    assert digest({"a": [1, 2], "b": None}) == digest({"b": None, "a": [1, 2]})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest(float("nan"))
