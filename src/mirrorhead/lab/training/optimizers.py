"""Optimizers by name: those of this package, and the baselines they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from mirrorhead.lab.training.settings import OPTIONS, OptimizerSettings
from mirrorhead.optim import MirrorAdam, MirrorDescent
from mirrorhead.optim._sharded import local


def build_optimizer(
    model: nn.Module, settings: OptimizerSettings, fused: bool = False
) -> Optimizer:
    """The optimizer that `settings` names, for all parameters of the model.

    >>> build_optimizer(nn.Linear(2, 1), OptimizerSettings("sgd", lr=0.1, momentum=0.9)).__class__
    <class 'torch.optim.sgd.SGD'>
    """
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    kind, extra = _KINDS[settings.name]
    how = {name: getattr(settings, name) for name in OPTIONS[settings.name]} | extra
    # On a CPU the mirror optimizers take their C step by default; their fused step is compiled by
    # torch for tens of seconds and is no faster there.
    on_cpu = all(param.device.type == "cpu" for _, param in params)
    if fused and not (kind in (MirrorDescent, MirrorAdam) and on_cpu):
        how["fused"] = True
    return kind(params, settings.lr, **how)


class ProximalSGD(SGD):
    """SGD with momentum, then the proximal step of l1 ||w||_1: the classical way to sparse weights.

    w <- sign(w) max(|w| - lr l1, 0) after each step, for matrices; vectors (gains, biases) are
    left alone.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, l1: float = 0.0, **how: Any
    ) -> None:
        super().__init__(params, lr, momentum=momentum, **how)
        self.l1 = l1

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                threshold = float(group["lr"]) * self.l1
                for param in group["params"]:
                    if param.ndim >= 2 and param.grad is not None and threshold > 0:
                        weight = local(param)
                        weight.copy_(nn.functional.softshrink(weight, threshold))
        return loss


#: The class of each optimizer, and options that are not in the settings.
_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mirror-descent": (MirrorDescent, {}),
    # The pure power and its floor, as in the stored results: they predate the knee.
    "mirror-adam": (MirrorAdam, {"knee": None, "rms_floor": 1e-2}),
    "adamw": (AdamW, {}),
    "sgd": (SGD, {}),
    "proximal-l1": (ProximalSGD, {}),
}
