"""What torch's optimizers promise, and what is ours: dual state, edits, precision, checks."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import reference
from building import build
from mirrorhead import MirrorAdam, MirrorDescent, native
from mirrorhead.geometry._powers import power

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "native": {},  # the default
}
each_implementation = pytest.mark.parametrize(
    "how", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys()
)
each_optimizer = pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])


def with_every(names: str, cases: list[tuple]) -> pytest.MarkDecorator:
    choices = [
        pytest.param(
            how, *case, id="-".join([name, *(getattr(x, "__name__", str(x)) for x in case)])
        )
        for name, how in IMPLEMENTATIONS.items()
        for case in cases
    ]
    return pytest.mark.parametrize(f"how, {names}", choices)


How = dict[str, Any]
Optimizers = type[MirrorDescent] | type[MirrorAdam]


def parameter(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 0.1) -> nn.Parameter:
    param = nn.Parameter((torch.randn(shape) * scale).to(dtype))
    param.grad = torch.randn(shape).to(dtype)
    return param


def steps(optimizer: torch.optim.Optimizer, count: int, zero: bool = False) -> None:
    for _ in range(count):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param) if zero else torch.randn_like(param)
        optimizer.step()


# Precision


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "count"),
    [
        ({}, 100_000),
        (IMPLEMENTATIONS["loop"], 5_000),
        (IMPLEMENTATIONS["foreach"], 5_000),
    ],
    ids=["native", "loop", "foreach"],
)
def test_weights_at_zero_move_as_they_should(how: How, count: int) -> None:
    """float32, p = 1.1, from 0, gradients of 1e-4, lr 1e-2, up to 1e5 steps: within 1e-3."""
    gradient = 1e-4 * torch.tensor([1.0, -1.0, 0.9, 1.1, 0.77, -1.23, 0.5, 2.0])
    param = nn.Parameter(torch.zeros(8))
    param.grad = gradient.clone()
    optimizer = MirrorDescent([param], lr=1e-2, geometry=1.1, **how)
    for _ in range(count):
        optimizer.step()
    u = torch.zeros(8, dtype=torch.float64)
    for _ in range(count):
        u -= 1e-2 * gradient.double()
    expected = reference.inverse(u, 1.1)
    assert ((param.double() - expected).abs() <= 1e-3 * expected.abs()).all()


@with_every(
    "p, dtype",
    list(product([1.1, 1.5, 1.75, 3.0, 6.0], [torch.bfloat16, torch.float16, torch.float32])),
)
def test_zero_gradients_change_no_bit(how: How, p: float, dtype: torch.dtype) -> None:
    values = [torch.randn(200), torch.randn(200) * 1e-3, torch.zeros(8)]
    values += [2.0 ** torch.arange(-20, 8), torch.full((3,), 1e-7)]
    param = nn.Parameter(torch.cat(values).to(dtype))
    before = param.detach().clone()
    steps(optimizer := MirrorDescent([param], lr=0.1, geometry=p, **how), 50, zero=True)
    assert torch.equal(param, before)
    # ... and after moving, too.
    steps(optimizer, 3)
    before = param.detach().clone()
    steps(optimizer, 50, zero=True)
    assert torch.equal(param, before)


@with_every("p, dtype", list(product([1.1, 3.0], [torch.bfloat16, torch.float16])))
def test_half_precision_follows_float32(how: How, p: float, dtype: torch.dtype) -> None:
    """Steps far below the resolution of the parameter add up in the state."""
    param = nn.Parameter((torch.rand(50) + 0.5).to(dtype))
    twin = nn.Parameter(param.detach().float())
    for weights in (param, twin):
        optimizer = MirrorDescent([weights], lr=1e-4, geometry=p, **how)
        torch.manual_seed(1)
        for _ in range(300):
            weights.grad = torch.rand(50).to(dtype).to(weights.dtype)
            optimizer.step()
    apart = (twin - param.float()).abs() / twin.abs()
    assert (apart <= torch.finfo(dtype).eps).all()


@with_every("keep_dual", [(True,), (False,)])
def test_stochastic_rounding_is_unbiased(how: How, keep_dual: bool) -> None:
    """Without state, bf16 weights lose small steps unless rounding is random."""
    start, lr, count = 1.0, 1e-4, 200
    results = {}
    for stochastic in (False, True):
        param = nn.Parameter(torch.full((4000,), start, dtype=torch.bfloat16))
        optimizer = MirrorDescent(
            [param], lr=lr, geometry=3, keep_dual=keep_dual, stochastic_rounding=stochastic, **how
        )
        for _ in range(count):
            param.grad = torch.ones_like(param)
            optimizer.step()
        results[stochastic] = param.float().mean().item()
    expected = (start - lr * count) ** 0.5  # u = w^2
    assert results[True] == pytest.approx(expected, abs=3e-4)
    if not keep_dual:
        assert results[False] == start


def test_stochastic_rounding_takes_either_neighbour() -> None:
    param = nn.Parameter(torch.full((10_000,), 1.0, dtype=torch.bfloat16))
    param.grad = torch.full_like(param, 1.0)
    MirrorDescent([param], lr=2.0**-9, geometry=2, stochastic_rounding=True).step()
    values, counts = param.float().unique(return_counts=True)
    below = 1 - 2.0**-8
    assert values.tolist() == [below, 1.0]  # 1 - 2^-9 lies half way between them
    assert abs(counts[0].item() / 10_000 - 0.5) < 0.03


# Edits from outside


@with_every(
    "p, dtype", list(product([1.1, 1.3, 1.5, 3.0], [torch.float32, torch.bfloat16, torch.float64]))
)
def test_edits_of_the_weights_are_noticed(how: How, p: float, dtype: torch.dtype) -> None:
    """Pruned, clamped and loaded weights go on from where they were put."""
    param = parameter(64, dtype=dtype, scale=1.0)
    optimizer = MirrorDescent([param], lr=0.01, geometry=p, **how)
    steps(optimizer, 3)
    param.data[:16] = 0  # pruning
    param.data[16:32].clamp_(-0.1, 0.1)
    param.data[32:48] = param.data[32:48].flip(0)  # a permutation
    edited = param.detach().clone()
    gradient = torch.randn(64).to(dtype)
    gradient[:4] = gradient[16:20] = 0
    param.grad = gradient
    optimizer.step()
    expected = reference.descend([edited], [[gradient]], lr=0.01, geometry=p)[0]
    rtol = {torch.float32: 2e-4, torch.float64: 1e-9, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(param.double(), expected, rtol=rtol, atol=1e-12)
    assert torch.equal(param[:4], edited[:4])
    assert torch.equal(param[16:20], edited[16:20])


@each_implementation
def test_tiny_weights_can_be_pruned(how: How) -> None:
    """Weights of 1e-25 set to 0 stay 0, though the difference is next to nothing."""
    param = nn.Parameter(torch.full((100,), 1e-25))
    optimizer = MirrorDescent([param], lr=1e-6, geometry=1.1, **how)
    steps(optimizer, 2)
    assert param.all()
    param.data.zero_()
    steps(optimizer, 3, zero=True)
    assert not param.any()


@each_implementation
def test_a_new_p_in_mid_run(how: How) -> None:
    param = parameter(50)
    optimizer = MirrorDescent([param], lr=0.01, geometry=1.1, **how)
    steps(optimizer, 3)
    optimizer.param_groups[0]["geometry"] = 1.5
    before, gradient = param.detach().clone(), torch.randn(50)
    param.grad = gradient
    optimizer.step()
    expected = reference.descend([before], [[gradient]], lr=0.01, geometry=1.5)[0]
    torch.testing.assert_close(param.double(), expected, rtol=1e-4, atol=1e-12)


# State


@pytest.mark.parametrize(
    ("p", "dtype", "options", "names"),
    [
        (1.1, torch.float32, {}, {"dual"}),
        (1.1, torch.float32, {"momentum": 0.9}, {"dual", "momentum_buffer"}),
        (1.1, torch.float32, {"keep_dual": False}, set()),
        (2.0, torch.float32, {}, set()),
        (2.0, torch.bfloat16, {}, set()),
        (3.0, torch.float32, {}, set()),
        (3.0, torch.bfloat16, {}, {"wide"}),
        (1.1, torch.bfloat16, {}, {"dual"}),
    ],
)
def test_state_is_no_more_than_needed(
    p: float, dtype: torch.dtype, options: dict[str, Any], names: set[str]
) -> None:
    param = parameter(5, dtype=dtype)
    optimizer = MirrorDescent([param], lr=0.1, geometry=p, **options)
    optimizer.step()
    assert set(optimizer.state[param]) == names
    assert all(x.dtype == torch.float32 for x in optimizer.state[param].values())


@with_every(
    "cls, dtype", list(product([MirrorDescent, MirrorAdam], [torch.float32, torch.bfloat16]))
)
def test_state_dict_resumes_to_the_bit(how: How, cls: Optimizers, dtype: torch.dtype) -> None:
    def fresh() -> tuple[list[nn.Parameter], Any]:
        torch.manual_seed(0)
        params = [parameter(4, 3, dtype=dtype), parameter(7, dtype=dtype)]
        groups = [{"params": params[:1]}, {"params": params[1:], "geometry": 3.0}]
        return params, cls(groups, lr=0.01, geometry=1.1, weight_decay=0.1, **how)

    params, optimizer = fresh()
    steps(optimizer, 3)
    saved = copy.deepcopy([q.detach() for q in params]), pickle.dumps(optimizer.state_dict())
    torch.manual_seed(5)
    steps(optimizer, 3)

    twins, other = fresh()
    for twin, value in zip(twins, saved[0], strict=True):
        twin.data.copy_(value)
    other.load_state_dict(pickle.loads(saved[1]))
    for state in other.state.values():
        assert all(x.dtype != torch.bfloat16 for x in state.values())
    torch.manual_seed(5)
    steps(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_loading_does_not_alias_the_checkpoint() -> None:
    param = parameter(4)
    optimizer = MirrorDescent([param], lr=0.1)
    optimizer.step()
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = MirrorDescent([parameter(4)], lr=0.1)
    other.load_state_dict(saved)
    steps(other, 2)
    assert torch.equal(saved["state"][0]["dual"], kept["state"][0]["dual"])


def test_load_state_dict_hooks_are_heeded() -> None:
    """A pre-hook may reorder the state, as torch's recipe for named parameters does."""
    a, b = parameter(3), parameter(3)
    optimizer = MirrorDescent([a, b], lr=0.1)
    optimizer.step()
    other = MirrorDescent([parameter(3), parameter(3)], lr=0.1)

    def swap(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = state_dict["state"]
        return {**state_dict, "state": {0: state[1], 1: state[0]}}

    other.register_load_state_dict_pre_hook(swap)
    other.load_state_dict(optimizer.state_dict())
    first = other.param_groups[0]["params"][0]
    assert torch.equal(other.state[first]["dual"], optimizer.state[b]["dual"])


def test_a_checkpoint_of_another_p_warns_and_is_used() -> None:
    param = parameter(4)
    optimizer = MirrorDescent([param], lr=0.1, geometry=1.5)
    optimizer.step()
    other = MirrorDescent([parameter(4)], lr=0.1, geometry=1.1)
    with pytest.warns(UserWarning, match=r"geometry=1\.5 in group 0.*geometry=1\.1; 1\.5 is used"):
        other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["geometry"] == 1.5


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s["state"][0].update(dual=torch.zeros(5)), r"'dual' of shape \(5,\)"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(4)), "'exp_avg', unknown"),
        (
            lambda s: s["param_groups"][0].update(geometry=0.5),
            "geometry must be finite and greater than 1",
        ),
        (lambda s: s["param_groups"][0].pop("geometry"), "has no geometry"),
        (lambda s: s["param_groups"][0].update(params=[0, 1]), "sizes"),
    ],
)
def test_a_bad_checkpoint_changes_nothing(
    damage: Callable[[dict[str, Any]], Any], message: str
) -> None:
    param = parameter(4)
    optimizer = MirrorDescent([param], lr=0.1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before)
    damage(bad)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["dual"], before["state"][0]["dual"])


