"""Paths in any geometry: steepest descent and mirror descent tend to the margin of their norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mirrorhead as mh
from mirrorhead.synthetic import random_problem

INF = math.inf
BOTH = (-2, -1)
NORMS: list[mh.Norm] = [
    *(mh.PNorm(p) for p in (1, 1.5, 2, INF)),
    *(mh.Schatten(p) for p in (1, 1.5, INF)),
    *(mh.Grouped(p, dim=0) for p in (1, INF)),
]


def slow_path(problem: mh.AttentionProblem, norm: mh.Norm, steps: int, lr: float) -> Tensor:
    """Steepest descent of one trial, as the formula says it."""
    W = torch.zeros(problem.weight_shape, dtype=torch.float64)
    for _ in range(steps):
        W = W - lr * norm.steepest(problem.gradient(W).direction)
    return W


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_steepest_descent_is_its_formula(norm: mh.Norm) -> None:
    problem = random_problem(3)
    path = mh.descend(problem, norm, steps=20, lr=0.3, rule="steepest")
    for k in range(3):
        slow = slow_path(problem.trial(k), norm, 20, 0.3)
        torch.testing.assert_close(path.W[-1, k], slow, rtol=1e-9, atol=1e-9)
    moved = norm.norm(path.W[0], BOTH)  # after one step
    torch.testing.assert_close(moved, torch.full((3,), 0.3, dtype=torch.float64), rtol=1e-9, atol=0)


POTENTIALS: list[mh.Potential] = [
    mh.Schatten(1.3), mh.Grouped(1.3, dim=1), mh.KSupport(k=30), mh.Knee(mh.PNorm(1.3), at=0.5),
    mh.HyperbolicEntropy(0.1),
]  # fmt: skip


@pytest.mark.parametrize("psi", POTENTIALS, ids=repr)
@pytest.mark.parametrize("rule", ["constant", "normalized"])
def test_mirror_descent_is_its_formula(psi: mh.Potential, rule: str) -> None:
    problem = random_problem(2)
    path = mh.descend(problem, psi, steps=15, lr=0.2, rule=rule)
    for k in range(2):
        one = problem.trial(k)
        u = psi.mirror(torch.zeros(one.weight_shape, dtype=torch.float64))
        for _ in range(15):
            gradient = one.gradient(psi.inverse(u))
            step = gradient.value
            if rule == "normalized":
                step = gradient.mantissa / psi.limit.dual_norm(gradient.mantissa)
            u = u - 0.2 * step
        torch.testing.assert_close(path.W[-1, k], psi.inverse(u), rtol=1e-9, atol=1e-12)


class Cosh(mh.Potential):
    """A potential of one's own that knows nothing of batches."""

    limit = mh.PNorm(INF)

    def mirror(self, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return w.sinh()

    def inverse(self, u: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return u.asinh()

    def value(self, w: Tensor, dims: Any = None) -> Tensor:
        entries = w.cosh() - 1
        return entries.sum() if dims is None else entries.sum(dims)


def test_a_potential_of_ones_own_descends() -> None:
    problem = random_problem(4)
    path = mh.descend(problem, Cosh(), steps=200)
    assert "Cosh" in repr(path)
    losses = problem.loss(path.W[-1])
    assert bool((losses < problem.loss(torch.zeros_like(path.W[-1]))).all())
    # Its weights grow alike, as in the max norm.
    share = path.W[-1].abs().mean(BOTH) / path.W[-1].abs().amax(BOTH)
    plain = mh.descend(problem, 1.5, steps=200).W[-1]
    assert bool((share > plain.abs().mean(BOTH) / plain.abs().amax(BOTH)).all())


@pytest.mark.parametrize(
    "norm", [mh.Schatten(1.5), mh.Schatten(3), mh.Grouped(1.5, dim=0)], ids=repr
)
def test_the_accelerated_rule_converges_in_any_smooth_norm(norm: mh.Norm) -> None:
    """Margin over norm hardly grows between 1,000 and 3,000 steps."""
    problem = random_problem(4)
    path = mh.descend(problem, norm, steps=3000, rule="accelerated", record=[1000, 3000])
    margins = []
    for W in path.W:
        logits = problem.logits(W)
        chosen = logits.gather(-1, path.tokens[..., None])
        apart = (chosen - logits).scatter(-1, path.tokens[..., None], INF)
        margins.append(apart.amin((-2, -1)) / norm.norm(W, BOTH))
    torch.testing.assert_close(margins[0], margins[1], rtol=1e-3, atol=0)
    # No other direction that was met has a larger one.
    assert bool((margins[1] > 0).all())


def test_resuming_knows_the_geometry(tmp_path: Any) -> None:
    problem, file = random_problem(2), tmp_path / "path.npz"
    first = mh.descend(problem, mh.Schatten(1.5), steps=10, checkpoint=file)
    again = mh.descend(problem, mh.Schatten(1.5), steps=20, checkpoint=file)
    whole = mh.descend(problem, mh.Schatten(1.5), steps=20)
    assert torch.equal(again.W[-1], whole.W[-1])
    assert torch.equal(first.W[0], again.W[0])
    with pytest.raises(ValueError, match="another"):
        mh.descend(problem, mh.Schatten(1.6), steps=20, checkpoint=file)


def test_a_geometry_that_does_not_fit_is_refused_before_any_work() -> None:
    problem = random_problem(2)
    with pytest.raises(ValueError, match=r"Schatten\(inf\) is only a norm"):
        mh.descend(problem, mh.Schatten(INF), steps=5)
    with pytest.raises(TypeError, match=r"geometry must be a norm; the limit of HyperbolicEntropy"):
        mh.descend(problem, mh.HyperbolicEntropy(0.1), steps=5, rule="steepest")
    with pytest.raises(ValueError, match="needs a norm whose dual is smooth"):
        mh.descend(problem, mh.Schatten(1), steps=5, rule="accelerated")
    with pytest.raises(ValueError, match="v must be a matrix"):
        mh.descend(problem, mh.Schatten(1.5), steps=5, joint=True)
    path = mh.descend(problem, mh.Schatten(1.5), steps=5)
    with pytest.raises(AttributeError, match=r"a path in Schatten\(1.5\) has no p"):
        path.p  # noqa: B018
