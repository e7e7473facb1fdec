"""The hyperbolic entropy: nearly |w| log |w| for large weights, quadratic for small ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mirrorhead._checks import check_positive
from mirrorhead.geometry._base import Norm, Separable
from mirrorhead.geometry._powers import Dims, in_wide
from mirrorhead.geometry.pnorm import PNorm


class HyperbolicEntropy(Separable):
    r"""psi(w) = sum w asinh(w/beta) - sqrt(w^2 + beta^2) + beta; inverse(u) = beta sinh(u).

    Mirror descent multiplies large weights, and its limit is the max-margin direction of the
    1-norm (Ghai, Hazan, Singer 2020; Woodworth et al. 2020).

    Args:
        beta: the size of weights around which the potential changes its shape.

    >>> HyperbolicEntropy(0.5).mirror(torch.tensor([-2.0, 0.0, 3.0]))
    tensor([-2.0947,  0.0000,  2.4918])
    """

    def __init__(self, beta: float) -> None:
        self.beta = check_positive("beta", beta)

    def __repr__(self) -> str:
        return f"HyperbolicEntropy({self.beta:g})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HyperbolicEntropy) and other.beta == self.beta

    def __hash__(self) -> int:
        return hash((HyperbolicEntropy, self.beta))

    @property
    def limit(self) -> Norm:  # pyright: ignore[reportIncompatibleVariableOverride]
        return PNorm(1)

    def mirror(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return asinh(w / beta)."""
        return in_wide(lambda x: (x / self.beta).asinh(), w)

    def inverse(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return beta sinh(u)."""
        return in_wide(lambda x: self.beta * x.sinh(), u)

    def curvature(self, w: Tensor) -> Tensor:
        """Return 1 / sqrt(w^2 + beta^2)."""
        return 1 / torch.hypot(w, torch.full_like(w, self.beta))

    def entry_value(self, w: Tensor) -> Tensor:
        """Return w asinh(w/beta) - (sqrt(w^2 + beta^2) - beta)."""
        root = torch.hypot(w, torch.full_like(w, self.beta))
        return w * (w / self.beta).asinh() - w.abs() * (w.abs() / (root + self.beta))

    def entry_divergence(self, w: Tensor, v: Tensor) -> Tensor:
        """Return beta/2 [e^a (e^-t - 1 + t) + e^-a (e^t - 1 - t)].

        Here a = mirror(w) and t = a - mirror(v), which is computed without cancellation. Both
        terms are at least 0.
        """
        x, y = w / self.beta, v / self.beta
        a = x.asinh()
        one = torch.ones_like(x)
        same = x.sign() * y.sign() > 0
        # asinh x - asinh y = asinh((x^2 - y^2) / (x sqrt(1 + y^2) + y sqrt(1 + x^2)))
        below = torch.where(same, x * torch.hypot(one, y) + y * torch.hypot(one, x), one)
        t = torch.where(same, ((w - v) / self.beta * ((x + y) / below)).asinh(), a - y.asinh())
        return self.beta / 2 * (a.exp() * _rest(-t) + (-a).exp() * _rest(t))


def _rest(t: Tensor) -> Tensor:
    """Return e^t - 1 - t, by its series where it would cancel."""
    small = t.abs() < 0.5
    s = torch.where(small, t, torch.zeros_like(t))
    series = torch.zeros_like(s)
    for n in range(16, 1, -1):  # s^2/2 (1 + s/3 (1 + s/4 (...)))
        series = (1 + series) * s / n
    return torch.where(small, series * s, t.expm1() - t)