@each_optimizer
def test_pickle(cls: Optimizers) -> None:
    param = parameter(4)
    optimizer = cls([param], lr=0.1)
    optimizer.step()
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.param_groups[0]["geometry"] == optimizer.param_groups[0]["geometry"]
    steps(copied, 1)


# Behaviour of torch's optimizers


@each_implementation
@each_optimizer
def test_lr_as_a_tensor_schedule_and_closure(how: How, cls: Optimizers) -> None:
    """A tensor lr, changed by a scheduler, gives the same as a float lr; closures are called."""
    results = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        torch.manual_seed(0)
        param = parameter(6, scale=1.0)
        optimizer = cls([param], lr=lr, **how)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def closure(optimizer: Any = optimizer, param: nn.Parameter = param) -> Tensor:
            optimizer.zero_grad()
            loss = (param**2).sum()
            loss.backward()
            return loss.detach()

        losses = []
        for _ in range(4):
            losses.append(optimizer.step(closure).item())
            schedule.step()
        assert losses == sorted(losses, reverse=True)
        results.append(param.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=0)


@each_implementation
@each_optimizer
def test_parameters_without_gradient_stay(how: How, cls: Optimizers) -> None:
    a, b = parameter(3), parameter(3)
    b.grad = None
    before = b.detach().clone()
    optimizer = cls([a, b], lr=0.1, **how)
    optimizer.step()
    assert torch.equal(b, before)
    assert b not in optimizer.state or not optimizer.state[b]
    assert list(optimizer.state) == [a]


