"""The compiled kernel against the same steps in torch."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import mirrorhead as mh
from margin_cases import HOPELESS, NASTY, generator, hopeless, nasty, random_problem
from mirrorhead import native
from mirrorhead.margin import _compiled, _interior_point, _linear_systems
from mirrorhead.margin._constraints import attention_constraints

pytestmark = pytest.mark.skipif(not native.available(), reason="the C library was not built")

PS = (1.05, 1.5, 2.0, 3.0, 20.0)
FIRST = _interior_point._SCHEDULES[0]


def in_torch(call):
    """The result of `call` without the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compiled, "can_solve", lambda A, schedule: False)
        patch.setattr(_compiled, "_cones", lambda: None)
        return call()


def both(*data, p, **options):
    """The solution by the kernel, after it was compared with torch's."""
    problem = attention_constraints(*data, mask=options.get("mask"))
    assert _compiled.can_solve(problem.A, FIRST)
    fast = mh.attention_svm(*data, geometry=p, **options)
    slow = in_torch(lambda: mh.attention_svm(*data, geometry=p, **options))
    assert fast.status == slow.status
    check = fast.check(*data, mask=options.get("mask"))
    assert check.supported.all()
    assert torch.equal(check.optimal, fast.optimal)
    # Both norms are within their gaps of the best one.
    tol = 3 * options.get("tol", 1e-9)
    torch.testing.assert_close(fast.norm, slow.norm, rtol=tol, atol=0)
    return fast, slow


@pytest.mark.parametrize("p", [1.05, 1.1, 1.25, 1.5, 1.75, 2.0, 3.0, 5.0, 10.0, 20.0])
def test_it_takes_the_steps_of_torch(p):
    fast, slow = both(*random_problem(50, 6, 8, 10, seed=11), p=p)
    assert fast.optimal.all()
    assert ((fast.iterations - slow.iterations).abs() <= 1).all()
    torch.testing.assert_close(fast.W, slow.W, rtol=0, atol=1e-3 * float(slow.W.abs().max()))


def test_a_batch_in_several_calls_is_the_same(monkeypatch):
    data = random_problem(10, 4, 5, 6, seed=3)
    whole = mh.attention_svm(*data, geometry=1.5)
    monkeypatch.setattr(_compiled, "AT_ONCE", 3 * (4 * 4) ** 2)
    parts = mh.attention_svm(*data, geometry=1.5)
    assert whole.W.equal(parts.W) and whole.iterations.equal(parts.iterations)


@pytest.mark.slow
@given(
    p=st.sampled_from([1.02, 1.3, 2.0, 4.0, 100.0]),
    shape=st.tuples(st.integers(1, 5), st.integers(2, 6), st.integers(2, 7)),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    tol=st.sampled_from([1e-3, 1e-9, 1e-12]),
    seed=st.integers(0, 1000),
)
def test_all_shapes_and_scales(p, shape, scale, tol, seed):
    X, z, tokens = random_problem(2, *shape, seed=seed)
    problem = attention_constraints(X, z, tokens)
    if _compiled.can_solve(problem.A, FIRST):  # not of many rows for few weights
        both(scale * X, z, tokens, p=p, tol=tol)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("name", NASTY)
def test_nasty_problems(name, p):
    fast, _ = both(*nasty(name, 10, seed=12), p=p)
    assert fast.optimal.all()


@pytest.mark.parametrize("name", HOPELESS)
@pytest.mark.parametrize("p", PS)
def test_infeasible_problems(name, p):
    fast, _ = both(*hopeless(name, 10, seed=13), p=p)
    assert fast.status == ["infeasible"] * 10


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("shape", [(10, 13, 12), (3, 10, 13, 12), (20, 20, 30)])
def test_rows_that_do_not_matter_are_left_out(shape, p):
    fast, slow = both(*random_problem(*shape, seed=14), p=p)
    assert fast.optimal.all()
    assert (fast.iterations <= 1.5 * slow.iterations + 1).all()


@pytest.mark.parametrize("p", PS)
def test_leaving_out_rows_that_matter_is_noticed(p, monkeypatch):
    """So tight a bound leaves out rows of the support: the run may not conclude from the rest."""
    data = random_problem(4, 10, 13, 12, seed=15)
    right = mh.attention_svm(*data, p)
    monkeypatch.setattr(_interior_point, "DROP_RATIO", 0.05)
    fast, _ = both(*data, p=p)
    assert fast.optimal.all()
    assert (fast.iterations > right.iterations).all()  # of a second attempt


@pytest.mark.parametrize("p", PS)
def test_padding_and_warm_starts(p):
    X, z, tokens = random_problem(8, 6, 8, 10, seed=16)
    mask = torch.rand(8, 6, 8, generator=generator(17)) < 0.7
    mask = mask.scatter(2, tokens.unsqueeze(-1), True)
    mask[0, 1:] = torch.nn.functional.one_hot(tokens[0, 1:], 8).bool()  # one sample is left
    fast, _ = both(X, z, tokens, p=p, mask=mask)
    assert fast.optimal.all()
    near, _ = both(X, z, tokens, p=p, mask=mask, start=mh.attention_svm(X, z, tokens, 1.7))
    assert near.optimal.all()
    again, _ = both(X, z, tokens, p=p, mask=mask, start=fast)
    assert (again.iterations <= fast.iterations + 1).all()


