"""The contract of an experiment: chunks, merging, settings, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import toy_experiment
from mirrorhead_lab.experiments import NAMES, load
from mirrorhead_lab.experiments.experiment import (
    Result,
    TrialSettings,
    merge,
    settings_from_json,
    settings_to_json,
    split,
)
from mirrorhead_lab.verdicts import Verdict, judge

TOY = load("toy_experiment")


@given(st.integers(1, 30), st.integers(0, 50), st.integers(1, 12))
def test_chunks_hold_every_seed_once_and_keep_the_rest(trials: int, first: int, size: int) -> None:
    settings = toy_experiment.Settings(trials=trials, first=first, scale=3.0)
    parts = split(settings, size)
    assert [seed for part in parts for seed in part.seeds] == list(settings.seeds)
    assert all(part.trials <= size for part in parts)
    assert all(replace(part, trials=trials, first=first) == settings for part in parts)


@pytest.mark.slow
@given(st.integers(1, 12), st.integers(0, 5), st.integers(1, 12), st.randoms())
def test_merged_chunks_are_the_whole(trials: int, first: int, size: int, random: Any) -> None:
    settings = toy_experiment.Settings(trials=trials, first=first)
    parts = [TOY.compute(chunk) for chunk in split(settings, size)]
    random.shuffle(parts)
    merged, whole = merge(parts), TOY.compute(settings)
    assert merged.settings == settings
    assert merged.seconds == pytest.approx(sum(part.seconds for part in parts))
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(merged[name], array)


@pytest.mark.parametrize("chosen", [(0, 2), (0, 1, 1), (0, 1, 1, 2)])
def test_lost_and_doubled_trials_are_noticed(chosen: tuple[int, ...]) -> None:
    parts = [TOY.compute(chunk) for chunk in split(TOY.quick, 4)]
    with pytest.raises(ValueError, match="missing or doubled"):
        merge([parts[k] for k in chosen])


def test_merge_refuses_strangers() -> None:
    one, two = (TOY.compute(chunk) for chunk in split(replace(TOY.quick, trials=8), 4))
    strange = Result(two.name, replace(two.settings, scale=9.0), two.arrays, 0.0)
    with pytest.raises(ValueError, match="not a chunk of the same run"):
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


def test_settings_are_checked_and_survive_json() -> None:
    with pytest.raises(ValueError, match="trials must be a whole number of at least 1, got 0"):
        TrialSettings(trials=0)
    with pytest.raises(ValueError, match="first must be a whole number of at least 0, got -1"):
        TrialSettings(trials=1, first=-1)
    settings = toy_experiment.Settings(trials=3, steps=(5, 6))
    assert settings_to_json(settings)["steps"] == [5, 6]
    assert settings_from_json(toy_experiment.Settings, settings_to_json(settings)) == settings


def test_what_is_not_an_experiment() -> None:
    with pytest.raises(TypeError, match="json has no EXPERIMENT = Experiment"):
        load("json")
    with pytest.raises(TypeError, match="toy: chunk must be at least 1, got 0"):
        replace(TOY, chunk=0)
    with pytest.raises(TypeError, match="toy: full must be its Settings"):
        replace(TOY, full=3)
    with pytest.raises(TypeError, match="toy: full must be its Settings"):
        replace(TOY, full=TrialSettings(trials=1))

    @dataclass(frozen=True, kw_only=True)
    class Odd(TrialSettings):
        p: Any = (1, 2)

    with pytest.raises(TypeError, match=r"numbers, words and tuples of them, got \[1\]"):
        replace(TOY, quick=Odd(trials=1, p=[1]), full=Odd(trials=1))


def test_unknown_names_and_broken_modules(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("figure-99", "no.such.module"):
        with pytest.raises(ValueError, match=f"no experiment {name!r}; there are example-1"):
            load(name)
    (tmp_path / "broken_experiment.py").write_text("import a_module_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        load("broken_experiment")


@pytest.mark.parametrize("name", NAMES)
def test_registered_experiments_keep_the_contract(name: str) -> None:
    found = load(name)
    assert found.name == name
    assert found.title and found.claim.rstrip(")").endswith(".") and found.equation
    assert isinstance(found.run, type(load)) and found.quick.first == 0 == found.full.first


def test_verdicts() -> None:
    assert judge("m", True, differs="Our model is smaller.").word == "holds"
    bad: Any = "perhaps"
    with pytest.raises(ValueError, match="must be one of"):
        Verdict("m", bad)
    for word in ("holds with a remark", "not seen at this scale"):
        with pytest.raises(ValueError, match="needs a remark"):
            Verdict("m", word)


def test_a_limit_that_was_not_followed_far_enough_is_not_refuted() -> None:
    never = replace(TOY, verdict=lambda result: judge("nothing", False, "Alas."), extent=("steps",))
    full = TOY.compute(replace(TOY.full, trials=2))
    assert never.judge(full).word == "does not hold"
    short = TOY.compute(replace(TOY.full, trials=2, steps=(1, 2)))
    found = never.judge(short)
    assert found.word == "not seen at this scale" and found.measured == "nothing"
    assert "steps = 1, 2 instead of 1, 10" in found.remark and found.remark.endswith("Alas.")
    assert replace(TOY, extent=("steps",)).judge(short).word == TOY.verdict(short).word
    with pytest.raises(TypeError, match=r"extent names settings that are not there: .'length'."):
        replace(TOY, extent=("length",))
