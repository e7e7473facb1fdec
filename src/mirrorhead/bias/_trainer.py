"""One torch optimizer, or several, on the weights of all trials, without mixing the trials.

Trials are most cheaply one tensor with a leading dimension. An optimizer that acts entry by entry
does not notice. One that takes norms or singular values of a tensor would mix the trials, so it
gets one parameter for each trial; and one that also looks across its parameters gets one instance
for each trial. Which layout is needed is found out by running the optimizer on a small example and
changing the other trials.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

MakeOptimizer = Callable[[list[torch.nn.Parameter]], Optimizer]
Tensors = dict[str, Tensor]  # by the name of a parameter

#: From the cheapest to the safest: all trials in one tensor, a parameter or an optimizer for each.
LAYOUTS = ("one tensor", "a parameter each", "an optimizer each")
#: Steps of a trial run: preconditioners that are renewed every ten steps are seen.
STEPS = 12
#: The scale by which gradients of a trial run are multiplied, to see how an optimizer scales.
LARGER = 8  # as a power of 2
#: Relative differences that the optimizer's own constants, such as eps = 1e-8, may make.
CLOSE = 1e-3


class StateEntry(NamedTuple):
    """A tensor in an optimizer's state; trial: the trial it belongs to, None for all of them."""

    key: str
    tensor: Tensor
    trial: int | None


class Trainer:
    """An optimizer and the weights that it moves, (trials, ...), with buffers for the gradients."""

    def __init__(self, make: MakeOptimizer, start: Tensors, layout: str) -> None:
        self.layout, self.trials = layout, len(next(iter(start.values())))
        self.weights = {name: w.detach().clone().contiguous() for name, w in start.items()}
        self.gradients = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.slots: list[tuple[torch.nn.Parameter, Tensor, Tensor, int | None]] = []
        for name, w in self.weights.items():
            whole = layout == "one tensor"
            for trial in (None,) if whole else range(self.trials):
                place = w if trial is None else w[trial]
                gradient = self.gradients[name]
                gradient = gradient if trial is None else gradient[trial]
                self.slots.append((torch.nn.Parameter(place), place, gradient, trial))
        self._trial_of = {id(param): trial for param, _, _, trial in self.slots}
        groups = [[param for param, *_ in self.slots]]
        if layout == "an optimizer each":
            groups = [
                [param for param, _, _, trial in self.slots if trial == k]
                for k in range(self.trials)
            ]
        self.optimizers = [checked_optimizer(make(group)) for group in groups]
        #: Gradients are handed over times 2^-exponent, by trial; NaN before the first one.
        self.exponent = next(iter(self.weights.values())).new_full((self.trials,), math.nan)
        self.rates: list[tuple[dict[str, Any], Any]] = [
            (group, group.get("lr")) for each in self.optimizers for group in each.param_groups
        ]

    @property
    def name(self) -> str:
        """The class of the optimizer."""
        return type(self.optimizers[0]).__qualname__

    def step(self, factor: float = 1.0) -> None:
        """Take a step on the gradients in the buffers; `factor` multiplies the learning rates."""
        if factor != 1.0:
            for group, rate in self.rates:
                group["lr"] = rate * factor
        for param, _, gradient, _ in self.slots:
            if param.grad is not gradient:
                param.grad = gradient
        for optimizer in self.optimizers:
            optimizer.step()
        for param, place, _, _ in self.slots:
            if param.data_ptr() != place.data_ptr() or param.shape != place.shape:
                if param.shape != place.shape:
                    shapes = f"{tuple(place.shape)} to {tuple(param.shape)}"
                    raise ValueError(f"{self.name} changed the shape of a parameter from {shapes}")
                place.copy_(param.detach())  # it gave the parameter another tensor
                param.data = place

    def entries(self) -> Iterator[StateEntry]:
        """The tensors in the state of all parameters, in a fixed order."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    for key, value in optimizer.state.get(param, {}).items():
                        if isinstance(value, Tensor):
                            yield StateEntry(key, value, self._trial_of[id(param)])

    def rescale(self, degrees: dict[str, int], exponents: Tensor) -> None:
        """Multiply the state by 2^(degree x exponent of the trial), as if all gradients had been.

        exponents: (trials,) integers; most are 0 most of the time.
        """
        moved = exponents.nonzero().squeeze(-1).tolist()
        if not moved:
            return
        factors = {degree: torch.exp2(exponents * degree) for degree in set(degrees.values())}
        wanted = set(moved)
        for key, tensor, trial in self.entries():
            degree = degrees.get(key, 0)
            if not degree:
                continue
            if trial is None:
                factor = factors[degree].to(tensor.dtype)
                tensor.mul_(factor.reshape(-1, *(1,) * (tensor.dim() - 1)))
            elif trial in wanted:
                tensor.mul_(float(factors[degree][trial]))


def checked_optimizer(optimizer: object) -> Optimizer:
    """Return the optimizer, or say by name why it cannot be followed."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a function that takes parameters and returns a torch optimizer, but"
            f" it returned {optimizer!r}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs = closure is not None and closure.default is inspect.Parameter.empty
    if needs or isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"{type(optimizer).__qualname__} needs a closure that evaluates the loss several times"
            " a step: follow gives one gradient a step"
        )
    return optimizer


