r"""Train many trials with any torch optimizer, on gradients that stay exact.

What the optimizer gets as the gradient g = a exp(s), where s is kept as a logarithm:

    "direction"   g / ||g||_2, for as long as one likes. Sign descent, normalised descent and all
                  others that ignore the size of a gradient make the steps that they would make;
                  Adam's moments see gradients of constant size.
    "value"       g itself, until it underflows, at 1e-308.
    "scaled"      g 2^-c with c = floor(log2 ||g||) of each trial. Whenever c changes, the state of
                  the optimizer is multiplied by the powers of 2 that it would have if all gradients
                  so far had been multiplied by 2^-c: exactly. The steps are therefore those of an
                  optimizer that saw the true gradients in arithmetic without underflow, up to the
                  rounding of s, |s| 1e-16 relative to g, and up to its eps, which is relative to
                  ||g|| here. It needs an optimizer whose steps do not depend on the scale of the
                  loss, such as Adam; SGD is refused.

All parameters of a trial are divided by the same number.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

import torch
from torch import Tensor

from mirrorhead._checks import check_integer, check_seed, is_number
from mirrorhead.bias._checkpoint import Run, resume
from mirrorhead.bias._objectives import AttentionTraining, Trainable, attention_weights
from mirrorhead.bias._trainer import MakeOptimizer, Tensors, Trainer, choose_layout, degrees_of
from mirrorhead.bias.linear import LinearProblem
from mirrorhead.bias.profile import MarginProfile, Norms, margin_profile
from mirrorhead.paths.descent import progress_bar, recorded_steps
from mirrorhead.problem import AttentionProblem, Gradient

GRADIENTS = ("direction", "value", "scaled")
STEPS_PER_LOOK = 250  # steps between checks of the weights, and readings of the clock
LOG2 = math.log(2)

Schedule = Callable[[int], float]


@dataclass(frozen=True, eq=False)
class OptimizerPath:
    """The weights of all trials at the recorded steps.

    optimizer: the name of its class; gradient: what it was given; layout: how trials were kept
    apart; steps: (records,); weights: by name, (records, ..., shape of one trial); log_loss:
    (records, ...), the logarithm of what remains of the training loss.
    """

    problem: Trainable | AttentionProblem = field(repr=False)
    optimizer: str
    gradient: str
    layout: str
    steps: Tensor = field(repr=False)
    weights: Tensors = field(repr=False)
    log_loss: Tensor = field(repr=False)

    @property
    def W(self) -> Tensor:
        """The weights of the model, K Q' where the factors were trained."""
        if not {"W", "K"} & self.weights.keys():
            raise AttributeError(f"there is no W among the weights {', '.join(self.weights)}")
        return attention_weights(self.weights)

    @property
    def tokens(self) -> Tensor:
        """(..., n), the tokens that attention selects at the end."""
        if not isinstance(self.problem, AttentionProblem):
            raise AttributeError("only attention selects tokens")
        return self.problem.select(self.W[-1])

    def profile(self, norms: Norms | None = None, *, records: bool = False) -> MarginProfile:
        """Return the share of the largest margin at the end, or at every record.

        The margins are those of the tokens that are selected at the end.
        """
        W, problem = self.W if records else self.W[-1], self.problem
        if isinstance(problem, AttentionProblem):
            data = problem.X, problem.z, self.tokens
            return margin_profile(W, *data, mask=problem.mask, norms=norms)
        if not isinstance(problem, LinearProblem):
            raise TypeError(f"{type(problem).__name__} has no certified largest margin")
        labels = problem.labels if problem.classes is None else problem.labels.long()
        return margin_profile(W, problem.features, labels=labels, norms=norms)


