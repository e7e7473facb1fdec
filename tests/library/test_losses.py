"""The losses against mpmath, where they are easy and where they are not."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirrorhead.losses import LOSSES, get_loss

LOG_SLOPES = {
    "logistic": lambda x: -mpmath.log1p(mpmath.exp(x)),
    "exponential": lambda x: -x,
    "linear": lambda x: mpmath.mpf(0),
}
VALUES = {
    "logistic": lambda x: mpmath.log1p(mpmath.exp(-x)),
    "exponential": lambda x: mpmath.exp(-x),
    "linear": lambda x: -x,
}
MARGINS = [-1e4, -700.0, -37.0, -1.0, 0.0, 1e-9, 1.0, 12.0, 37.0, 700.0, 1e4]


def at(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("x", MARGINS)
def test_value_and_slope(name, x):
    loss = get_loss(name)
    with mpmath.workdps(60):
        value, log_slope = (
            float(VALUES[name](mpmath.mpf(x))),
            float(LOG_SLOPES[name](mpmath.mpf(x))),
        )
    if math.isfinite(value):
        assert float(loss.value(at(x))) == pytest.approx(value, rel=1e-12)
    assert float(loss.log_slope(at(x))) == pytest.approx(log_slope, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_slope_and_curvature_are_derivatives(name):
    loss = get_loss(name)
    x = torch.linspace(-20, 20, 41, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss.value(x).sum(), x, create_graph=True)
    assert torch.allclose(-loss.log_slope(x).exp(), slope, rtol=1e-12)
    if slope.requires_grad:
        (curvature,) = torch.autograd.grad(slope.sum(), x)
        ratio = curvature / -slope
        assert torch.allclose(loss.relative_curvature(x), ratio, rtol=1e-6, atol=1e-9)
    else:
        assert not loss.relative_curvature(x).any()
    far = loss.relative_curvature(torch.tensor([-1e4, 1e4], dtype=torch.float64))
    expected = {"logistic": [0.0, 1.0], "exponential": [1.0, 1.0], "linear": [0.0, 0.0]}[name]
    assert far.tolist() == expected


def check_excess(name: str, b: float, log_e: float) -> None:
    with mpmath.workdps(60 + int(abs(log_e)) + int(abs(b))):
        e = mpmath.exp(mpmath.mpf(log_e))
        expected = float(mpmath.log(VALUES[name](b - e) - VALUES[name](mpmath.mpf(b))))
    got = float(get_loss(name).log_excess(at(b), at(log_e)))
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-11)


@given(st.sampled_from(list(LOSSES)), st.floats(-60, 60), st.floats(-80, 4))
def test_excess(name, b, log_e):
    check_excess(name, b, log_e)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("b", [-800.0, 0.0, 3.0, 800.0])
@pytest.mark.parametrize("log_e", [-2000.0, -700.0, math.log(1e-3), -1.0, 6.0, 6.7, 9.0])
def test_excess_far_out(name, b, log_e):
    check_excess(name, b, log_e)


@pytest.mark.parametrize("b", [10.9, 11.0, 11.1])
def test_logistic_excess_at_the_seam_of_its_formulas(b):
    """e = log 2 makes the ratio sigmoid(-b), which is where the series takes over."""
    log_e = math.log(math.log(2))
    with mpmath.workdps(40):
        e = mpmath.exp(mpmath.mpf(log_e))
        exact = float(mpmath.log(VALUES["logistic"](b - e) - VALUES["logistic"](mpmath.mpf(b))))
    got = float(LOSSES["logistic"].log_excess(at(b), at(log_e)))
    assert got == pytest.approx(exact, rel=0, abs=2e-14)


@pytest.mark.parametrize("b", [-3.0, 50.0])
def test_logistic_excess_of_a_shortfall_too_large_for_exp(b):
    """l(b - e) - l(b) is e, but for b, once e is huge."""
    for log_e in (50.0, 599.0, 601.0, 800.0, 1e6):
        got = float(LOSSES["logistic"].log_excess(at(b), at(log_e)))
        assert got == pytest.approx(log_e, rel=1e-13)


@pytest.mark.parametrize("name", LOSSES)
def test_no_shortfall_no_excess(name):
    assert float(get_loss(name).log_excess(at(1.0), at(-math.inf))) == -math.inf


def test_the_excess_grows_with_the_shortfall():
    """Across the seams of the formulas too."""
    log_e = torch.linspace(-40, 8, 200_001, dtype=torch.float64)
    for name, loss in LOSSES.items():
        for b in (-30.0, 0.0, 5.0, 40.0):
            excess = loss.log_excess(torch.full_like(log_e, b), log_e)
            assert bool((excess.diff() > 0).all()), (name, b)


def test_names():
    assert repr(LOSSES["linear"]) == "Loss(linear)"
    with pytest.raises(ValueError, match="loss must be one of logistic, exponential, linear; got"):
        get_loss("hinge")