@each_implementation
@each_optimizer
def test_empty_and_zero_dimensional(how: How, cls: Optimizers) -> None:
    params = [parameter(0), parameter(), parameter(2, 0, 3), parameter(2)]
    optimizer = cls(params, lr=0.1, **how)
    before = params[1].item()
    optimizer.step()
    assert params[1].item() != before


@each_optimizer
def test_groups_named_parameters_and_add_param_group(cls: Optimizers) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = cls(model[0].named_parameters(), lr=0.1)
    optimizer.add_param_group(
        {"params": list(model[1].named_parameters()), "geometry": 3.0, "lr": 0.2}
    )
    assert [group["geometry"] for group in optimizer.param_groups] == [
        optimizer.defaults["geometry"],
        3.0,
    ]
    assert optimizer.param_groups[1]["param_names"] == ["weight", "bias"]
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    last = model.get_parameter("1.weight")
    last.grad = torch.full_like(last, torch.nan)
    with pytest.raises(RuntimeError, match="gradient of 'weight' is not finite"):
        optimizer.step()


@each_implementation
def test_maximize_is_minimize_of_the_negative(how: How) -> None:
    a = parameter(9)
    b = nn.Parameter(a.detach().clone())
    assert a.grad is not None
    b.grad = -a.grad
    MirrorDescent([a], lr=0.1, maximize=True, **how).step()
    MirrorDescent([b], lr=0.1, **how).step()
    assert torch.equal(a, b)


