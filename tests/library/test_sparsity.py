"""Zeros on request: exact numbers of zeros, schedules that resume to the bit, fast selection."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mirrorhead as mh
from mirrorhead.geometry import k_support


def largest(flat: Tensor, k: int) -> Tensor:
    """The k largest by a sort, of equals the first."""
    order = torch.sort(flat.abs(), dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(flat).scatter(-1, order, flat.gather(-1, order))


@given(data=st.data())
def test_the_k_largest_are_those_of_a_sort(data: st.DataObject) -> None:
    rows, count = data.draw(st.sampled_from([(1, 1), (1, 7), (3, 64), (2, 1000), (5, 3)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    x = torch.randn(rows, count, generator=generator)
    x *= 10.0 ** data.draw(st.sampled_from([0, -44, 30]))  # subnormal and huge ones too
    if data.draw(st.booleans()):
        x = x.sign() * x.abs().clamp(max=float(x.abs().median()))  # many are alike
    if data.draw(st.booleans()):
        x[0, 0] = data.draw(st.sampled_from([float("inf"), -float("inf"), 0.0]))
    k = data.draw(st.integers(1, count))
    found = k_support._largest(x, k)
    assert torch.equal(found, largest(x, k))
    assert int((found != 0).sum(-1).max()) <= k


def test_without_the_c_library_as_many_entries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    u = torch.randn(30, 40)
    fast = mh.KSupport(0.1).inverse(u)
    monkeypatch.setattr(k_support, "_keep_in_c", lambda: None)
    assert torch.equal(fast, mh.KSupport(0.1).inverse(u))
    assert int(fast.count_nonzero()) == 120


def test_n_of_m_patterns_hold_in_every_group_at_every_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 6, bias=False)
    optimizer = mh.MirrorAdam(model.parameters(), lr=0.05, geometry=mh.KSupport(k=2, group=4))
    for _ in range(20):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        (model(x) - x[:, :6]).square().mean().backward()
        optimizer.step()
        assert (model.weight.view(6, 4, 4).count_nonzero(-1) == 2).all()
    norm, w = mh.KSupport(k=2, group=4), torch.randn(6, 16, dtype=torch.float64)
    parts = [mh.KSupport(k=2).norm(part) for part in w.reshape(-1, 4)]
    torch.testing.assert_close(norm.norm(w), torch.stack(parts).norm())
    with pytest.raises(ValueError, match="groups of 4 along its last dimension, got shape"):
        mh.MirrorAdam([nn.Parameter(torch.ones(4, 6))], lr=0.1, geometry=norm)
    with pytest.raises(ValueError, match="k must be at most group = 4, got 5"):
        mh.KSupport(k=5, group=4)


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 5))
    matrices = [w for w in model.parameters() if w.ndim == 2]
    others = [w for w in model.parameters() if w.ndim < 2]
    groups = [{"params": matrices, "geometry": mh.KSupport(0.8)}, {"params": others}]
    return model, mh.MirrorAdam(groups, lr=1e-2, geometry=2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, schedule: mh.DensitySchedule
) -> None:
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        (model(x) - x[:, :5]).square().mean().backward()
        optimizer.step()
        schedule.step()


def test_the_density_falls_geometrically_with_exact_zeros_at_every_step() -> None:
    model, optimizer = build()
    schedule = mh.anneal(optimizer, to=0.05, steps=8)
    expected = 0.8
    for step in range(12):
        train(model, optimizer, range(step, step + 1), schedule)
        for name, shape, count in mh.sparsity_report(model).rows:
            assert name.endswith("weight")
            assert count == round(expected * shape[0] * shape[1])
        expected = 0.8 * (0.05 / 0.8) ** min(1.0, (step + 1) / 8)
    assert mh.sparsity_report(model).density == pytest.approx(0.05, abs=1e-3)
    assert optimizer.param_groups[1]["geometry"] == 2


def test_a_checkpoint_resumes_to_the_bit() -> None:
    straight, optimizer = build()
    train(straight, optimizer, range(10), mh.anneal(optimizer, to=0.1, steps=7))
    model, optimizer = build()
    schedule = mh.anneal(optimizer, to=0.1, steps=7)
    train(model, optimizer, range(4), schedule)
    parts = copy.deepcopy([part.state_dict() for part in (model, optimizer, schedule)])
    model, optimizer = build(seed=1)
    schedule = mh.anneal(optimizer, to=0.5, steps=3)
    model.load_state_dict(parts[0])
    schedule.load_state_dict(parts[2])  # first: the optimizer refuses another geometry
    optimizer.load_state_dict(parts[1])
    train(model, optimizer, range(4, 10), schedule)
    for one, other in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(one, other)


def test_wrong_arguments() -> None:
    _, optimizer = build()
    for to in (0, 0.9, float("nan"), True):
        with pytest.raises(ValueError, match=r"to must be above 0 and at most 0\.8, got"):
            mh.anneal(optimizer, to=to, steps=3)
    with pytest.raises(ValueError, match="steps must be an integer >= 1, got 0"):
        mh.anneal(optimizer, to=0.1, steps=0)
    weight = nn.Parameter(torch.ones(3, 3))
    for geometry in (1.5, mh.KSupport(k=2)):
        dense = mh.MirrorAdam([weight], lr=1e-3, geometry=geometry)
        with pytest.raises(ValueError, match="a KSupport with a share"):
            mh.anneal(dense, to=0.1, steps=3)
    schedule = mh.anneal(optimizer, to=0.1, steps=3)
    state = schedule.state_dict()
    with pytest.raises(ValueError, match="has 2 groups, the state is of 1"):
        schedule.load_state_dict({**state, "starts": [0.8]})
