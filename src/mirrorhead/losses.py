"""Losses l(x) of the margin x = y f(X, z): decreasing, as in the paper's Assumption A."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus


@dataclass(frozen=True)
class Loss:
    """A loss by its value, the logarithm of -l'(x), and l''(x) / -l'(x), entry by entry.

    The slope is kept as a logarithm because it underflows long before training ends.
    `log_excess(b, log_e)` is log(l(b - e) - l(b)) for e > 0 given as its logarithm: the loss of
    a margin that is smaller than b by e, computed without cancellation. `native` is the code of
    the loss in native/descent.c; None for a loss that C does not have, which torch computes.

    >>> loss = LOSSES["logistic"]
    >>> loss.value(torch.tensor(0.0)), loss.log_slope(torch.tensor(1000.0))
    (tensor(0.6931), tensor(-1000.))
    """

    name: str
    value: Callable[[Tensor], Tensor]
    log_slope: Callable[[Tensor], Tensor]
    relative_curvature: Callable[[Tensor], Tensor]
    log_excess: Callable[[Tensor, Tensor], Tensor]
    native: int | None = None

    def __repr__(self) -> str:
        return f"Loss({self.name})"


def _log_expm1(log_e: Tensor) -> Tensor:
    """log(exp(e) - 1), which is log(e) + e/2 + e^2/24 - ... for small e."""
    e = log_e.exp()
    small = e < 1e-3
    safe = torch.where(small, torch.ones_like(e), e)
    return torch.where(small, log_e + e / 2 + e * e / 24, safe + (-(-safe).expm1()).log())


def _logistic_excess(b: Tensor, log_e: Tensor) -> Tensor:
    # log(1 + exp(e - b)) - log(1 + exp(-b)) = log(1 + sigmoid(-b) (exp(e) - 1))
    huge = log_e > 600  # there it is log(e), and exp(log_e) will soon be infinite
    log_ratio = logsigmoid(-b) + _log_expm1(log_e.clamp_max(600))
    small = log_ratio < -11
    ratio = torch.where(small, log_ratio, torch.zeros_like(log_ratio)).exp()
    series = log_ratio - ratio / 2 + ratio * ratio * (5 / 24)
    exact = softplus(torch.where(small, torch.ones_like(log_ratio), log_ratio)).log()
    return torch.where(huge, log_e, torch.where(small, series, exact))


LOSSES = {
    "logistic": Loss(
        "logistic",
        value=lambda x: -logsigmoid(x),
        log_slope=lambda x: logsigmoid(-x),
        relative_curvature=torch.sigmoid,
        log_excess=_logistic_excess,
        native=0,
    ),
    "exponential": Loss(
        "exponential",
        value=lambda x: (-x).exp(),
        log_slope=lambda x: -x,
        relative_curvature=torch.ones_like,
        log_excess=lambda b, log_e: -b + _log_expm1(log_e),
        native=1,
    ),
    "linear": Loss(
        "linear",
        value=lambda x: -x,
        log_slope=torch.zeros_like,
        relative_curvature=torch.zeros_like,
        log_excess=lambda b, log_e: log_e + torch.zeros_like(b),
        native=2,
    ),
}


def get_loss(loss: str) -> Loss:
    """The loss of that name, or a ValueError that lists the names."""
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}; got {loss!r}")
    return LOSSES[loss]