@with_every("normalize, p", list(product(["tensor", "global"], [1.1, 2.0, 3.0])))
def test_normalize(how: How, normalize: Any, p: float) -> None:
    """Zero gradients change nothing; tiny ones go as far as large ones."""
    params = [parameter(5), parameter(3)]
    before = [q.detach().clone() for q in params]
    steps(
        optimizer := MirrorDescent(params, lr=0.1, geometry=p, normalize=normalize, **how),
        2,
        zero=True,
    )
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    gradients = [torch.randn(5), torch.randn(3)]
    results = []
    for scale in (1.0, 1e-30, 1e30):
        for param, start, g in zip(params, before, gradients, strict=True):
            param.data.copy_(start)
            param.grad = g * scale
        optimizer.step()
        results.append(torch.cat([q.detach() for q in params]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-9)


@each_implementation
@each_optimizer
def test_step_with_lr_0_changes_nothing(how: How, cls: Optimizers) -> None:
    """As torch's distributed checkpoint does to make an optimizer's state."""
    param = parameter(50)
    before = param.detach().clone()
    options: dict[str, Any] = {"normalize": "global"} if cls is MirrorDescent else {}
    optimizer = cls([param], lr=0.0, weight_decay=0.1, **options, **how)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, before)


# Non-finite gradients


@with_every(
    "cls, normalize, p, bad",
    [
        (cls, normalize, p, bad)
        for cls, normalize in ((MirrorDescent, None), (MirrorDescent, "global"), (MirrorAdam, None))
        for p in (1.1, 2.0, 3.0)
        for bad in (torch.nan, torch.inf, -torch.inf)
    ],
)
def test_nonfinite_gradients(
    how: How, cls: Optimizers, normalize: str | None, p: float, bad: float
) -> None:
    """An error names the parameter, and the bad entries have moved nothing."""
    options: dict[str, Any] = {"normalize": normalize, "momentum": 0.9} if normalize else {}
    a, b = parameter(3), parameter(4)
    before = [a.detach().clone(), b.detach().clone()]
    assert b.grad is not None
    b.grad[2] = bad
    optimizer = cls([a, b], lr=0.1, geometry=p, **options, **how)
    with pytest.raises(RuntimeError, match=r"gradient of parameter 1 of group 0, shape \(4,\)"):
        optimizer.step()
    skipping = cls([a, b], lr=0.1, geometry=p, error_if_nonfinite=False, **options, **how)
    skipping.step()
    assert (a != before[0]).all()
    assert (b != before[1]).tolist() == [True, True, False, True]
    for used in (optimizer, skipping):
        for state in used.state.values():
            assert all(x.isfinite().all() for x in state.values())
    steps(optimizer, 1)
    assert a.isfinite().all()
    assert b.isfinite().all()


def test_several_nonfinite_gradients_are_a_list_with_single_commas() -> None:
    params = [parameter(3), parameter(4)]
    for param in params:
        param.grad = torch.full_like(param, torch.inf)
    with pytest.raises(RuntimeError) as caught:
        MirrorDescent(params, lr=0.1, geometry=1.5).step()
    first = "parameter 0 of group 0, shape (3,), parameter 1 of group 0, shape (4,) is not finite"
    assert first in str(caught.value)