def choose_layout(make: MakeOptimizer, start: Tensors) -> str:
    """Return the cheapest layout in which no trial feels another one."""
    if len(next(iter(start.values()))) == 1:
        return LAYOUTS[1]
    failure: Exception | None = None
    for layout in LAYOUTS:
        try:
            if not _mixes(make, start, layout):
                return layout
        except TypeError:
            raise
        except Exception as error:  # Muon refuses three dimensions, for example
            failure = error
    name = getattr(make, "__qualname__", repr(make))
    raise ValueError(f"optimizer {name} fails on its first steps: {failure}") from failure


def _mixes(make: MakeOptimizer, start: Tensors, layout: str) -> bool:
    """Whether the first trial of an example depends on what the second one does."""
    one = example_run(make, start, layout, others=0)
    two = example_run(make, start, layout, others=1)
    return any(
        float((a[0] - b[0]).abs().max()) > 1e-9 * float(a[0].abs().max())
        for a, b in zip(one.weights.values(), two.weights.values(), strict=True)
    )


def example_run(
    make: MakeOptimizer,
    start: Tensors,
    layout: str,
    others: int = 0,
    scale: int = 0,
    steps: int = STEPS,
) -> Trainer:
    """Run an optimizer on random gradients of two trials.

    others: a seed of the second trial; scale: gradients are multiplied by 2^scale.
    """
    trainer = Trainer(make, example_start(start, others), layout)
    for k in range(steps):
        feed_example(trainer, k, others, scale)
        _own_random_numbers(trainer, k)
    return trainer


def example_start(start: Tensors, others: int) -> Tensors:
    """Random weights of two trials in the shapes of `start`."""
    found = {}
    for number, (name, w) in enumerate(start.items()):
        first, second = (
            torch.randn(w.shape[1:], generator=_seeded(number, -1, seed), dtype=w.dtype)
            for seed in (-1, others)
        )
        found[name] = torch.stack([first, second * 10**others]).to(w.device)
    return found


def feed_example(trainer: Trainer, k: int, others: int, scale: int | Tensor = 0) -> None:
    """Put the gradients of step k of an example into the buffers."""
    for number, gradient in enumerate(trainer.gradients.values()):
        shape, dtype = gradient.shape[1:], gradient.dtype
        # Half of it is the same in all steps, so that moments have a direction.
        parts = [
            torch.randn(shape, generator=_seeded(number, step, seed), dtype=dtype)
            for seed in (-1, others)
            for step in (k, 1000)
        ]
        pair = torch.stack([parts[0] + parts[1], (parts[2] + parts[3]) * 10**others])
        factor = torch.exp2(torch.as_tensor(scale, dtype=dtype).reshape(-1, *(1,) * len(shape)))
        gradient.copy_(pair / math.sqrt(pair[0].numel()) * factor)


def _own_random_numbers(trainer: Trainer, k: int) -> None:
    """Take a step with the same random numbers in every run of an example."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(k)
        trainer.step()


def _seeded(*numbers: int) -> torch.Generator:
    seed = 0
    for number in numbers:
        seed = (seed * 7919 + number + 2) % 2**31
    return torch.Generator().manual_seed(seed)


def continued_run(trainer: Trainer, first: int, scale: int | Tensor) -> list[Tensors]:
    """Take as many steps again with gradients times 2^scale; return the moves of each."""
    moves = []
    for k in range(first, first + STEPS):
        before = {name: w.clone() for name, w in trainer.weights.items()}
        feed_example(trainer, k, 0, scale)
        _own_random_numbers(trainer, k)
        moves.append({name: w - before[name] for name, w in trainer.weights.items()})
    return moves


def degrees_of(make: MakeOptimizer, start: Tensors, layout: str) -> dict[str, Any]:
    """Return with which power of the gradients' scale each tensor in the state grows.

    ValueError if the steps depend on the scale of the gradients, or if the state cannot be scaled.
    """
    plain = example_run(make, start, layout)
    larger = example_run(make, start, layout, scale=LARGER)
    degrees: dict[str, int] = {}
    for one, two in zip(plain.entries(), larger.entries(), strict=True):
        size, grown = (float(x.tensor.double().abs().sum()) for x in (one, two))
        if size > 0 and grown > 0 and math.isfinite(size + grown):
            degrees[one.key] = round(math.log2(grown / size) / LARGER)
    # The proof of it: after a change of scale in the first trial the moves must be as before.
    change = torch.tensor([LARGER, 0])
    plain.rescale(degrees, change)
    again = example_run(make, start, layout)
    moves = continued_run(plain, STEPS, change), continued_run(again, STEPS, 0)
    for one, two in zip(*moves, strict=True):
        for name in one:
            apart, size = float((one[name] - two[name]).abs().max()), float(two[name].abs().max())
            if apart > CLOSE * size:
                raise ValueError(
                    f"the steps of {plain.name} depend on the size of the gradient, so"
                    " gradient='scaled' has no meaning for it: use 'direction', or 'value'"
                )
    return degrees
