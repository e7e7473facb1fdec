"""lp-AttGD and lp-JointGD: mirror descent on attention, recorded as a path."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from pathlib import Path as File

import torch
from torch import Tensor

from mirrorhead._checks import as_floats, check_integer, check_positive, is_number
from mirrorhead.geometry import Norm, PNorm, Potential, as_norm, as_potential
from mirrorhead.geometry._choice import describe, divergence_of, norm_of
from mirrorhead.margin import MarginSolution
from mirrorhead.paths._checkpoint import Progress, fingerprint, load_checkpoint, save_checkpoint
from mirrorhead.paths._compiled import compiled_loop
from mirrorhead.paths._update_rules import (
    Accelerated,
    Constant,
    Normalized,
    Rule,
    State,
    Steepest,
)
from mirrorhead.paths.step_size import warn_if_too_large
from mirrorhead.problem import AttentionProblem, Gradient, check_problem

RULES = ("constant", "normalized", "steepest", "accelerated")
STEPS_PER_CALL = 250  # the clock is read, and Ctrl-C noticed, after each call
PATIENCE, INTERVAL = 2.0, 0.1  # seconds before the progress line is shown, and between updates

Init = Tensor | tuple[Tensor, Tensor] | list[Tensor] | None  # W, or (K, Q), or zero
States = dict[str, State]  # by the name of a parameter


@dataclass(frozen=True, eq=False)
class Path:
    """The weights of all trials at the recorded steps.

    steps: (records,) ints; W: (records, ..., d, d) in the problem's shape; v: the head at
    each record where it was trained (lp-JointGD), else None; K, Q: the factors where
    W = K Q' was trained, else None; tokens: (..., n), selected at the end. The accelerated rule
    records W(k) less an earlier W(j), which has the same limit direction and converges sooner.

    `loss`, `norm` and `margin` are computed from W when they are first asked for. `norm` and
    `margin` are those of each head.
    """

    problem: AttentionProblem = field(repr=False)
    geometry: Norm | Potential
    rule: str
    lr: float
    steps: Tensor
    W: Tensor
    tokens: Tensor
    v: Tensor | None = None
    K: Tensor | None = None
    Q: Tensor | None = None

    def __repr__(self) -> str:
        joint = ", joint" if self.v is not None else ""
        factors = ", key-query" if self.K is not None else ""
        records = f"{len(self.steps)} records up to step {int(self.steps[-1])}"
        return (
            f"Path({title(self.geometry)}, {self.rule}, lr={self.lr:g},"
            f" trials={self.problem.trials}, {records}{joint}{factors})"
        )

    @property
    def p(self) -> float:
        """The exponent, for a path in a p-norm."""
        if not isinstance(self.geometry, PNorm):
            raise AttributeError(f"a path in {self.geometry!r} has no p")
        return self.geometry.p

    @cached_property
    def loss(self) -> Tensor:
        """The training loss, (records, ...)."""
        heads = [None] * len(self.W) if self.v is None else self.v
        of = (self.problem if v is None else self.problem.with_head(v) for v in heads)
        return torch.stack([problem.loss(W) for problem, W in zip(of, self.W, strict=True)])

    @cached_property
    def norm(self) -> Tensor:
        """||W(k)|| in the path's norm, for a potential its limit, (records, ...)."""
        return norm_of(self.geometry).norm(self.W, (-2, -1))

    @cached_property
    def margin(self) -> Tensor:
        """The least lead of a token selected at the end over another token, (records, ...)."""
        return torch.stack([self.problem.margin(W, self.tokens) for W in self.W])

    def divergence_to(
        self, solution: MarginSolution, geometry: float | Norm | Potential | None = None
    ) -> Tensor:
        """Return D(W_mm, W(k)) of the directions, (records, ...).

        NaN where W(k) is zero or the problem is infeasible, since there is no direction.

        Args:
            geometry: the potential that measures D; that of the solution by default, and
                `PNorm(2)` for norms that are none, such as the nuclear norm.
        """
        return divergence_to(solution, "W", self.W, 2, geometry)

    def head_divergence_to(self, solution: MarginSolution) -> Tensor:
        """The same for the head v of lp-JointGD and a solution of `svm`, (records, ...)."""
        if self.v is None:
            raise ValueError("the head was not trained: this path has no v")
        return divergence_to(solution, "v", self.v, 1)


