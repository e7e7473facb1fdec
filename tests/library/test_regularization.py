"""Regularization paths: optimality at every radius, Theorems 1 and 5, Assumption B."""

from __future__ import annotations

import math
from itertools import product

import mpmath
import pytest
import torch
from scipy.optimize import minimize as scipy_minimize
from torch import Tensor

import mirrorhead as mh
from margin_cases import generator
from mirrorhead.paths._continuation import directions, follow_spheres
from mirrorhead.paths._excess_loss import ExcessLoss, log_logistic, log_loss
from mirrorhead.paths._lbfgs import minimize
from mirrorhead.paths.descent import direction_divergence
from mirrorhead.synthetic import example_2, random_problem

LOSSES = ("logistic", "exponential", "linear")


def masked(problem: mh.AttentionProblem, seed: int = 0) -> mh.AttentionProblem:
    mask = torch.rand(problem.X.shape[:-1], generator=generator(seed)) < 0.6
    mask[..., 0] |= ~mask.any(-1)
    return mh.AttentionProblem(
        problem.X, problem.z, problem.y, problem.v, problem.loss_function, mask=mask
    )


def repeated(
    problem: mh.AttentionProblem, count: int, v: Tensor | None = None
) -> mh.AttentionProblem:
    """The same data `count` times over, perhaps with a head for each."""
    X, z, y = (x.expand(count, *x.shape) for x in (problem.X, problem.z, problem.y))
    return mh.AttentionProblem(X, z, y, problem.v.expand(count, -1) if v is None else v)


def stationarity(W: Tensor, gradient: Tensor, p: float, dims: tuple[int, ...]) -> Tensor:
    """mirror(W)/||W||^(p-1) against -gradient/||gradient||_q: 0 at a minimum over a sphere."""
    psi = mh.PNorm(p)
    pull = psi.mirror(W / psi.norm(W, dims).reshape(-1, *(1 for _ in dims)))
    down = -gradient / psi.dual_norm(gradient, dims).reshape(-1, *(1 for _ in dims))
    return psi.dual_norm(pull - down, dims)


# -- the optimizer ------------------------------------------------------------------------------


