"""The potential of linearised Bregman iterations: weights are 0 until u passes a threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from mirrorhead._checks import check_positive
from mirrorhead.geometry._base import Norm, Separable
from mirrorhead.geometry._powers import Dims, in_wide
from mirrorhead.geometry.pnorm import PNorm


class SoftThreshold(Separable):
    r"""psi(w) = 1/2 ||w||^2 + threshold ||w||_1; inverse(u) is u moved towards 0 by the threshold.

    At w = 0 every u up to the threshold is a subgradient; `mirror` returns 0. The potential is
    quadratic at infinity, so the limit of mirror descent is the 2-norm's; the threshold shapes the
    way (Osher et al. 2010; AdaBreg, Bungert et al. 2022).

    >>> SoftThreshold(1.0).inverse(torch.tensor([0.5, -3.0]))
    tensor([ 0., -2.])
    """

    dense_dual = True

    def __init__(self, threshold: float) -> None:
        self.threshold = check_positive("threshold", threshold)

    def __repr__(self) -> str:
        return f"SoftThreshold({self.threshold:g})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SoftThreshold) and other.threshold == self.threshold

    def __hash__(self) -> int:
        return hash((SoftThreshold, self.threshold))

    @property
    def limit(self) -> Norm:  # pyright: ignore[reportIncompatibleVariableOverride]
        return PNorm(2)

    def mirror(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return w + threshold sign(w)."""
        return in_wide(lambda x: x + self.threshold * x.sign(), w)

    def inverse(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return sign(u) max(|u| - threshold, 0)."""
        return in_wide(lambda x: torch.nn.functional.softshrink(x, self.threshold), u)

    def curvature(self, w: Tensor) -> Tensor:
        """Return 1; at w = 0 the potential has a corner."""
        return torch.ones_like(w)

    def entry_value(self, w: Tensor) -> Tensor:
        """Return 1/2 w^2 + threshold |w|."""
        return w.square() / 2 + self.threshold * w.abs()

    def entry_divergence(self, w: Tensor, v: Tensor) -> Tensor:
        """Return 1/2 (w - v)^2 + threshold (|w| - sign(v) w)."""
        return (w - v).square() / 2 + self.threshold * (w.abs() - v.sign() * w)
