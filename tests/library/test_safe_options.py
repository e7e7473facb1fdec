"""No documented value of an option is dangerous while the others keep their defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from building import build
from mirrorhead import MirrorAdam, MirrorDescent

HOWS = [{}, {"foreach": True}, {"foreach": False}]
RUNS = [(torch.float32, how) for how in HOWS] + [(torch.bfloat16, {}), (torch.float16, {})]
P = [1.01, 1.03, 1.05, 1.1, 1.2, 1.25, 1.3, 1.5, 1.75, 1.9, 2, 2.5, 3, 4, 6, 10]
LR = 1e-3  # the default
# The size of a tensor: what it starts at, what single weights of a trained one may be.
SIZES = [0.0, 1e-30, 1e-12, 1e-8, 1e-6, 1e-4, 9e-4, 1.1e-3, 5e-3, 0.02, 1.0]

BOTH: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"maximize": True},
    {"keep_dual": False},
    {"stochastic_rounding": True},
    {"error_if_nonfinite": False},
    {"lr": torch.tensor(LR)},
]
ADAM: list[dict[str, Any]] = [
    *BOTH,
    {"knee": None},
    {"knee": 0.1},
    {"knee": 10.0},
    {"rms_floor": 1e-12},
    {"rms_floor": 1e-2},
    {"rms_floor": 1.0},
    {"eps": 0.0},
    {"eps": 1e-3},
    {"betas": (0.0, 0.0)},
    {"betas": (0.99, 0.9999)},
    {"center": "init", "steps": 100, "lr": LR},
]
DESCENT: list[dict[str, Any]] = [
    *BOTH,
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"normalize": "tensor"},
    {"normalize": "global"},
    {"center": "init"},
]


def tensors(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter((size * torch.randn(16)).to(dtype)) for size in SIZES]


def walk(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int) -> list[Tensor]:
    """Take steps along a gradient of size 1 that keeps its sign. Return how far each moved."""
    torch.manual_seed(1)
    for param in params:
        param.grad = torch.randn(param.shape).sign().to(param.dtype)
    start = [param.detach().double() for param in params]
    for _ in range(steps):
        optimizer.step()
    return [(param.detach().double() - w) for param, w in zip(params, start, strict=True)]


def sizes(param: nn.Parameter, by: Tensor) -> tuple[Tensor, float, float]:
    """Return the weights before the step, the largest of before and after, and its rounding."""
    after, info = param.detach().double(), torch.finfo(param.dtype)
    largest = float(torch.maximum(after.abs(), (after - by).abs()).max())
    return after - by, largest, 2.1 * info.eps * max(largest, info.tiny)


# Honest warnings, at p > 2.
@pytest.mark.filterwarnings("ignore:knee=.* has no effect")
@pytest.mark.filterwarnings("ignore:p=.* so they do not move")
@pytest.mark.parametrize(("dtype", "how"), RUNS, ids=str)
@pytest.mark.parametrize("options", ADAM, ids=str)
def test_a_step_of_adam_is_bounded(
    options: dict[str, Any], dtype: torch.dtype, how: dict[str, Any]
) -> None:
    knee = options.get("knee", 1.0)
    for p in P:
        params = tensors(dtype)
        moved = walk(build(MirrorAdam, params, geometry=p, **options, **how), params, 1)
        for param, by in zip(params, moved, strict=True):
            assert param.isfinite().all()
            before, largest, rounding = sizes(param, by)
            r = max(float(before.square().mean().sqrt()), options.get("rms_floor", 0))
            if p > 2:  # a weight at 0 moves furthest: u moves by lr (p-1) r^(p-2)
                r = max(largest, options.get("rms_floor", 1e-2))
                bound = 2 * (LR * (p - 1) * r ** (p - 2)) ** (1 / (p - 1))
            elif r < 1e-3 or p == 2:  # as with AdamW, whatever the options
                bound = LR
            else:
                bound = LR * max(largest / r if knee is None else knee, 1) ** (2 - p)
            decayed = largest * (1 - (1 - LR * options.get("weight_decay", 0)) ** (1 / (p - 1)))
            assert float(by.abs().max()) <= 1.01 * (bound + decayed) + rounding, (p, r)


@pytest.mark.parametrize(("dtype", "how"), RUNS, ids=str)
@pytest.mark.parametrize("options", DESCENT, ids=str)
def test_a_step_of_descent_is_bounded(
    options: dict[str, Any], dtype: torch.dtype, how: dict[str, Any]
) -> None:
    for p in P:
        params = tensors(dtype)
        moved = walk(MirrorDescent(params, geometry=p, **options, **how), params, 1)
        in_dual = 1.01 * LR * (1 + options.get("momentum", 0))
        for param, by in zip(params, moved, strict=True):
            assert param.isfinite().all()
            _, largest, rounding = sizes(param, by)
            if p > 2:  # a weight at 0 moves furthest
                bound = 2 * in_dual ** (1 / (p - 1))
            else:
                size = 1.0 if options.get("center") else largest
                bound = in_dual * size ** (2 - p) / (p - 1)
            decayed = largest * (1 - (1 - LR * options.get("weight_decay", 0)) ** (1 / (p - 1)))
            assert float(by.abs().max()) <= 1.01 * (bound + decayed) + rounding, p


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("knee", [None, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("p", [1.03, 1.05, 1.1, 1.5, 1.75])
def test_biases_at_zero_move_as_with_adamw_whatever_the_knee(
    p: float, knee: float | None, how: dict[str, Any]
) -> None:
    mine = [nn.Parameter(torch.zeros(3)), nn.Parameter(0.02 * torch.randn(4, 3))]
    theirs = [nn.Parameter(param.detach().clone()) for param in mine]
    torch.manual_seed(2)
    optimizers = (
        MirrorAdam(mine, geometry=p, knee=knee, **how),
        torch.optim.AdamW(theirs, weight_decay=0),
    )
    for _ in range(30):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = other.grad = torch.randn(one.shape) + 0.5
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(mine[0], theirs[0], rtol=2e-3, atol=1e-6)
    assert not torch.allclose(mine[1], theirs[1], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("p", [1.1, 1.5, 2, 3])
def test_without_eps_a_weight_without_a_gradient_stays(p: float, how: dict[str, Any]) -> None:
    w = nn.Parameter(torch.tensor([0.0, 0.02, -0.5]))
    before = w.detach().clone()
    w.grad = torch.tensor([0.0, 0.0, 1.0])
    MirrorAdam([w], geometry=p, eps=0.0, **how).step()
    assert torch.equal(w.detach()[:2], before[:2])
    assert w[2] < before[2]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("p", [2.5, 3.0, 4.0])
def test_above_2_a_tensor_at_zero_has_the_size_1e_2(p: float, how: dict[str, Any]) -> None:
    w = nn.Parameter(torch.zeros(3))
    w.grad = torch.ones(3)
    MirrorAdam([w], geometry=p, **how).step()
    expected = -((LR * (p - 1) * 1e-2 ** (p - 2)) ** (1 / (p - 1)))
    torch.testing.assert_close(w.detach(), torch.full((3,), expected), rtol=1e-5, atol=0)
