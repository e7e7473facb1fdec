"""Everything that decides a run's result, in two dataclasses, and the optimizer that they name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from mirrorhead.geometry._powers import check_p
from mirrorhead.optim import MirrorAdam, MirrorDescent
from mirrorhead.optim._sharded import local

OptimizerName = Literal["mirror-descent", "mirror-adam", "adamw", "sgd", "proximal-l1"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
#: The name of an optimizer that the caller of `complete_run` makes.
OWN = "own"
#: Which options an optimizer has, beside lr.
OPTIONS: dict[str, tuple[str, ...]] = {
    "mirror-descent": ("p", "momentum", "normalize", "weight_decay"),
    "mirror-adam": ("p", "weight_decay", "knee"),
    "adamw": ("weight_decay",),
    "sgd": ("momentum", "weight_decay"),
    "proximal-l1": ("momentum", "l1"),
    OWN: (),
}


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer by name, for all parameters of a model.

    An option that the optimizer does not have must keep its default.

    >>> OptimizerSettings("adamw", lr=1e-3, p=1.5)
    Traceback (most recent call last):
    ValueError: adamw has no p; it has: weight_decay
    """

    name: OptimizerName | Literal["own"] = "mirror-descent"
    lr: float = 0.1
    p: float | None = None
    momentum: float = 0.0
    normalize: Literal["tensor", "global"] | None = None
    weight_decay: float = 0.0
    l1: float = 0.0
    # Of MirrorAdam, see there. 0: none, and a larger floor, as in results that predate the knee.
    knee: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in OPTIONS:
            raise ValueError(f"name must be one of {', '.join(OPTIMIZERS)}, got {self.name!r}")
        check("lr", self.lr, low=0, open_low=True)
        own = OPTIONS[self.name]
        for option in ("p", "momentum", "normalize", "weight_decay", "l1", "knee"):
            if option not in own and getattr(self, option) not in (None, 0):
                raise ValueError(f"{self.name} has no {option}; it has: {', '.join(own)}")
        if "p" in own:
            if self.p is None:
                raise ValueError(f"{self.name} needs p")
            check_p(self.p)
        check("momentum", self.momentum, low=0, below=1)
        check("weight_decay", self.weight_decay, low=0)
        check("l1", self.l1, low=0)
        check("knee", self.knee, low=0)
        if self.normalize is not None:
            _check_word("normalize", self.normalize, "tensor", "global")


@dataclass(frozen=True)
class TrainSettings:
    """How long, in what order and at what rate to train."""

    epochs: int = 5  # passes over the training set, at most
    batch_size: int = 32  # over all processes together
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(p=1.1))
    schedule: Literal["constant", "cosine"] = "constant"  # cosine: from lr to 0 over all epochs
    warmup: float = 0.0  # share of all steps in which lr grows from 0
    clip: float | None = None  # largest 2-norm of the gradient
    # Stop after an epoch with this share of the training examples right, with dropout on.
    stop_at: float | None = None
    # Keep and score the weights of the epoch with the best validation accuracy, or of the last.
    choose: Literal["best", "last"] = "best"
    # Keep also those after the first epoch with each share of training examples right; 0: epoch 1.
    milestones: tuple[float, ...] = ()
    seed: int = 0  # of the order of examples and of dropout
    checkpoint_every: int = 500  # steps between checkpoints, beside one after every epoch
    keep: int = 2  # checkpoints
    compile: bool = False  # train through torch.compile
    fused: bool = False  # use the optimizer's fused kernels, where they can be built
    parallel: Literal["ddp", "fsdp"] = "ddp"  # several processes replicate the model, or shard it

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "checkpoint_every", "keep"):
            check(name, getattr(self, name), low=1)
        check("seed", self.seed, low=0, below=2**63)
        check("warmup", self.warmup, low=0, below=1)
        if self.clip is not None:
            check("clip", self.clip, low=0, open_low=True)
        if self.stop_at is not None and not 0 < self.stop_at <= 1:
            raise ValueError(f"stop_at must be above 0 and at most 1, got {self.stop_at}")
        if not all(0 <= share <= 1 for share in self.milestones):
            raise ValueError(f"milestones must be from 0 to 1, got {list(self.milestones)}")
        _check_word("choose", self.choose, "best", "last")
        _check_word("schedule", self.schedule, "constant", "cosine")
        _check_word("parallel", self.parallel, "ddp", "fsdp")

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide a run's files, which is what a run is known by."""
        found = dataclasses.asdict(self)
        for name in ("keep", "checkpoint_every"):
            del found[name]
        return found


@dataclass(frozen=True)
class Schedule:
    """What the learning rates are multiplied by in each step.

    They rise linearly over the first steps and then stay, or fall to `end`: at the last step if
    that is above 0, else one step later, as a step of rate 0 would be lost.

    >>> schedule = Schedule("cosine", warmup=0.5)
    >>> [round(schedule(step, 4), 3) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """

    shape: Literal["constant", "linear", "cosine"] = "constant"
    warmup: float = 0.0  # share of the steps in which rates rise
    end: float = 0.0

    def __call__(self, step: int, steps: int) -> float:
        """Return the factor in step number `step` of `steps`, counted from 0."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        done = step - rising + (self.end > 0)
        if self.shape == "cosine":
            cosine = math.cos(math.pi * done / (steps - rising))
            return (1 + self.end) / 2 + (1 - self.end) / 2 * cosine
        if self.shape == "linear":
            return self.end + (1 - self.end) * (steps - rising - done) / (steps - rising)
        return 1.0


def _check_word(name: str, value: str, one: str, other: str) -> None:
    if value not in (one, other):
        raise ValueError(f'{name} must be "{one}" or "{other}", got {value!r}')


def check(
    name: str, value: float, low: float, below: float = math.inf, open_low: bool = False
) -> None:
    if not (value > low if open_low else value >= low) or not value < below:
        than = "greater than" if open_low else "at least"
        limit = f" and less than {below:,}"
        if below == math.inf:
            limit = " and finite" * isinstance(value, float)
        raise ValueError(f"{name} must be {than} {low:g}{limit}, got {value!r}")


def build_optimizer(
    model: nn.Module, settings: OptimizerSettings, fused: bool = False
) -> Optimizer:
    """The optimizer that `settings` names, for all parameters of the model.

    >>> build_optimizer(nn.Linear(2, 1), OptimizerSettings("sgd", lr=0.1, momentum=0.9)).__class__
    <class 'torch.optim.sgd.SGD'>
    """
    if settings.name == OWN:
        raise ValueError("an optimizer of your own is given to complete_run as a function")
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    kind = _KINDS[settings.name]
    how = {name: getattr(settings, name) for name in OPTIONS[settings.name]}
    if "p" in how:
        how["geometry"] = how.pop("p")
    if kind is MirrorAdam and not settings.knee:
        how |= {"knee": None, "rms_floor": 1e-2}
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


#: The class of each optimizer.
_KINDS: dict[str, Any] = {
    "mirror-descent": MirrorDescent,
    "mirror-adam": MirrorAdam,
    "adamw": AdamW,
    "sgd": SGD,
    "proximal-l1": ProximalSGD,
}
