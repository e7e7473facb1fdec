"""What `follow` needs to know of a problem, and how attention provides it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mirrorhead._checks import as_floats
from mirrorhead.problem import AttentionProblem, Gradient, check_problem

Tensors = dict[str, Tensor]  # by the name of a parameter


@runtime_checkable
class Trainable(Protocol):
    """A training problem of many trials at once, with exact gradients.

    `LinearProblem` is one. All tensors have the trials as leading dimensions.
    """

    @property
    def trials(self) -> tuple[int, ...]:
        """The leading dimensions."""
        ...

    @property
    def samples(self) -> int:
        """The number of samples of one trial."""
        ...

    @property
    def tensors(self) -> Tensors:
        """The data, which identify a checkpoint."""
        ...

    def start(self) -> Tensors:
        """The weights before the first step, by name."""
        ...

    def part(self, samples: list[int]) -> Trainable:
        """The problem of these samples alone."""
        ...

    def gradients(self, weights: Tensors) -> dict[str, Gradient]:
        """The gradient of the training loss in each of the weights."""
        ...

    def log_loss(self, weights: Tensors) -> Tensor:
        """The logarithm of what remains of the training loss, (...)."""
        ...


class AttentionTraining:
    """One layer of attention as a `Trainable`: the weights W, or K and Q with W = K Q'."""

    def __init__(self, problem: AttentionProblem, init: object = None) -> None:
        self.problem = check_problem(problem)
        if problem.heads is not None:
            raise ValueError(f"problem must have one head, got heads={problem.heads}")
        self._init = _weights(problem, init)

    @property
    def trials(self) -> tuple[int, ...]:
        return self.problem.trials

    @property
    def samples(self) -> int:
        return self.problem.X.shape[-3]

    @property
    def tensors(self) -> Tensors:
        return {**self.problem.tensors, **{f"init {k}": w for k, w in self._init.items()}}

    def start(self) -> Tensors:
        return self._init

    def part(self, samples: list[int]) -> AttentionTraining:
        lead = len(self.trials)

        def chosen(name: str, x: Tensor) -> Tensor:
            return x if name == "v" else x[(slice(None),) * lead + (samples,)]

        tensors = {name: chosen(name, x) for name, x in self.problem.tensors.items()}
        return AttentionTraining(AttentionProblem(**tensors, **self.problem.options), self._init)  # pyright: ignore

    def gradients(self, weights: Tensors) -> dict[str, Gradient]:
        G = self.problem.gradient(attention_weights(weights))
        if "W" in weights:
            return {"W": G}
        # W = K Q': dL/dK = G Q, dL/dQ = G' K
        K, Q = weights["K"], weights["Q"]
        return {
            "K": Gradient(G.mantissa @ Q, G.log_scale, G.dims),
            "Q": Gradient(G.mantissa.mT @ K, G.log_scale, G.dims),
        }

    def log_loss(self, weights: Tensors) -> Tensor:
        """The logarithm of what the loss is above its value at one-hot attention, nearly.

        The loss itself tends to that value and soon equals it to all digits.
        """
        G = self.problem.gradient(attention_weights(weights))
        assert G.mass is not None
        return G.mass.log() + G.log_scale


def attention_weights(weights: Tensors) -> Tensor:
    """W, or K Q'."""
    return weights["W"] if "W" in weights else weights["K"] @ weights["Q"].mT


def _weights(problem: AttentionProblem, init: object) -> Tensors:
    shape = problem.weight_shape
    if isinstance(init, dict):
        return init
    if isinstance(init, tuple):
        if len(init) != 2:
            raise ValueError(f"init must be W or a pair (K, Q), got {len(init)} entries")
        K, Q = (as_floats(f"init[{k}]", init[k], problem.X) for k in range(2))
        fits = K.shape[:-1] == shape[:-1] and Q.shape[:-1] == (*shape[:-2], shape[-1])
        if not fits or K.shape[-1] != Q.shape[-1]:
            given = tuple(K.shape), tuple(Q.shape)
            raise ValueError(f"init must be a pair (K, Q) with K Q' of shape {shape}, got {given}")
        if not bool(torch.cat([K, Q], -2).flatten(-2).any(-1).all()):
            raise ValueError("init must not be a pair of zeros in any trial: that is a saddle")
        return {"K": K, "Q": Q}
    W = problem.X.new_zeros(shape) if init is None else as_floats("init", init, problem.X)
    if W.shape != shape:
        raise ValueError(f"init must have shape {shape}, or be a pair (K, Q); got {tuple(W.shape)}")
    return {"W": W}