def descend(
    problem: AttentionProblem,
    geometry: float | Potential | Norm,
    steps: int,
    lr: float = 0.1,
    rule: str = "normalized",
    joint: bool = False,
    init: Init = None,
    *,
    head_lr: float | None = None,
    record: Sequence[int] | Tensor | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 30.0,
) -> Path:
    r"""Run mirror descent, or steepest descent, on the training loss of all trials.

        u(k+1) = mirror(W(k)) - lr grad L(W(k)),   W(k+1) = inverse(u(k+1))
        W(k+1) = W(k) - lr steepest(grad L(W(k)))                        (rule="steepest")

    Args:
        problem: the data; leading dimensions are trials, each with its own W.
        geometry: the potential, or the norm for "steepest" and "accelerated"; a number stands for
            `PNorm`, so 1.5 is the potential (1/p)||.||_p^p with p = 1.5.
        steps: how many steps to take.
        lr: the step size; for "accelerated", which adapts its own, the smallest one.
        rule: "constant" is the formula above (lp-AttGD; warns if lr exceeds what Remark 1
            allows at the start or at a recorded step). "normalized" divides the gradient by its
            dual norm in the potential's `limit`. "steepest" is steepest descent, in any norm.
            "accelerated" reaches the same direction in a fraction of the steps
            (docs/acceleration.md); it trains only W, in a norm whose dual is smooth.
        joint: also train the head v, with the same rule (lp-JointGD), from problem.v. A problem
            that was given its scores has no head to train, and is refused.
        init: W(0), zero by default. A pair (K, Q) of (..., d, m) trains the factors of W = K Q'
            instead of W; for p = 2 their product converges to the solution of smallest nuclear
            norm (docs/descent.md). Zero factors are a saddle point and are refused.
        head_lr: with `joint`, the step size of the head, lr by default.
        record: the steps to record, from 0 (the start) to `steps`; by default about forty per
            decade, and the last.
        progress: show a progress line on a terminal, after two seconds.
        checkpoint: a file to resume from, and to save to every `checkpoint_seconds`. A run
            that was killed and called again gives the same path, bit for bit. A longer run
            continues where a shorter one ended.

    >>> from mirrorhead.synthetic import random_problem
    >>> problem = random_problem(trials=2)
    >>> path = descend(problem, geometry=1.5, steps=200)
    >>> path
    Path(p=1.5, normalized, lr=0.1, trials=(2,), 60 records up to step 200)
    >>> from mirrorhead.margin import attention_svm
    >>> solution = attention_svm(problem.X, problem.z, path.tokens, geometry=1.5)
    >>> bool((path.divergence_to(solution)[-1] < 0.1).all())
    True
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}; got {rule!r}")
    geometry = _geometry(geometry, rule)
    steps = check_integer("steps", steps, 1)
    lr = check_positive("lr", lr)
    if not isinstance(joint, bool):
        raise TypeError(f"joint must be True or False, got {joint!r}")
    if head_lr is not None and check_positive("head_lr", head_lr) and not joint:
        raise ValueError(
            f"head_lr needs joint=True, which trains the head; got head_lr={head_lr!r}"
        )
    head_lr = lr if head_lr is None else float(head_lr)
    parameters = _parameters(check_problem(problem, head=joint), joint, init)
    if rule == "accelerated" and parameters.keys() != {"W"}:
        raise ValueError("rule='accelerated' trains W alone: no joint=True, no factors (K, Q)")
    wanted = recorded_steps(steps) if record is None else _check_record(record, steps)
    if not (is_number(checkpoint_seconds) and checkpoint_seconds >= 0):
        raise ValueError(f"checkpoint_seconds must be a number >= 0, got {checkpoint_seconds!r}")
    rules = {}
    for name, (w, dims) in parameters.items():
        geometry.check(w.shape[w.dim() - dims :], name)
        rate = head_lr if name == "v" else lr
        rules[name] = _rule(rule, problem, geometry, rate, tuple(range(-dims, 0)))

    with torch.no_grad():
        states = {name: rules[name].start(w) for name, (w, _) in parameters.items()}
        run, warned = Progress(0, states, {}), False
        file, key = None if checkpoint is None else File(checkpoint), ""
        if file is not None:
            start = {name: w for name, (w, _) in parameters.items()}
            data = problem.tensors | {f"init {name}": w for name, w in start.items()}
            options = {"geometry": describe(geometry), "rule": rule, "lr": lr, "head_lr": head_lr}
            options |= problem.options | {"loss": repr(problem.loss_function)}
            key = fingerprint(data, options)
            stored = load_checkpoint(file, key, run, start)
            if stored is None:  # a file that cannot be written is noticed now, not after the run
                save_checkpoint(file, key, run)
            else:
                run = stored
                _check_kept(wanted, steps, run)
        advance = _stepper(problem, rules)
        # Remark 1 is about the p-norm.
        exponent = geometry.p if rule == "constant" and isinstance(geometry, PNorm) else None
        if exponent is not None:  # the check is costly: it warns once
            warned = warn_if_too_large(
                problem, exponent, lr, {n: w for n, (w, _) in parameters.items()}, 0
            )
        stops = sorted(k for k in wanted | {steps} if k >= run.step)
        saved = time.monotonic()
        with progress_bar(f"descent, {title(geometry)}", steps, progress) as tick:
            for stop in stops:
                while run.step < stop:
                    count = min(stop - run.step, STEPS_PER_CALL)
                    run.states = advance(run.states, count)
                    run.step += count
                    tick(run.step)
                    if file is not None and time.monotonic() - saved > checkpoint_seconds:
                        save_checkpoint(file, key, run)
                        saved = time.monotonic()
                if stop in wanted and stop not in run.records:
                    weights = {name: rules[name].recorded(run.states[name]) for name in rules}
                    _check_finite(weights, stop, lr)
                    run.records[stop] = weights
                    if exponent is not None and stop > 0 and not warned:
                        warned = warn_if_too_large(problem, exponent, lr, weights, stop)
        if file is not None:
            save_checkpoint(file, key, run)
    kept = torch.tensor(sorted(wanted))
    records = [run.records[k] for k in sorted(wanted)]
    W = torch.stack([_attention_weights(weights) for weights in records])
    others = parameters.keys() - {"W"}
    trained = {name: torch.stack([weights[name] for weights in records]) for name in others}
    return Path(problem, geometry, rule, lr, kept, W, problem.select(W[-1]), **trained)


def recorded_steps(steps: int, per_decade: int = 40) -> set[int]:
    """1, 2, ... with at most `per_decade` steps per decade, and the last step.

    The steps are the same for runs of any length, except for the last.

    >>> sorted(recorded_steps(30, per_decade=4))
    [1, 2, 3, 6, 10, 18, 30]
    """
    decades = math.ceil(math.log10(steps)) if steps > 1 else 0
    spaced = {round(10 ** (j / per_decade)) for j in range(decades * per_decade + 1)}
    return {k for k in spaced if k <= steps} | {steps}


def divergence_to(
    solution: MarginSolution,
    name: str,
    path: Tensor,
    dims: int,
    geometry: float | Norm | Potential | None = None,
) -> Tensor:
    """The divergence of the directions of `path` to a part W or v of a solution, (records, ...)."""
    if not isinstance(solution, MarginSolution):
        given = type(solution).__name__
        raise TypeError(f"solution must come from attention_svm or svm, got {given}")
    target, shape = getattr(solution, name), tuple(path.shape[1:])
    try:
        torch.broadcast_shapes(target.shape, shape)
        fits = target.shape[-dims:] == path.shape[-dims:]
    except RuntimeError:
        fits = False
    if not fits:
        given = tuple(target.shape)
        raise ValueError(f"solution must have a {name} of shape {shape} like the path, got {given}")
    own = solution.geometry if geometry is None else geometry
    return direction_divergence(own, target, path, dims)


def direction_divergence(
    geometry: float | Norm | Potential, target: Tensor, path: Tensor, dims: int
) -> Tensor:
    """D(target, path) of the directions over the last dims; NaN where one is zero or NaN."""
    along = tuple(range(-dims, 0))
    target = target.expand_as(path)
    defined = (path.abs().amax(along) > 0) & (target.abs().amax(along) > 0)  # NaN > 0 is False
    mask = defined.reshape(defined.shape + (1,) * dims)
    safe = target.where(mask, 1.0), path.where(mask, 1.0)
    found = divergence_of(geometry).direction_divergence(*safe, along)
    return found.where(defined, torch.nan)


def title(geometry: Norm | Potential) -> str:
    """Name a geometry in few letters.

    >>> title(PNorm(1.5))
    'p=1.5'
    """
    return f"p={geometry.p:g}" if isinstance(geometry, PNorm) else describe(geometry)


@contextmanager
def progress_bar(title: str, total: int, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of steps done; it writes to a terminal only."""
    if not (show and sys.stderr.isatty()):
        yield lambda done: None
        return
    begin = time.monotonic()
    due, width = begin + PATIENCE, 0

    def tick(done: int) -> None:
        nonlocal due, width
        now = time.monotonic()
        if now < due:
            return
        left = (now - begin) * (total - done) / max(done, 1)
        line = f"{title}: {done}/{total}, {left:.0f} s left"
        sys.stderr.write("\r" + line.ljust(width))
        sys.stderr.flush()
        due, width = now + INTERVAL, len(line)

    try:
        yield tick
    finally:
        if width:
            sys.stderr.write("\r" + " " * width + "\r")
            sys.stderr.flush()


