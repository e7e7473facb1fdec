"""A checkpoint is loaded whole or not at all: missing state and NaN in it are refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from building import build
from mirrorhead import MirrorAdam, MirrorDescent

CASES: list[tuple[Any, torch.dtype, dict[str, Any]]] = [
    (MirrorDescent, torch.float32, {"geometry": 1.1, "momentum": 0.9}),
    (MirrorDescent, torch.bfloat16, {"geometry": 3, "momentum": 0.9}),
    (MirrorDescent, torch.float16, {"geometry": 3, "momentum": 0.9, "nesterov": True}),
    (MirrorDescent, torch.float32, {"geometry": 1.5, "center": "init"}),
    (MirrorDescent, torch.float32, {"geometry": 2, "center": "init", "momentum": 0.9}),
    (MirrorAdam, torch.float32, {"geometry": 1.1}),
    (MirrorAdam, torch.float32, {"geometry": 2, "weight_decay": 0.1}),
    (MirrorAdam, torch.float32, {"geometry": 3}),
    (MirrorAdam, torch.bfloat16, {"geometry": 1.5}),
    (MirrorAdam, torch.bfloat16, {"geometry": 2}),
    (MirrorAdam, torch.float16, {"geometry": 3}),
    (MirrorAdam, torch.float32, {"geometry": 1.1, "center": "init"}),
    (MirrorAdam, torch.float16, {"geometry": 3, "center": "init"}),
]
each_case = pytest.mark.parametrize(("cls", "dtype", "options"), CASES, ids=str)


def stepped(cls: Any, dtype: torch.dtype, options: dict[str, Any], steps: int = 2) -> Any:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in [(4, 3), (5,)]]
    params = [nn.Parameter(w) for w in start]
    optimizer = build(cls, [("one", params[0]), ("two", params[1])], lr=0.1, **options)
    advance(optimizer, steps)
    return optimizer


def advance(optimizer: Any, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, Tensor) else a == b


def assert_refused(optimizer: Any, state_dict: dict[str, Any], message: str) -> None:
    """Not only the state stays: the next steps are those of an optimizer that loaded nothing."""
    before, twin = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert same(optimizer.state_dict(), before)
    for one in (optimizer, twin):
        advance(one, 1, seed=7)
    assert same(optimizer.state_dict()["state"], twin.state_dict()["state"])
    for mine, other in zip(
        optimizer.param_groups[0]["params"], twin.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(mine, other)


@each_case
def test_missing_state_is_refused(cls: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    optimizer = stepped(cls, dtype, options)
    saved = copy.deepcopy(optimizer.state_dict())
    for name in saved["state"][1]:
        bad = copy.deepcopy(saved)
        del bad["state"][1][name]
        assert_refused(optimizer, bad, f"has no '{name}' for 'two'")


@each_case
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_state_that_is_not_finite_is_refused(
    cls: Any, dtype: torch.dtype, options: dict[str, Any], bad: float
) -> None:
    optimizer = stepped(cls, dtype, options)
    saved = copy.deepcopy(optimizer.state_dict())
    for name, value in saved["state"][1].items():
        if name == "exp_avg_sq" and bad == math.inf:
            continue
        broken = copy.deepcopy(saved)
        broken["state"][1][name] = value.clone()
        broken["state"][1][name].view(-1)[-1] = bad
        assert_refused(optimizer, broken, f"'{name}' for 'two'.* must be .*, got {bad}")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("exp_avg_sq", -torch.ones(5), r"at least 0, got -1\.0"),
        ("rms", torch.tensor(-1.0), "at least 0, got -1"),
        ("step", torch.tensor(-1.0), "at least 0, got -1"),
        ("step", "3", "must be a tensor of one number, got a str|number at least 0, got '3'"),
        ("rms", torch.ones(2), "must be a tensor of one number"),
        ("scale", torch.tensor(0.0), "greater than 0, got 0"),
        ("dual", [1.0] * 5, "must be a floating point tensor, got list"),
        ("exp_avg", torch.ones(5, dtype=torch.int64), r"got torch\.int64"),
    ],
)
def test_state_that_no_run_has_is_refused(name: str, value: Any, message: str) -> None:
    optimizer = stepped(*CASES[11])
    bad = copy.deepcopy(optimizer.state_dict())
    bad["state"][1][name] = value
    assert_refused(optimizer, bad, f"'{name}' for 'two': .*{message}")


def test_parameters_without_names_are_counted() -> None:
    optimizer = MirrorAdam([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
    advance(optimizer, 1)
    bad = copy.deepcopy(optimizer.state_dict())
    del bad["state"][1]["rms"]
    assert_refused(optimizer, bad, r"no 'rms' for parameter 1 of group 0, shape \(3,\); it has")


def test_what_overflowed_in_a_run_is_loaded_as_it_was() -> None:
    """A gradient of 1e25 is finite, and its square is not."""
    optimizer = stepped(MirrorAdam, torch.float32, {"geometry": 1.1}, steps=1)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 1e25)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["exp_avg_sq"].isposinf().all()
    optimizer.load_state_dict(saved)
    assert same(optimizer.state_dict()["state"], saved["state"])


@each_case
def test_what_has_no_state_yet_needs_none(
    cls: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Before the first step, for parameters that are frozen, and for empty entries."""
    start = stepped(cls, dtype, options, steps=0)
    start.load_state_dict(copy.deepcopy(start.state_dict()))
    frozen = stepped(cls, dtype, options, steps=0)
    one, two = frozen.param_groups[0]["params"]
    one.grad = torch.ones_like(one)
    frozen.step()
    for entries in ({}, {1: {}}):
        saved = copy.deepcopy(frozen.state_dict())
        saved["state"].update(entries)
        other = stepped(cls, dtype, options, steps=0)
        other.load_state_dict(saved)
        two.grad = torch.ones_like(two)
        advance(other, 1)


