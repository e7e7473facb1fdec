"""The conventions of torch.optim, which torch tests its own optimizers for, hold for ours.

The cases come from torch's OptimizerInfo database (`optimizer_infos`), which has an entry for every
optimizer that mirrorhead exports.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
)

import mirrorhead as mh
from optimizer_infos import EXPORTED, INFOS, Kwargs, least_squares, set_gradients

Copy = Callable[[Optimizer], Optimizer]

every_info = pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
every_case = pytest.mark.parametrize(
    ("info", "kwargs"),
    [
        pytest.param(info, case.kwargs, id=f"{info.name} {case.desc}")
        for info in INFOS
        for case in info.optim_inputs_func("cpu")
    ],
)


def build(info: OptimizerInfo, params: Any, kwargs: Kwargs) -> Optimizer:
    cls: Any = info.optim_cls
    required = {"reach": 0.3, "total_steps": 10, "geometry": 2} if cls is mh.CenteredAdam else {}
    return cls(params, **{**required, **deepcopy(kwargs)})


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((5, 4), (7,), (), (0, 2))]


def trained(
    info: OptimizerInfo, kwargs: Kwargs, steps: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Parameter], Optimizer]:
    params = parameters(dtype)
    optimizer = build(info, params, kwargs)
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return params, optimizer


def keys(optimizer: Optimizer) -> Any:
    """Return the names of everything that an optimizer holds."""
    saved = optimizer.state_dict()
    groups = [list(group) for group in saved["param_groups"]]
    return list(optimizer.defaults), groups, {i: list(x) for i, x in saved["state"].items()}


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_torchs_database_leaves_the_flags_of_torch_free() -> None:
    assert not torch.backends.flags_frozen()
    torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled  # pyright: ignore[reportAttributeAccessIssue]


def test_every_exported_optimizer_is_tested() -> None:
    assert {mh.MirrorAdam, mh.MirrorDescent} <= set(EXPORTED)
    assert [info.optim_cls for info in INFOS] == EXPORTED


@pytest.mark.parametrize(
    ("info", "error"),
    [
        pytest.param(info, error, id=f"{info.name} {error.optimizer_error_input.desc}")
        for info in INFOS
        if info.optim_error_inputs_func
        for error in info.optim_error_inputs_func("cpu", torch.float32)
    ],
)
def test_errors_of_torch(info: OptimizerInfo, error: ErrorOptimizerInput) -> None:
    given = error.optimizer_error_input
    params = [nn.Parameter(torch.randn(1))] if given.params is None else given.params
    assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            build(info, params, given.kwargs)
    else:
        with pytest.raises(error.error_type, match=error.error_regex):
            build(info, params, given.kwargs)


@every_info
@pytest.mark.parametrize("kind", [set, frozenset])
def test_parameters_without_an_order_are_refused(info: OptimizerInfo, kind: type) -> None:
    params = kind(parameters())
    for given in (params, [{"params": params}]):
        with pytest.raises(TypeError, match=r"ordered collections, .*got a (frozen)?set"):
            build(info, given, {})
    optimizer = build(info, parameters(), {})
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 1


@every_info
def test_what_is_no_leaf_tensor_is_refused(info: OptimizerInfo) -> None:
    x = nn.Parameter(torch.ones(2))
    for bad, error in ((x * 2, ValueError), (3.0, TypeError), (torch.zeros(2).long(), TypeError)):
        with pytest.raises(error):
            build(info, [bad], {})
    for dtype in (torch.complex64, torch.complex128):
        with pytest.raises(TypeError, match="view_as_real"):
            build(info, [nn.Parameter(torch.ones(2, dtype=dtype))], {})


@every_info
@pytest.mark.parametrize("option", ["differentiable", "capturable"])
def test_options_that_torch_has_and_we_do_not_are_refused_by_name(
    info: OptimizerInfo, option: str
) -> None:
    with pytest.raises(TypeError, match=f"{option}=True"):
        build(info, [{"params": parameters(), option: True}], {})
    optimizer = build(info, parameters(), {})
    saved = optimizer.state_dict()
    saved["param_groups"][0][option] = True
    with pytest.raises(TypeError, match=f"{option}=True"):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0][option] = True
    set_gradients(optimizer.param_groups[0]["params"], 0)
    with pytest.raises(TypeError, match=f"{option}=True"):
        optimizer.step()


@every_info
def test_sparse_gradients_are_refused_by_name(info: OptimizerInfo) -> None:
    layer = nn.Embedding(3, 2, sparse=True)
    optimizer = build(info, layer.named_parameters(), {})
    layer(torch.tensor([1])).sum().backward()
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"the gradient of 'weight' is sparse"):
        optimizer.step()
    assert torch.equal(layer.weight, before)


@every_case
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_loss_goes_the_right_way(info: OptimizerInfo, kwargs: Kwargs, contiguous: bool) -> None:
    weight, bias, x = least_squares(contiguous)
    optimizer = build(info, [weight, bias], kwargs)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).pow(2).sum()
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(20):
        loss: Any = optimizer.step(closure)  # pyright: ignore[reportArgumentType, reportCallIssue]
        assert loss.requires_grad
    assert (closure().item() > first) == kwargs.get("maximize", False)


@every_info
@pytest.mark.parametrize("which", range(len(INFOS[0].scheduler_inputs)))
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=str)
def test_schedulers_and_groups(info: OptimizerInfo, which: int, lr: Any) -> None:
    weight, bias, x = least_squares()
    optimizer = build(info, [{"params": [weight]}, {"params": [bias], "lr": 1e-3}], {"lr": lr})
    schedulers = [make(optimizer) for make in info.scheduler_inputs[which]]
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).pow(2).sum()
        loss.backward()
        optimizer.step()
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(loss.detach()) if plateau else scheduler.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert isinstance(optimizer.param_groups[0]["lr"], type(lr))


@pytest.mark.parametrize("kind", ["CyclicLR", "OneCycleLR"])
@every_info
def test_cycles_take_tensors_as_bounds(info: OptimizerInfo, kind: str) -> None:
    def run(number: Callable[[float], Any]) -> list[torch.Tensor]:
        params = parameters()
        optimizer = build(info, params, {"lr": number(1e-2)})
        bounds = {"base_momentum": number(0.7), "max_momentum": number(0.9)}
        if kind == "CyclicLR":
            bounds |= {"base_lr": number(1e-3), "max_lr": number(1e-2), "step_size_up": 3}
            scheduler = CyclicLR(optimizer, **bounds)
        else:
            scheduler = OneCycleLR(optimizer, max_lr=number(1e-2), total_steps=10, **bounds)
        for step in range(9):
            set_gradients(params, step)
            optimizer.step()
            scheduler.step()
        group = optimizer.param_groups[0]
        cycled = group["betas"][0] if "betas" in group else group["momentum"]
        assert 0.69 < cycled < 0.91
        return [param.detach() for param in params]

    expected = run(float)
    got = run(lambda x: torch.tensor(x, dtype=torch.float64))
    torch.testing.assert_close(got, expected)


@every_case
def test_implementations_agree(info: OptimizerInfo, kwargs: Kwargs) -> None:
    if not info.supported_impls:
        return  # it has one
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        expected, reference = trained(info, kwargs, 7, dtype)
        if kwargs.get("stochastic_rounding") and dtype == torch.bfloat16:
            continue  # each draws its own noise
        for foreach in (False, True):
            got, optimizer = trained(info, {**kwargs, "foreach": foreach}, 7, dtype)
            rtol, atol = (1.6e-2, 1e-4) if dtype == torch.bfloat16 else (3e-5, 1e-6)
            torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
            for one, other in zip(got, expected, strict=True):
                assert optimizer.state[one].keys() == reference.state[other].keys()


@pytest.mark.slow
@every_info
@pytest.mark.parametrize("p", [1.5, 2, 3])
def test_fused_agrees(info: OptimizerInfo, p: float) -> None:
    if not info.supported_impls:
        return
    expected, _ = trained(info, {"geometry": p, "foreach": False}, 7)
    got, _ = trained(info, {"geometry": p, "fused": True}, 7)
    torch.testing.assert_close(got, expected, rtol=3e-5, atol=1e-6)


@every_info
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_lr_is_a_number(info: OptimizerInfo, how: Kwargs, shape: tuple) -> None:
    how = how if info.supported_impls else {}
    lr = torch.full(shape, 0.015625)
    got, optimizer = trained(info, {**how, "lr": lr})
    expected, _ = trained(info, {**how, "lr": 0.015625})
    assert_same(got, expected)
    assert torch.equal(optimizer.param_groups[0]["lr"], lr)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (mh.MirrorDescent, {"momentum": 0.5, "weight_decay": 0.25}),
        (mh.MirrorAdam, {"betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.25}),
    ],
)
def test_tensors_as_options_are_numbers(cls: Any, options: Kwargs) -> None:
    def as_tensors(value: Any) -> Any:
        return tuple(map(as_tensors, value)) if isinstance(value, tuple) else torch.tensor([value])

    info = next(info for info in INFOS if info.optim_cls is cls)
    tensors = {name: as_tensors(value) for name, value in options.items()}
    expected, _ = trained(info, options)
    got, optimizer = trained(info, tensors)
    assert_same(got, expected)
    for name, value in options.items():
        assert optimizer.defaults[name] == optimizer.param_groups[0][name] == value
    # The same set in a group in the middle of the run.
    got, optimizer = trained(info, {}, steps=0)
    optimizer.param_groups[0].update(tensors)
    for step in range(3):
        set_gradients(got, step)
        optimizer.step()
    assert_same(got, expected)


@every_case
def test_no_gradient_moves_nothing_and_zero_gradients_only_decay(
    info: OptimizerInfo, kwargs: Kwargs
) -> None:
    params = parameters()
    before = deepcopy(params)
    optimizer = build(info, params, kwargs)
    optimizer.step()
    assert_same(params, before)
    assert not optimizer.state
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        still = not kwargs.get("weight_decay") or not param.numel()
        assert torch.equal(param, old) == still


@every_case
def test_gradients_are_not_changed(info: OptimizerInfo, kwargs: Kwargs) -> None:
    params = parameters()
    optimizer = build(info, params, kwargs)
    grads = []
    for step in range(3):
        set_gradients(params, step)
        grads = [param.grad for param in params]
        copies = deepcopy(grads)
        optimizer.step()
        assert_same(grads, copies)
        assert all(param.grad is g for param, g in zip(params, grads, strict=True))
    optimizer.zero_grad(set_to_none=False)
    assert all(not g.any() for g in grads if g is not None)
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)


@every_case
def test_no_entry_of_the_state_is_empty(info: OptimizerInfo, kwargs: Kwargs) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _, optimizer = trained(info, kwargs, dtype=dtype)
        assert all(optimizer.state.values())
        assert len(optimizer.state) in (0, 4)


def by_load_state_dict(optimizer: Optimizer) -> Optimizer:
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def by_file(optimizer: Optimizer) -> Optimizer:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    return optimizer


COPIES: dict[str, Copy] = {
    "load_state_dict": by_load_state_dict,
    "file": by_file,
    "deepcopy": deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@every_case
@pytest.mark.parametrize("copy", COPIES)
def test_a_round_trip_changes_no_key_and_no_bit(
    info: OptimizerInfo, kwargs: Kwargs, copy: str
) -> None:
    params, optimizer = trained(info, kwargs)
    other = COPIES[copy](COPIES[copy](optimizer))
    straight, reference = trained(info, kwargs)
    assert keys(other) == keys(reference)
    assert_same(other.state_dict()["state"], reference.state_dict()["state"])
    params = other.param_groups[0]["params"]
    for step in range(3, 6):
        for some, one in ((params, other), (straight, reference)):
            set_gradients(some, step)
            one.step()
    assert_same(params, straight)
    other.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert other.param_groups[0].keys() == other.param_groups[1].keys() | (
        {"reach"} & other.param_groups[0].keys()
    )


@every_info
def test_a_copy_has_all_public_attributes(info: OptimizerInfo) -> None:
    _, optimizer = trained(info, {})
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    copied = deepcopy(optimizer)
    assert public == {name for name in vars(copied) if not name.startswith("_")}
    assert info.name in repr(copied)


@every_info
def test_a_checkpoint_without_newer_options_loads(info: OptimizerInfo) -> None:
    params, optimizer = trained(info, {})
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        for name in (*info.not_og_supported_flags, "fused", "stochastic_rounding", "step"):
            group.pop(name, None)
    other = build(info, params, {})
    expected = keys(other)[1]
    other.load_state_dict(saved)
    assert [set(names) for names in keys(other)[1]] == [set(names) for names in expected]
    other.step()


@every_info
@pytest.mark.parametrize("old", ["differentiable", "capturable"])
def test_a_key_that_an_earlier_round_trip_added_is_left_out(info: OptimizerInfo, old: str) -> None:
    params, optimizer = trained(info, {})
    saved = optimizer.state_dict()
    saved["param_groups"][0][old] = False
    given = deepcopy(saved)
    other = build(info, params, {})
    other.load_state_dict(saved)
    assert keys(other) == keys(optimizer)
    assert saved["param_groups"] == given["param_groups"]


@every_case
@pytest.mark.parametrize("kind", [int, float])
def test_a_step_that_is_a_plain_number_loads(
    info: OptimizerInfo, kwargs: Kwargs, kind: type
) -> None:
    def plain(saved: dict[str, Any]) -> dict[str, Any]:
        for state in saved["state"].values():
            if "step" in state:
                state["step"] = kind(state["step"])
        return saved

    expected, reference = trained(info, kwargs)
    params, optimizer = trained(info, kwargs)
    optimizer.load_state_dict(plain(deepcopy(optimizer.state_dict())))
    assert_same(optimizer.state_dict()["state"], reference.state_dict()["state"])
    for some, one in ((params, optimizer), (expected, reference)):
        set_gradients(some, 3)
        one.step()
    assert_same(params, expected)


def test_an_old_checkpoint_of_adamw_loads() -> None:
    params = parameters()
    theirs = torch.optim.AdamW(params)
    set_gradients(params, 0)
    theirs.step()
    saved = deepcopy(theirs.state_dict())
    for state in saved["state"].values():
        state["step"] = 1
    mine = mh.MirrorAdam(params, geometry=2)
    mine.load_state_dict(saved)
    others = deepcopy(params)
    theirs = torch.optim.AdamW(others)
    theirs.load_state_dict(saved)
    for some, one in ((params, mine), (others, theirs)):
        set_gradients(some, 1)
        one.step()
    assert_same(params, others)


@pytest.mark.parametrize("bad", ["3", None, True, [1.0], -1, float("nan")])
def test_a_step_that_is_no_number_is_refused(bad: Any) -> None:
    params = parameters()
    optimizer = mh.MirrorAdam(params)
    set_gradients(params, 0)
    optimizer.step()
    saved = deepcopy(optimizer.state_dict())
    saved["state"][1]["step"] = bad
    with pytest.raises(ValueError, match=r"'step'.*must be a finite number at least 0, got"):
        optimizer.load_state_dict(saved)


@every_info
def test_checkpoints_with_and_without_names(info: OptimizerInfo) -> None:
    params = parameters()
    named = [(f"w{i}", param) for i, param in enumerate(params)]
    for source, target in ((params, named), (named, params), (named, named)):
        one, other = build(info, source, {}), build(info, target, {})
        set_gradients(params, 0)
        one.step()
        saved = one.state_dict()
        assert saved["param_groups"][0].get("param_names") == (
            [name for name, _ in named] if source is named else None
        )
        other.load_state_dict(saved)
        names = other.param_groups[0].get("param_names")
        assert names == (None if source is target is params else [name for name, _ in named])


@every_info
def test_hooks_are_called_in_order(info: OptimizerInfo) -> None:
    _, optimizer = trained(info, {})
    calls: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    for what in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            register = getattr(optimizer, f"register_{what}_{when}_hook")
            handle = register(hook("removed"))
            register(hook(f"{what} {when}"))
            if what != "step":
                register(hook(f"{what} {when} first"), prepend=True)
            handle.remove()
    optimizer.step()
    assert calls == ["step pre", "step post"]
    calls.clear()
    saved = optimizer.state_dict()
    assert calls == [f"state_dict {x}" for x in ("pre first", "pre", "post first", "post")]
    calls.clear()
    optimizer.load_state_dict(saved)
    assert calls == [f"load_state_dict {x}" for x in ("pre first", "pre", "post first", "post")]

    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    assert optimizer.state_dict()["note"] == 1

    def twice(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 2 * group["lr"]} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(twice)
    lr = optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 2 * lr


@every_info
def test_groups_may_be_empty_and_differ(info: OptimizerInfo) -> None:
    params = parameters()
    before = deepcopy(params)
    # At its center a weight does not decay.
    own = {"center": None} if info.optim_cls is mh.CenteredAdam else {}
    groups = [
        {"params": []},
        {"params": params[:2], "weight_decay": 0.5, **own},
        {"params": params[2:], "lr": 0.0},
    ]
    optimizer = build(info, groups, {"lr": 0.1})
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert params[0].norm() < before[0].norm()
    assert_same(params[2:], before[2:])
    by_load_state_dict(optimizer).step()


@every_info
def test_the_default_lr_is_that_of_torch(info: OptimizerInfo) -> None:
    theirs = torch.optim.SGD(parameters()).defaults["lr"]
    if info.optim_cls is mh.CenteredAdam:
        theirs = 1.0  # a share of the full rate
    assert build(info, parameters(), {}).defaults["lr"] == theirs


@every_case
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_loads_twice(
    info: OptimizerInfo, kwargs: Kwargs, tmp_path: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "geometry": 1.5}]
    optimizer = build(info, groups, kwargs)

    def train() -> list[torch.Tensor]:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    train()
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    straight = [train(), train()]
    for _ in range(2):
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state}
        load(saved, checkpoint_id=tmp_path, no_dist=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        assert_same([train(), train()], straight)
