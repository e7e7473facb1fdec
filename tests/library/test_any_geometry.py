"""Paths in any geometry: steepest descent and mirror descent tend to the margin of their norm."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import mirrorhead as mh
from mirrorhead.paths._balls import ball
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
    found = mh.diagnose(path)  # in the limit norm
    assert found.solution.geometry == mh.PNorm(INF) and found.in_cone is None
    assert torch.equal(path.norm, path.W.abs().amax(BOTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    "norm", [mh.Schatten(1.5), mh.Schatten(3), mh.Grouped(1.5, dim=0)], ids=repr
)
def test_the_accelerated_rule_converges_in_any_smooth_norm(norm: mh.Norm) -> None:
    """Margin over norm hardly grows between 1,000 and 3,000 steps."""
    problem = random_problem(4)
    path = mh.descend(problem, norm, steps=3000, rule="accelerated", record=[1000, 3000])
    margins = path.margin / path.norm
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


def test_a_path_has_its_loss_norm_and_margin() -> None:
    problem = random_problem(3)
    path = mh.descend(problem, mh.Schatten(1.5), 30)
    joint = mh.descend(problem, 2, 30, joint=True)
    for one in (path, joint):
        for k, W in enumerate(one.W):
            of = problem if one.v is None else problem.with_head(one.v[k])
            torch.testing.assert_close(one.loss[k], of.loss(W))
            singular = torch.linalg.svdvals(W)
            size = W.norm(dim=BOTH) if one is joint else singular.pow(1.5).sum(-1).pow(1 / 1.5)
            torch.testing.assert_close(one.norm[k], size)
            for trial in range(3):
                logits = problem.trial(trial).logits(W[trial])
                leads = [
                    row[chosen] - row[[t for t in range(len(row)) if t != chosen]].max()
                    for row, chosen in zip(logits, one.tokens[trial].tolist(), strict=True)
                ]
                assert float(one.margin[k, trial]) == pytest.approx(float(min(leads)))
    heads = mh.descend(random_problem(2, heads=3), 1.5, 5)
    assert heads.norm.shape == heads.margin.shape == (*heads.W.shape[:2], 3)
    with pytest.raises(ValueError, match=r"tokens must have shape \(3, 6\), got \(2, 6\)"):
        problem.margin(path.W[-1], path.tokens[:2])


SMOOTH = [mh.Schatten(1.5), mh.Grouped(1.5, dim=1)]


@pytest.mark.slow
@pytest.mark.parametrize("norm", [*SMOOTH, *NORMS], ids=repr)
def test_a_path_is_diagnosed_in_its_own_geometry(norm: mh.Norm) -> None:
    """The share of the largest margin grows; D is that of PNorm(2) where the norm has none."""
    rule, lr = ("normalized", 0.1) if norm in SMOOTH else ("steepest", 0.02)
    path = mh.descend(random_problem(2, n=3, T=4, d=5), norm, 2000, lr=lr, rule=rule)
    found = mh.diagnose(path)
    assert found.solution.geometry == norm and f"share {found.share[-1].median():.4f}" in repr(
        found
    )
    assert bool((found.share[-1] > 0.7).all()) and bool((found.share[-1] <= 1 + 1e-8).all())
    assert bool((found.share[-1] > found.share[len(path.steps) // 3]).all())
    own = norm if 1 < getattr(norm, "p", 2) < INF else mh.PNorm(2)
    assert isinstance(own, mh.Potential)
    expected = own.direction_divergence(found.solution.W, path.W[-1], BOTH)
    torch.testing.assert_close(found.divergence[-1], expected)
    torch.testing.assert_close(path.divergence_to(found.solution, own), found.divergence)


@pytest.mark.slow
def test_a_path_of_factors_is_diagnosed_in_the_norm_that_is_named() -> None:
    problem = random_problem(2, n=2, T=3, d=4)
    K = 0.1 * torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    path = mh.descend(problem, 2, 3000, init=(K, K))
    with pytest.raises(ValueError, match=r"geometry must be given .* Schatten\(1\) for p = 2"):
        mh.diagnose(path)
    nuclear = mh.diagnose(path, geometry=mh.Schatten(1))
    assert bool((nuclear.share[-1] > mh.diagnose(path, geometry=3).share[-1]).all())


# -- regularization paths and tokens in any norm ------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("norm", [mh.Schatten(3), mh.Grouped(1.5, dim=1), *NORMS], ids=repr)
def test_theorem_1_in_any_norm(norm: mh.Norm) -> None:
    """At each radius W is steepest for -gradient, and the limit is the certified solution."""
    problem = random_problem(2, n=2, T=4, d=4)
    best = mh.globally_optimal_tokens(problem)
    solution = mh.attention_svm(problem.X, problem.z, best, norm)
    radii = torch.tensor([10.0, 100.0]).double()[:, None] * solution.norm
    path = mh.regularization_path(problem, norm, radii, starts=3)
    torch.testing.assert_close(path.norms, radii)
    assert torch.equal(path.tokens, best.expand_as(path.tokens))
    shares = []
    for W in path.W:
        down = -problem.gradient(W).direction
        aligned = (down * W).sum(BOTH) / norm.norm(W, BOTH) / norm.dual_norm(down, BOTH)
        torch.testing.assert_close(aligned, torch.ones(2).double(), rtol=0, atol=1e-5)
        shares.append(problem.margin(W, best) / norm.norm(W, BOTH) * solution.norm)
    assert bool((shares[1] > shares[0]).all()) and bool((shares[1] > 0.97).all())
    assert path.geometry == norm and repr(path).startswith("RegularizationPath(")


@pytest.mark.slow
@pytest.mark.parametrize("norm", [mh.Schatten(1.5), *NORMS], ids=repr)
def test_no_weights_of_a_fine_grid_are_better(norm: mh.Norm) -> None:
    """Brute force over the ball: W is 2 x 2, with 21 values for each entry."""
    problem = random_problem(1, n=3, T=3, d=2, first=4).trial(0)
    ticks = torch.linspace(-1, 1, 21, dtype=torch.float64)
    grid = torch.cartesian_prod(ticks, ticks, ticks, ticks).reshape(-1, 2, 2)
    sizes = norm.norm(grid, BOTH)
    grid = torch.cat([grid[sizes <= 1], grid[sizes > 0.1] / sizes[sizes > 0.1, None, None]])
    for radius in (1.0, 20.0):
        path = mh.regularization_path(problem, norm, [radius], starts=4)
        assert float(path.norms[0]) <= radius * (1 + 1e-9)
        logits = (problem.X @ (radius * grid)[:, None] @ problem.z.unsqueeze(-1)).squeeze(-1)
        margins = (logits.softmax(-1) * problem.scores()).sum(-1)
        lowest = problem.loss_function.value(margins).mean(-1).min()
        assert float(problem.loss(path.W[0])) <= float(lowest) + 1e-12


class Weighted(mh.Norm):
    """||(1 + row) w||_2: a norm of one's own, with its dual."""

    def __init__(self, power: int = 1) -> None:
        self.power = power

    def __repr__(self) -> str:
        return f"Weighted({self.power})"

    def scaled(self, w: Tensor) -> Tensor:
        rows = torch.arange(1.0, w.shape[-2] + 1, dtype=w.dtype).unsqueeze(-1)
        return w * rows**self.power

    def norm(self, w: Tensor, dims: Any = None) -> Tensor:
        return torch.linalg.vector_norm(self.scaled(w), dim=dims)

    def dual_norm(self, u: Tensor, dims: Any = None) -> Tensor:
        return self.dual.norm(u, dims)

    def steepest(self, u: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dual.scaled(self.dual.scaled(u)) / self.dual_norm(u)

    @property
    def dual(self) -> Weighted:
        return Weighted(-self.power)


@pytest.mark.parametrize(
    "norm", [mh.PNorm(3), mh.Schatten(1.7), mh.Grouped(3, dim=0), Weighted(), *NORMS], ids=repr
)
def test_the_maps_of_balls_stay_inside_and_pull_gradients_back(norm: mh.Norm) -> None:
    g, unit = torch.Generator().manual_seed(0), ball(norm, (3, 2))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    x = normal(5, 6)
    x = 0.9 * x / unit.norm(x).unsqueeze(-1)
    for inside in (False, True):
        at = unit.coordinates(x, inside)
        at = at + 0.3 * normal(*at.shape)
        assert bool((unit.norm(unit.point(at)[0]) <= 1 + 1e-12).all())
        slope, step = normal(5, 6), 1e-6 * normal(*at.shape)
        moved = unit.point(at + step)[0] - unit.point(at - step)[0]
        expected = (unit.point(at)[1](slope) * 2 * step).sum(-1)
        torch.testing.assert_close((slope * moved).sum(-1), expected, rtol=1e-5, atol=1e-12)
    near = unit.point(unit.coordinates(x, True))[0]
    torch.testing.assert_close(near, x, rtol=0, atol=0.12)


@pytest.mark.slow
def test_a_norm_of_ones_own_has_paths() -> None:
    """It is PNorm(2) for tokens with scaled entries, so the solution is known."""
    problem, norm = random_problem(2, n=3, T=4, d=4), Weighted()
    rows = torch.arange(1.0, 5, dtype=torch.float64)
    best = mh.globally_optimal_tokens(problem)
    scaled = mh.attention_svm(problem.X / rows, problem.z, best, 2)
    path = mh.regularization_path(problem, norm, 100 * scaled.norm.expand(1, -1), starts=4)
    share = problem.margin(path.W[-1], best) / path.norms[-1] * scaled.norm
    assert bool((share > 0.97).all())
    steps = mh.descend(problem, norm, 3000, rule="steepest", record=[300, 1000, 3000])
    own = mh.attention_svm(problem.X / rows, problem.z, steps.tokens, 2)
    shares = steps.margin / steps.norm * own.norm
    assert bool((shares.diff(dim=0) > 0).all()) and bool((shares[-1] > 0.85).all())


@pytest.mark.slow
def test_a_potential_of_ones_own_has_a_regularization_path_in_its_limit_norm() -> None:
    problem = random_problem(2, n=2, T=3, d=3)
    best = mh.globally_optimal_tokens(problem)
    solution = mh.attention_svm(problem.X, problem.z, best, Cosh.limit)
    path = mh.regularization_path(problem, Cosh.limit, 100 * solution.norm.expand(1, -1), 4)
    share = problem.margin(path.W[-1], best) / path.norms[-1] * solution.norm
    assert bool((share > 0.97).all())


@pytest.mark.slow
@pytest.mark.parametrize("norm", [*SMOOTH, *NORMS], ids=repr)
def test_local_optimality_is_its_definition_in_any_norm(norm: mh.Norm) -> None:
    """Definition 3 by the solution's own constraint values, where no slack is in doubt."""
    problem = random_problem(1, n=2, T=3, d=3, first=2).trial(0)
    scores, optimal = problem.scores(), []
    for tokens in (torch.tensor(pair) for pair in product(range(3), repeat=2)):
        solution = mh.attention_svm(problem.X, problem.z, tokens, norm, 1e-10)
        logits, at = problem.logits(solution.W), tokens.unsqueeze(-1)
        slack = (logits.gather(-1, at) - logits - 1).scatter(-1, at, INF)
        decision = mh.locally_optimal(problem, tokens, norm)
        if bool(decision.undecided) or solution.status != "optimal":
            continue
        highest = scores.where(slack < 1e-5, -INF).amax(-1)
        assert bool(decision) == bool((highest < scores.gather(-1, at).squeeze(-1)).all())
        optimal += [tokens.tolist()] * bool(decision)
        assert torch.equal(mh.support_tokens(problem, tokens, norm), decision.solution.support)
    assert optimal
    assert mh.locally_optimal_sets(problem, norm).tolist() == optimal


def test_what_is_of_p_norms_only_refuses_others_by_name() -> None:
    problem = random_problem(2)
    tokens, W = mh.globally_optimal_tokens(problem), torch.zeros(problem.weight_shape)
    of_p_norms: list[Any] = [
        lambda norm: mh.cone_constants(problem, tokens, norm),
        lambda norm: mh.largest_step(problem, W, norm),
        lambda norm: mh.assumption_b(problem, tokens, norm),
        lambda norm: mh.joint_regularization_path(problem, norm, [1.0], [1.0]),
    ]
    for call in of_p_norms:
        with pytest.raises(ValueError, match=r"geometry must be .*PNorm.*Schatten\(1\.5\)"):
            call(mh.Schatten(1.5))
        with pytest.raises(ValueError, match=r"geometry must be a potential.*PNorm\(inf\)"):
            call(mh.PNorm(INF))
    with pytest.raises(ValueError, match=r"geometry must be PNorm, Schatten, .* got KSupport"):
        mh.regularization_path(problem, mh.KSupport(k=3), [1.0])
    with pytest.raises(ValueError, match="W has no dimension 3"):
        mh.regularization_path(problem, mh.Grouped(1, dim=3), [1.0])
    for call in (mh.locally_optimal, mh.support_tokens):
        with pytest.raises(ValueError, match="geometry must be a norm that has a solver, got KSup"):
            call(problem, tokens, mh.KSupport(k=3))