def _stepper(problem: AttentionProblem, rules: dict[str, Rule]) -> Callable[[States, int], States]:
    """The function that takes a number of steps: in C where that applies, else in torch."""
    if rules.keys() == {"W"} and (loop := compiled_loop(problem, rules["W"])) is not None:
        return lambda states, count: {"W": loop(states["W"], count)}

    def advance(states: States, count: int) -> States:
        for _ in range(count):
            weights = {name: rules[name].weights(state) for name, state in states.items()}
            gradients = _gradients(problem, weights)
            states = {name: rules[name].advance(states[name], gradients[name]) for name in rules}
        return states

    return advance


def _parameters(
    problem: AttentionProblem, joint: bool, init: Init
) -> dict[str, tuple[Tensor, int]]:
    """What is trained, by name: the start, and how many of its dimensions are not trials."""
    shape, dims = problem.weight_shape, problem.weight_dims
    # A list of tensors is a pair [K, Q], a list of lists of numbers is W.
    if isinstance(init, tuple) or (isinstance(init, list) and init and isinstance(init[0], Tensor)):
        if len(init) != 2:
            raise ValueError(f"init must be W or a pair (K, Q), got {len(init)} entries")
        K, Q = (as_floats(f"init[{k}]", init[k], problem.X) for k in range(2))
        outer = (shape[:-1], (*shape[:-2], shape[-1]))
        for k, (factor, sizes) in enumerate(zip((K, Q), outer, strict=True)):
            if factor.shape[:-1] != sizes or factor.shape[-1:] != K.shape[-1:]:
                given, fits = tuple(factor.shape), ", ".join(map(str, sizes))
                raise ValueError(
                    f"init[{k}] must have shape ({fits}, m) with one m for both factors of a pair"
                    f" (K, Q), got {given}"
                )
        if not bool(torch.cat([K, Q], -2).flatten(-dims).any(-1).all()):
            raise ValueError("init must not be a pair of zeros in any trial: that is a saddle")
        parameters = {"K": (K, dims), "Q": (Q, dims)}
    else:
        W = problem.X.new_zeros(shape) if init is None else as_floats("init", init, problem.X)
        if (given := tuple(W.shape)) != shape:
            raise ValueError(
                f"init must have shape {shape}, or be a pair (K, Q); got shape {given}"
            )
        parameters = {"W": (W, dims)}
    if joint:
        parameters["v"] = (problem.v, problem.head_dims)
    return parameters


