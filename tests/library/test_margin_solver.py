"""The solver by its certificates: everything optimal is proved, everything infeasible too."""

import dataclasses
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import mirrorhead as mh
from margin_cases import HOPELESS, NASTY, dense_rows, hopeless, nasty, random_problem
from mirrorhead.margin._constraints import attention_constraints

TEN_P = (1.05, 1.1, 1.25, 1.5, 1.75, 2.0, 3.0, 5.0, 10.0, 20.0)


@pytest.mark.parametrize("p", TEN_P)
def test_a_thousand_random_problems_are_all_solved(p):
    X, z, tokens = random_problem(1000, 6, 8, 10, seed=1)
    solution = mh.attention_svm(X, z, tokens, p)
    assert solution.status == ["optimal"] * 1000
    check = solution.check(X, z, tokens)
    assert check
    assert check.supported.all()
    assert (check.gap <= 1e-9).all()
    assert (check.margin >= 1 - 1e-12).all()


@pytest.mark.parametrize("p", [1.02, 50.0, 100.0])
def test_the_ends_of_the_range_of_p(p):
    X, z, tokens = random_problem(200, 6, 8, 10, seed=2)
    solution = mh.attention_svm(X, z, tokens, p)
    assert solution.optimal.all()
    assert solution.check(X, z, tokens)


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("p", [1.05, 1.5, 2.0, 3.0, 20.0])
def test_nasty_problems(name, p):
    X, z, tokens = nasty(name, 40)
    solution = mh.attention_svm(X, z, tokens, p)
    assert solution.optimal.all(), solution
    assert solution.check(X, z, tokens)


@pytest.mark.parametrize("name", HOPELESS)
@pytest.mark.parametrize("p", [1.05, 2.0, 5.0, 100.0])
def test_infeasible_problems_come_with_a_farkas_certificate(name, p):
    X, z, tokens = hopeless(name, 20)
    solution = mh.attention_svm(X, z, tokens, p)
    assert solution.status == ["infeasible"] * 20
    check = solution.check(X, z, tokens)
    assert check.supported.all()
    assert not check  # nothing that uses W may run
    assert solution.W.isnan().all()
    assert (solution.norm == math.inf).all()
    for k in range(3):  # once by the formula: lam >= 0, sum lam = 1, A' lam = 0
        rows = dense_rows(X[k], z[k], tokens[k])
        keep = torch.ones(6, 8, dtype=torch.bool).scatter(1, tokens[k].unsqueeze(-1), False)
        lam = solution.dual[k][keep]
        assert (lam >= 0).all()
        assert lam.sum().item() == pytest.approx(1, abs=1e-12)
        assert (lam @ rows).norm() <= 2e-9 * (lam * rows.norm(dim=1)).sum()


@pytest.mark.parametrize("p", [1.1, 1.5, 2.0, 3.0, 10.0])
def test_optimality_conditions(p):
    X, z, tokens = random_problem(50, 6, 8, 10, seed=3)
    solution = mh.attention_svm(X, z, tokens, p, tol=1e-12)
    assert solution.optimal.all()
    problem = attention_constraints(X, z, tokens)
    w = solution.W.reshape(50, -1)
    lam = problem.collect(solution.dual)
    s = problem.A.adjoint(lam)
    psi = mh.PNorm(p)
    # Signs, and no multiplier at the selected token.
    assert (solution.dual >= 0).all()
    assert (solution.dual.gather(-1, tokens.unsqueeze(-1)) == 0).all()
    # The scale of the dual: ||A' lam||_q = 1 and sum lam = ||W||.
    torch.testing.assert_close(psi.dual_norm(s, -1), torch.ones(50).double(), rtol=1e-12, atol=0)
    torch.testing.assert_close(lam.sum(-1), solution.norm, rtol=1e-11, atol=0)
    # Stationarity: A' lam is the mirror image of the normalised weights, compared on the side
    # where the map is smooth.
    unit = w / solution.norm.unsqueeze(-1)
    if p <= 2:
        assert (psi.norm(unit - psi.inverse(s), -1) < 1e-5).all()
    else:
        assert (psi.dual_norm(s - psi.mirror(unit), -1) < 1e-5).all()
    # Complementarity: sum lam (A w - 1) is at most the gap.
    slack = problem.A.apply(w) - 1
    assert (slack > -1e-11).all()
    assert ((lam * slack).sum(-1) / solution.norm < 2e-12 + 1e-13 * p).all()
    # The support is where multipliers are positive, and there only.
    support = problem.collect(solution.support) > 0
    assert (slack[support] < 1e-4).all()
    assert ((lam / lam.sum(-1, keepdim=True))[~support] < 1e-4).all()


