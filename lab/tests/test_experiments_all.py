"""What holds for every experiment: the contract, chunks that make the whole, labelled axes."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import pytest

from experiment_cases import TINY, tiny
from mirrorhead_lab.experiments import NAMES
from mirrorhead_lab.experiments.experiment import merge, split

names = pytest.mark.parametrize("name", TINY)


def test_every_experiment_is_here() -> None:
    assert set(TINY) == set(NAMES)


@pytest.mark.slow
@names
def test_the_contract_holds(name: str) -> None:
    experiment, result = tiny(name)
    assert experiment.name == name
    assert result.settings == TINY[name]
    assert experiment.quick.trials <= experiment.full.trials
    words = experiment.verdict(result)
    assert "nan" not in words.measured + words.remark


@pytest.mark.slow
@names
def test_chunks_make_the_whole(name: str) -> None:
    experiment, whole = tiny(name)
    if experiment.fixed_trials:
        assert whole.settings.trials == 1
        return
    parts = merge([experiment.compute(chunk) for chunk in split(TINY[name], 2)])
    assert parts.settings == whole.settings
    for key, array in whole.arrays.items():
        np.testing.assert_allclose(parts[key], array, rtol=1e-5, atol=1e-9, err_msg=key)


@pytest.mark.slow
@names
def test_axes_are_labelled(name: str) -> None:
    experiment, result = tiny(name)
    figure = experiment.draw(result)
    assert figure.get_size_inches()[0] == 8
    for axis in figure.axes:
        place: Any = axis.get_subplotspec()
        assert axis.get_xlabel() or not place.is_last_row()
        assert axis.get_ylabel() or not place.is_first_col()
        assert axis.lines or axis.patches
        for line in axis.lines:
            assert np.isfinite(np.asarray(line.get_xydata(), float)).all()
    with matplotlib.rc_context({"figure.max_open_warning": 1}):
        figure.canvas.draw()  # warnings, of layout or of log scales, are errors here