def _geometry(given: float | Potential | Norm, rule: str) -> Norm | Potential:
    """Return the geometry that a rule needs, from what the caller gave."""
    if rule in ("constant", "normalized") or (rule == "accelerated" and is_number(given)):
        return as_potential(given, "geometry")
    norm = as_norm(given, "geometry")
    if rule == "accelerated" and getattr(norm, "p", 2.0) in (1, math.inf):
        raise ValueError(
            "rule='accelerated' needs a norm whose dual is smooth, such as PNorm(1.1);"
            f" got {norm!r}"
        )
    return norm


def _rule(
    rule: str,
    problem: AttentionProblem,
    geometry: Norm | Potential,
    lr: float,
    dims: tuple[int, ...],
) -> Rule:
    if isinstance(geometry, Norm) and rule == "accelerated":
        return Accelerated(geometry, lr, dims, problem.reach(geometry))
    if isinstance(geometry, Norm) and rule == "steepest":
        return Steepest(geometry, lr, dims)
    assert isinstance(geometry, Potential)
    return (Constant if rule == "constant" else Normalized)(geometry, lr, dims)


def _gradients(problem: AttentionProblem, weights: dict[str, Tensor]) -> dict[str, Gradient]:
    W, gradients = _attention_weights(weights), {}
    if "v" in weights:
        G, gradients["v"] = problem.with_head(weights["v"]).gradients(W)
    else:
        G = problem.gradient(W)
    if "W" in weights:
        gradients["W"] = G
    else:  # W = K Q': dL/dK = G Q, dL/dQ = G' K
        gradients["K"] = Gradient(G.mantissa @ weights["Q"], G.log_scale, G.dims)
        gradients["Q"] = Gradient(G.mantissa.mT @ weights["K"], G.log_scale, G.dims)
    return gradients