def follow(
    problem: AttentionProblem | Trainable,
    optimizer: MakeOptimizer,
    steps: int,
    *,
    gradient: str = "direction",
    schedule: Schedule | None = None,
    batch: int | None = None,
    seed: int = 0,
    init: Tensor | tuple[Tensor, Tensor] | None = None,
    record: Sequence[int] | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 30.0,
) -> OptimizerPath:
    r"""Train every trial of a problem with any torch optimizer, on exact gradients.

    Trials never influence each other. Optimizers that act entry by entry get all trials as one
    tensor; those that take norms or singular values of a tensor are detected and get one parameter
    for each trial.

    Args:
        problem: an `AttentionProblem`, a `LinearProblem`, or an object of your own with their
            methods `start`, `gradients`, `part` and `log_loss`.
        optimizer: a function from parameters to a torch optimizer, or a class that has defaults.
        steps: how many steps to take.
        gradient: "direction", "value" or "scaled"; the module's text has the formulas.
        schedule: a factor of the learning rates for each step k = 0, 1, ...
        batch: samples for each step; all of them by default, 1 for one sample at a time. The
            batches are visited in a new order in each pass over the data.
        seed: of the order of the batches.
        init: for attention W(0), zero by default, or a pair (K, Q), which trains W = K Q'.
        record: the steps to record; by default about ten per decade, and the last.
        progress: show a progress line on a terminal, after two seconds.
        checkpoint: a file to resume from, saved every `checkpoint_seconds`. A run that was killed
            and called again gives the same path, bit for bit.

    >>> from mirrorhead.synthetic import random_problem
    >>> problem = random_problem(trials=2)
    >>> def optimizer(params):
    ...     return torch.optim.RMSprop(params, lr=0.1, alpha=0.9)
    >>> path = follow(problem, optimizer, 1000, schedule=lambda k: (1 + k / 100) ** -0.5)
    >>> path
    OptimizerPath(optimizer='RMSprop', gradient='direction', layout='one tensor')
    >>> path.profile(norms=[1, 2, math.inf]).best
    [PNorm(inf), PNorm(inf)]
    """
    steps = check_integer("steps", steps, 1)
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient must be one of {', '.join(GRADIENTS)}; got {gradient!r}")
    if not callable(optimizer):
        raise TypeError(
            f"optimizer must be a function from parameters to an optimizer, got {optimizer!r}"
        )
    training = _trainable(problem, init)
    wanted = _records(record, steps)
    lead, order = training.trials, _Order(training, batch, check_seed(seed))
    objective = _Flat(lead)
    with torch.no_grad():
        start = {name: objective.flat(w) for name, w in training.start().items()}
        layout = choose_layout(optimizer, start)
        trainer = Trainer(optimizer, start, layout)
        _check_schedule(schedule, trainer)
        degrees = degrees_of(optimizer, start, layout) if gradient == "scaled" else {}
        scale = _Scale(gradient, trainer, degrees)
        run = Run(trainer, 0, {})
        save: Callable[[], None] | None = None
        if checkpoint is not None:
            factors = None if schedule is None else [float(schedule(k)) for k in (0, 1, 10, 1000)]
            options = {"gradient": gradient, "batch": batch, "seed": seed, "schedule": factors}
            look = objective.shaped(trainer.weights)  # of a record
            save = resume(File(checkpoint), training.tensors, options, optimizer, run, look)
            missing = [k for k in wanted if k < run.step and k not in run.records]
            if run.step > steps or missing:
                raise ValueError(
                    f"steps must be at least {run.step}, where the checkpoint is, and record among"
                    f" what it kept before: give another file name; got steps={steps}"
                )
        saved = time.monotonic()
        with progress_bar(f"follow, {trainer.name}", steps, progress) as tick:
            for stop in sorted(k for k in wanted | {steps} if k >= run.step):
                while run.step < stop:
                    end = min(stop, run.step + STEPS_PER_LOOK)
                    for k in range(run.step, end):
                        weights = objective.shaped(trainer.weights)
                        scale.hand_over(order.part(k).gradients(weights), objective)
                        trainer.step(1.0 if schedule is None else float(schedule(k)))
                    run.step = end
                    _check_finite(trainer, run.step)
                    tick(run.step)
                    if save is not None and time.monotonic() - saved > checkpoint_seconds:
                        save()
                        saved = time.monotonic()
                if stop in wanted and stop not in run.records:
                    shaped = objective.shaped(trainer.weights)
                    run.records[stop] = {name: w.clone() for name, w in shaped.items()}
        if save is not None:
            save()
        kept = [run.records[k] for k in sorted(wanted)]
        log_loss = torch.stack([training.log_loss(weights) for weights in kept])
    found = {name: torch.stack([weights[name] for weights in kept]) for name in start}
    at = torch.tensor(sorted(wanted))
    return OptimizerPath(problem, trainer.name, gradient, layout, at, found, log_loss)


class _Flat:
    """All leading dimensions as one, of size 1 where there is none."""

    def __init__(self, lead: tuple[int, ...]) -> None:
        self.lead = lead

    def flat(self, x: Tensor) -> Tensor:
        return x.reshape(math.prod(self.lead), *x.shape[len(self.lead) :])

    def shaped(self, weights: Tensors) -> Tensors:
        if len(self.lead) == 1:
            return weights
        return {name: w.reshape(*self.lead, *w.shape[1:]) for name, w in weights.items()}


