"""The short cuts of the solver in torch against the plain way: same answers, and caught when wrong.

The compiled kernel, which would take most of these problems, is off here; it has its own tests.
"""

import dataclasses

import pytest
import torch

import mirrorhead as mh
from margin_cases import generator, hopeless, nasty, random_problem
from mirrorhead.margin import _compiled, _interior_point, _linear_systems
from mirrorhead.margin._constraints import ConstraintMatrix

PS = (1.05, 1.5, 2.0, 3.0, 20.0)


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch):
    monkeypatch.setattr(_compiled, "can_solve", lambda A, schedule: False)


def plainly(monkeypatch):
    """float64 and all rows: what the short cuts are compared with."""
    schedules = tuple(
        dataclasses.replace(schedule, shortcuts=False) for schedule in _interior_point._SCHEDULES
    )
    monkeypatch.setattr(_interior_point, "_SCHEDULES", schedules)


def assert_same(fast, plain, *data):
    assert fast.status == plain.status
    assert fast.check(*data)
    torch.testing.assert_close(fast.norm, plain.norm, rtol=3e-9, atol=0)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("shape", [(10, 13, 12), (4, 10, 13, 12), (20, 20, 30)])
def test_float32_and_fewer_rows_find_the_same(shape, p, monkeypatch):
    data = random_problem(*shape, seed=5)
    fast = mh.attention_svm(*data, p)
    plainly(monkeypatch)
    plain = mh.attention_svm(*data, p)
    assert_same(fast, plain, *data)
    assert (fast.iterations <= plain.iterations + 3).all()


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize(
    "name", ["six decades of row norms", "near-infeasible", "repeated unselected tokens"]
)
def test_short_cuts_on_nasty_problems(name, p, monkeypatch):
    monkeypatch.setattr(_interior_point, "SHORTCUT_ROWS", 0)
    data = nasty(name, 10, seed=3)
    fast = mh.attention_svm(*data, p)
    plainly(monkeypatch)
    assert_same(fast, mh.attention_svm(*data, p), *data)


@pytest.mark.slow
def test_short_cuts_on_infeasible_problems(monkeypatch):
    monkeypatch.setattr(_interior_point, "SHORTCUT_ROWS", 0)
    X, z, tokens = hopeless("selected token in the hull of the others", 10)
    for p in PS:
        solution = mh.attention_svm(X, z, tokens, p)
        assert solution.status == ["infeasible"] * 10
        assert solution.check(X, z, tokens).supported.all()
        assert mh.attention_svm(X[0], z[0], tokens[0], p).status == "infeasible"


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("count", [1, 3])
def test_leaving_out_the_wrong_rows_is_noticed(p, count, monkeypatch):
    """Rows that matter are thrown out on purpose: the run may not conclude from the rest."""
    data = random_problem(count, 10, 13, 12, seed=6)
    thrown = []

    def wrong(x, gram, A, goal):
        if A.left.shape[2] < 12:
            return None
        u = torch.as_tensor(x.u).reshape(A.batch, 10, 12)
        thrown.append(True)
        return u.topk(6, dim=-1).indices  # the half with the largest slack

    right = mh.attention_svm(*data, p)
    monkeypatch.setattr(_interior_point, "_rows_that_matter", wrong)
    solution = mh.attention_svm(*data, p)
    assert thrown
    assert_same(solution, right, *data)
    assert (solution.iterations > right.iterations).all()  # of a second attempt


def test_a_narrow_system_is_the_system_of_its_rows():
    g = generator(7)
    left = torch.randn(2, 4, 5, 3, generator=g, dtype=torch.float64)
    A = ConstraintMatrix(left, torch.randn(2, 4, 3, generator=g, dtype=torch.float64)).unit_rows()
    index = torch.rand(2, 4, 5, generator=g).topk(3, dim=-1).indices
    narrow = A.keep_rows(index)
    flat = (index + torch.arange(0, 20, 5).view(4, 1)).view(2, -1)
    every = torch.arange(12).expand(2, -1)
    torch.testing.assert_close(narrow.take_rows(every), A.take_rows(flat), rtol=0, atol=0)
    h, r = torch.rand(2, 9, generator=g).double(), torch.randn(2, 12, generator=g).double()
    e = torch.rand(2, 12, generator=g).double() + 0.1
    system = _linear_systems.RowSystem(A, allow_float32=True)
    system.factor(h, torch.ones(2, 20).double(), 1.0)
    system = system.keep_rows(narrow)  # in the memory of the former
    rows = narrow.take_rows(every)
    K = (rows * h.unsqueeze(-2)) @ rows.mT + torch.diag_embed(e)
    torch.testing.assert_close(
        system.factor(h, e, 1e-3)(r, None, 1e-3), torch.linalg.solve(K, r), rtol=1e-4, atol=1e-5
    )
    assert system.float32 is not None
    torch.testing.assert_close(system.factor(h, e, 1e-8)(r, None, 1e-8), torch.linalg.solve(K, r))
    assert system.float32 is None  # float64 from here on
