"""The solver against independent answers: conic, linear and quadratic solvers, closed forms."""

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from scipy import optimize

import mirrorhead as mh
from margin_cases import dense_rows, random_problem


def conic(rows: torch.Tensor, p: float):
    """Value and minimiser by cvxpy and Clarabel."""
    w = cp.Variable(rows.shape[1])
    objective = cp.Minimize(cp.pnorm(w, p))  # pyright: ignore[reportArgumentType]
    problem = cp.Problem(objective, [rows.numpy() @ w >= 1])
    problem.solve(solver=cp.CLARABEL)
    return problem.value, torch.from_numpy(w.value)


def allowed(gap: float, p: float) -> float:
    """How far from the optimum a feasible point may lie, by uniform convexity (docs/margin.md)."""
    return 2 * (gap / (p - 1)) ** 0.5 if p <= 2 else 2 * (gap * p / 2) ** (1 / p)


@pytest.mark.parametrize("p", [1.1, 1.5, 2, 3, 5])
def test_against_a_conic_solver(p):
    for seed in range(3):
        X, z, tokens = random_problem(4, 5, 6, seed=seed)
        solution = mh.attention_svm(X, z, tokens, p, tol=1e-12)
        rows = dense_rows(X, z, tokens)
        value, w = conic(rows, p)
        assert solution.norm.item() == pytest.approx(value, rel=1e-6)
        psi = mh.PNorm(p)
        w = w / (rows @ w).min()  # feasible
        gap = psi.norm(w).item() / solution.dual.sum().item() - 1
        distance = psi.norm(w - solution.W.reshape(-1)).item() / solution.norm.item()
        assert distance <= allowed(gap, p) + allowed(1e-12, p)


@pytest.mark.parametrize("p", [1.1, 1.5, 2, 3, 10])
def test_weights_are_as_near_as_the_gap_allows(p):
    data = random_problem(30, 6, 8, 10, seed=6)
    exact = mh.attention_svm(*data, p, tol=1e-13)
    for tol in (1e-2, 1e-5, 1e-9):
        rough = mh.attention_svm(*data, p, tol=tol)
        distance = mh.PNorm(p).norm(rough.W - exact.W, (-2, -1)) / exact.norm
        assert (distance <= allowed(tol, p) + allowed(1e-13, p)).all()


def test_p2_against_a_quadratic_program():
    """Non-negative least squares solves the dual exactly: min 1/2 |A' lam|^2 - sum lam."""
    for seed in range(5):
        X, z, tokens = random_problem(4, 5, 6, seed=seed)
        rows = dense_rows(X, z, tokens)
        # The nearest point of {A' lam, sum lam = 1} as an NNLS problem with a heavy row.
        system = np.vstack([rows.numpy().T, np.ones(len(rows))])
        lam, _ = optimize.nnls(system, np.append(np.zeros(rows.shape[1]), 1.0))
        s = rows.numpy().T @ lam
        w = torch.from_numpy(s / (rows.numpy() @ s).min()).view(6, 6)
        solution = mh.attention_svm(X, z, tokens, 2, tol=1e-13)
        torch.testing.assert_close(solution.W, w, rtol=1e-6, atol=1e-7)
        assert solution.norm.item() == pytest.approx(w.norm().item(), rel=1e-12)


@pytest.mark.parametrize("limit", [1, math.inf])
def test_the_limits_by_linear_programming(limit):
    X, z, tokens = random_problem(6, 4, 5, 6, seed=1)
    solution = mh.attention_svm(X, z, tokens, limit)
    assert solution.optimal.all()
    assert solution.check(X, z, tokens)
    # Norms are monotone in p and within N^(1/p) or N^(1 - 1/p) of the limit, N = 36.
    near = 1.02 if limit == 1 else 100.0
    norm = mh.attention_svm(X, z, tokens, near).norm
    spread = 36 ** (1 - 1 / near) if limit == 1 else 36 ** (1 / near)
    small, large = (norm, solution.norm) if limit == 1 else (solution.norm, norm)
    assert (small <= large * (1 + 1e-9)).all()
    assert (large <= small * spread * (1 + 1e-9)).all()