class _Order:
    """Which samples each step sees: fixed batches, in a new order in each pass."""

    def __init__(self, training: Trainable, batch: int | None, seed: int) -> None:
        n = training.samples
        if batch is not None and check_integer("batch", batch, 1) > n:
            raise ValueError(f"batch must be at most {n}, the number of samples, got {batch}")
        self.seed, self.epoch, self.order = seed, -1, [0]
        self.parts = [training]
        if batch is not None and batch < n:
            samples = list(range(n))
            self.parts = [training.part(samples[k : k + batch]) for k in range(0, n, batch)]

    def part(self, step: int) -> Trainable:
        count = len(self.parts)
        if count > 1 and step // count != self.epoch:
            self.epoch = step // count
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            self.order = torch.randperm(count, generator=generator).tolist()
        return self.parts[self.order[step % count]]


class _Scale:
    """Puts gradients into the optimizer's buffers, as the mode says."""

    def __init__(self, mode: str, trainer: Trainer, degrees: dict[str, int]) -> None:
        self.mode, self.trainer, self.degrees = mode, trainer, degrees

    def hand_over(self, gradients: dict[str, Gradient], objective: _Flat) -> None:
        buffers = self.trainer.gradients
        if self.mode == "value":
            for name, g in gradients.items():
                buffers[name].copy_(objective.flat(g.value))
            return
        top = _largest([g.log_scale for g in gradients.values()])
        mantissas = {}
        for name, g in gradients.items():
            factor = None if g.log_scale is top else (g.log_scale - top).exp()
            x = g.mantissa if factor is None else g.mantissa * _over(factor, g.dims)
            mantissas[name] = objective.flat(x)
        squares = [x.flatten(1).square().sum(1) for x in mantissas.values()]
        size = (squares[0] if len(squares) == 1 else torch.stack(squares).sum(0)).sqrt()
        some = size > 0
        if self.mode == "direction":
            factor = 1 / size.where(some, 1.0)
        else:
            log_scale = top.reshape(-1)
            exponent = ((size.log() + log_scale) / LOG2).floor()
            before = self.trainer.exponent
            exponent = exponent.where(some & exponent.isfinite(), before)
            change = (before - exponent).nan_to_num(0.0)
            if bool(change.any()):
                self.trainer.rescale(self.degrees, change)
            self.trainer.exponent = exponent
            factor = (log_scale - exponent * LOG2).exp().where(some, 0.0)
        for name, x in mantissas.items():
            torch.mul(x, factor.reshape(-1, *(1,) * (x.dim() - 1)), out=buffers[name])


def _largest(log_scales: list[Tensor]) -> Tensor:
    first = log_scales[0]
    if all(each is first for each in log_scales):
        return first
    return torch.stack(log_scales).amax(0)


def _over(factor: Tensor, dims: int) -> Tensor:
    return factor.reshape(factor.shape + (1,) * dims)


def _trainable(problem: object, init: object) -> Trainable:
    if isinstance(problem, AttentionProblem):
        return AttentionTraining(problem, init)
    if not isinstance(problem, Trainable):
        raise TypeError(
            "problem must be an AttentionProblem, a LinearProblem, or have their methods start,"
            f" gradients, part and log_loss; got {type(problem).__name__}"
        )
    if init is not None:
        raise TypeError("init goes with an AttentionProblem; others say themselves where to start")
    return problem


def _records(record: Sequence[int] | None, steps: int) -> set[int]:
    if record is None:
        return recorded_steps(steps, per_decade=10)
    wanted = {check_integer("record", k, 0) for k in record}
    if not wanted or max(wanted) > steps:
        raise ValueError(f"record must be steps from 0 to {steps}, got {sorted(wanted)}")
    return wanted


def _check_schedule(schedule: object, trainer: Trainer) -> None:
    if schedule is None:
        return
    if not callable(schedule):
        raise TypeError(f"schedule must be a function from a step to a factor, got {schedule!r}")
    if not all(is_number(rate) or isinstance(rate, Tensor) for _, rate in trainer.rates):
        raise ValueError(f"schedule multiplies lr, and {trainer.name} has a group without lr")
    first: Any = schedule(0)
    if not (is_number(first) and 0 <= first < math.inf):
        raise ValueError(f"schedule must return a number >= 0, got {first!r} for step 0")


def _check_finite(trainer: Trainer, step: int) -> None:
    for name, w in trainer.weights.items():
        if not bool(w.isfinite().all()):
            trial = int((~w.flatten(1).isfinite()).any(1).nonzero()[0])
            raise FloatingPointError(
                f"{name} is not finite after {step} steps of {trainer.name} (trial {trial}):"
                " a smaller learning rate, or the optimizer divides by zero"
            )