def test_huge_gradients_are_not_called_infinite() -> None:
    param = parameter(3)
    param.grad = torch.full((3,), 1e30)  # its square is not
    MirrorDescent([param], lr=1e-31, geometry=1.5).step()
    assert param.isfinite().all()


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"geometry": 1}, ValueError, "geometry must be finite and greater than 1, got 1"),
        (
            {"geometry": float("nan")},
            ValueError,
            "geometry must be finite and greater than 1, got nan",
        ),
        (
            {"geometry": "2"},
            TypeError,
            "geometry must be a number greater than 1 or a Potential, got '2'",
        ),
        ({"lr": -1.0}, ValueError, "lr must be at least 0 and finite, got -1.0"),
        ({"lr": float("nan")}, ValueError, "lr must be at least 0 and finite, got nan"),
        ({"lr": "x"}, TypeError, "lr must be a number, got 'x'"),
        ({"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
        ({"momentum": 1.0}, ValueError, "momentum must be at least 0 and less than 1, got 1.0"),
        ({"momentum": -0.1}, ValueError, "momentum must be at least 0 and less than 1, got -0.1"),
        ({"weight_decay": -1}, ValueError, "weight_decay must be at least 0 and finite, got -1"),
        ({"normalize": "row"}, ValueError, 'normalize must be None, "tensor" or "global"'),
        ({"nesterov": True}, ValueError, "nesterov=True needs momentum"),
        ({"foreach": True, "fused": True}, ValueError, "foreach and fused cannot both be True"),
        ({"fused": "yes"}, TypeError, "fused must be True, False or None, got 'yes'"),
        ({"maximize": 1}, TypeError, "maximize must be True or False, got 1"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    param = parameter(2)
    with pytest.raises(error, match=message):
        MirrorDescent([param], **{"lr": 0.1, **options})
    optimizer = MirrorDescent([param], lr=0.1)
    with pytest.raises(error, match=f"param group 1 'head': {message}"):
        optimizer.add_param_group({"params": [parameter(2)], "name": "head", **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] must be at least 0 and less than 1"),
        ({"betas": 0.9}, TypeError, "betas must be two numbers"),
        ({"eps": -1e-8}, ValueError, "eps must be at least 0"),
        ({"rms_floor": 0.0}, ValueError, "rms_floor must be greater than 0"),
        ({"geometry": 1.0}, ValueError, "geometry must be finite and greater than 1"),
    ],
)
def test_bad_options_of_adam(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MirrorAdam([parameter(2)], **options)


@each_optimizer
def test_bad_parameters(cls: Optimizers) -> None:
    with pytest.raises(ValueError, match="params is an empty list"):
        cls([], lr=0.1)
    with pytest.raises(TypeError, match=r"real floating point tensors, got torch\.complex64"):
        cls([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1)
    eight_bits = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(TypeError, match=r"16 bits or more, got torch\.float8_e4m3fn"):
        cls([eight_bits], lr=0.1)
    model = nn.Sequential(nn.Linear(2, 2))
    given: Any = (model, [{"params": model}])
    for params in given:
        with pytest.raises(
            TypeError, match=r"got the model Sequential: give model\.parameters\(\)"
        ):
            cls(params, lr=0.1)
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse .*sparse=False"):
        cls(embedding.parameters(), lr=0.1).step()


# MirrorAdam


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_have_no_size(bad: float) -> None:
    """One NaN in a tensor made all of it NaN; nothing moves, and the tensor is named."""
    model = nn.Linear(6, 2)
    model.weight.data[0, 0] = bad
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer = MirrorAdam(model.named_parameters(), lr=1e-3, geometry=1.1)
    with pytest.raises(RuntimeError, match=r"'weight' has the root mean square (nan|inf)"):
        optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.nan_to_num(), old.nan_to_num())
    model.weight.data[0, 0] = 0.1
    optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())


def test_options_without_an_effect_give_a_warning() -> None:
    with pytest.warns(UserWarning, match="knee=2 has no effect for p > 2"):
        MirrorAdam([parameter(2)], geometry=3, knee=2.0).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MirrorAdam([{"params": [parameter(2)]}, {"params": [parameter(2)], "geometry": 3}]).step()
        MirrorAdam([parameter(2)], geometry=3).step()


@pytest.mark.parametrize("p", [1.1, 2.0])
def test_the_weight_decay_of_adamw_gives_a_warning(p: float) -> None:
    """Loading replaces options, as in torch; at p = 2 the number means the same."""
    theirs = torch.optim.AdamW([{"params": [parameter(2)]}, {"params": [parameter(2)]}])
    ours = MirrorAdam([{"params": [parameter(2)]}, {"params": [parameter(2)]}], geometry=p)
    ours.param_groups[1]["weight_decay"] = 0.01
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.load_state_dict(theirs.state_dict())
    words = [str(warning.message) for warning in caught]
    assert len(words) == (p != 2)
    assert all(r"replaces weight_decay: 0.01 (group 0) for 0. It acts" in text for text in words)
    assert [group["weight_decay"] for group in ours.param_groups] == [0.01, 0.01]


@pytest.mark.parametrize("p", [1.1, 1.5, 3.0])
def test_adams_learning_rate_carries_over(p: float) -> None:
    """A weight of typical size first moves by about lr, whatever p and the tensor's size."""
    for scale in (0.02, 1.0):
        param = nn.Parameter(torch.full((1000,), scale))
        param.grad = torch.randn(1000)
        MirrorAdam([param], lr=1e-5, geometry=p).step()
        moved = (param.detach() - scale).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-5), rtol=0.05, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.1, 1.5, 3.0])
def test_tensors_that_start_at_zero_learn(p: float) -> None:
    param = nn.Parameter(torch.zeros(20))
    target = torch.linspace(-0.1, 0.1, 20)
    optimizer = MirrorAdam([param], lr=3e-3, geometry=p)
    for _ in range(2000):
        param.grad = param.detach() - target
        optimizer.step()
    torch.testing.assert_close(param.detach(), target, rtol=0, atol=0.02)


@pytest.mark.slow
@each_implementation
@pytest.mark.parametrize("p", [1.05, 1.1, 1.3, 1.5, 1.75])
def test_a_tensor_at_zero_moves_as_with_adamw(how: How, p: float) -> None:
    """300 steps with a gradient of -1, as for LoRA's second factor."""
    ours, theirs = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
    optimizers = [
        MirrorAdam([ours], lr=1e-4, geometry=p, **how),
        torch.optim.AdamW([theirs], lr=1e-4, weight_decay=0),
    ]
    for _ in range(300):
        ours.grad, theirs.grad = torch.full((8,), -1.0), torch.full((8,), -1.0)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.1, 1.5])