def test_a_smaller_tol_brings_nearer_weights():
    X, z, tokens = random_problem(20, 6, 8, 10, seed=4)
    exact = mh.attention_svm(X, z, tokens, 3, tol=1e-13).W
    errors = [
        float((mh.attention_svm(X, z, tokens, 3, tol=tol).W - exact).abs().amax())
        for tol in (1e-3, 1e-6, 1e-9)
    ]
    assert errors[0] > errors[1] > errors[2]


def test_unfinished_says_so():
    """No float64 arithmetic certifies 1e-16; the run ends, with the gap it has."""
    X, z, tokens = nasty("six decades of row norms", 5)
    solution = mh.attention_svm(X, z, tokens, 1.3, tol=1e-30)
    assert not solution.optimal.any() or (solution.gap[solution.optimal] == 0).all()
    assert (solution.gap < 1e-6).all()
    assert "unfinished" in solution.status
    assert solution.check(X, z, tokens).supported.all()  # no claim, nothing to refute


def test_check_refutes_false_claims():
    X, z, tokens = random_problem(3, 4, 5, 6, seed=5)
    solution = mh.attention_svm(X, z, tokens, 1.5)
    for wrong in (
        {"W": 0.999 * solution.W},  # infeasible
        {"W": 1.001 * solution.W},  # wasteful
        {"dual": solution.dual.roll(1, -1)},  # wrong multipliers
        {"dual": -solution.dual},
        {"codes": torch.ones_like(solution.codes)},  # not infeasible at all
        {"norm": 1.001 * solution.norm},
        {"gap": solution.gap + 1e-8},
        {"dual": 2 * solution.dual},  # its sum is no lower bound of the norm
        {"support": ~solution.support},
        {"support": solution.support.roll(1, -1)},
    ):
        assert not dataclasses.replace(solution, **wrong).check(X, z, tokens).supported.any()
    assert not solution.check(X, z, (tokens + 1) % 5).supported.any()  # of another problem


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 6),
    T=st.integers(2, 9),
    d=st.integers(1, 9),
    p=st.sampled_from([1.05, 1.3, 1.75, 2.0, 2.5, 4.0, 15.0]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 10_000),
)
def test_any_shape_is_either_solved_or_refuted(n, T, d, p, scale, seed):
    X, z, tokens = random_problem(3, n, T, d, seed=seed)
    solution = mh.attention_svm(scale * X, z, tokens, p)
    assert "unfinished" not in solution.status
    assert solution.check(scale * X, z, tokens).supported.all()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    near=st.sampled_from([1e-2, 1e-3, 1e-4, 1e-5]),
    p=st.sampled_from([1.1, 1.5, 2.0, 3.0, 8.0]),
    seed=st.integers(0, 10_000),
)
def test_near_infeasible_and_near_duplicate(near, p, seed):
    X, z, tokens = random_problem(2, 4, 6, 8, seed=seed)
    X[:, 1] = X[:, 0] + near * X[:, 1]
    z[:, 1] = z[:, 0] + near * z[:, 1]
    tokens[:, 1] = (tokens[:, 0] + 1) % 6
    X[:, 2, 0], tokens[:, 2] = X[:, 2, 1] + near * X[:, 2, 0], 0
    solution = mh.attention_svm(X, z, tokens, p)
    assert solution.optimal.all()
    assert solution.check(X, z, tokens)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 40),
    d=st.integers(1, 12),
    p=st.sampled_from([1.05, 1.5, 2.0, 3.0, 15.0]),
    seed=st.integers(0, 10_000),
)
def test_plain_svm_of_any_shape(n, d, p, seed):
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(2, n, d, generator=g, dtype=torch.float64)
    labels = torch.randint(0, 2, (2, n), generator=g) * 2 - 1
    solution = mh.svm(features, labels, p)
    assert "unfinished" not in solution.status
    assert solution.check(features, labels).supported.all()
    if n == 1:
        assert solution.optimal.all()
