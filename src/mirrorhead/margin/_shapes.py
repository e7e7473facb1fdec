"""Weights as lengths and directions: of groups, or singular values and singular vectors.

A norm of lengths becomes a norm of weights, and a power of lengths a map of weights. Its derivative
is a product with positive coefficients, in coordinates that the point gives: along a group and
across it, or of the symmetric and the antisymmetric part of each pair of singular vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mirrorhead.geometry import Grouped

Pair: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Groups:
    """Weights (..., N) as groups (..., G, k); the order of the entries is that of `order_rows`."""

    count: int

    def split(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the lengths (B, G) and what `join` and `multiply` need, the directions."""
        groups = x.unflatten(-1, (self.count, -1))
        lengths = torch.linalg.vector_norm(groups, dim=-1)
        return lengths, groups / lengths.clamp_min(1e-300).unsqueeze(-1)

    def lengths(self, x: Tensor) -> Tensor:
        return self.split(x)[0]

    def join(self, frame: Any, lengths: Tensor) -> Tensor:
        """Return the weights with these directions and other lengths."""
        return (lengths.unsqueeze(-1) * frame).flatten(-2)

    def slopes(self, lengths: Tensor, exponent: Tensor) -> Pair:
        """Return the derivative of the map length -> length^exponent, along and across."""
        across = lengths ** (exponent - 1)
        return exponent * across, across

    def multiply(self, frame: Any, slopes: Pair, x: Tensor) -> Tensor:
        """Return the derivative times each row of x, (B, j, N)."""
        along, across = (y[:, None, :, None] for y in slopes)
        groups, frame = x.unflatten(-1, (self.count, -1)), frame.unsqueeze(1)
        inner = (groups * frame).sum(-1, keepdim=True)
        return torch.addcmul(across * groups, (along - across) * inner, frame).flatten(-2)


@dataclass(frozen=True)
class Spectrum:
    """Weights (..., N) as matrices of the shape (a, c) with a >= c."""

    shape: tuple[int, int]

    def split(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the singular values (B, c), and the singular vectors (B, a, a), (B, c, c)."""
        usable = x.isfinite().all(-1, keepdim=True)  # LAPACK raises where it is not
        U, sigma, Vt = torch.linalg.svd(x.where(usable, 0.0).unflatten(-1, self.shape))
        return sigma, (U, Vt)

    def lengths(self, x: Tensor) -> Tensor:
        return self.split(x)[0]

    def join(self, frame: Any, lengths: Tensor) -> Tensor:
        U, Vt = frame
        return ((U[..., : self.shape[1]] * lengths.unsqueeze(-2)) @ Vt).flatten(-2)

    def slopes(self, lengths: Tensor, exponent: Tensor) -> Pair:
        """Return the derivative (Daleckii, Krein) on symmetric and antisymmetric parts, (B, a, c).

        With f = sigma^e these are (f_i - f_j) / (sigma_i - sigma_j) and (f_i + f_j) / (sigma_i +
        sigma_j), and f_j / sigma_j on the rows beyond c.
        """
        x, y, e = lengths.unsqueeze(-1), lengths.unsqueeze(-2), exponent.unsqueeze(-1)
        x, y = torch.maximum(x, y), torch.minimum(x, y)
        t = y / x.clamp_min(1e-300)
        log = torch.log1p((t - 1).clamp_min(-1 + 1e-300)).clamp_min(-700)
        apart = log < -1e-8
        safe = torch.where(apart, log, -1.0)
        quotient = torch.where(apart, torch.expm1(e * safe) / torch.expm1(safe), e)
        power = x ** (e - 1)
        symmetric, other = power * quotient, power * (1 + t**e) / (1 + t)
        rest = self.shape[0] - self.shape[1]
        if rest:
            below = (lengths ** (exponent - 1)).unsqueeze(-2).expand(-1, rest, -1)
            symmetric, other = (torch.cat([part, below], -2) for part in (symmetric, other))
        return symmetric, other

    def multiply(self, frame: Any, slopes: Pair, x: Tensor) -> Tensor:
        U, Vt = (side.unsqueeze(1) for side in frame)
        c = self.shape[1]
        inside = U.mT @ x.unflatten(-1, self.shape) @ Vt.mT
        symmetric, other = (y.unsqueeze(1) for y in slopes)
        turned = 0.5 * (symmetric + other) * inside
        # Rows beyond c have one slope, so that nothing is left for their mirror images.
        turned[..., :c, :] += 0.5 * (symmetric - other)[..., :c, :] * inside[..., :c, :].mT
        return (U @ turned @ Vt).flatten(-2)


Shape: TypeAlias = Groups | Spectrum


def order_rows(norm: object, weights: tuple[int, ...]) -> tuple[Shape, Tensor]:
    """Return the shape of weights in this norm, and the order in which it has the entries."""
    places = torch.arange(int(torch.tensor(weights).prod())).view(weights)
    if isinstance(norm, Grouped):
        places = places.movedim(norm.dim, 0)
        return Groups(len(places) // norm.size), places.flatten()
    a, c = weights
    if a < c:
        return Spectrum((c, a)), places.mT.flatten()
    return Spectrum((a, c)), places.flatten()