def test_lora_learns_as_with_adamw(p: float) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(256, 16), torch.randn(16, 2) @ torch.randn(2, 16) * 0.1
    start = torch.randn(16, 4) / 4
    losses, loss = [], torch.tensor(0.0)
    choices: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {"weight_decay": 0.0}),
        (MirrorAdam, {"geometry": p}),
    ]
    for cls, options in choices:
        a, b = nn.Parameter(start.clone()), nn.Parameter(torch.zeros(4, 16))
        optimizer = cls([a, b], lr=3e-3, **options)
        for _ in range(300):
            optimizer.zero_grad()
            loss = (x @ a @ b - x @ target).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    untrained = float((x @ target).square().mean())
    assert losses[0] < 0.1 * untrained
    assert losses[1] < 0.1 * untrained


@each_implementation
@pytest.mark.parametrize("p", [1.1, 1.5, 1.9])
def test_no_weight_moves_further_than_with_adamw(how: How, p: float) -> None:
    """Weights of all sizes, 20 steps of one sign and one direction of growth."""
    start = torch.randn(2000) * torch.logspace(-4, 2, 2000)
    w, twin = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    rms = start.square().mean().sqrt()
    ours = MirrorAdam([w], lr=1e-2, geometry=p, **how)
    theirs = torch.optim.AdamW([twin], lr=1e-2, weight_decay=0)
    for _ in range(20):
        before = w.detach().clone(), twin.detach().clone()
        w.grad = -start.sign() * torch.rand(2000)
        twin.grad = w.grad.clone()
        ours.step()
        theirs.step()
        moved, allowed = (w - before[0]).abs(), (twin - before[1]).abs()
        rounding = 20 / (p - 1) * 1.2e-7 * w.detach().abs()
        assert (moved <= allowed * 1.001 + rounding).all()
        large = before[0].abs() > rms
        assert (moved >= allowed * 0.999 - rounding)[large].all()


@pytest.mark.parametrize("cls", [MirrorAdam, torch.optim.AdamW])
def test_a_large_learning_rate_does_not_explode(cls: Any) -> None:
    """p = 1.1 with a gradient whose sign never changes: |w| grows by lr per step, no faster."""
    w = nn.Parameter(torch.randn(100) * 0.02)
    optimizer = cls([w], lr=3e-2, **({"geometry": 1.1} if cls is MirrorAdam else {}))
    for _ in range(300):
        w.grad = torch.full_like(w, -1.0)
        optimizer.step()
    assert w.abs().max() < 300 * 3e-2 + 0.2


def test_the_pure_power_is_there_without_a_knee() -> None:
    params = [parameter(9)]
    gradient = [[torch.randn(9)]]
    expected = reference.adam([params[0].detach()], gradient, lr=1e-2, geometry=1.1, knee=None)[0]
    params[0].grad = gradient[0][0].clone()
    MirrorAdam(params, lr=1e-2, geometry=1.1, knee=None).step()
    torch.testing.assert_close(params[0].double(), expected, rtol=1e-4, atol=1e-9)


def test_a_p_that_cannot_move_small_weights_gives_a_warning() -> None:
    param = nn.Parameter(torch.full((4,), 0.02))
    param.grad = torch.ones(4)
    with pytest.warns(UserWarning, match="p=30 with weights of about 0.02 .* do not move"):
        MirrorAdam([param], lr=1e-3, geometry=30.0).step()


# Surprises in everyday use


@each_implementation
@each_optimizer
@pytest.mark.parametrize("p", [1.1, 1.3, 1.5])
def test_the_smallest_edit_counts(how: How, cls: Optimizers, p: float) -> None:
    """A user's own decay of 1e-5 after every step, each far below the accuracy of u."""
    param = nn.Parameter(torch.rand(64) + 0.5)
    start = param.detach().clone()
    optimizer = cls([param], lr=1e-6, geometry=p, **how)
    for k in range(300):  # steps that cancel each other, so that every weight is written again
        param.grad = torch.full_like(param, (-1.0) ** k)
        optimizer.step()
        param.data.mul_(1 - 1e-5)
    # Each step rounds u, and w = u^(1/(p-1)): at most 1.8e-4 in all, of an effect of 3e-3. The
    # powers of the C library round u by up to four times as much.
    bound = 300 * 2.0**-24 * (1 if how else 4) / (p - 1) + 1e-5
    torch.testing.assert_close(param.detach(), start * (1 - 1e-5) ** 300, rtol=bound, atol=0)


@each_implementation
@pytest.mark.parametrize("p", [1.1, 1.3, 1.5])
def test_an_edit_of_one_unit_in_the_last_place(how: How, p: float) -> None:
    param = parameter(64, scale=1.0)
    optimizer = MirrorDescent([param], lr=1e-3, geometry=p, **how)
    steps(optimizer, 3)
    param.data.copy_(torch.nextafter(param.data, torch.tensor(9.0)))
    edited = param.detach().clone()
    steps(optimizer, 1, zero=True)
    assert torch.equal(param, edited)
    dual = optimizer.state[param]["dual"].double()
    expected = reference.mirror(edited.double(), p)
    assert ((dual / expected - 1).abs() < 2.0**-22).all()


