"""One step of mirror descent: what a gradient does to the dual variable.

A rule keeps its state in a dictionary of tensors, which is all that a checkpoint saves. The
plain rules keep the dual variable u = mirror(w) alone, so that a weight at zero can move and
no digits are lost by mapping to w and back:

    constant     u+ = u - lr grad                   lp-AttGD, the rule of the theorems
    normalized   u+ = u - lr grad / ||grad||_q      the rule of the paper's experiments

The accelerated rule keeps more (`_acceleration.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mirrorhead.potentials import dual_exponent, inverse_exponent, signed_power
from mirrorhead.problem import Gradient

State = dict[str, Tensor]


class Rule(Protocol):
    """The interface of an update rule; one instance moves one parameter of all trials."""

    def start(self, w: Tensor, dims: int) -> State:
        """The state at the weights w, whose last `dims` dimensions are not trials."""
        ...

    def weights(self, state: State) -> Tensor:
        """The weights at which the next gradient is to be taken."""
        ...

    def recorded(self, state: State) -> Tensor:
        """The weights that a path records: the same for the plain rules."""
        ...

    def advance(self, state: State, gradient: Gradient) -> State:
        """The state after one step."""
        ...


@dataclass(frozen=True)
class Constant:
    """u+ = u - lr grad."""

    p: float
    lr: float

    def start(self, w: Tensor, dims: int) -> State:
        return {"u": signed_power(w, self.p - 1).clone()}

    def weights(self, state: State) -> Tensor:
        return signed_power(state["u"], inverse_exponent(self.p))

    def recorded(self, state: State) -> Tensor:
        return self.weights(state)

    def advance(self, state: State, gradient: Gradient) -> State:
        return {"u": state["u"] - self.lr * gradient.value}


@dataclass(frozen=True)
class Normalized(Constant):
    """u+ = u - lr grad / ||grad||_q; a zero gradient changes nothing."""

    def advance(self, state: State, gradient: Gradient) -> State:
        return {"u": state["u"] - self.lr * gradient.normalized(dual_exponent(self.p))}
