"""Weights as lengths and directions: of groups, or singular values and singular vectors.

A norm of lengths becomes a norm of weights, and a power of lengths a map of weights. Its derivative
is a product with positive coefficients, in coordinates that the point gives: along a group and
across it, or of the symmetric and the antisymmetric part of each pair of singular vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from mirrorhead.geometry import Grouped, Schatten
from mirrorhead.margin._constraints import ConstraintMatrix

Pair: TypeAlias = tuple[Tensor, Tensor]


class Shape(ABC):
    """How the weights (B, N) of a problem are made of lengths and a frame, their directions."""

    @abstractmethod
    def split(self, w: Tensor) -> tuple[Tensor, Any]:
        """Return the lengths (B, .) and the frame."""

    @abstractmethod
    def join(self, frame: Any, lengths: Tensor) -> Tensor:
        """Return the weights with these directions and other lengths."""

    @abstractmethod
    def slopes(self, lengths: Tensor, exponent: Tensor) -> Pair:
        """Return the derivative of the map length -> length^exponent in the frame."""

    @abstractmethod
    def multiply(self, frame: Any, slopes: Pair, w: Tensor) -> Tensor:
        """Return the derivative with these slopes times w."""

    @abstractmethod
    def gram(self, A: ConstraintMatrix, frame: Any, slopes: Pair) -> Tensor:
        """Return A times this derivative times A', (B, m, m)."""


@dataclass(frozen=True)
class Groups(Shape):
    """Groups of `size` neighbours along the dimension `dim` of the weights (a, c)."""

    weights: tuple[int, int]
    dim: int
    size: int

    @property
    def count(self) -> int:
        return self.weights[self.dim] // self.size

    def groups(self, w: Tensor) -> Tensor:
        """Return the groups of the weights, (B, G, k)."""
        x = w.view(-1, *self.weights)
        return (x if self.dim == 0 else x.mT).reshape(len(w), self.count, -1)

    def joined(self, groups: Tensor) -> Tensor:
        """Return the weights with these groups."""
        if self.dim == 0:
            return groups.flatten(1)
        return groups.reshape(len(groups), *self.weights[::-1]).mT.flatten(1)

    def split(self, w: Tensor) -> tuple[Tensor, Any]:
        groups = self.groups(w)
        lengths = torch.linalg.vector_norm(groups, dim=-1)
        return lengths, groups / lengths.clamp_min(1e-300).unsqueeze(-1)

    def join(self, frame: Any, lengths: Tensor) -> Tensor:
        return self.joined(lengths.unsqueeze(-1) * frame)

    def slopes(self, lengths: Tensor, exponent: Tensor) -> Pair:
        """Return the slopes along and across the groups."""
        across = lengths ** (exponent - 1)
        return exponent * across, across

    def multiply(self, frame: Any, slopes: Pair, w: Tensor) -> Tensor:
        along, across = (y.unsqueeze(-1) for y in slopes)
        groups = self.groups(w)
        inner = (groups * frame).sum(-1, keepdim=True)
        return self.joined(torch.addcmul(across * groups, (along - across) * inner, frame))

    def gram(self, A: ConstraintMatrix, frame: Any, slopes: Pair) -> Tensor:
        along, across = slopes
        h = self.joined(across.unsqueeze(-1).expand_as(frame)).view(-1, *self.weights)
        # What the groups contribute to A times the frame, (B, m, G).
        B, n, R, _ = A.left.shape
        F = self.joined(frame).view(-1, *self.weights)
        if self.dim == 0:
            parts = A.left * (A.right @ F.mT).unsqueeze(2)
        else:
            parts = (A.left @ F.unsqueeze(1)) * A.right.unsqueeze(2)
        parts = parts.reshape(B, n * R, self.count, self.size).sum(-1)
        K = A.gram(h)
        return K.baddbmm_(parts * (along - across).unsqueeze(1), parts.mT)


@dataclass(frozen=True)
class Spectrum(Shape):
    """The singular values of the weights (a, c)."""

    weights: tuple[int, int]

    def split(self, w: Tensor) -> tuple[Tensor, Any]:
        """Return the singular values, and the singular vectors (B, a, a), (B, c, c)."""
        usable = w.isfinite().all(-1, keepdim=True)  # LAPACK raises where it is not
        U, sigma, Vt = torch.linalg.svd(w.where(usable, 0.0).view(-1, *self.weights))
        return sigma, (U, Vt.mT)

    def join(self, frame: Any, lengths: Tensor) -> Tensor:
        U, V = (side[..., : lengths.shape[-1]] for side in frame)
        return ((U * lengths.unsqueeze(-2)) @ V.mT).flatten(1)

    def slopes(self, lengths: Tensor, exponent: Tensor) -> Pair:
        """Return the derivative (Daleckii, Krein) on symmetric and antisymmetric parts, (B, a, c).

        With f = sigma^e these are (f_i - f_j) / (sigma_i - sigma_j) and (f_i + f_j) / (sigma_i +
        sigma_j); beyond the smaller of a and c, sigma = 0.
        """
        a, c = self.weights
        x, y = (pad(lengths, (0, side - lengths.shape[-1])) for side in (a, c))
        x, y, e = x.unsqueeze(-1), y.unsqueeze(-2), exponent.unsqueeze(-1)
        x, y = torch.maximum(x, y), torch.minimum(x, y)
        t = y / x.clamp_min(1e-300)
        log = torch.log1p((t - 1).clamp_min(-1 + 1e-300)).clamp_min(-700)
        apart = log < -1e-8
        safe = torch.where(apart, log, -1.0)
        quotient = torch.where(apart, torch.expm1(e * safe) / torch.expm1(safe), e)
        power = x ** (e - 1)
        return power * quotient, power * (1 + t**e) / (1 + t)

    def _entries(self, slopes: Pair) -> Pair:
        """Return the factors of an entry and of its mirror image in the frame."""
        symmetric, other = slopes
        inside = slice(min(self.weights))
        return 0.5 * (symmetric + other), 0.5 * (symmetric - other)[:, inside, inside]

    def multiply(self, frame: Any, slopes: Pair, w: Tensor) -> Tensor:
        own, swap = self._entries(slopes)
        U, V = frame
        return turn(U, V, own, swap, w.view(-1, *self.weights)).flatten(1)

    def gram(self, A: ConstraintMatrix, frame: Any, slopes: Pair) -> Tensor:
        U, V = frame
        return A.turned(U, V).gram(*self._entries(slopes))


def turn(left: Tensor, right: Tensor, own: Tensor, swap: Tensor, y: Tensor) -> Tensor:
    """Return left (own o x + swap o x') right' for x = left' y right."""
    y = left.mT @ y @ right
    turned, inside = own * y, slice(swap.shape[-1])
    turned[:, inside, inside] += swap * y[:, inside, inside].mT
    return left @ turned @ right.mT


def shape_of(norm: Grouped | Schatten, A: ConstraintMatrix, weights: tuple[int, ...]) -> Shape:
    """Return the shape of weights in this norm."""
    if isinstance(norm, Grouped):
        return Groups(A.shape, norm.dim % len(weights), norm.size)
    return Spectrum(A.shape)