def test_minimize_solves_quadratics_of_any_condition():
    g = generator(0)
    count, size = 12, 8
    Q = torch.linalg.qr(torch.randn(count, size, size, generator=g, dtype=torch.float64)).Q
    scales = 10 ** (4 * torch.rand(count, size, generator=g, dtype=torch.float64))
    A = Q @ (scales.unsqueeze(-1) * Q.mT)
    goal = torch.randn(count, size, generator=g, dtype=torch.float64)

    def bowl(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        gradient = (A[which] @ (x - goal[which]).unsqueeze(-1)).squeeze(-1)
        return 0.5 * ((x - goal[which]) * gradient).sum(-1), gradient

    start = torch.ones(count, size, dtype=torch.float64)
    found = minimize(bowl, start, tol=1e-9)
    assert (found.x - goal).abs().max() < 1e-6
    assert int(found.iterations.max()) < 500
    alone = minimize(lambda x, which: bowl(x, which + 5), start[5:6], tol=1e-9)
    assert torch.allclose(alone.x[0], found.x[5], atol=1e-9)


def test_minimize_agrees_with_scipy_on_a_bent_valley():
    def rosenbrock(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x[:, 0], x[:, 1]
        value = (1 - a) ** 2 + 100 * (b - a * a) ** 2
        gradient = torch.stack([-2 * (1 - a) - 400 * a * (b - a * a), 200 * (b - a * a)], -1)
        return value, gradient

    starts = torch.tensor([[-1.2, 1.0], [2.0, -3.0], [0.5, 0.5]], dtype=torch.float64)
    found = minimize(rosenbrock, starts, tol=1e-9)
    assert torch.allclose(found.x, torch.ones_like(starts), atol=1e-7)
    assert torch.allclose(found.gradient, rosenbrock(found.x, torch.arange(3))[1])

    def one(x):
        value, gradient = rosenbrock(torch.from_numpy(x)[None], torch.tensor([0]))
        return float(value), gradient[0].numpy()

    theirs = scipy_minimize(one, starts[0].numpy(), jac=True, method="L-BFGS-B")
    assert int(found.iterations[0]) < 2 * theirs.nit


def test_minimize_backs_off_from_where_the_function_is_not_finite():
    def barrier(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        return 10 * x[:, 0] - x[:, 0].log(), 10 - 1 / x

    start = torch.tensor([[5.0], [1e-3]], dtype=torch.float64)
    assert torch.allclose(minimize(barrier, start).x, torch.full((2, 1), 0.1).double(), atol=1e-6)


# -- log(L - L*) --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", [0.0, 1.0, 50.0, 4000.0])
@pytest.mark.parametrize("padded", [False, True])
def test_excess_is_exact(loss, size, padded):
    """The value against mpmath; the gradient against the problem's own, which is that of L."""
    problem = random_problem(2, n=3, T=4, d=5, loss=loss)
    problem = masked(problem) if padded else problem
    tokens = problem.scores().where(_valid(problem), -math.inf).argmax(-1)
    direction = mh.attention_svm(problem.X, problem.z, tokens, mask=problem.mask).W
    g = generator(1)
    W = size * (direction + 0.1 * torch.randn(direction.shape, generator=g, dtype=torch.float64))
    value, gradient = ExcessLoss(problem, problem.scores())(W, torch.arange(2))
    true = problem.gradient(W)
    for k in range(2):
        assert float(value[k]) == pytest.approx(_log_excess(problem.trial(k), W[k]), abs=1e-9)
    assert torch.allclose(gradient.flatten(1).norm(dim=-1), (true.log_norm - value).exp())
    unit = gradient / gradient.flatten(1).norm(dim=-1)[:, None, None]
    assert torch.allclose(unit, true.direction, atol=1e-9)
    if size == 4000:
        assert bool((value < -1500).all())


def _valid(problem: mh.AttentionProblem) -> Tensor:
    everything = torch.ones(problem.X.shape[:-1], dtype=torch.bool)
    return everything if problem.mask is None else problem.mask


def _log_excess(problem: mh.AttentionProblem, W: Tensor) -> float:
    """log(L - L*) as it is written, with enough digits."""
    loss = {
        "logistic": lambda x: mpmath.log1p(mpmath.exp(-x)),
        "exponential": lambda x: mpmath.exp(-x),
        "linear": lambda x: -x,
    }[problem.loss_function.name]
    n, T, d = problem.X.shape
    with mpmath.workdps(4000):
        total = mpmath.mpf(0)
        for i in range(n):
            kept = [t for t in range(T) if _valid(problem)[i, t]]
            X = [[mpmath.mpf(x) for x in row] for row in problem.X[i, kept].tolist()]
            Wz = [
                mpmath.fsum(
                    mpmath.mpf(w) * z for w, z in zip(row, problem.z[i].tolist(), strict=True)
                )
                for row in W.tolist()
            ]
            h = [mpmath.fsum(x[a] * Wz[a] for a in range(d)) for x in X]
            s = [mpmath.exp(a - max(h)) for a in h]
            v = problem.v.tolist()
            scores = [int(problem.y[i]) * mpmath.fsum(x[a] * v[a] for a in range(d)) for x in X]
            margin = mpmath.fsum(a * b for a, b in zip(s, scores, strict=True)) / mpmath.fsum(s)
            total += (loss(margin) - loss(max(scores))) / n
        return float(mpmath.log(total))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_leading_term_leads(loss):
    """It is convex, its gradient is its derivative, and L - L* tends to it."""
    problem = masked(random_problem(1, n=3, T=4, d=5, loss=loss))
    excess, only = ExcessLoss(problem, problem.scores()), torch.tensor([0])
    g = generator(2)
    for _ in range(20):
        A, B = torch.randn(2, 1, 5, 5, generator=g, dtype=torch.float64) * 10
        ends = [excess.leading_term(x, only)[0] for x in (A, B, (A + B) / 2)]
        assert bool(ends[2] <= (ends[0] + ends[1]) / 2 + 1e-12)
        _, gradient = excess.leading_term(A, only)
        step = 1e-6 * B
        ahead, behind = (excess.leading_term(A + sign * step, only)[0] for sign in (1, -1))
        assert float((ahead - behind) / 2) == pytest.approx(
            float((gradient * step).sum()), rel=1e-5
        )
    tokens = problem.scores().where(_valid(problem), -math.inf).argmax(-1)
    W = 100 * mh.attention_svm(problem.X, problem.z, tokens, mask=problem.mask).W
    assert torch.allclose(excess.leading_term(W, only)[0], excess(W, only)[0], atol=1e-12)


def test_log_loss_and_its_gradients():
    problem = masked(random_problem(3, n=3, T=4, d=5))
    g = generator(3)
    W = torch.randn(3, 5, 5, generator=g, dtype=torch.float64).requires_grad_()
    v = torch.randn(3, 5, generator=g, dtype=torch.float64).requires_grad_()
    total = problem.with_head(v).loss(W).log()
    expected = torch.autograd.grad(total.sum(), (W, v))
    value, to_W, to_v = log_loss(problem, W.detach(), v.detach(), torch.arange(3))
    assert torch.allclose(value, total)
    assert torch.allclose(to_W, expected[0], atol=1e-12)
    assert torch.allclose(to_v, expected[1], atol=1e-12)
    for x in (-1e4, -5.0, 0.0, 11.9, 12.1, 40.0, 1e4):
        with mpmath.workdps(30):
            exact = float(mpmath.log(mpmath.log1p(mpmath.exp(mpmath.mpf(-x)))))
        assert float(log_logistic(torch.tensor(x, dtype=torch.float64))) == pytest.approx(
            exact, rel=1e-14
        )


# -- lp-AttRP -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_theorem_1(p):
    """The optimality conditions at every radius, and the limit: D falls as R^-2 to W_mm."""
    problem = random_problem(3)
    best = mh.globally_optimal_tokens(problem)
    solution = mh.attention_svm(problem.X, problem.z, best, p, tol=1e-12)
    scale = torch.tensor([1.0, 10.0, 30.0, 100.0]).double()
    path = mh.regularization_path(problem, p, scale[:, None] * solution.norm, starts=4)
    assert torch.allclose(path.norms, path.radii)
    assert bool((path.log_excess.diff(dim=0) < 0).all())
    for W in path.W:
        gradient = problem.gradient(W).direction
        assert stationarity(W, gradient, p, (-2, -1)).max() < 2e-4
    for W, log_excess in zip(path.W[:2], path.log_excess[:2], strict=True):
        least = problem.loss_function.value(problem.scores().amax(-1)).mean(-1)
        assert torch.allclose((problem.loss(W) - least).log(), log_excess, atol=1e-6)
    assert bool((path.tokens[1:] == best).all())
    divergence = path.divergence_to(solution)
    assert bool((divergence.diff(dim=0) < 0).all())
    slope = (divergence[-1] / divergence[-2]).log() / math.log(100 / 30)
    assert float(slope.median()) == pytest.approx(-2, abs=0.25)
    assert float(divergence[-1].median()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.5, 3.0])
def test_no_other_search_does_better(p):
    """scipy's L-BFGS-B on the plain loss, cold from twelve places, in a problem that has traps."""
    problem = random_problem(1, n=4, T=5, d=4, first=18).trial(0)
    radii = [4.0, 20.0]
    path = mh.regularization_path(problem, p, radii)
    assert bool((path.optima > 1).all())
    psi = mh.PNorm(p)
    for radius, found in zip(radii, path.W, strict=True):
        lowest = math.inf

        def loss(x, radius=radius):
            M = torch.tensor(x).reshape(4, 4).requires_grad_()
            value = problem.loss(radius * M / psi.norm(M))
            value.backward()
            assert M.grad is not None
            return float(value.detach()), M.grad.flatten().numpy()

        for seed in range(12):
            start = torch.randn(16, generator=generator(seed), dtype=torch.float64).numpy()
            end = scipy_minimize(loss, start, jac=True, method="L-BFGS-B", options={"gtol": 1e-9})
            lowest = min(lowest, float(end.fun))
        assert float(problem.loss(found)) <= lowest + 1e-9


@pytest.mark.slow
def test_a_path_is_its_trial_and_its_seed():
    problem = random_problem(4, n=3, T=4, d=5)
    radii = torch.tensor([5.0, 15.0])
    together = mh.regularization_path(problem, 1.75, radii, starts=4, seed=3)
    again = mh.regularization_path(problem, 1.75, radii, starts=4, seed=3)
    assert torch.equal(together.W, again.W)
    alone = mh.regularization_path(problem.trial(2), 1.75, radii, starts=4, seed=3)
    assert alone.W.shape == (2, 5, 5) and alone.tokens.shape == (2, 3)
    assert alone.all_log_excess.shape == (2, 4)
    assert torch.allclose(alone.log_excess, together.log_excess[:, 2], atol=1e-6)
    square = mh.AttentionProblem(
        problem.X.reshape(2, 2, 3, 4, 5), problem.z.reshape(2, 2, 3, 5),
        problem.y.reshape(2, 2, 3), problem.v.reshape(2, 2, 5),
    )  # fmt: skip
    grid = mh.regularization_path(square, 1.75, radii, starts=4, seed=3)
    assert grid.W.shape == (2, 2, 2, 5, 5) and grid.spread.shape == (2, 2, 2)
    assert torch.allclose(grid.W.flatten(1, 2), together.W, atol=1e-6)


@pytest.mark.slow
def test_what_the_starts_saw_is_told():
    problem = random_problem(3)
    path = mh.regularization_path(problem, 2, [0.1, 100.0], starts=5)
    assert path.all_log_excess.shape == (2, 5, 3)
    assert torch.equal(path.all_log_excess.amin(1), path.log_excess)
    assert bool((path.all_log_excess.diff(dim=1) >= 0).all())
    assert torch.equal(path.spread, path.all_log_excess[:, -1] - path.all_log_excess[:, 0])
    # Near zero the loss is nearly linear and has one minimum on the sphere; far out, many.
    assert torch.equal(path.optima[0], torch.ones(3))
    assert bool((path.spread[0] < 1e-6).all() and (path.optima[1] > 1).any())
    assert repr(path).startswith("RegularizationPath(p=2, trials=(3,), 2 radii 0.1 to 100, log-")


def test_an_optimum_met_late_is_carried_back_and_no_radius_is_worse_than_a_smaller():
    """A search that finds the better branch, -2 R against -R, from R = 2 on; at 4 both are bad."""

    def search(points: Tensor, radius: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        found = (points[..., 0] > 5) | (radius >= 2)
        values = -radius * torch.where(found, 2.0, 1.0) * torch.where(radius == 4, 0.1, 1.0)
        return torch.where(found, 9.0, 1.0).unsqueeze(-1), values

    radii = torch.tensor([1.0, 2.0, 4.0]).double().reshape(3, 1, 1)
    nowhere = torch.zeros(1, 1, dtype=torch.float64)
    soft = torch.ones(1, 1).double()
    points, reach, values = follow_spheres(search, directions(nowhere, 3, 0), radii, soft)
    assert points.flatten().tolist() == [9.0, 9.0, 9.0]
    assert values[:, 0].flatten().tolist() == [-2.0, -4.0, -4.0]
    assert reach.flatten().tolist() == [1.0, 2.0, 2.0]
    assert values.shape == (3, 3, 1)


def test_divergence_where_there_is_no_direction_or_no_common_row():
    X = torch.ones(1, 2, 2)
    hopeless = mh.attention_svm(X, X[:, 0], torch.tensor([0]))
    upper = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    W = torch.stack([upper, upper.flip(0), torch.zeros(2, 2)])
    assert bool(direction_divergence(2, hopeless.W, W, 2).isnan().all())
    apart = direction_divergence(2, upper, W, 2)
    assert apart[:2].tolist() == [0.0, 1.0] and bool(apart[2].isnan())


def test_near_zero_the_path_follows_the_gradient():
    problem = random_problem(5)
    for p in (1.5, 3.0):
        path = mh.regularization_path(problem, p, [1e-4], starts=2)
        gradient = problem.gradient(torch.zeros(problem.weight_shape)).direction
        steepest = -mh.PNorm(p).inverse(gradient)
        assert mh.PNorm(p).direction_divergence(steepest, path.W[0], (-2, -1)).max() < 1e-6


@pytest.mark.slow
def test_padding_does_not_matter():
    short = random_problem(2, n=3, T=4, d=5)
    X = torch.cat([torch.full((2, 3, 2, 5), 3.0, dtype=torch.float64), short.X], -2)
    mask = torch.tensor([False] * 2 + [True] * 4).expand(2, 3, 6)
    padded = mh.AttentionProblem(X, short.z, short.y, short.v, mask=mask)
    ours, theirs = (mh.regularization_path(x, 2, [3.0, 30.0], starts=3) for x in (padded, short))
    assert torch.equal(ours.tokens, theirs.tokens + 2)
    assert torch.allclose(ours.log_excess, theirs.log_excess, atol=1e-6)


@pytest.mark.slow
def test_ties_and_single_tokens_are_no_obstacle():
    problem = random_problem(1, n=3, T=4, d=5).trial(0)
    X = problem.X.clone()
    X[0, 1:] = X[0, :1]  # one token, four times over
    tied = mh.AttentionProblem(X, problem.z, problem.y, problem.v)
    path = mh.regularization_path(tied, 2, [1.0, 50.0], starts=3)
    rest = mh.AttentionProblem(X[1:], problem.z[1:], problem.y[1:], problem.v)
    other = mh.regularization_path(rest, 2, [1.0, 50.0], starts=3)
    assert torch.allclose(path.log_excess, other.log_excess + math.log(2 / 3), atol=1e-6)
    X[1:, 1:] = X[1:, :1]
    with pytest.raises(ValueError, match="equal scores only: L does not depend on W"):
        mh.regularization_path(mh.AttentionProblem(X, *_rest(problem)), 2, [1.0])


def _rest(problem: mh.AttentionProblem) -> tuple[Tensor, Tensor, Tensor]:
    return problem.z, problem.y, problem.v


# -- minima inside the ball ---------------------------------------------------------------------


def contradictory(d: int = 1) -> mh.AttentionProblem:
    """Three samples of the same two tokens, labelled 1, 1 and -1: no W selects the best tokens."""
    X = torch.zeros(3, 2, d, dtype=torch.float64)
    X[:, 0, 0], X[:, 1, 0] = 1.0, -1.0
    return mh.AttentionProblem(X, torch.ones(3, d), [1, 1, -1], [1.0] + [0.0] * (d - 1))


@pytest.mark.slow
def test_the_minimum_over_a_ball_may_lie_inside():
    """One weight: a dense grid over [-R, R] is an independent check."""
    problem = contradictory()
    radii = [0.5, 1.0, 50.0]
    path = mh.regularization_path(problem, 2, radii)
    for radius, W, log_excess in zip(radii, path.W, path.log_excess, strict=True):
        grid = torch.linspace(-radius, radius, 200_001, dtype=torch.float64)
        losses = repeated(problem, len(grid)).loss(grid.reshape(-1, 1, 1))
        assert float(problem.loss(W)) <= float(losses.min()) + 1e-9
        least = problem.loss_function.value(problem.scores().amax(-1)).mean()
        assert float((problem.loss(W) - least).log()) == pytest.approx(float(log_excess))
    assert path.active.tolist() == [True, False, False]
    assert path.norms[1:].tolist() == pytest.approx([0.854, 0.854], abs=1e-3)
    assert torch.equal(path.all_log_excess.amin(1), path.log_excess)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "seed"), [(1.2, 0), (2.0, 1), (2.0, 2), (5.0, 3)])
def test_no_point_of_the_ball_does_better(p, seed):
    """Against a grid of the ball and scipy's SLSQP, where every sample contradicts itself.

    Each of five random pairs of tokens a, -a with v'a = 2 comes three times, labelled 1, 1 and
    -1. The loss is least at the margin log(2), where attention is soft.
    """
    g = generator(seed)
    a, z = (torch.randn(5, 1, 2, generator=g, dtype=torch.float64) for _ in range(2))
    a = 2 * a / (a @ torch.tensor([1.0, 0.5], dtype=torch.float64)).unsqueeze(-1)
    X = torch.cat([a, -a], 1).repeat(3, 1, 1)
    labels = torch.tensor([1.0, 1.0, -1.0]).repeat_interleave(5)
    problem = mh.AttentionProblem(X, z[:, 0].repeat(3, 1), labels, [1.0, 0.5])
    path = mh.regularization_path(problem, p, [0.1, 30.0], starts=4)
    axis = torch.linspace(-1, 1, 13, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis, axis, axis)
    grid = grid[mh.PNorm(p).norm(grid, -1) <= 1].reshape(-1, 2, 2)
    many = repeated(problem, len(grid))

    for radius, W in zip((0.1, 30.0), path.W, strict=True):

        def loss(x):
            W = torch.tensor(x).reshape(2, 2).requires_grad_()
            value = problem.loss(W)
            value.backward()
            assert W.grad is not None
            return float(value.detach()), W.grad.flatten().numpy()

        room = {"type": "ineq", "fun": lambda x, R=radius: 1 - (abs(x / R) ** p).sum()}
        lowest = min(float(many.loss(scale * grid).min()) for scale in (radius, radius / 10))
        for start in range(10):
            x = torch.randn(4, generator=generator(start), dtype=torch.float64)
            x = (x / mh.PNorm(p).norm(x) * min(radius, 1.0) / 2).numpy()
            end = scipy_minimize(loss, x, jac=True, method="SLSQP", constraints=[room])
            if room["fun"](end.x) >= -1e-9:
                lowest = min(lowest, float(end.fun))
        assert float(problem.loss(W)) <= lowest + 1e-7
        assert float(mh.PNorm(p).norm(W)) <= radius * (1 + 1e-12)
    assert path.active.tolist() == [True, False]
    assert float(problem.gradient(path.W[1]).log_norm) < math.log(1e-6)  # no constraint acts


@pytest.mark.slow
def test_a_trial_inside_does_not_change_its_neighbours():
    unclear = contradictory()
    clear = mh.AttentionProblem(unclear.X, unclear.z, [1.0, 1.0, 1.0], unclear.v)
    both = mh.AttentionProblem(
        torch.stack([clear.X, unclear.X]), torch.stack([clear.z, unclear.z]),
        torch.stack([clear.y, unclear.y]), torch.stack([clear.v, unclear.v]),
    )  # fmt: skip
    together = mh.regularization_path(both, 2, [2.0, 20.0], starts=3)
    assert together.active.tolist() == [[True, False], [True, False]]
    alone = mh.regularization_path(clear, 2, [2.0, 20.0], starts=3)
    assert torch.allclose(alone.log_excess, together.log_excess[:, 0])


@pytest.mark.slow
def test_a_joint_path_may_lie_inside_as_well():
    """v tanh(W) = log(2) is best for labels 1, 1 and -1: a grid of both balls finds no better."""
    problem = contradictory()
    path = mh.joint_regularization_path(problem, 2, [0.5, 40.0], [0.5, 40.0], starts=4)
    assert path.v is not None
    axis = torch.linspace(-1, 1, 401, dtype=torch.float64)
    W, v = torch.cartesian_prod(axis, axis).unbind(-1)
    for radius, value, at in zip((0.5, 40.0), path.log_excess, path.v, strict=True):
        grid = repeated(problem, len(W), radius * v.unsqueeze(-1))
        assert float(value) <= float(grid.loss(radius * W.reshape(-1, 1, 1)).min().log()) + 1e-9
        assert float(at.abs()) <= radius
    assert path.active[0] and not (path.active[1] and path.v[1].abs() > 39.9)
    assert float(path.v[1] * path.W[1].tanh()) == pytest.approx(math.log(2), abs=1e-4)


# -- lp-JointRP ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("p", "tokens"), [(1.75, (1, 0)), (2.0, (0, 0)), (3.0, (0, 0))])
def test_theorem_5_on_example_2(p, tokens):
    """Both tend to the max-margin solutions of the tokens with the largest label margin."""
    problem = example_2()
    solutions = {}
    for pair in product(range(3), repeat=2):
        chosen = problem.X[torch.arange(2), torch.tensor(pair)]
        solutions[pair] = mh.svm(chosen, problem.y, p, tol=1e-12)
    assert min(solutions, key=lambda pair: float(solutions[pair].norm)) == tokens
    label = solutions[tokens]
    attention = mh.attention_svm(problem.X, problem.z, torch.tensor(tokens), p, tol=1e-12)
    scale = torch.tensor([10.0, 100.0, 1000.0]).double()
    path = mh.joint_regularization_path(problem, p, scale * attention.norm, scale * label.norm)
    assert path.tokens[-1].tolist() == list(tokens)
    assert path.v is not None and path.head_radii is not None
    assert torch.allclose(path.norms, path.radii)
    assert torch.allclose(mh.PNorm(p).norm(path.v, -1), path.head_radii)
    assert path.log_excess[-1] == pytest.approx(-1000, rel=0.01)  # log L = -r Gamma + O(1)
    for divergence in (path.divergence_to(attention), path.head_divergence_to(label)):
        assert bool((divergence.diff() < 0).all())
        assert divergence[-1] < 2e-5
    for W, v in zip(path.W, path.v, strict=True):
        to_W, to_v = problem.with_head(v).gradients(W)
        assert stationarity(W[None], to_W.direction[None], p, (-2, -1)) < 1e-3
        assert stationarity(v[None], to_v.direction[None], p, (-1,)) < 1e-3
    assert "joint" in repr(path)
    # Assumption B picks the same tokens.
    nu = {pair: float(mh.assumption_b(problem, torch.tensor(pair), p)) for pair in solutions}
    assert [pair for pair in nu if nu[pair] > 0] == [tokens]


@pytest.mark.slow
def test_joint_paths_of_several_trials():
    problem = random_problem(2, n=2, T=3, d=4)
    path = mh.joint_regularization_path(problem, 2, [1.0, 5.0], [1.0, 5.0], starts=3)
    assert path.v is not None
    assert path.W.shape == (2, 2, 4, 4) and path.v.shape == (2, 2, 4)
    for k, (W, v) in enumerate(zip(path.W, path.v, strict=True)):
        assert torch.allclose(problem.with_head(v).loss(W).log(), path.log_excess[k])
        to_W, to_v = problem.with_head(v).gradients(W)
        assert stationarity(W, to_W.direction, 2, (-2, -1)).max() < 1e-3
        assert stationarity(v, to_v.direction, 2, (-1,)).max() < 1e-3


# -- Assumption B -------------------------------------------------------------------------------


def test_nu_is_the_least_ratio_of_a_fine_grid():
    """One sample with three tokens and one with one: the simplex can be searched exhaustively."""
    X = torch.tensor([[[3.0, 1], [1, 2], [0, 1]], [[0, 2.0], [9, 9], [9, 9]]], dtype=torch.float64)
    mask = torch.tensor([[True] * 3, [True, False, False]])
    problem = mh.AttentionProblem(X, X[:, 0], [1, 1], [0.0, 0.0], mask=mask)
    tokens = torch.tensor([0, 0])
    for p in (1.5, 2.0, 3.0):
        margin = 1 / mh.svm(X[:, 0], problem.y, p, tol=1e-12).norm
        grid = [
            (1 - a - b, a, b)
            for a in torch.linspace(0, 1, 41).tolist()
            for b in torch.linspace(0, 1, 41).tolist()
            if 1e-9 < a + b <= 1
        ]
        s = torch.tensor(grid, dtype=torch.float64)
        features = torch.stack([s @ X[0], X[1, 0].expand(len(s), 2)], 1)
        mixed = 1 / mh.svm(features, problem.y.expand(len(s), 2), p).norm
        least = float(((margin - mixed) / (1 - s[:, 0])).min())
        nu = float(mh.assumption_b(problem, tokens, p))
        assert nu <= least + 1e-7
        assert nu == pytest.approx(least, abs=0.02)


def test_nu_can_be_the_slope_at_the_selected_tokens():
    """From the origin to the line through (1, 0) and (1 - h, 1) it is 1/sqrt(1 + h^2)."""
    h = 0.05
    X = torch.tensor([[[1 - h, 1.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    problem = mh.AttentionProblem(X, X[:, 0], [1, 1], [0.0, 0.0], mask=mask)
    nu = float(mh.assumption_b(problem, torch.tensor([0, 0]), 2))
    assert nu == pytest.approx(h * (1 - h) * (1 + h * h) ** -1.5, rel=1e-6)


def test_a_sample_that_is_no_support_vector_breaks_assumption_b():
    X = torch.tensor([[[1.0, 0.0], [0.5, 0.0]], [[9.0, 0.0], [8.0, 0.0]]])
    problem = mh.AttentionProblem(X, X[:, 0], [1, 1], [0.0, 0.0])
    assert float(mh.assumption_b(problem, torch.tensor([0, 0]), 2)) <= 1e-8
    both = mh.AttentionProblem(
        torch.stack([X, X.flip(-3)]),
        torch.stack([X[:, 0]] * 2),
        torch.ones(2, 2),
        torch.zeros(2, 2),
    )
    assert mh.assumption_b(both, torch.zeros(2, 2).long(), 2).shape == (2,)


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"geometry": 0.5},
            "geometry must be (a number from 1 to inf|finite and greater than 1), got 0.5",
        ),
        ({"radii": []}, r"radii must be \(radii,\) or \(radii, \*\(2,\)\), got shape \(0,\)"),
        ({"radii": 3.0}, r"radii must be .* got shape \(\)"),
        ({"radii": torch.ones(2, 3)}, r"radii must be .* got shape \(2, 3\)"),
        ({"radii": [1.0, 1.0]}, "radii must be positive, finite and increasing"),
        ({"radii": [-1.0, 1.0]}, "radii must be positive, finite and increasing"),
        ({"radii": [1.0, math.inf]}, "radii must be positive, finite and increasing"),
        ({"starts": 0}, "starts must be an integer >= 1, got 0"),
        ({"seed": 0.5}, "seed must be an integer, got 0.5"),
        ({"problem": random_problem(2, heads=2)}, "problem must have one head and labels"),
        ({"problem": random_problem(2, classes=3)}, "problem must have one head and labels"),
    ],
)
def test_bad_requests_are_refused(change, message):
    arguments = {"problem": random_problem(2), "geometry": 2, "radii": [1.0, 2.0]} | change
    with pytest.raises((TypeError, ValueError), match=message):
        mh.regularization_path(**arguments)
    with pytest.raises((TypeError, ValueError), match=message):
        mh.joint_regularization_path(**arguments, head_radii=[1.0, 2.0])


def test_bad_joint_requests_are_refused():
    problem = random_problem(2)
    with pytest.raises(ValueError, match="head_radii must be 2 like radii, got 1"):
        mh.joint_regularization_path(problem, 2, [1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="head_radii must be positive"):
        mh.joint_regularization_path(problem, 2, [1.0], [0.0])
    with pytest.raises(ValueError, match="problem must have the logistic loss, got Linear"):
        mh.joint_regularization_path(random_problem(1, loss="linear"), 2, [1.0], [1.0])
    path = mh.regularization_path(problem, 2, [1.0], starts=1)
    with pytest.raises(ValueError, match="the head was fixed"):
        path.head_divergence_to(mh.svm(problem.X[:, :, 0], problem.y))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(2)}, r"tokens must be integers of shape \(2,\), got torch.float32"),
        (
            {"tokens": torch.zeros(3).long()},
            r"tokens must be integers of shape \(2,\), got .*\(3,\)",
        ),
        ({"tokens": torch.tensor([0, 3])}, "tokens must be from 0 to 2, got 3"),
        ({"tokens": torch.tensor([2, 2])}, "features that can be separated, got infeasible"),
        ({"samples": 0}, "samples must be an integer >= 1, got 0"),
        ({"geometry": 0.5}, "geometry must be finite and greater than 1"),
        ({"problem": random_problem(1, classes=3)}, "problem must have one head"),
    ],
)
def test_bad_requests_for_nu_are_refused(change, message):
    problem = example_2()
    X = problem.X.clone()
    X[1, 2] = X[0, 2]
    clash = mh.AttentionProblem(X, problem.z, problem.y, problem.v)
    arguments = {"problem": clash, "tokens": torch.tensor([0, 0]), "geometry": 2} | change
    with pytest.raises(ValueError, match=message):
        mh.assumption_b(**arguments)