def _attention_weights(weights: dict[str, Tensor]) -> Tensor:
    return weights["W"] if "W" in weights else weights["K"] @ weights["Q"].mT


def _check_record(record: Sequence[int] | Tensor, steps: int) -> set[int]:
    try:
        wanted = {index(k) for k in record}
    except TypeError:
        raise TypeError(f"record must be a list of integers, got {record!r}") from None
    if not wanted or min(wanted) < 0 or max(wanted) > steps:
        raise ValueError(f"record must be steps from 0 to {steps}, got {sorted(wanted)}")
    return wanted


def _check_kept(wanted: set[int], steps: int, run: Progress) -> None:
    if run.step > steps:
        raise ValueError(f"steps must be at least {run.step}, where the checkpoint is; got {steps}")
    missing = sorted(k for k in wanted if k < run.step and k not in run.records)
    if missing:
        raise ValueError(
            f"record asks for step {missing[0]}, which the checkpoint, at step {run.step}, did not"
            " keep; give another file name to start from the beginning"
        )


def _check_finite(weights: dict[str, Tensor], step: int, lr: float) -> None:
    for name, w in weights.items():
        if not bool(w.isfinite().all()):
            raise FloatingPointError(
                f"{name} is not finite at step {step}: lr = {lr:g} or the start is too large, p too"
                " close to 1 for so long a run, or the data near the limits of floating point"
            )
