"""Margin solutions in Schatten and group norms, against a conic solver and by their laws."""

import math
import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch

import mirrorhead as mh
from margin_cases import HOPELESS, NASTY, dense_rows, hopeless, nasty, random_problem
from mirrorhead.synthetic import random_problem as sampled

NORMS = (
    *(mh.Schatten(p) for p in (1, 1.5, 3, math.inf)),
    *(mh.Grouped(1), mh.Grouped(1, 1, 2), mh.Grouped(1.5, 1), mh.Grouped(3, 0, 2)),
    *(mh.Grouped(math.inf), mh.Grouped(math.inf, -1)),
)


def cases(name):
    return pytest.mark.parametrize(name, NORMS, ids=repr)


def conic(norm, rows, shape):
    """The smallest norm by cvxpy and Clarabel."""
    W, asked = cp.Variable(shape), []
    if norm == mh.Schatten(1):
        value = cp.normNuc(W)
    elif norm == mh.Schatten(math.inf):
        value = cp.sigma_max(W)
    elif isinstance(norm, mh.Schatten):
        # Decreasing t whose first k entries bound the k largest singular values together.
        none = [np.zeros((side, side)) for side in shape]
        both = cp.bmat([[none[0], W], [W.T, none[1]]])
        t = cp.Variable(min(shape))
        sums = [cp.lambda_sum_largest(both, k) <= cp.sum(t[:k]) for k in range(1, min(shape) + 1)]
        asked, value = [*sums, cp.diff(t) <= 0], cp.pnorm(t, norm.p)  # pyright: ignore[reportArgumentType]
    else:
        parts, k = W if norm.dim == 0 else W.T, norm.size
        lengths = [
            cp.norm(cp.vec(parts[i : i + k], order="C")) for i in range(0, parts.shape[0], k)
        ]
        value = cp.pnorm(cp.hstack(lengths), norm.p)
    problem = cp.Problem(cp.Minimize(value), [rows.numpy() @ cp.vec(W, order="C") >= 1, *asked])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the solution may be inaccurate
        problem.solve(solver=cp.CLARABEL)
    return problem.value if problem.status == cp.OPTIMAL else None


@pytest.mark.parametrize(
    ("norm", "count"),
    [
        pytest.param(norm, count, id=f"{norm}-{count}", marks=[pytest.mark.slow] * (count > 5))
        for norm in NORMS
        for count in (3, 50)
    ],
)
def test_norms_agree_with_a_conic_solver(norm, count):
    unsure = 0
    for seed in range(count):
        n, T, d = 2 + seed % 4, 3 + seed % 3, 4 + 2 * (seed % 2)
        X, z, tokens = random_problem(n, T, d, seed=seed)
        if seed % 5 == 4:
            X, z, tokens = (x[0] for x in hopeless(HOPELESS[seed % 4], 1, seed))
        solution = mh.attention_svm(X, z, tokens, norm)
        assert solution.check(X, z, tokens).supported
        rows = dense_rows(X, z, tokens)
        if solution.status == "infeasible":
            assert solution.check(X, z, tokens).farkas <= 2e-9
            continue
        assert solution.status == "optimal", (norm, seed)
        value = conic(norm, rows, tuple(solution.W.shape))
        unsure += value is None  # Clarabel says that it is
        if value is None:
            continue
        assert solution.norm.item() == pytest.approx(value, rel=1e-6), (norm, seed)
    assert unsure <= count / 25


@cases("norm")
def test_every_solution_is_certified_and_a_batch_is_a_loop(norm):
    X, z, tokens = random_problem(12, 5, 6, 8, seed=1)
    X[3, 1], z[3, 1], tokens[3, 1] = X[3, 0], z[3, 0], (tokens[3, 0] + 1) % 6
    solution = mh.attention_svm(X, z, tokens, norm)
    assert solution.status == ["optimal"] * 3 + ["infeasible"] + ["optimal"] * 8
    assert solution.check(X, z, tokens).supported.all()
    assert (solution.gap[solution.optimal] <= 1e-9).all()
    assert solution.geometry == norm
    for k in (0, 3, 11):
        alone = mh.attention_svm(X[k], z[k], tokens[k], norm)
        assert alone.status == solution.status[k]
        torch.testing.assert_close(alone.norm, solution.norm[k], rtol=2e-9, atol=0)


