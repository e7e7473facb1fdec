"""The losses against mpmath, where they are easy and where they are not."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mirrorhead as mh
from mirrorhead.losses import LOSSES, Loss, check_assumption_a, get_loss
from mirrorhead.synthetic import random_problem

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


class Plain(Loss):
    """A built-in loss by its value alone: all else is a default."""

    def __init__(self, name):
        self.of = name

    def value(self, x):
        return LOSSES[self.of].value(x)


class Probit(Loss):
    def value(self, x):
        return -torch.special.log_ndtr(x)


class Power(Loss):
    """A heavy tail: 1/(1 + x) for x > 0, continued by a parabola."""

    def value(self, x):
        tail = 1 / (1 + x.clamp_min(0))
        return torch.where(x > 0, tail, 1 - x + x * x)


@pytest.mark.parametrize("name", LOSSES)
def test_the_defaults_of_a_loss_agree_with_the_formulas(name):
    """The slope to 1e-10 on [-30, 30], the curvature on [-10, 10]; the excess to 1e-8 of its size.

    torch's second derivative of logsigmoid has no digits where it is below 1e-16.
    """
    plain, full = Plain(name), LOSSES[name]
    x = torch.linspace(-30, 30, 61, dtype=torch.float64)
    assert torch.allclose(plain.log_slope(x), full.log_slope(x), rtol=1e-10, atol=1e-10)
    near = x[x.abs() <= 10]
    expected = full.relative_curvature(near)
    assert torch.allclose(plain.relative_curvature(near), expected, rtol=1e-9, atol=1e-9)
    log_e = torch.linspace(-60, 4, 65, dtype=torch.float64)
    b, log_e = torch.meshgrid(x, log_e, indexing="ij")
    got, expected = plain.log_excess(b, log_e), full.log_excess(b, log_e)
    assert torch.allclose(got, expected, rtol=0, atol=1e-8)


def test_the_defaults_do_not_touch_the_graph_of_others():
    x = torch.tensor([0.5], dtype=torch.float64)
    assert not Probit().log_slope(x).requires_grad
    x.requires_grad_()
    (found,) = torch.autograd.grad(Probit().log_slope(x).sum(), x)
    expected = -Probit().relative_curvature(x.detach())
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("loss", [Probit(), Power(), *map(Plain, LOSSES), *LOSSES.values()])
def test_losses_that_satisfy_assumption_a(loss):
    check_assumption_a(loss)
    assert get_loss(loss) is loss


class Broken(Loss):
    def __init__(self, value, **parts):
        self.value_of, self.parts = value, parts

    def value(self, x):
        return self.value_of(x)

    def log_slope(self, x):
        own = self.parts.get("log_slope")
        return super().log_slope(x) if own is None else own(x)

    def log_excess(self, b, log_e):
        own = self.parts.get("log_excess")
        return super().log_excess(b, log_e) if own is None else own(b, log_e)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (Broken(lambda x: (1 - x).clamp_min(0)), "decrease strictly"),  # the hinge
        (Broken(torch.exp), "decrease strictly"),
        (Broken(lambda x: -x.sin() - x), None),
        (Broken(lambda x: -x.sin() - 0.9 * x), "decrease strictly"),
        (Broken(lambda x: torch.maximum(-x, -0.1 * x)), "have a Lipschitz derivative"),
        (Broken(lambda x: -x - x.clamp_max(0.3).sub(0.3).abs().pow(1.5).neg()), "Lipschitz"),
        (Broken(lambda x: (-40 * x).exp()), "have finite values"),
        (Broken(lambda x: -x, log_slope=lambda x: torch.ones_like(x)), "`log_slope` as its"),
        (Broken(lambda x: -x, log_excess=lambda b, log_e: log_e + 1), "a `log_excess` that fits"),
        (Broken(lambda x: -x.sum()), "act entry by entry"),
        (Broken(lambda x: -x.float()), "act entry by entry on float64"),
    ],
)
def test_assumption_a_is_checked_at_the_door(loss, says):
    X = torch.ones(1, 2, 3)
    if says is None:  # its slope is 0 at single points, which no grid sees
        mh.AttentionProblem(X, X[:, 0], [1.0], torch.ones(3), loss=loss)
        return
    with pytest.raises(ValueError, match=f"loss must .*{says}"):
        mh.AttentionProblem(X, X[:, 0], [1.0], torch.ones(3), loss=loss)


@pytest.mark.slow
def test_a_loss_of_ones_own_in_problems_and_paths():
    """It needs its value alone; the regularization path tends to the solution as Theorem 1 says."""
    problem = random_problem(3, n=3, T=4, d=5, loss=Probit())
    assert problem.loss_function.name == "probit"
    assert problem.trial(1).loss_function is problem.loss_function
    W = torch.randn(problem.weight_shape, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(problem.loss(W).sum(), W)
    torch.testing.assert_close(problem.gradient(W.detach()).value, slope, rtol=1e-9, atol=1e-12)
    path = mh.descend(problem, 1.5, steps=400)
    solution = mh.attention_svm(problem.X, problem.z, path.tokens, 1.5)
    assert bool((path.divergence_to(solution)[-1] < 0.1).all())
    best = mh.globally_optimal_tokens(problem)
    solution = mh.attention_svm(problem.X, problem.z, best, 1.5)
    radii = torch.tensor([1.0, 30.0], dtype=torch.float64)[:, None] * solution.norm
    found = mh.regularization_path(problem, 1.5, radii, starts=4)
    assert torch.equal(found.tokens[-1], best)
    assert bool((found.divergence_to(solution)[-1] < 1e-2).all())


def test_names():
    assert repr(LOSSES["linear"]) == "Linear()"
    assert get_loss("linear").name == "linear"
    with pytest.raises(ValueError, match="loss must be one of logistic, exponential, linear, or a"):
        get_loss("hinge")
