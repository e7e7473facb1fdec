"""Entries for torch's OptimizerInfo database: one for every optimizer that mirrorhead exports."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import hypothesis
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    PolynomialLR,
    ReduceLROnPlateau,
    StepLR,
)

import mirrorhead

# torch's test utilities load a hypothesis profile of their own and freeze torch's flags, for all
# tests of the process: undo both.
hypothesis.settings.register_profile("before torch", hypothesis.settings())
from torch.testing._internal.common_optimizers import (  # noqa: E402
    ErrorOptimizerInput,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

hypothesis.settings.load_profile("before torch")
# torch.backends stands for the module that has the flag, so setting it there would not reach it.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

Kwargs = dict[str, Any]

EXPORTED: list[type[Optimizer]] = [
    thing
    for thing in (getattr(mirrorhead, name) for name in mirrorhead.__all__)
    if isinstance(thing, type) and issubclass(thing, Optimizer)
]

COMMON: list[Kwargs] = [
    {},
    {"lr": 1e-2},
    {"lr": torch.tensor(1e-2)},
    {"geometry": 1.1},
    {"geometry": 1.75},
    {"geometry": 2},
    {"geometry": 3.0, "weight_decay": 0.1},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"geometry": 2, "weight_decay": 0.1, "maximize": True},
    {"keep_dual": False, "geometry": 1.5},
    {"stochastic_rounding": True},
    {"error_if_nonfinite": False},
]
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"SteepestDescent": ()}
TAKE_COMMON = ("MirrorDescent", "MirrorAdam")
CENTERED: list[Kwargs] = [
    {"reach": 0.1, "total_steps": 40, **own}
    for own in ({}, {"geometry": 1.5, "betas": (0.5, 0.9)}, {"lr": torch.tensor(0.5)})
] + [{"center": None, "lr": 1e-2}, {"center": None, "geometry": 3.0, "lr": 1e-2}]
STEEPEST: list[Kwargs] = [
    {},
    {"lr": 1e-2},
    {"lr": torch.tensor(1e-2)},
    *({"geometry": p} for p in (1, 1.5, 2)),
    {"geometry": 3.0, "weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "error_if_nonfinite": False},
    {"momentum": torch.tensor(0.9), "nesterov": True, "match_rms": 0.2},
]
OWN: dict[str, list[Kwargs]] = {
    "SteepestDescent": STEEPEST,
    "CenteredAdam": CENTERED,
    "MirrorDescent": [
        *({"momentum": 0.9, "geometry": p} for p in (1.5, 2, 3)),
        *(
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "geometry": p}
            for p in (1.5, 2)
        ),
        {"momentum": torch.tensor(0.9), "weight_decay": torch.tensor(0.1)},
        {"normalize": "tensor"},
        {"normalize": "global", "momentum": 0.9},
        {"center": "init", "geometry": 1.5},
        {"center": "init", "geometry": 1.5, "momentum": 0.9},
    ],
    "MirrorAdam": [
        {"betas": (0.5, 0.9), "eps": 1e-3},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "weight_decay": torch.tensor(0.1)},
        {"betas": (torch.tensor([[0.9]]), torch.tensor([0.99])), "lr": torch.tensor([1e-3])},
        {"knee": 3.0, "geometry": 1.1},
        {"knee": None, "geometry": 1.1},
        {"knee": None, "geometry": 1.5, "rms_floor": 1e-2},
    ],
}
BAD: dict[str, list[tuple[Kwargs, type[Exception], str]]] = {
    "MirrorDescent": [
        ({"momentum": -0.5}, ValueError, "momentum must be at least 0"),
        ({"momentum": torch.tensor([0.5, 0.5])}, ValueError, "Tensor momentum must be 1-element"),
        ({"nesterov": True}, ValueError, "nesterov=True needs momentum"),
    ],
    "CenteredAdam": [
        ({"reach": 0.0, "total_steps": 3}, ValueError, "reach must be greater than 0"),
    ],
    "SteepestDescent": [
        ({"momentum": -0.5}, ValueError, "momentum must be at least 0"),
        ({"nesterov": True}, ValueError, "nesterov=True needs momentum"),
        ({"geometry": 0.5}, ValueError, "geometry must be a number from 1 to inf"),
        ({"match_rms": 0.0}, ValueError, "match_rms must be greater than 0"),
    ],
    "MirrorAdam": [
        ({"betas": (1.0, 0.0)}, ValueError, r"betas\[0\] must be at least 0 and less than 1"),
        ({"betas": (0.5, torch.tensor(-1.0))}, ValueError, r"betas\[1\] must be at least 0"),
        (
            {"betas": (0.5, torch.tensor([0.9, 0.9]))},
            ValueError,
            r"Tensor betas\[1\] must be 1-element",
        ),
        ({"eps": -1e-8}, ValueError, "eps must be at least 0"),
    ],
}
for _name in ("MirrorDescent", "MirrorAdam"):
    BAD[_name].append(({"foreach": True, "fused": True}, ValueError, "foreach and fused"))
for _both in BAD.values():
    _both += [
        ({"lr": -1.0}, ValueError, "lr must be at least 0"),
        ({"weight_decay": -1}, ValueError, "weight_decay must be at least 0"),
        ({"differentiable": True}, TypeError, "differentiable"),
        ({"capturable": True}, TypeError, "capturable"),
    ]


def _info(cls: type[Optimizer]) -> OptimizerInfo:
    def inputs(device: Any, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
        return [
            OptimizerInput(params=None, kwargs=deepcopy(kwargs), desc=str(kwargs) or "default")  # pyright: ignore[reportArgumentType]
            for kwargs in OWN[cls.__name__] + (COMMON if cls.__name__ in TAKE_COMMON else [])
        ]

    def errors(device: Any, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
        own = [
            ErrorOptimizerInput(
                OptimizerInput(params=None, kwargs=kwargs, desc=text),  # pyright: ignore[reportArgumentType]
                error_type=error,  # pyright: ignore[reportArgumentType]
                error_regex=text,
            )
            for kwargs, error, text in BAD[cls.__name__]
        ]
        with torch.random.fork_rng(devices=[]):  # torch's draw random parameters
            return get_error_inputs_for_all_optims(device, dtype) + own

    return OptimizerInfo(
        cls,  # pyright: ignore[reportArgumentType]
        optim_inputs_func=inputs,
        optim_error_inputs_func=errors,
        scheduler_inputs=(
            [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
            [lambda opt: LinearLR(opt, start_factor=0.4, total_iters=4)],
            [lambda opt: ConstantLR(opt, factor=0.4, total_iters=4)],
            [lambda opt: PolynomialLR(opt, power=0.9, total_iters=4)],
            [
                lambda opt: StepLR(opt, gamma=0.9, step_size=10),
                lambda opt: ReduceLROnPlateau(opt),
            ],
            [lambda opt: ExponentialLR(opt, gamma=0.99), lambda opt: CosineAnnealingLR(opt, 50)],
        ),
        supported_impls=IMPLEMENTATIONS.get(cls.__name__, ("foreach", "fused")),
        supports_complex=False,
        supports_fused_on=("cpu",),
    )


INFOS = [_info(cls) for cls in EXPORTED]


def least_squares(contiguous: bool = True) -> tuple[nn.Parameter, nn.Parameter, Tensor]:
    """Return weight, bias and input of torch's own test problem, at the size of trained weights."""
    weight, bias = 0.1 * torch.randn(10, 5, 2), 0.1 * torch.randn(10, 2)
    x = torch.nn.functional.normalize(torch.randn(5), dim=0)
    weight, bias = weight[..., 0], bias[..., 0]
    if contiguous:
        weight, bias = weight.contiguous(), bias.contiguous()
    return nn.Parameter(weight), nn.Parameter(bias), x


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