@each_implementation
@each_optimizer
def test_a_resized_parameter_is_refused(how: How, cls: Optimizers) -> None:
    rows = nn.Parameter(torch.randn(40_960, 1))
    other = parameter(3)
    optimizer = cls([rows, other], lr=0.1, geometry=1.1, **how)
    steps(optimizer, 1)
    rows.data = torch.cat([rows.data, torch.randn(100, 1)])
    rows.grad = torch.randn_like(rows)
    before = rows.detach().clone(), other.detach().clone()
    with pytest.raises(RuntimeError, match=r"another shape than its state .*\(40960, 1\)"):
        optimizer.step()
    assert torch.equal(rows, before[0])
    assert torch.equal(other, before[1])


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
@each_optimizer
def test_a_gradient_of_another_shape_is_refused(how: How, p: float, cls: Optimizers) -> None:
    """The C library would read beyond its end, or take the wrong entries."""
    param, other = parameter(6, 4), parameter(3)
    optimizer = cls([param, other], lr=0.1, geometry=p, **how)
    for kept in (param.data[:, :3].clone(), torch.ones(6, 4000)):
        param.data = kept.clone()
        before = other.detach().clone()
        with pytest.raises(RuntimeError, match=r"another shape than its gradient, \(6, 4\)"):
            optimizer.step()
        assert torch.equal(param, kept) and torch.equal(other, before) and not optimizer.state


@each_optimizer
def test_options_set_in_mid_run_may_be_numbers_of_numpy(cls: Optimizers) -> None:
    params = [nn.Parameter(torch.full((5,), 0.5)) for _ in range(2)]
    for number, param in zip((np.float64, float), params, strict=True):
        optimizer = cls([param], lr=0.1, geometry=1.1)
        for p in (1.53125, 2.0, 3.03125):
            optimizer.param_groups[0].update(
                geometry=number(p), lr=number(0.1), weight_decay=number(0.1)
            )
            for _ in range(2):
                param.grad = torch.ones(5)
                optimizer.step()
    assert torch.equal(*params)


def test_a_beta_set_in_mid_run_in_a_list_is_checked_and_used() -> None:
    param = parameter(5)
    optimizer = MirrorAdam([param], lr=0.1, betas=[0.9, 0.999])  # pyright: ignore[reportArgumentType]
    steps(optimizer, 3)
    optimizer.param_groups[0]["betas"][0] = 1.5
    with pytest.raises(ValueError, match=r"betas\[0\] must be"):
        steps(optimizer, 1)
    optimizer.param_groups[0]["betas"][0] = 0.0
    steps(optimizer, 1)
    assert param.grad is not None and torch.equal(optimizer.state[param]["exp_avg"], param.grad)


