"""The operator and the three linear systems against dense algebra, and large problems."""

import dataclasses
import threading

import pytest
import torch

import mirrorhead as mh
from margin_cases import generator, nasty, random_problem
from mirrorhead.margin import _interior_point, _linear_systems
from mirrorhead.margin._constraints import ConstraintMatrix


def random_blocks(B, n, R, a, c, seed=0):
    g = generator(seed)
    left = torch.randn(B, n, R, a, generator=g, dtype=torch.float64)
    return ConstraintMatrix(
        left, torch.randn(B, n, c, generator=g, dtype=torch.float64)
    ).unit_rows()


def dense(A):
    every = torch.arange(A.rows).expand(A.batch, -1)
    return A.take_rows(every)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 3, 4, 5, 6), (3, 1, 7, 2, 1)])
def test_operator_is_its_matrix(shape):
    A = random_blocks(*shape)
    B, n, R, a, c = shape
    matrix = torch.einsum("bnra,bnc->bnrac", A.left, A.right).reshape(B, n * R, a * c)
    torch.testing.assert_close(dense(A), matrix)
    g = generator(1)
    w = torch.randn(B, a * c, generator=g, dtype=torch.float64)
    lam = torch.randn(B, n * R, generator=g, dtype=torch.float64)
    h = torch.rand(B, a * c, generator=g, dtype=torch.float64)
    torch.testing.assert_close(A.apply(w), (matrix @ w.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(A.adjoint(lam), (matrix.mT @ lam.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(A.row_norms, matrix.norm(dim=-1))
    torch.testing.assert_close(A.column_sizes(), matrix.square().sum(-2))
    gram = (matrix * h.unsqueeze(-2)) @ matrix.mT
    blocks = gram.view(B, n, R, n, R).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    torch.testing.assert_close(A.block_gram(h), blocks)
    columns = torch.arange(a * c).flip(0)
    taken = A.take_columns(columns, slice(0, n)).reshape(B, n * R, a * c)
    torch.testing.assert_close(taken, matrix[..., columns])


def test_chunked_methods_do_not_depend_on_the_chunks(monkeypatch):
    A = random_blocks(2, 5, 3, 4, 4)
    h = torch.rand(2, 16, dtype=torch.float64)
    whole = A.block_gram(h), A.column_sizes()
    monkeypatch.setattr("mirrorhead.margin._constraints._CHUNK", 1)
    torch.testing.assert_close((A.block_gram(h), A.column_sizes()), whole)


@pytest.mark.parametrize("heavy", [0, 4])
def test_blocks_on_several_threads_are_the_same_to_the_bit(heavy, monkeypatch):
    A = random_blocks(1, 7, 5, 6, 6)
    g = generator(2)
    h, e, r = (torch.rand(1, k, generator=g, dtype=torch.float64) for k in (36, 35, 35))
    system = _linear_systems.IterativeSystem(A, grows=True, heavy=heavy)
    alone = system._preconditioner(h, e)(r)
    monkeypatch.setattr(_linear_systems, "SHARED_FROM", 0)
    used = set()
    solve = torch.linalg.solve_triangular

    def watched(*args, **options):
        used.add(threading.get_ident())
        return solve(*args, **options)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        monkeypatch.setattr(torch.linalg, "solve_triangular", watched)
        shared = system._preconditioner(h, e)(r)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(shared, alone)
    assert used - {threading.get_ident()}


@pytest.mark.parametrize("spread", [0, 6, 12])
@pytest.mark.parametrize("shape", [(3, 4, 5, 6, 6), (3, 6, 9, 3, 3)])
def test_the_systems_agree(shape, spread):
    """Weights and diagonals over many decades, as they occur close to the solution."""
    A = random_blocks(*shape)
    g = generator(2)
    h = 10 ** (spread / 2 * torch.rand(A.batch, A.columns, generator=g, dtype=torch.float64))
    e = 10 ** (spread * (torch.rand(A.batch, A.rows, generator=g, dtype=torch.float64) - 0.5))
    x = torch.randn(A.batch, A.rows, generator=g, dtype=torch.float64)
    matrix = dense(A)
    K = (matrix * h.unsqueeze(-2)) @ matrix.mT + torch.diag_embed(e)
    r = (K @ x.unsqueeze(-1)).squeeze(-1)
    for system in (_linear_systems.RowSystem(A), _linear_systems.ColumnSystem(A)):
        found = system.factor(h, e, 1e-14)(r, None, 1e-14)
        back = (K @ found.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(back, r, rtol=1e-7, atol=1e-7 * r.abs().max())
    for heavy in (0, 4):
        for k in range(A.batch):
            one = _linear_systems.IterativeSystem(A.take(slice(k, k + 1)), grows=True, heavy=heavy)
            found = one.factor(h[k : k + 1], e[k : k + 1], 1e-13)(r[k : k + 1], None, 1e-13)
            back = (K[k] @ found[0]).unsqueeze(0)
            torch.testing.assert_close(back, r[k : k + 1], rtol=1e-6, atol=1e-6 * r.abs().max())
            assert one.steps > 0


def test_a_cholesky_that_fails_is_mended_alone():
    good = torch.eye(3, dtype=torch.float64)
    bad = torch.ones(3, 3, dtype=torch.float64) - 1e-15 * good
    L = _linear_systems.cholesky(torch.stack([good, bad]))
    assert torch.equal(L[0], good)
    torch.testing.assert_close(L[1] @ L[1].mT, bad, rtol=0, atol=1e-8)


@pytest.mark.parametrize("p", [1.1, 1.5, 2, 3, 10])
def test_iterative_and_dense_give_the_same_answer(p, monkeypatch):
    X, z, tokens = random_problem(2, 12, 10, 16, seed=1)
    factored = mh.attention_svm(X, z, tokens, p, tol=1e-12)
    schedule = _interior_point._SCHEDULES[0]
    monkeypatch.setattr(
        _interior_point, "_SCHEDULES", (dataclasses.replace(schedule, dense_limit=0),)
    )
    iterative = mh.attention_svm(X, z, tokens, p, tol=1e-12)
    assert (iterative.inner_iterations > 0).all()
    assert iterative.check(X, z, tokens)
    torch.testing.assert_close(iterative.norm, factored.norm, rtol=1e-11, atol=0)
    torch.testing.assert_close(iterative.W, factored.W, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("p", [1.2, 2, 5])
def test_a_batch_in_parts_is_the_batch(p, monkeypatch):
    X, z, tokens = random_problem(7, 6, 8, 10, seed=2)
    whole = mh.attention_svm(X, z, tokens, p)
    monkeypatch.setattr(_linear_systems, "BUDGET", 1)
    parts = mh.attention_svm(X, z, tokens, p)
    torch.testing.assert_close(parts.norm, whole.norm, rtol=1e-9, atol=0)
    assert parts.check(X, z, tokens)


@pytest.mark.parametrize("p", [1.1, 1.5, 2, 3, 5, 10])
@pytest.mark.parametrize("shape", [(20, 20, 30), (50, 30, 50)])
def test_large_problems_are_certified(shape, p):
    X, z, tokens = random_problem(*shape, seed=3)
    solution = mh.attention_svm(X, z, tokens, p)
    assert solution.status == "optimal"
    assert solution.check(X, z, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.1, 2, 5])
def test_larger_problems_are_certified(p):
    X, z, tokens = random_problem(100, 50, 100, seed=4)
    solution = mh.attention_svm(X, z, tokens, p)
    assert solution.status == "optimal"
    assert solution.inner_iterations > 0
    assert solution.check(X, z, tokens)


@pytest.mark.parametrize("p", [1.2, 2, 6])
def test_svm_with_many_more_samples_than_features(p):
    g = generator(5)
    features = torch.randn(3000, 8, generator=g, dtype=torch.float64)
    labels = torch.where(features[:, 0] > 0, 1, -1)
    features[:, 0] += 0.5 * labels
    solution = mh.svm(features, labels, p)
    assert solution.status == "optimal"
    assert solution.check(features, labels)
    assert solution.support.sum() <= 9


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.2, 2, 4])
def test_svm_with_many_samples_and_features(p):
    g = generator(6)
    features = torch.randn(1000, 1500, generator=g, dtype=torch.float64)
    labels = torch.randint(0, 2, (1000,), generator=g) * 2 - 1
    solution = mh.svm(features, labels, p)
    assert solution.status == "optimal"
    assert solution.inner_iterations > 0
    assert solution.check(features, labels)


@pytest.mark.slow
def test_nasty_problems_by_conjugate_gradients(monkeypatch):
    """What the iterative schedule leaves, the factored ones finish."""
    schedules = _interior_point._SCHEDULES
    first = dataclasses.replace(schedules[0], dense_limit=0)
    monkeypatch.setattr(_interior_point, "_SCHEDULES", (first, *schedules[1:]))
    for name in ("near-duplicate of the selected token", "near-infeasible"):
        X, z, tokens = nasty(name, 3)
        for p in (1.1, 2, 5):
            assert mh.attention_svm(X, z, tokens, p).optimal.all()