@pytest.mark.parametrize("p", [1.1, 2.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_of_adamw_can_be_saved_again_before_a_step(
    p: float, dtype: torch.dtype
) -> None:
    adamw = stepped(torch.optim.AdamW, dtype, {"weight_decay": 0.0})
    runs = []
    for again in (False, True):
        ours = stepped(MirrorAdam, dtype, {"geometry": p}, steps=0)
        ours.load_state_dict(copy.deepcopy(adamw.state_dict()))
        if again:
            saved = copy.deepcopy(ours.state_dict())
            ours = stepped(MirrorAdam, dtype, {"geometry": p}, steps=0)
            ours.load_state_dict(saved)
        advance(ours, 2)
        runs.append(ours)
    assert same(*(run.state_dict()["state"] for run in runs))
    for name in ("exp_avg", "exp_avg_sq", "step"):
        bad = copy.deepcopy(adamw.state_dict())
        del bad["state"][0][name]
        assert_refused(runs[0], bad, f"has no '{name}' for 'one'")


def test_a_checkpoint_in_full_precision_is_loaded_for_weights_in_half() -> None:
    full = stepped(MirrorAdam, torch.float32, {"geometry": 3})
    half = stepped(MirrorAdam, torch.bfloat16, {"geometry": 3}, steps=0)
    half.load_state_dict(copy.deepcopy(full.state_dict()))
    advance(half, 1)
    assert "wide" in half.state[half.param_groups[0]["params"][0]]


def changed_p(optimizer: Any) -> None:
    optimizer.param_groups[0]["geometry"] = 1.5


def changed_center(optimizer: Any) -> None:
    optimizer.param_groups[0].update(center="init")


@pytest.mark.filterwarnings("ignore:the state_dict was saved with geometry=1.5:UserWarning")
@pytest.mark.parametrize(
    ("cls", "change", "name"),
    [(MirrorAdam, changed_p, "dual"), (MirrorDescent, changed_center, "center")],
)
def test_the_error_says_how_to_load_after_a_change_of_options(
    cls: Any, change: Callable[[Any], None], name: str
) -> None:
    options = {"geometry": 3, **({"momentum": 0.9} if cls is MirrorDescent else {})}
    optimizer = stepped(cls, torch.float32, options)
    before = {**optimizer.param_groups[0]}
    change(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    other = stepped(cls, torch.float32, options, steps=0)
    with pytest.raises(ValueError, match=rf"no '{name}'.*load the state_dict with the old value"):
        other.load_state_dict(saved)
    for option in {"geometry", "center"} & before.keys():
        saved["param_groups"][0][option] = before[option]
    other.load_state_dict(saved)
    with torch.no_grad():
        for mine, theirs in zip(
            other.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True
        ):
            mine.copy_(theirs)
    change(other)
    for one in (optimizer, other):
        advance(one, 2)
    assert same(optimizer.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize(("cls", "dtype", "options"), CASES[8:], ids=str)
def test_step_and_rms_come_back_to_the_cpu(
    cls: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """From torch.load(map_location="cuda"): there, every step would wait for each of them."""
    saved = stepped(cls, dtype, options).state_dict()
    with FakeTensorMode():  # a device that needs no hardware, nor numbers
        for entry in saved["state"].values():
            for name, x in entry.items():
                entry[name] = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        params = [nn.Parameter(torch.empty(s, dtype=dtype, device="cuda")) for s in [(4, 3), (5,)]]
        optimizer = build(cls, params, lr=0.1, **options)
        optimizer.load_state_dict(saved)
        devices = {name: x.device.type for name, x in optimizer.state[params[0]].items()}
    assert devices == {name: "cpu" if name in ("step", "rms") else "cuda" for name in devices}
