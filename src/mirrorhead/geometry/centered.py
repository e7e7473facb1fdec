"""A potential centred at given weights: training stays close to them."""

from __future__ import annotations

import torch
from torch import Tensor

from mirrorhead._checks import check_positive
from mirrorhead.geometry._base import Norm, Potential, Separable
from mirrorhead.geometry._powers import Dims, all_dims, in_wide


class Centered(Potential):
    r"""Another potential of (w - at) / S, times S^2, where S is `reach`.

    mirror(w) = S mirror_psi((w - at) / S), in units of weights. `inverse` raises S to the largest
    |u| where that is larger, and `mirror` to the largest |w - at|, so that no number above 1 is
    raised to a high power and no change can explode; for `PNorm` this keeps the direction of u.

    Args:
        potential: entry by entry, such as `PNorm(1.1)`.
        at: the weights in the centre.
        reach: how far a weight moves if u grows to `reach`.

    >>> from mirrorhead.geometry import PNorm
    >>> psi = Centered(PNorm(1.5), at=torch.tensor([1.0, 1.0]), reach=2.0)
    >>> psi.inverse(torch.tensor([0.0, 1.0]))
    tensor([1.0000, 1.5000])
    """

    def __init__(self, potential: Separable, at: Tensor, reach: float) -> None:
        if not isinstance(potential, Separable):
            raise TypeError(
                "Centered needs a potential that acts entry by entry, such as PNorm,"
                f" got {potential!r}"
            )
        if not isinstance(at, Tensor) or not at.is_floating_point():
            raise TypeError(f"at must be a floating point tensor, got {type(at).__name__}")
        if not bool(at.isfinite().all()):
            raise ValueError("at must be finite")
        self.potential, self.reach = potential, check_positive("reach", reach)
        self.at = at.detach().clone()  # the caller's tensor may move

    def __repr__(self) -> str:
        return f"Centered({self.potential!r}, at=..., reach={self.reach:g})"

    @property
    def limit(self) -> Norm:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.potential.limit

    def check(self, shape: torch.Size | tuple[int, ...], name: str = "w") -> None:
        if tuple(shape) != tuple(self.at.shape):
            raise ValueError(
                f"{name} must have the shape {tuple(self.at.shape)} of the centre,"
                f" got {tuple(shape)}"
            )

    def mirror(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return u, which is 0 at the centre."""

        def gradient(w: Tensor) -> Tensor:
            x = w - self.at.to(w)
            scale = self._scale(x, dims)
            return scale * self.potential.mirror(x / scale)

        return in_wide(gradient, w)

    def inverse(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the weights whose mirror image is u."""

        def weights(u: Tensor) -> Tensor:
            scale = self._scale(u, dims)
            return self.at.to(u) + scale * self.potential.inverse(u / scale)

        return in_wide(weights, u)

    def value(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return S^2 psi((w - at) / S)."""
        return in_wide(lambda w: self.reach**2 * self.potential.value(self._units(w), dims), w)

    def divergence(self, w: Tensor, v: Tensor, dims: Dims = None) -> Tensor:
        """Return the Bregman divergence."""

        def apart(w: Tensor, v: Tensor) -> Tensor:
            return self.reach**2 * self.potential.divergence(self._units(w), self._units(v), dims)

        return in_wide(apart, w, v)

    def _units(self, w: Tensor) -> Tensor:
        return (w - self.at.to(w)) / self.reach

    def _scale(self, x: Tensor, dims: Dims) -> Tensor:
        largest = x.detach().abs()
        largest = largest.amax(all_dims(x, dims), keepdim=True) if x.numel() else largest.sum()
        return largest.clamp_min(self.reach)