@each_optimizer
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("geometry", 0.75, "geometry must be finite and greater than 1, got 0.75"),
        ("geometry", 1.0, "geometry must be finite and greater than 1, got 1.0"),
        ("lr", -1.0, "lr must be at least 0"),
        ("weight_decay", float("nan"), "weight_decay must be at least 0"),
    ],
)
def test_options_set_in_mid_run_are_checked(
    cls: Optimizers, option: str, value: float, message: str
) -> None:
    params = [parameter(3), parameter(4)]
    optimizer = cls([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    steps(optimizer, 2)
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[1][option] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]


@pytest.mark.parametrize("exponent", [-0.25, 0.0])
def test_power_refuses_what_would_never_end(exponent: float) -> None:
    with pytest.raises(ValueError, match="exponent must be greater than 0"):
        power(torch.ones(1), exponent)


def test_an_overflow_is_named_for_what_it_is() -> None:
    """Weights at -inf, and so a gradient of NaN: the message does not say that all is well."""
    param = nn.Parameter(torch.ones(3))
    optimizer = MirrorDescent([param], lr=1.0, geometry=1.1)
    param.grad = torch.tensor([1e5, 0.0, 0.0])
    optimizer.step()
    assert param[0] == -torch.inf
    param.grad = torch.full((3,), torch.nan)
    with pytest.raises(RuntimeError, match=r"The weights of parameter 0 .* are not finite either"):
        optimizer.step()
    assert param[0] == -torch.inf
    assert param[1:].isfinite().all()


def test_the_checkpoint_of_another_optimizer_is_refused() -> None:
    descent, adam = (cls([parameter(4)], lr=0.1) for cls in (MirrorDescent, MirrorAdam))
    descent.step()
    adam.step()
    with pytest.raises(ValueError, match="no betas: it was not saved by MirrorAdam"):
        adam.load_state_dict(descent.state_dict())
    with pytest.raises(ValueError, match="no normalize: it was not saved by MirrorDescent"):
        descent.load_state_dict(adam.state_dict())
    choices: list[dict[str, Any]] = [{"amsgrad": True}, {"weight_decay": 0.1}]
    for options in choices:
        other = torch.optim.Adam([parameter(4)], **options)
        other.step()
        with pytest.raises(ValueError, match="only AdamW's can be loaded"):
            adam.load_state_dict(other.state_dict())


@each_implementation
def test_mirror_adam_resumes_a_run_of_adamw(how: How) -> None:
    torch.manual_seed(0)
    params = [parameter(4, 3), parameter(7)]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    theirs: dict[str, Any] = {"foreach": how["foreach"]} if how else {"fused": native.available()}
    adamw = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, **theirs)
    steps(adamw, 3)
    ours = MirrorAdam(twins, lr=0.5, geometry=2.0, **how)
    for twin, param in zip(twins, params, strict=True):
        twin.data.copy_(param.detach())
    ours.load_state_dict(adamw.state_dict())
    assert ours.param_groups[0]["lr"] == 1e-2
    for optimizer in (adamw, ours):
        torch.manual_seed(5)
        steps(optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


@each_optimizer
def test_numbers_of_numpy(cls: Optimizers, tmp_path: Path) -> None:
    lr: Any = np.float32(1e-3)
    optimizer = cls([parameter(3)], lr=lr, geometry=np.float64(1.5))
    optimizer.add_param_group({"params": [parameter(2)], "weight_decay": np.float32(0.1)})
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert loaded["param_groups"][0]["lr"] == float(np.float32(1e-3))


@each_optimizer
@pytest.mark.parametrize("how", [{}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("p", [1.1, 2.0, 3.0])
def test_tensors_without_values(cls: Optimizers, how: How, p: float) -> None:
    """Meta and fake tensors, as people use them to plan memory."""

    def take_steps(device: str | None = None) -> nn.Parameter:
        param = nn.Parameter(torch.ones(3, 4, device=device))
        param.grad = torch.ones(3, 4, device=device)
        optimizer = cls([param], lr=0.1, geometry=p, **how)
        optimizer.step()
        optimizer.step()
        return param

    assert take_steps("meta").device.type == "meta"
    with FakeTensorMode():
        assert isinstance(take_steps(), FakeTensor)
    with torch.device("meta"):
        assert take_steps().device.type == "meta"
        if "fused" not in how:
            assert (take_steps("cpu") < 1).all()


@pytest.mark.slow
@each_optimizer
def test_a_compiled_step_is_the_same_step(cls: Optimizers) -> None:
    """torch.compile(optimizer.step) breaks no graph and compiles nothing again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    params = [parameter(5), parameter(3, 2)]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    ours, theirs = cls(params, lr=0.01), cls(twins, lr=0.01)
    compiled = torch.compile(ours.step)
    for k in range(4):
        for param, twin in zip(params, twins, strict=True):
            param.grad = torch.randn_like(param)
            twin.grad = param.grad.clone()
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.01 / (k + 1)
        compiled()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1


@pytest.mark.slow
def test_importing_the_optimizers_imports_nothing_distributed() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import mirrorhead as mh; mh.MirrorAdam;"
        "print([m for m in set(sys.modules) - before if m.startswith('torch.distributed')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


# The compiled kernel


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"center": "init"}], ids=str)
@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
@each_optimizer
def test_a_backward_pass_through_moved_weights_is_refused(
    cls: Optimizers, p: float, options: How, dtype: torch.dtype, how: How
) -> None:
    """As with torch's optimizers: its gradient would be that of no function."""
    param = parameter(5, dtype=dtype)
    optimizer = build(cls, [param], lr=0.1, geometry=p, **options, **how)
    for _ in range(3):
        loss = param.square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.5, 2.0])
@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"center": "init"}, {"maximize": True}]
)
@each_optimizer
def test_gradients_are_free_after_zero_grad(cls: Optimizers, options: How, p: float) -> None:
    """Without Python's garbage collector, which does not see how much memory a tensor takes."""
    param = parameter(1003)
    optimizer = build(cls, [param], lr=0.1, geometry=p, **options)
    alive = []
    gc.disable()
    try:
        for _ in range(6):
            param.grad = torch.randn(1003)
            optimizer.step()
            optimizer.zero_grad()
            tensors = [x for x in gc.get_objects() if type(x) is Tensor and x.numel() == 1003]
            alive.append(len({x.untyped_storage().data_ptr() for x in tensors}))
    finally:
        gc.enable()
    assert alive[-1] == alive[1]


@each_optimizer
def test_a_group_without_an_option_moves_nothing(cls: Optimizers) -> None:
    param = parameter(5)
    optimizer = cls([param], lr=0.1)
    param.grad = torch.ones(5)
    del optimizer.param_groups[0]["error_if_nonfinite"]
    before = param.detach().clone()
    with pytest.raises(KeyError, match="error_if_nonfinite"):
        optimizer.step()
    assert torch.equal(param, before)


def test_no_warnings_on_import_or_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(MirrorDescent([parameter(3)], lr=0.1), 2)