@cases("norm")
def test_the_multipliers_are_the_dual_solution(norm):
    """A' dual is a subgradient of the norm at W: of dual norm 1, and <A' dual, W> = ||W||."""
    X, z, tokens = random_problem(5, 6, 8, seed=2)
    solution = mh.attention_svm(X, z, tokens, norm, 1e-10)
    others = torch.arange(6) != tokens.unsqueeze(-1)
    pulled = (dense_rows(X, z, tokens) * solution.dual[others].unsqueeze(-1)).sum(0).view(8, 8)
    assert norm.dual_norm(pulled).item() == pytest.approx(1, rel=1e-9)
    assert (pulled * solution.W).sum().item() == pytest.approx(solution.norm.item(), rel=1e-8)
    assert norm.norm(solution.W).item() == pytest.approx(solution.norm.item(), rel=1e-9)


@cases("norm")
@pytest.mark.parametrize("scale", [1e-150, 1e-3, 1e150])
def test_units_change_nothing(norm, scale):
    X, z, tokens = random_problem(4, 5, 6, seed=3)
    base = mh.attention_svm(X, z, tokens, norm)
    scaled = mh.attention_svm(scale * X, z, tokens, norm)
    assert scaled.status == "optimal"
    assert scaled.check(scale * X, z, tokens)
    assert scaled.norm.item() * scale == pytest.approx(base.norm.item(), rel=2e-9)


@pytest.mark.parametrize("norm", [mh.Schatten(2), mh.Grouped(2), mh.Grouped(2, 1, 3)], ids=repr)
def test_at_p2_all_norms_are_one(norm):
    data = random_problem(4, 5, 6, seed=4)
    own = mh.attention_svm(*data, norm)
    assert own.norm.item() == pytest.approx(mh.attention_svm(*data, 2).norm.item(), rel=2e-9)


@pytest.mark.parametrize("p", [1, 1.5, 4, math.inf])
def test_groups_of_one_entry_are_the_p_norm(p):
    g = torch.Generator().manual_seed(0)
    features = torch.randn(9, 12, generator=g, dtype=torch.float64)
    labels = torch.where(torch.rand(9, generator=g) < 0.5, 1, -1)
    for norm in (mh.Grouped(p), mh.Grouped(p, -1)):
        own = mh.svm(features, labels, norm)
        assert own.check(features, labels)
        assert own.norm.item() == pytest.approx(mh.svm(features, labels, p).norm.item(), rel=2e-9)


@pytest.mark.parametrize("norm", [mh.Grouped(1), mh.Grouped(1.5), mh.Grouped(5)], ids=repr)
def test_rows_of_the_transposed_problem_are_columns(norm):
    """One token a sample makes X and z exchangeable."""
    X, z, tokens = random_problem(5, 2, 6, seed=5)
    rows = X.gather(1, tokens.view(5, 1, 1).expand(5, 1, 6)).squeeze(1)
    left = rows - X.gather(1, 1 - tokens.view(5, 1, 1).expand(5, 1, 6)).squeeze(1)
    zero = torch.zeros_like(left)
    none = torch.zeros(5, dtype=torch.long)
    straight = mh.attention_svm(torch.stack([left, zero], 1), z, none, norm)
    turned = mh.attention_svm(
        torch.stack([z, zero], 1), left, none, mh.Grouped(norm.p, 1, norm.size)
    )
    assert straight.norm.item() == pytest.approx(turned.norm.item(), rel=2e-9)


@pytest.mark.parametrize("p", [1, 1.3, 3, math.inf])
@pytest.mark.parametrize("width", [3, 20])
def test_one_constraint_has_a_closed_form_in_schatten_norms(p, width):
    """<u v', W> >= 1: the smallest W is u v' / (||u|| ||v||)^2 in each of them."""
    X, z, _ = random_problem(1, 2, 7, seed=6)
    z = torch.cat([z] * 3, -1)[:, :width]
    solution = mh.attention_svm(X, z, torch.tensor([0]), mh.Schatten(p))
    u = X[0, 0] - X[0, 1]
    assert solution.norm.item() == pytest.approx(1 / (u.norm() * z.norm()).item(), rel=2e-9)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.02, 1.1, 10, 30, 100])
def test_near_p1_and_far_from_it(p):
    data = random_problem(20, 6, 8, 10, seed=7)
    for own in (mh.Schatten(p), mh.Grouped(p), mh.Grouped(p, 1, 5)):
        assert mh.attention_svm(*data, own).check(*data), own


@pytest.mark.slow
@cases("norm")
def test_problems_beyond_the_compiled_kernel(norm):
    data = random_problem(30, 16, 24, seed=9)  # 450 constraints, and more samples than columns
    assert mh.attention_svm(*data, norm).check(*data)
    data = random_problem(30, 16, 40, seed=9)
    assert mh.attention_svm(*data, norm).check(*data)


