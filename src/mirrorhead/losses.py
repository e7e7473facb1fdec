"""Losses l(x) of the margin x = y f(X, z): decreasing, as in the paper's Assumption A."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

# Gauss-Legendre points and weights on [0, 1].
NODES, WEIGHTS = (torch.from_numpy(x) / 2 for x in np.polynomial.legendre.leggauss(48))
NODES = NODES + 0.5
RANGE, CELLS, HALVINGS = 20.0, 800, 30  # where and how finely Assumption A is checked


class Loss(ABC):
    """A loss. One of your own defines `value`; give it to `AttentionProblem(loss=...)`.

    Everything acts entry by entry on float64 tensors. Defaults follow from `value` by autograd:

    - `log_slope`, log(-l'): define it if -l' or the value underflows (below 1e-308) where training
      leads. It is a logarithm because the slope underflows long before training ends.
    - `relative_curvature`, l'' / -l' = -d log_slope / dx, as accurate as autograd is.
    - `log_excess(b, log_e)`, log(l(b - e) - l(b)) for e > 0: the difference, or the integral of
      -l' by quadrature where the difference would cancel. That loses digits where l' changes by
      more than about exp(40) from b - e to b.

    `native` is the code of the loss in native/descent.c; None for a loss that torch computes. A
    derived class does not inherit it.

    >>> class Probit(Loss):  # minus the logarithm of the normal distribution function
    ...     def value(self, x): return -torch.special.log_ndtr(x)
    >>> x = torch.tensor([0.0, 2.0], dtype=torch.float64)
    >>> Probit().value(x), Probit().log_slope(x).exp()
    (tensor([0.6931, 0.0230], dtype=torch.float64), tensor([0.7979, 0.0552], dtype=torch.float64))
    """

    native: ClassVar[int | None] = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.native = vars(cls).get("native")

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """Return l(x)."""

    def log_slope(self, x: Tensor) -> Tensor:
        """Return log(-l'(x))."""
        return (-_derivative(self.value, x)).log()

    def relative_curvature(self, x: Tensor) -> Tensor:
        """Return l''(x) / -l'(x)."""
        return -_derivative(self.log_slope, x)

    def log_excess(self, b: Tensor, log_e: Tensor) -> Tensor:
        """Return log(l(b - e) - l(b)) for e > 0 given as its logarithm."""
        e = log_e.exp()
        points = b.unsqueeze(-1) - e.unsqueeze(-1) * NODES.to(b)
        integral = log_e + (self.log_slope(points) + WEIGHTS.to(b).log()).logsumexp(-1)
        high, low = self.value(b - e), self.value(b)
        difference = high - low
        clear = (difference > 0.5 * torch.maximum(high.abs(), low.abs())) & difference.isfinite()
        return torch.where(clear, difference, 1.0).log().where(clear, integral)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class Logistic(Loss):
    """log(1 + exp(-x))."""

    native = 0

    def value(self, x: Tensor) -> Tensor:
        return -logsigmoid(x)

    def log_slope(self, x: Tensor) -> Tensor:
        return logsigmoid(-x)

    def relative_curvature(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def log_excess(self, b: Tensor, log_e: Tensor) -> Tensor:
        # log(1 + exp(e - b)) - log(1 + exp(-b)) = log(1 + sigmoid(-b) (exp(e) - 1))
        huge = log_e > 600  # there it is log(e), and exp(log_e) will soon be infinite
        log_ratio = logsigmoid(-b) + _log_expm1(log_e.clamp_max(600))
        small = log_ratio < -11
        ratio = torch.where(small, log_ratio, torch.zeros_like(log_ratio)).exp()
        series = log_ratio - ratio / 2 + ratio * ratio * (5 / 24)
        exact = softplus(torch.where(small, torch.ones_like(log_ratio), log_ratio)).log()
        return torch.where(huge, log_e, torch.where(small, series, exact))


class Exponential(Loss):
    """exp(-x)."""

    native = 1

    def value(self, x: Tensor) -> Tensor:
        return (-x).exp()

    def log_slope(self, x: Tensor) -> Tensor:
        return -x

    def relative_curvature(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)

    def log_excess(self, b: Tensor, log_e: Tensor) -> Tensor:
        return -b + _log_expm1(log_e)


class Linear(Loss):
    """-x."""

    native = 2

    def value(self, x: Tensor) -> Tensor:
        return -x

    def log_slope(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def relative_curvature(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def log_excess(self, b: Tensor, log_e: Tensor) -> Tensor:
        return log_e + torch.zeros_like(b)


LOSSES: dict[str, Loss] = {loss.name: loss for loss in (Logistic(), Exponential(), Linear())}
_CHECKED: WeakSet[Loss] = WeakSet(LOSSES.values())


def get_loss(loss: str | Loss) -> Loss:
    """Return a loss: a name stands for one of `LOSSES`. Others are checked (`check_assumption_a`).

    >>> get_loss("logistic")
    Logistic()
    """
    if isinstance(loss, Loss):
        hashable = type(loss).__hash__ is not None
        if not (hashable and loss in _CHECKED):
            check_assumption_a(loss)
            if hashable:
                _CHECKED.add(loss)
        return loss
    if not isinstance(loss, str) or loss not in LOSSES:
        names = ", ".join(LOSSES)
        raise ValueError(f"loss must be one of {names}, or a mirrorhead.Loss; got {loss!r}")
    return LOSSES[loss]


def check_assumption_a(loss: Loss) -> None:
    """Refuse a loss that is not decreasing with a Lipschitz derivative on [-20, 20].

    That is Assumption A, checked on a grid: the value is finite, the slope is negative and is the
    derivative of the value, and differences of the slope shrink with the grid.
    """

    def fail(where: Tensor, must: str) -> None:
        if bool(where.any()):
            at = float(x[where.nonzero()[0, 0]])
            raise ValueError(
                f"loss must {must} (Assumption A, checked from {-RANGE:g} to {RANGE:g}):"
                f" {loss!r} does not near {at:g}"
            )

    x = torch.linspace(-RANGE, RANGE, CELLS + 1, dtype=torch.float64)
    step = 2 * RANGE / CELLS
    value, log_slope = loss.value(x).detach(), loss.log_slope(x).detach()
    for name, found in (("value", value), ("log_slope", log_slope)):
        if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != x.dtype:
            raise ValueError(f"loss must act entry by entry on float64: {loss!r}.{name} does not")
    fail(~value.isfinite(), "have finite values")
    fail(~log_slope.isfinite(), "decrease strictly")

    fall = value[:-1] - value[1:]
    points = x[:-1, None] + step * NODES
    integral = step * (WEIGHTS * loss.log_slope(points).exp()).sum(-1).detach()
    excess = loss.log_excess(x[1:], torch.full_like(fall, step).log()).exp().detach()
    noise = 1e-6 * fall.abs() + 1e-13 * value[:-1].abs()
    fail((integral - fall).abs() > noise, "have `log_slope` as its derivative")
    fail((excess - fall).abs() > noise, "have a `log_excess` that fits its values")

    # Halve every cell, and keep the half in which the slope changes more.
    left, right = x[:-1], x[1:]
    slopes = [log_slope[:-1].exp(), log_slope[1:].exp()]
    first = (slopes[0] - slopes[1]).abs()
    for _ in range(HALVINGS):
        middle = (left + right) / 2
        slope = loss.log_slope(middle).exp().detach()
        lower = (slopes[0] - slope).abs() > (slope - slopes[1]).abs()
        left, right = torch.where(lower, left, middle), torch.where(lower, middle, right)
        slopes = [torch.where(lower, slopes[0], slope), torch.where(lower, slope, slopes[1])]
    jump, noise = (slopes[0] - slopes[1]).abs(), 1e-12 * slopes[0]
    fail(jump > 1e-6 * first + noise, "have a Lipschitz derivative")


def _derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The derivative of a function that acts entry by entry."""
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        y = function(at)
        if not y.requires_grad:  # a constant
            return torch.zeros_like(x)
        (slope,) = torch.autograd.grad(y.sum(), at, create_graph=True)
    return slope if x.requires_grad else slope.detach()


def _log_expm1(log_e: Tensor) -> Tensor:
    """log(exp(e) - 1), which is log(e) + e/2 + e^2/24 - ... for small e."""
    e = log_e.exp()
    small = e < 1e-3
    safe = torch.where(small, torch.ones_like(e), e)
    return torch.where(small, log_e + e / 2 + e * e / 24, safe + (-(-safe).expm1()).log())
