"""A potential that is quadratic for large weights, so that they move at a constant speed."""

from __future__ import annotations

import torch
from torch import Tensor

from mirrorhead._checks import check_positive
from mirrorhead.geometry._base import Norm, Separable
from mirrorhead.geometry._powers import Dims, in_wide
from mirrorhead.geometry.pnorm import PNorm


class Knee(Separable):
    r"""Another potential up to |w| = at, and a parabola with its value and slopes beyond.

    With c = clamp(w, -K, K), K = at and T = 1 / psi''(K):

        mirror(w) = mirror_psi(c) + (w - c) / T,   inverse(u) = inverse_psi(c') + (u - c') T

    where c' = clamp(u, -U, U) and U = mirror_psi(K). Mirror descent then tends to the max-margin
    direction of the 2-norm, whatever psi is: the knee shapes the way, not the limit.

    Args:
        potential: entry by entry, such as `PNorm(1.1)`.
        at: where the parabola begins.

    >>> Knee(PNorm(1.5), at=1.0).mirror(torch.tensor([0.25, 3.0]))
    tensor([0.5000, 2.0000])
    """

    def __init__(self, potential: Separable, at: float) -> None:
        if not isinstance(potential, Separable):
            raise TypeError(
                "a knee needs a potential that acts entry by entry, such as PNorm,"
                f" got {potential!r}"
            )
        self.potential, self.at = potential, check_positive("at", at)
        point = torch.tensor(self.at, dtype=torch.float64)
        self._dual, self._curve = float(potential.mirror(point)), float(potential.curvature(point))
        self._value = float(potential.entry_value(point))

    def __repr__(self) -> str:
        return f"Knee({self.potential!r}, at={self.at:g})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Knee) and (other.potential, other.at) == (self.potential, self.at)

    def __hash__(self) -> int:
        return hash((Knee, self.potential, self.at))

    @property
    def limit(self) -> Norm:  # pyright: ignore[reportIncompatibleVariableOverride]
        return PNorm(2)

    def mirror(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return the gradient of the potential."""

        def gradient(x: Tensor) -> Tensor:
            c = x.clamp(-self.at, self.at)
            return self.potential.mirror(c) + (x - c) * self._curve

        return in_wide(gradient, w)

    def inverse(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the inverse of `mirror`."""

        def weights(x: Tensor) -> Tensor:
            c = x.clamp(-self._dual, self._dual)
            return self.potential.inverse(c) + (x - c) / self._curve

        return in_wide(weights, u)

    def curvature(self, w: Tensor) -> Tensor:
        """Return the second derivative: that of the potential, constant beyond the knee."""
        return self.potential.curvature(w.clamp(-self.at, self.at))

    def entry_value(self, w: Tensor) -> Tensor:
        """Return psi(c), and beyond the knee psi(K) + U e + e^2 / (2T) with e = |w| - K."""
        c = w.clamp(-self.at, self.at)
        e = (w - c).abs()
        return self.potential.entry_value(c) + e * self._dual + e.square() * self._curve / 2

    def entry_divergence(self, w: Tensor, v: Tensor) -> Tensor:
        """Return d(w, v) = d_psi(cw, cv) + (ew - ev)^2 / (2T) + (mirror(cw) - mirror(cv)) ew.

        c is the part up to the knee and e the rest; (e, c) of a weight have one sign, so every
        term is at least 0. Where v is beyond the knee and w is not, ev acts on cv - cw.
        """
        cw, cv = (x.clamp(-self.at, self.at) for x in (w, v))
        ew, ev = w - cw, v - cv
        across = (self.potential.mirror(cw) - self.potential.mirror(cv)) * ew
        back = (cv - cw) * ev * self._curve
        beyond = (w - v) - (cw - cv)  # ew - ev, without its cancellation
        parabola = beyond.square() * self._curve / 2
        return self.potential.entry_divergence(cw, cv) + parabola + across + back