def test_a_start_that_says_nothing_is_passed_over():
    useless = mh.attention_svm(*hopeless("one input, two answers", 4, seed=18), 1.5)
    assert useless.W.isnan().all()
    fast, _ = both(*random_problem(4, 6, 8, 10, seed=18), p=1.5, start=useless)
    assert fast.optimal.all()


def test_plain_svms():
    g = generator(19)
    features = torch.randn(5, 9, 12, generator=g, dtype=torch.float64)
    labels = 1 - 2 * torch.randint(0, 2, (5, 9), generator=g)
    for p in PS:
        fast = mh.svm(features, labels, p)
        slow = in_torch(lambda p=p: mh.svm(features, labels, p))
        assert fast.status == slow.status == ["optimal"] * 5
        torch.testing.assert_close(fast.norm, slow.norm, rtol=3e-9, atol=0)


def test_what_cannot_be_reached_is_unfinished_at_the_best_point_seen():
    data = nasty("six decades of row norms", 5, seed=20)
    for p in (1.3, 2.0, 4.0):
        solution = mh.attention_svm(*data, p, tol=1e-30)
        assert not solution.optimal.any() or (solution.gap[solution.optimal] == 0).all()
        assert (solution.gap < 1e-9).all()


def test_without_the_c_library_torch_takes_over(monkeypatch):
    data = random_problem(3, 6, 8, 10, seed=21)
    fast = mh.attention_svm(*data, 1.5)
    monkeypatch.setattr(_compiled, "_solver", lambda: None)
    assert not _compiled.can_solve(attention_constraints(*data).A, FIRST)
    torch.testing.assert_close(mh.attention_svm(*data, 1.5).norm, fast.norm, rtol=3e-9, atol=0)


def test_large_problems_and_those_of_many_rows_are_left_to_torch():
    for shape in ((40, 20, 30), (8, 15, 6), (1, 8, 1)):
        assert not _compiled.can_solve(attention_constraints(*random_problem(*shape)).A, FIRST)
    assert _compiled.can_solve(attention_constraints(*random_problem(20, 20, 30)).A, FIRST)


@pytest.mark.parametrize(
    ("p", "n", "d"), [(1.1, 25, 9), (1.5, 25, 9), (5.0, 25, 9), (1.5, 130, 20)]
)
def test_problems_with_more_rows_than_columns(p, n, d):
    """Up to 1,100 rows, and three times as many as columns, against the system of columns."""
    X, z, _ = random_problem(2, n, 9, d, seed=22)  # 200 rows and 81 columns; 1,040 and 400
    W = torch.randn(d, d, dtype=torch.float64, generator=generator(22))
    tokens = (X @ W @ z.unsqueeze(-1)).squeeze(-1).argmax(-1)
    A = attention_constraints(X, z, tokens).A
    assert _linear_systems.system_kind(A, FIRST.dense_limit) == "columns"
    fast, _ = both(X, z, tokens, p=p)
    assert fast.optimal.all()


CONES = (mh.Schatten(1), mh.Schatten(float("inf")))


@pytest.mark.parametrize("norm", CONES, ids=repr)
@pytest.mark.parametrize("shape", [(20, 6, 8, 10), (9, 12, 3, 5), (3, 1, 4, 7), (4, 5, 1, 3)])
def test_cones_are_solved_as_in_torch(norm, shape):
    X, z, tokens = random_problem(*shape, seed=12)
    z = torch.cat([z, z.flip(-1)], -1)[..., : shape[-1] + 2]  # W is not square
    mask = torch.rand(X.shape[:-1], generator=generator(13)) < 0.8
    mask = mask.scatter(-1, tokens.unsqueeze(-1), True)
    for padding in (None, mask):
        fast = mh.attention_svm(X, z, tokens, norm, mask=padding)
        slow = in_torch(lambda mask=padding: mh.attention_svm(X, z, tokens, norm, mask=mask))
        assert fast.status == slow.status
        assert fast.check(X, z, tokens, mask=padding).supported.all()
        assert (fast.iterations - slow.iterations).abs().double().mean() <= 1
        torch.testing.assert_close(fast.norm, slow.norm, rtol=3e-9, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("norm", CONES, ids=repr)
@pytest.mark.parametrize("name", NASTY)
def test_nasty_cones_end_as_in_torch(name, norm):
    data = nasty(name, 10)
    slow = in_torch(lambda: mh.attention_svm(*data, norm))
    assert slow.check(*data).supported.all()
    assert (slow.optimal | (slow.gap < 1e-6)).all(), slow
    fast = mh.attention_svm(*data, norm)
    torch.testing.assert_close(fast.norm, slow.norm, rtol=1e-6, atol=0)
