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
from torch.testing._internal.two_tensor import TwoTensor

from mirrorhead import MirrorAdam, MirrorDescent, native

pytestmark = pytest.mark.skipif(not native.available(), reason="the C library was not built")

SHAPES = [(4, 6), (7,), (), (3, 2, 5), (1025,)]
Change = Callable[[Any, list[Tensor]], None]


def group_of(optimizer: Any) -> dict[str, Any]:
    return optimizer.param_groups[0]


def set_option(name: str, value: Any) -> Change:
    return lambda optimizer, _: group_of(optimizer).__setitem__(name, value)


def change_beta(optimizer: Any, _: list[Tensor]) -> None:
    """In place, in a list."""
    if "betas" in group_of(optimizer):
        group_of(optimizer)["betas"][0] *= 0.7


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


def negate_gradient(_: Any, params: list[Tensor]) -> None:
    """As .imag of a conjugate: torch has not written the negative numbers yet."""
    assert params[0].grad is not None
    params[0].grad = torch._neg_view(params[0].grad)


def empty_gradient(_: Any, params: list[Tensor]) -> None:
    """Zeros without memory."""
    params[0].grad = torch._efficientzerotensor(params[0].shape, dtype=params[0].dtype)


def wrap_gradient(_: Any, params: list[Tensor]) -> None:
    """A subclass without memory of its own, such as the result of a collective."""
    assert params[0].grad is not None
    params[0].grad = TwoTensor(params[0].grad, params[0].grad.clone())


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
        if name in ("rms", "step", "exp_avg", "momentum_buffer", "dual"):
            value.mul_(3)


def move_state(optimizer: Any, params: list[Tensor]) -> None:
    for value in optimizer.state[params[4]].values():
        if value.dim():
            value.data = value.data.clone()


def delete_state(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.state.pop(params[2], None)


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
    **{f"p={p}": set_option("geometry", p) for p in (1.1, 1.3, 2.0, 3.0)},
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
CHANGES |= {f.__name__: f for f in (reorder, add_group, change_beta)}
ODD_GRADIENTS = {f.__name__: f for f in (negate_gradient, empty_gradient, wrap_gradient)}
CHANGES |= ODD_GRADIENTS


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
    options: dict[str, Any] = {"lr": 0.01, "geometry": p, "error_if_nonfinite": False}
    options |= {"momentum": 0.9} if momentum and cls is MirrorDescent else {}
    options |= {"betas": [0.9, 0.99]} if cls is MirrorAdam else {}
    start = [torch.randn(s, generator=generator) for s in SHAPES]
    runs = []
    for _ in range(2):
        params = [nn.Parameter(w.clone()) for w in start]
        runs.append((params, cls(params, **copy.deepcopy(options))))
    for change in ["nothing", *changes, "nothing"]:
        for _ in range(2):  # the second step may use the plan that the first one kept
            gradients = [torch.randn(s, generator=generator) for s in SHAPES]
            for k, (params, optimizer) in enumerate(runs):
                for param, g in zip(params, gradients, strict=True):
                    param.grad = g.to(param.dtype, copy=True)  # SGD may write to it
                CHANGES[change](optimizer, params)
                if k:
                    optimizer._kept.clear()
                optimizer.step()
            for a, b in zip(runs[0][0], runs[1][0], strict=True):
                assert torch.equal(a, b)
                mine, other = (o.state.get(q, {}) for (_, o), q in zip(runs, (a, b), strict=True))
                assert mine.keys() == other.keys()
                assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])
def test_the_plan_is_kept_while_only_gradients_and_lr_change(cls: Any) -> None:
    params = [nn.Parameter(torch.randn(s)) for s in SHAPES]
    optimizer = cls(params, lr=0.01, geometry=1.1)
    plans = set()
    for k in range(4):
        for param in params:
            param.grad = torch.randn_like(param)
        group_of(optimizer)["lr"] = 0.01 / (1 + k)
        optimizer.step()
        plans.add(id(optimizer._kept[id(group_of(optimizer))]))
    assert len(plans) == 1
    other = copy.deepcopy(optimizer)
    assert not other._kept


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])
@pytest.mark.parametrize("odd", ODD_GRADIENTS.values())
def test_gradients_that_are_not_in_memory_count_as_what_they_are(
    odd: Change, cls: Any, p: float, how: dict[str, Any]
) -> None:
    start = torch.randn(4, 6)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [cls([param], lr=0.1, geometry=p, **how) for param in params]
    for change in (lambda *_: None, odd, odd):
        gradient = torch.randn(4, 6)
        for k, (param, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            param.grad = gradient.clone()
            change(optimizer, [param])
            if k:
                param.grad = torch.empty(4, 6).copy_(param.grad)
            optimizer.step()
        assert torch.equal(*params)


@pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])
def test_a_weight_that_holds_other_tensors_takes_steps(cls: Any) -> None:
    start, gradient = torch.randn(4, 6), torch.randn(4, 6)
    params = [nn.Parameter(start.clone()), nn.Parameter(TwoTensor(start.clone(), start.clone()))]
    for param in params:
        optimizer = cls([param], lr=0.1, geometry=1.5)
        for _ in range(3):
            param.grad = gradient.clone()
            if isinstance(param, TwoTensor):
                param.grad = TwoTensor(gradient.clone(), gradient.clone())
            optimizer.step()
    assert isinstance(params[1], TwoTensor)
    torch.testing.assert_close(params[1].a, params[0].detach())
    torch.testing.assert_close(params[1].b, params[0].detach())
