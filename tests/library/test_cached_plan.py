"""The plan kept between steps: whatever changes in between, the step is the same without it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mirrorhead import MirrorAdam, MirrorDescent, native

pytestmark = pytest.mark.skipif(not native.available(), reason="the C library was not built")

SHAPES = [(4, 6), (7,), (), (3, 2, 5), (1025,)]
Change = Callable[[Any, list[Tensor]], None]


def group_of(optimizer: Any) -> dict[str, Any]:
    return optimizer.param_groups[0]


def set_option(name: str, value: Any) -> Change:
    return lambda optimizer, _: group_of(optimizer).__setitem__(name, value)


def edit_weights(_: Any, params: list[Tensor]) -> None:
    params[0].data[1] += 0.5


def move_weights(_: Any, params: list[Tensor]) -> None:
    params[1].data = params[1].data.clone() * 2


def turn_weights(_: Any, params: list[Tensor]) -> None:
    """The same shape and address, another order in memory."""
    flat = params[3].data.reshape(-1)
    params[3].data = flat.as_strided((3, 2, 5), (1, 3, 6))


def turn_gradient(_: Any, params: list[Tensor]) -> None:
    assert params[0].grad is not None
    params[0].grad = params[0].grad.t().contiguous().t()


def drop_gradient(_: Any, params: list[Tensor]) -> None:
    params[1].grad = None


def spoil_gradient(_: Any, params: list[Tensor]) -> None:
    assert params[4].grad is not None
    params[4].grad[3] = torch.nan


def change_dtype(_: Any, params: list[Tensor]) -> None:
    for param in params:
        param.data = param.data.to(torch.bfloat16)
        assert param.grad is not None
        param.grad = param.grad.to(torch.bfloat16)


def reload(optimizer: Any, _: list[Tensor]) -> None:
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))


def replace_state(optimizer: Any, params: list[Tensor]) -> None:
    for name, value in optimizer.state[params[0]].items():
        if name != "step":
            optimizer.state[params[0]][name] = value.clone() * 1.5


def edit_state(optimizer: Any, params: list[Tensor]) -> None:
    for name, value in optimizer.state[params[3]].items():
        if name in ("rms", "step", "exp_avg", "momentum_buffer"):
            value.mul_(3)


def move_state(optimizer: Any, params: list[Tensor]) -> None:
    for value in optimizer.state[params[4]].values():
        if value.dim():
            value.data = value.data.clone()


def delete_state(optimizer: Any, params: list[Tensor]) -> None:
    del optimizer.state[params[2]]


def delete_all_state(optimizer: Any, _: list[Tensor]) -> None:
    optimizer.state.clear()


def reorder(optimizer: Any, params: list[Tensor]) -> None:
    group_of(optimizer)["params"].reverse()


def add_group(optimizer: Any, _: list[Tensor]) -> None:
    extra = nn.Parameter(torch.ones(3))
    extra.grad = torch.ones(3)
    optimizer.add_param_group({"params": [extra], "lr": 0.3})


CHANGES: dict[str, Change] = {
    "nothing": lambda *_: None,
    **{f"p={p}": set_option("p", p) for p in (1.1, 1.3, 2.0, 3.0)},
    **{f"lr={lr}": set_option("lr", lr) for lr in (0.0, 0.02, torch.tensor(0.03))},
    "decay": set_option("weight_decay", 0.1),
    "maximize": set_option("maximize", True),
    "foreach": set_option("foreach", True),
    "stochastic": set_option("stochastic_rounding", True),
    "no dual": set_option("keep_dual", False),
    "unknown option": set_option("initial_lr", 0.1),
}
CHANGES |= {
    f.__name__: f for f in (edit_weights, move_weights, turn_weights, turn_gradient, drop_gradient)
}
CHANGES |= {f.__name__: f for f in (spoil_gradient, change_dtype, reload, replace_state)}
CHANGES |= {f.__name__: f for f in (edit_state, move_state, delete_state, delete_all_state)}
CHANGES |= {f.__name__: f for f in (reorder, add_group)}


@pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])
@given(
    changes=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=5),
    p=st.sampled_from([1.1, 1.3, 3.0]),
    momentum=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_whatever_changes_the_step_is_that_of_a_fresh_plan(
    cls: Any, changes: list[str], p: float, momentum: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"lr": 0.01, "p": p, "error_if_nonfinite": False}
    options |= {"momentum": 0.9} if momentum and cls is MirrorDescent else {}
    start = [torch.randn(s, generator=generator) for s in SHAPES]
    runs = []
    for _ in range(2):
        params = [nn.Parameter(w.clone()) for w in start]
        runs.append((params, cls(params, **options)))
    for change in ["nothing", *changes, "nothing"]:
        for _ in range(2):  # the second step may use the plan that the first one kept
            gradients = [torch.randn(s, generator=generator) for s in SHAPES]
            for k, (params, optimizer) in enumerate(runs):
                for param, g in zip(params, gradients, strict=True):
                    param.grad = g.to(param.dtype, copy=True)  # SGD may write to it
                CHANGES[change](optimizer, params)
                if k:
                    optimizer._plans.clear()
                optimizer.step()
            for a, b in zip(runs[0][0], runs[1][0], strict=True):
                assert torch.equal(a, b)
                mine, other = (o.state.get(q, {}) for (_, o), q in zip(runs, (a, b), strict=True))
                assert mine.keys() == other.keys()
                assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])
def test_the_plan_is_kept_while_only_gradients_and_lr_change(cls: Any) -> None:
    params = [nn.Parameter(torch.randn(s)) for s in SHAPES]
    optimizer = cls(params, lr=0.01, p=1.1)
    plans = set()
    for k in range(4):
        for param in params:
            param.grad = torch.randn_like(param)
        group_of(optimizer)["lr"] = 0.01 / (1 + k)
        optimizer.step()
        plans.add(id(optimizer._plans[id(group_of(optimizer))]))
    assert len(plans) == 1
    other = copy.deepcopy(optimizer)
    assert not other._plans
