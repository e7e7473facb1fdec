"""Fingerprints: stored results are refused when the code behind them changed, and only then."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from mirrorhead_lab.experiments import NAMES, load
from mirrorhead_lab.runtime import fingerprints
from mirrorhead_lab.runtime.fingerprints import code_of, digest

EXPERIMENT = """
from helper_of_mine import half

def run(settings):
    return {what}

def draw(result):
    return "{figure}"
"""


@pytest.mark.parametrize(
    ("what", "figure", "factor", "changed"),
    [
        ("half(settings)", "another figure, drawn well", 2, set()),
        ("half(half(settings))", "a figure", 2, {"experiment_of_mine.py"}),
        ("half(settings)", "a figure", 3, {"helper_of_mine.py"}),
    ],
)
def test_an_edit_changes_the_part_it_belongs_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    what: str, figure: str, factor: int, changed: set[str],
) -> None:  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)

    def written(what: str, figure: str, factor: int) -> dict[str, str]:
        """The fingerprint of these modules as a new process sees it."""
        (tmp_path / "helper_of_mine.py").write_text(f"def half(x):\n    return x / {factor}\n")
        text = EXPERIMENT.format(what=what, figure=figure)
        (tmp_path / "experiment_of_mine.py").write_text(text)
        fingerprints._read.cache_clear()
        module = importlib.reload(importlib.import_module("experiment_of_mine"))
        return code_of(module.run, ("draw",))

    before, after = written("half(settings)", "a figure", 2), written(what, figure, factor)
    assert before.keys() == after.keys() == {"experiment_of_mine.py", "helper_of_mine.py"}
    assert {name for name in before if before[name] != after[name]} == changed


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_depends_on_the_library_and_on_its_folder(name: str) -> None:
    experiment = load(name)
    found = code_of(experiment.run)
    own = {f"{experiment.module.split('.')[-1]}.py", "experiment.py"}
    assert own | {"mirrorhead/native/native.h"} <= found.keys()
    # One of them has solutions, and no paths.
    assert name == "choose-geometry" or "mirrorhead/problem.py" in found
    assert not any(key.startswith("mirrorhead/patches") for key in found)


def test_figure_4_depends_on_what_solves_and_follows() -> None:
    found = code_of(load("figure-4").run)
    assert {"mirrorhead/margin/_interior_point.py", "mirrorhead/native/descent.c"} <= found.keys()
    assert not any(key.startswith("mirrorhead/optim") for key in found)


@pytest.mark.slow
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
    assert found.keys() >= {f"{name}.py", "mirrorhead/geometry/pnorm.py"}
    assert ("mirrorhead/paths/descent.py" in found) is whole


def test_digests() -> None:
    assert digest({"a": [1, 2], "b": None}) == digest({"b": None, "a": [1, 2]})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest(float("nan"))