def test_the_limit_p1_directly():
    X, z, tokens = random_problem(4, 5, 6, seed=2)
    rows = dense_rows(X, z, tokens).numpy()
    split = np.hstack([rows, -rows])
    found = optimize.linprog(np.ones(split.shape[1]), A_ub=-split, b_ub=-np.ones(len(split)))
    solution = mh.attention_svm(X, z, tokens, 1)
    assert solution.norm.item() == pytest.approx(found.fun, rel=1e-9)
    assert solution.W.abs().sum().item() == pytest.approx(found.fun, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
# Rounding of 1e-16 times a norm of 1e5 and more leaves a gap of up to 1e-9 in the last case.
@pytest.mark.parametrize(("hardness", "tol"), [(0.0, 1e-9), (1e-3, 1e-9), (1e-5, 1e-8)])
def test_the_limit_inf_directly(scale, hardness, tol):
    """min t with -t <= w <= t, the obvious linear program, for margins of 1e-5 too."""
    for seed in range(4):
        X, z, tokens = random_problem(4, 5, 6, seed=seed)
        if hardness:  # one sample wants X[0, 0] above X[0, 1], another nearly the opposite
            z[1], tokens[:2] = z[0], 0
            X[1, :2] = X[0, [1, 0]] + hardness * X[2, :2]
        X = X * scale
        rows = dense_rows(X, z, tokens).numpy() / scale
        N = rows.shape[1]
        both = np.vstack([np.eye(N), -np.eye(N)])
        A = np.block([[-rows, np.zeros((len(rows), 1))], [both, -np.ones((2 * N, 1))]])
        b = np.append(-np.ones(len(rows)), np.zeros(2 * N))
        cost = np.append(np.zeros(N), 1.0)
        found = optimize.linprog(cost, A_ub=A, b_ub=b, bounds=(None, None))
        solution = mh.attention_svm(X, z, tokens, math.inf, tol=tol)
        assert solution.check(X, z, tokens)
        assert (solution.status == "optimal") == (found.status == 0), (solution, found.message)
        if found.status == 0:
            assert solution.norm.item() * scale == pytest.approx(found.fun, rel=1e-7)


@pytest.mark.parametrize("p", [1.02, 1.5, 2, 3, 20, 100])
def test_one_constraint_has_a_closed_form(p):
    """min ||W||_p with <a, W> = 1: W = mirror-inverse of a, scaled."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(1, 2, 3, generator=g, dtype=torch.float64)
    z = torch.randn(1, 4, generator=g, dtype=torch.float64)
    a = torch.outer(X[0, 1] - X[0, 0], z[0])
    w = mh.PNorm(p).inverse(a / a.abs().max())
    w = w / (a * w).sum()
    solution = mh.attention_svm(X, z, torch.tensor([1]), p, tol=1e-13)
    torch.testing.assert_close(solution.W, w, rtol=1e-5, atol=1e-6)
    assert solution.norm.item() == pytest.approx(1 / mh.PNorm(p).dual_norm(a).item(), rel=1e-12)


@pytest.mark.parametrize("p", [1.1, 2, 5])
def test_orthogonal_data_have_a_closed_form(p):
    """Constraints on separate weights: each is met on its own, W_ij = 1/a_ij."""
    features = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    labels = torch.tensor([1, -1, 1])
    solution = mh.svm(features, labels, p, tol=1e-13)
    expected = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    torch.testing.assert_close(solution.v, expected, rtol=1e-6, atol=1e-6)
    assert solution.support.all()


@pytest.mark.parametrize("p", [1.3, 2, 4])
def test_svm_is_attention_with_one_sample_and_query_one(p):
    g = torch.Generator().manual_seed(1)
    features = torch.randn(7, 9, generator=g, dtype=torch.float64)
    labels = torch.where(features @ torch.randn(9, generator=g, dtype=torch.float64) > 0, 1, -1)
    X = torch.cat([torch.zeros(1, 9).double(), -labels.unsqueeze(-1) * features]).unsqueeze(0)
    plain = mh.svm(features, labels, p)
    posed = mh.attention_svm(X, torch.ones(1, 1).double(), torch.tensor([0]), p)
    assert plain.norm.item() == pytest.approx(posed.norm.item(), rel=1e-9)
    torch.testing.assert_close(plain.v, posed.W.squeeze(-1), rtol=1e-4, atol=1e-5)


def test_invariances():
    X, z, tokens = random_problem(5, 6, 7, seed=3)
    base = mh.attention_svm(X, z, tokens, 1.5, tol=1e-13)
    # Scaling a query by c divides the weights by c.
    scaled = mh.attention_svm(X, 3 * z, tokens, 1.5, tol=1e-13)
    torch.testing.assert_close(scaled.W, base.W / 3, rtol=1e-6, atol=1e-8)
    # The order of samples and of tokens does not matter.
    order = torch.tensor([3, 1, 4, 0, 2])
    permuted = mh.attention_svm(X[order], z[order], tokens[order], 1.5, tol=1e-13)
    torch.testing.assert_close(permuted.W, base.W, rtol=1e-6, atol=1e-8)
    flipped = mh.attention_svm(X.flip(1), z, 5 - tokens, 1.5, tol=1e-13)
    torch.testing.assert_close(flipped.W, base.W, rtol=1e-6, atol=1e-8)
    # Shifting all tokens of a sample changes no difference.
    shifted = mh.attention_svm(X + 1, z, tokens, 1.5, tol=1e-13)
    torch.testing.assert_close(shifted.W, base.W, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("norm", [2, mh.Schatten(1), mh.Schatten(1.2), mh.Schatten(1.5)])
def test_rotations_change_no_norm_of_singular_values(norm):
    X, z, tokens = random_problem(5, 6, 7, seed=4)
    U, _ = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64))
    base = mh.attention_svm(X, z, tokens, norm)
    turned = mh.attention_svm(X @ U, z @ U, tokens, norm)
    assert turned.norm.item() == pytest.approx(base.norm.item(), rel=2e-9)
    torch.testing.assert_close(turned.W, U.T @ base.W @ U, rtol=1e-3, atol=1e-4)


def test_nuclear_norm_against_a_conic_solver():
    for seed in range(3):
        X, z, tokens = random_problem(4, 5, 6, seed=seed)
        solution = mh.attention_svm(X, z, tokens, mh.Schatten(1))
        assert solution.check(X, z, tokens)
        W = cp.Variable((6, 6))
        rows = dense_rows(X, z, tokens).numpy()
        constraint = rows @ cp.vec(W, order="C") >= 1
        problem = cp.Problem(cp.Minimize(cp.normNuc(W)), [constraint])
        problem.solve(solver=cp.CLARABEL)
        assert solution.norm.item() == pytest.approx(problem.value, rel=1e-6)


def test_nuclear_norm_in_batches_and_infeasible():
    X, z, tokens = random_problem(6, 4, 5, 6, seed=5)
    X[2, 1], z[2, 1] = X[2, 0], z[2, 0]
    tokens[2, 1] = (tokens[2, 0] + 1) % 5
    solution = mh.attention_svm(X, z, tokens, mh.Schatten(1))
    assert solution.status == ["optimal"] * 2 + ["infeasible"] + ["optimal"] * 3
    assert solution.check(X, z, tokens).supported.all()


def test_nuclear_norm_with_rows_that_do_not_matter_at_p2():
    """The compiled kernel leaves out rows above 100; their multipliers of 0 are no start."""
    X, z, tokens = random_problem(10, 13, 12, seed=0)
    solution = mh.attention_svm(X, z, tokens, mh.Schatten(1))
    assert solution.status == "optimal"
    assert solution.check(X, z, tokens)