@pytest.mark.slow
@cases("norm")
@pytest.mark.parametrize("name", NASTY)
def test_nasty_problems_end_with_what_the_data_support(name, norm):
    data = nasty(name, 20)
    solution = mh.attention_svm(*data, norm)
    assert solution.check(*data).supported.all()
    assert (solution.optimal | (solution.gap < 1e-6)).all(), solution


@pytest.mark.slow
@cases("norm")
@pytest.mark.parametrize("name", HOPELESS)
def test_problems_without_a_solution_are_proved_to_have_none(name, norm):
    data = hopeless(name, 10)
    solution = mh.attention_svm(*data, norm)
    assert solution.status == ["infeasible"] * 10
    assert solution.check(*data).supported.all()


def test_classes_of_a_linear_classifier():
    g = torch.Generator().manual_seed(8)
    features = torch.randn(3, 10, 16, generator=g, dtype=torch.float64)
    labels = torch.randint(0, 4, (3, 10), generator=g)
    tokens = torch.eye(4, dtype=torch.float64).expand(3, 10, 4, 4)
    for norm in (1.5, mh.Schatten(1), mh.Schatten(math.inf), mh.Grouped(1, 1)):
        solution = mh.multiclass_svm(features, labels, norm)
        assert solution.check(tokens, features, labels)
        scores = torch.einsum("bkd,bnd->bnk", solution.W, features)
        own = scores.gather(-1, labels.unsqueeze(-1))
        others = torch.arange(4) != labels.unsqueeze(-1)
        assert ((own - scores)[others] >= 1 - 1e-9).all()


# Paths in norms that are not smooth at sparse weights, or at those of low rank, take longer.
PATHS = [
    *((mh.PNorm(p), 10_000) for p in (2, math.inf)),
    *((mh.Schatten(p), 10_000) for p in (1.5, math.inf)),
    *((mh.Grouped(p), 10_000) for p in (1.5, math.inf)),
    *((norm, 30_000) for norm in (mh.Schatten(1), mh.Grouped(1))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "steps"), PATHS, ids=lambda x: repr(x))
def test_steepest_descent_reaches_the_certified_margin_of_its_norm(norm, steps):
    problem = sampled(20)
    path = mh.descend(problem, norm, steps, rule="steepest", record=[steps])
    solution = mh.attention_svm(problem.X, problem.z, path.tokens, norm)
    assert solution.optimal.all()
    W, selected = path.W[-1], path.tokens.unsqueeze(-1)
    logits = problem.logits(W)
    apart = (logits.gather(-1, selected) - logits).scatter(-1, selected, math.inf)
    share = apart.amin((-2, -1)) / norm.norm(W, (-2, -1)) * solution.norm
    assert (share > 0.95).all(), share
    assert (share < 1 + 1e-8).all(), share


def test_a_path_is_measured_in_the_geometry_of_the_solution():
    problem, psi = sampled(3), mh.Schatten(1.5)
    path = mh.descend(problem, psi, 300)
    solution = mh.attention_svm(problem.X, problem.z, path.tokens, psi)
    own = path.divergence_to(solution)
    torch.testing.assert_close(own[-1], psi.direction_divergence(solution.W, path.W[-1], (-2, -1)))
    nuclear = mh.attention_svm(problem.X, problem.z, path.tokens, mh.Schatten(1))
    # The nuclear norm is no potential.
    torch.testing.assert_close(path.divergence_to(nuclear), path.divergence_to(nuclear, 2))
    assert path.divergence_to(nuclear, geometry=psi).shape == own.shape


def test_a_norm_without_a_solver_is_refused_by_name():
    class Doubled(mh.PNorm):
        def norm(self, w, dims=None):
            return 2 * super().norm(w, dims)

    X, z, tokens = random_problem(4, 5, 6)
    wrong = X / 0  # never looked at
    for norm in (mh.KSupport(k=3), Doubled(2)):
        with pytest.raises(ValueError, match="must be a norm that has a solver, got"):
            mh.attention_svm(wrong, z, tokens, norm)
        with pytest.raises(ValueError, match=r"^geometry must be a norm that has a solver"):
            mh.multiclass_svm(wrong[0], tokens, norm)


def test_only_p_norms_have_a_p():
    X, z, tokens = random_problem(4, 5, 6)
    assert mh.attention_svm(X, z, tokens, mh.PNorm(1.5)).p == 1.5
    with pytest.raises(AttributeError, match=r"of Schatten\(1\) and has no p: use its geometry"):
        _ = mh.attention_svm(X, z, tokens, mh.Schatten(1)).p
