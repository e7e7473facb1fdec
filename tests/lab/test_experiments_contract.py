"""The contract of an experiment: pieces, merging, settings, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import toy_experiment
from mirrorhead.lab.experiments import ORDER, load
from mirrorhead.lab.experiments.base import (
    Experiment,
    Result,
    TrialSettings,
    Verdict,
    judge,
    merge,
    pieces,
    plain,
    restore,
)
from mirrorhead.lab.experiments.source import code_hash

TOY = load("toy_experiment")


@given(st.integers(1, 30), st.integers(0, 50), st.integers(1, 12))
def test_pieces_hold_every_seed_once_and_keep_the_rest(trials: int, first: int, size: int) -> None:
    settings = toy_experiment.Settings(trials=trials, first=first, scale=3.0)
    parts = pieces(settings, size)
    assert [seed for part in parts for seed in part.seeds] == list(settings.seeds)
    assert all(part.trials <= size for part in parts)
    assert all(replace(part, trials=trials, first=first) == settings for part in parts)


@given(st.integers(1, 12), st.integers(0, 5), st.integers(1, 12), st.randoms())
def test_merged_pieces_are_the_whole(trials: int, first: int, size: int, random: Any) -> None:
    settings = toy_experiment.Settings(trials=trials, first=first)
    parts = [TOY.compute(piece) for piece in pieces(settings, size)]
    random.shuffle(parts)
    merged, whole = merge(parts), TOY.compute(settings)
    assert merged.settings == settings
    assert merged.seconds == pytest.approx(sum(part.seconds for part in parts))
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(merged[name], array)


@pytest.mark.parametrize("chosen", [(0, 2), (0, 1, 1), (0, 1, 1, 2)])
def test_lost_and_doubled_trials_are_noticed(chosen: tuple[int, ...]) -> None:
    parts = [TOY.compute(piece) for piece in pieces(TOY.quick, 4)]
    with pytest.raises(ValueError, match="missing or doubled"):
        merge([parts[k] for k in chosen])


def test_merge_refuses_strangers() -> None:
    one, two = (TOY.compute(piece) for piece in pieces(replace(TOY.quick, trials=8), 4))
    strange = Result(two.name, replace(two.settings, scale=9.0), two.arrays, 0.0)
    with pytest.raises(ValueError, match="no piece of the same run"):
        merge([one, strange])
    with pytest.raises(ValueError, match="at least one"):
        merge([])


def result(**arrays: Any) -> Result[Any]:
    arrays = {name: np.asarray(value) for name, value in arrays.items()}
    return Result("toy", toy_experiment.Settings(trials=2, first=5), arrays, 0.0)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "no arrays"),
        ({"x": 1.0}, r"'x' must be \(2 trials, ...\), got \(\)"),
        ({"x": [1.0, 2.0, 3.0]}, r"must be \(2 trials"),
        ({"x": ["a", "b"]}, "numbers or bools"),
        ({"x": np.array([None, 1.0])}, "numbers or bools"),
        ({"x": [1.0, np.nan]}, "not finite in the trials of seeds 6"),
        ({"gaps": [np.inf, 1.0]}, "not finite in the trials of seeds 5"),
    ],
)
def test_arrays_that_break_the_contract(arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TOY.check(result(**arrays))


def test_nan_is_allowed_where_it_is_declared() -> None:
    TOY.check(result(gaps=[np.nan, 1.0], x=[True, False], k=[1, 2]))


def test_a_result_of_something_else_is_refused() -> None:
    stranger = replace(TOY, run=lambda settings: result(x=[1.0, 2.0]))
    with pytest.raises(ValueError, match="returned a result of"):
        stranger.compute(TOY.quick)


def test_settings_are_checked_and_survive_json() -> None:
    with pytest.raises(ValueError, match="trials must be a whole number of at least 1, got 0"):
        TrialSettings(trials=0)
    with pytest.raises(ValueError, match="first must be a whole number of at least 0, got -1"):
        TrialSettings(trials=1, first=-1)
    settings = toy_experiment.Settings(trials=3, steps=(5, 6))
    assert plain(settings)["steps"] == [5, 6]
    assert restore(toy_experiment.Settings, plain(settings)) == settings


def module(**changes: Any) -> Any:
    names = {name: getattr(toy_experiment, name) for name in dir(toy_experiment)}
    return SimpleNamespace(**{**names, **changes})


def test_a_module_that_is_no_experiment() -> None:
    with pytest.raises(TypeError, match=r"json is no experiment: it lacks NAME, TITLE"):
        load("json")
    with pytest.raises(TypeError, match="PIECE must be at least 1, got 0"):
        Experiment.of(module(PIECE=0))
    with pytest.raises(TypeError, match="FULL must be its Settings"):
        Experiment.of(module(FULL=3))

    @dataclass(frozen=True, kw_only=True)
    class Odd(TrialSettings):
        p: Any = (1, 2)

    with pytest.raises(TypeError, match=r"numbers, words and tuples of them, got \[1\]"):
        Experiment.of(module(Settings=Odd, FULL=Odd(trials=1), QUICK=Odd(trials=1, p=[1])))


def test_unknown_names_and_broken_modules(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("figure-99", "no.such.module"):
        with pytest.raises(ValueError, match=f"no experiment {name!r}; there are example-1"):
            load(name)
    (tmp_path / "broken_experiment.py").write_text("import a_module_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        load("broken_experiment")


@pytest.mark.parametrize("name", ORDER)
def test_registered_experiments_keep_the_contract(name: str) -> None:
    found = load(name)
    assert found.name == name
    assert found.title and found.claim.endswith(".")
    assert isinstance(found.run, type(load)) and found.quick.first == 0 == found.full.first


def test_results_belong_to_the_code_that_computes_them() -> None:
    text = Path(toy_experiment.__file__ or "").read_text()
    code = code_hash(text, "run")
    assert code == TOY.code
    for old, new in (
        ("largest mean {", "the largest {"),  # verdict
        ("axis.legend()", "axis.legend(ncols=2)"),  # draw
        ("CLAIM = ", "# a comment\nCLAIM = "),
        ("from matplotlib.figure import Figure", "import matplotlib"),
        ("QUICK = Settings(trials=10)", "QUICK = Settings(trials=9)"),  # settings have a key
    ):
        assert old in text
        assert code_hash(text.replace(old, new), "run") == code
    for old, new in (
        ("manual_seed(s)", "manual_seed(s + 1)"),
        ("scale: float = 1.0", "scale: float = 2.0"),  # a class that run names
        ("@experiment(NAME)", "@experiment(NAME)\n@cached"),
        ("import torch\n", "import torch as torch\n"),
        ('NAME = "toy"', 'torch.set_default_dtype(torch.float64)\nNAME = "toy"'),
    ):
        assert old in text
        assert code_hash(text.replace(old, new), "run") != code


def test_verdicts() -> None:
    assert judge("c", "m", True).holds == "holds"
    assert judge("c", "m", True, "but").holds == "holds with a remark"
    assert judge("c", "m", False, "since").holds == "does not hold"
    bad: Any = "perhaps"
    with pytest.raises(ValueError, match="must be one of"):
        Verdict("c", "m", bad)
    with pytest.raises(ValueError, match="needs the remark"):
        Verdict("c", "m", "holds with a remark")


def test_a_real_one_from_settings_to_figure() -> None:
    """Example 1: the printed matrix is not the solution for the printed p."""
    example = load("example-1")
    found = example.compute(example.quick)
    assert example.verdict(found).holds == "does not hold"
    assert example.draw(found).axes
