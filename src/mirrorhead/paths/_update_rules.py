"""One step of mirror descent: what a gradient does to the dual variable.

A rule keeps its state in a dictionary of tensors, which is all that a checkpoint saves. The
rules of mirror descent keep the dual variable u = mirror(w) alone, so that a weight at zero can
move and no digits are lost by mapping to w and back:

    constant     u+ = u - lr grad                   lp-AttGD, the rule of the theorems
    normalized   u+ = u - lr grad / ||grad||_*      the rule of the paper's experiments
    steepest     w+ = w - lr steepest(grad)         steepest descent in a norm
    accelerated  keeps more (`Accelerated`)

A rule asks its geometry for everything; none knows p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mirrorhead.geometry import Norm, Potential
from mirrorhead.geometry._powers import expand
from mirrorhead.problem import Gradient

GROWTH, SHRINK = 1.05, 0.5
RESTART = 64
# The largest step over its floor: where a single row is active no step is too long,
# and logits beyond 1e12 would be noise.
LONGEST = 1e3
# Rounding of the test: logits of 1e7 leave 1e-9 of noise in z, and 1e-15 in the slope.
TOLERANCE = 1e-13

State = dict[str, Tensor]


@dataclass(frozen=True)
class Constant:
    """u+ = u - lr grad. One instance of a rule moves one parameter of all trials.

    dims: the dimensions of one trial's weights, counted from the end.
    """

    potential: Potential
    lr: float
    dims: tuple[int, ...]

    def start(self, w: Tensor) -> State:
        """The state at the weights w."""
        return {"u": self.potential.of_each("mirror", w, self.dims).clone()}

    def weights(self, state: State) -> Tensor:
        """The weights at which the next gradient is to be taken."""
        return self.potential.of_each("inverse", state["u"], self.dims)

    recorded = weights  # the weights that a path records

    def advance(self, state: State, gradient: Gradient) -> State:
        """The state after one step."""
        return {"u": state["u"] - self.lr * gradient.value}


@dataclass(frozen=True)
class Normalized(Constant):
    """u+ = u - lr grad / ||grad||_*; a zero gradient changes nothing."""

    def advance(self, state: State, gradient: Gradient) -> State:
        return {"u": state["u"] - self.lr * gradient.divided_by_dual(self.potential.limit)}


@dataclass(frozen=True)
class Steepest:
    """w+ = w - lr d, where d of norm 1 has the largest <grad, d>."""

    norm: Norm
    lr: float
    dims: tuple[int, ...]

    def start(self, w: Tensor) -> State:
        return {"w": w.clone()}

    def weights(self, state: State) -> Tensor:
        return state["w"]

    recorded = weights

    def advance(self, state: State, gradient: Gradient) -> State:
        return {"w": state["w"] - self.lr * gradient.steepest(self.norm)}


@dataclass(frozen=True, eq=False)
class Accelerated:
    r"""Nesterov's method on the dual of the max-margin problem, with a step size for each trial.

    docs/acceleration.md derives it. The dual is min phi(A' lambda) over the simplex, with
    phi(u) = 1/2 ||u||_*^2; of lambda the method needs only z = A' lambda = -grad / mass. It keeps
    the weights W, a sum of primal points, and x, an average of the z. With s its step and B the
    sum of all a,

        a = (s + sqrt(s^2 + 4 s B)) / 2,   theta = a / (B + a),   y = (1 - theta) x + theta z,
        W+ = W + a grad phi(y),   z+ = z at W+,   x+ = (1 - theta) x + theta z+.

    If <grad phi(x+), z+ - z> <= 0, x+ has not gone past the minimum, and s grows by GROWTH; else
    the step is taken back and s halved. At its floor lr / reach^2 a step is taken all the same:
    before attention has settled the dual problem itself still moves, and no step would pass.

    At the steps 64, 128, 256, ... the average is reset, x = z and B = 0, while W stays. What came
    before attention settled is forgotten, and convergence is faster than any power of k. For the
    same reason a path records W(k) - W(j) with j the power of two in (k/4, k/2].

    lr: the shortest step, in units of 1 / reach^2. reach: (...), how far weights of norm one can
    move a logit (`AttentionProblem.reach`), so that the scale of the data does not matter.
    """

    norm: Norm
    lr: float
    dims: tuple[int, ...]
    reach: Tensor

    def start(self, w: Tensor) -> State:
        """The state at w, with a pending step of length 0: the first gradient is taken at w."""
        zero, scalar = torch.zeros_like(w), self.floor(len(self.dims)).to(w)
        return {
            "W": w.clone(),  # what has been accepted
            "x": zero,
            "z": zero,
            "move": zero,  # grad phi(y)
            "sum": torch.zeros_like(scalar),  # B
            "a": torch.zeros_like(scalar),
            "theta": torch.ones_like(scalar),
            "step": scalar,  # s
            "count": torch.zeros((), dtype=torch.int64, device=w.device),
            "anchor": zero,  # W(j), left out of what is recorded
            "next_anchor": zero,  # W(2 j)
        }

    def weights(self, state: State) -> Tensor:
        return state["W"] + state["a"] * state["move"]

    def recorded(self, state: State) -> Tensor:
        """W(k) - W(j); W(k) while the difference is less than half of it, as after a large init."""
        W = self.weights(state)
        rest = W - state["anchor"]
        size, whole = (self.norm.norm(x, self.dims) for x in (rest, W))
        return rest.where(expand(size >= 0.5 * whole, W, self.dims), W)

    def advance(self, state: State, gradient: Gradient) -> State:
        norm, dims = self.norm, self.dims
        z, x, theta, step = state["z"], state["x"], state["theta"], state["step"]
        floor = self.floor(len(dims)).to(step)

        # The step from W, judged by the gradient at its end: z = -grad / mass, a weighted mean of
        # rows where every weight is positive. No mass, no gradient.
        assert gradient.mass is not None
        mass = gradient.mass.where(gradient.mass > 0, 1)
        new_z = -gradient.mantissa / mass.reshape(mass.shape + (1,) * gradient.dims)
        new_x = x + theta * (new_z - x)
        slope, size = grad_phi(new_x, norm, dims)
        overshoot = (slope * (new_z - z)).sum(dims, keepdim=True)
        fits = overshoot <= TOLERANCE * size**2
        accepted = fits | (step <= floor)
        W = self.weights(state).where(accepted, state["W"])
        x, z = new_x.where(accepted, x), new_z.where(accepted, z)
        total = (state["sum"] + state["a"]).where(accepted, state["sum"])
        longer = torch.minimum(step * GROWTH, floor * LONGEST)
        step = longer.where(fits, torch.maximum(step * SHRINK, floor))

        # The next one.
        count = int(state["count"]) + 1
        power_of_two = count & (count - 1) == 0
        if power_of_two and count >= RESTART:
            x, total = z, torch.zeros_like(total)
        a = (step + (step * step + 4 * step * total).sqrt()) / 2
        theta = a / (total + a)
        new = {
            "W": W, "x": x, "z": z, "move": grad_phi(x + theta * (z - x), norm, dims)[0],
            "sum": total, "a": a, "theta": theta, "step": step, "count": state["count"] + 1,
        }  # fmt: skip
        if power_of_two:
            return new | {"anchor": state["next_anchor"], "next_anchor": self.weights(new)}
        return new | {name: state[name] for name in ("anchor", "next_anchor")}

    def floor(self, dims: int) -> Tensor:
        """The shortest step of each trial, with `dims` further dimensions of size 1."""
        reach = self.reach.where(self.reach > 0, 1)  # all tokens alike: no gradient either
        return (self.lr / reach**2).reshape(self.reach.shape + (1,) * dims)


Rule = Constant | Steepest | Accelerated


def grad_phi(u: Tensor, norm: Norm, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the gradient of 1/2 ||u||_*^2, ||u||_* times the steepest direction, and ||u||_*."""
    size = expand(norm.dual_norm(u, dims), u, dims)
    return size * norm.of_each("steepest", u, dims), size
