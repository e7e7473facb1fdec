r"""Balls of norms as images of smooth maps, so that L-BFGS needs no constraints.

| norm | its unit ball is the image of |
| --- | --- |
| smooth | x / h, h^r = \|\|x\|\|^r + \|s\|^r, with one more coordinate s; the sphere is s = 0 |
| p = 1 | a_g b_g / m with m = (\|a\|^2 + \|b\|^2) / 2, and a number a_g for each group g |
| nuclear | A B / m with m = (\|A\|^2 + \|B\|^2) / 2 |
| p = inf | w_g / h_g, h_g^2 = \|w_g\|^2 + s_g^2, with a number s_g for each group |
| spectral | the upper block of the polar factor of a matrix of more rows |

The groups of a `PNorm` are its entries. The norms of a b and A B are at most m, with equality where
both factors are in balance. A map knows how a gradient is pulled back through it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrorhead.geometry import Grouped, Norm, PNorm, Schatten
from mirrorhead.geometry._powers import signed_power
from mirrorhead.paths._lbfgs import Function, minimize

ROOM = 1e-3  # starts keep this away from where a map is flat

Found = tuple[Tensor, Tensor]  # points (trials, starts, N) and their values (trials, starts)
Pull = Callable[[Tensor], Tensor]  # from a gradient at a point to one in its coordinates


@dataclass(frozen=True)
class Ball(ABC):
    """The unit ball of a norm, for weights of this shape; points are flat, (..., size)."""

    of: Norm
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(range(-len(self.shape), 0))

    def weights(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, self.shape)

    def norm(self, x: Tensor) -> Tensor:
        return self.of.norm(self.weights(x), self.dims)

    @abstractmethod
    def coordinates(self, x: Tensor, inside: bool) -> Tensor:
        """Coordinates of points x of norm at most 1; `inside`: they may leave the sphere."""

    @abstractmethod
    def point(self, x: Tensor) -> tuple[Tensor, Pull]:
        """The points of coordinates x, and the pull back of gradients."""


class Smooth(Ball):
    @property
    def power(self) -> float:
        """r, for which `gradient` is that of (1/r) ||x||^r."""
        return self.of.p if isinstance(self.of, PNorm | Schatten | Grouped) else 2.0

    def gradient(self, x: Tensor) -> Tensor:
        if isinstance(self.of, PNorm):
            return signed_power(x, self.of.p - 1)
        w = self.weights(x)
        if isinstance(self.of, Schatten | Grouped):
            return self.of.mirror(w, self.dims).flatten(-len(self.shape))
        slope = self.of.dual.of_each("steepest", w, self.dims)
        return self.norm(x).unsqueeze(-1) * slope.flatten(-len(self.shape))

    def coordinates(self, x: Tensor, inside: bool) -> Tensor:
        room = (1 - self.norm(x) ** self.power).clamp_min(0) ** (1 / self.power)
        return torch.cat([x, room.unsqueeze(-1)], -1) if inside else x

    def point(self, x: Tensor) -> tuple[Tensor, Pull]:
        w, s, r = x[..., : self.size], x[..., self.size :], self.power
        h = self.norm(w).unsqueeze(-1)
        if s.shape[-1]:
            h = PNorm(r).norm(torch.cat([h, s], -1), -1).unsqueeze(-1)
        w, s = w / h, s / h

        def pull_back(gradient: Tensor) -> Tensor:
            radial = (gradient * w).sum(-1, keepdim=True)
            rest = -radial * signed_power(s, r - 1)
            return torch.cat([gradient - radial * self.gradient(w), rest], -1) / h

        return w, pull_back


class Groups(Ball):
    """Groups of weights: those of a `Grouped`, single entries of a `PNorm`."""

    @property
    def index(self) -> Tensor:
        """The places of the entries of each group, (groups, entries)."""
        places = torch.arange(self.size).reshape(self.shape)
        return self.of._groups(places, None) if isinstance(self.of, Grouped) else places.view(-1, 1)

    def grouped(self, x: Tensor) -> Tensor:
        return x[..., self.index]

    def flat(self, groups: Tensor) -> Tensor:
        return groups.flatten(-2)[..., self.index.flatten().argsort()]


class SumOfGroups(Groups):
    def coordinates(self, x: Tensor, inside: bool) -> Tensor:
        groups = self.grouped(x)
        length = groups.norm(dim=-1)
        a = (length + ROOM * length.mean(-1, keepdim=True)).sqrt()
        return torch.cat([a, (groups / a.unsqueeze(-1)).flatten(-2)], -1)

    def point(self, x: Tensor) -> tuple[Tensor, Pull]:
        count, entries = self.index.shape
        a, b = x[..., :count, None], x[..., count:].unflatten(-1, (count, entries))
        m = (x * x).sum(-1, keepdim=True) / 2
        w = self.flat(a * b) / m

        def pull_back(gradient: Tensor) -> Tensor:
            G = self.grouped(gradient)
            to_both = torch.cat([(G * b).sum(-1), (G * a).flatten(-2)], -1)
            return (to_both - (gradient * w).sum(-1, keepdim=True) * x) / m

        return w, pull_back


class LargestOfGroups(Groups):
    def coordinates(self, x: Tensor, inside: bool) -> Tensor:
        room = (1 - self.grouped(x).square().sum(-1)).clamp_min(ROOM).sqrt()
        return torch.cat([x, room], -1)

    def point(self, x: Tensor) -> tuple[Tensor, Pull]:
        w, s = self.grouped(x[..., : self.size]), x[..., self.size :, None]
        h = (w.square().sum(-1, keepdim=True) + s * s).sqrt()
        w, s = w / h, s / h

        def pull_back(gradient: Tensor) -> Tensor:
            G = self.grouped(gradient)
            radial = (G * w).sum(-1, keepdim=True)
            return torch.cat([self.flat((G - radial * w) / h), (-radial * s / h).squeeze(-1)], -1)

        return self.flat(w), pull_back


class Nuclear(Ball):
    def coordinates(self, x: Tensor, inside: bool) -> Tensor:
        U, S, Vh = torch.linalg.svd(self.weights(x), full_matrices=False)
        root = (S + ROOM * S.mean(-1, keepdim=True)).sqrt()
        A, B = U * root.unsqueeze(-2), (S / root).unsqueeze(-1) * Vh
        return torch.cat([A.flatten(-2), B.flatten(-2)], -1)

    def point(self, x: Tensor) -> tuple[Tensor, Pull]:
        (rows, columns), rank = self.shape, min(self.shape)
        A = x[..., : rows * rank].unflatten(-1, (rows, rank))
        B = x[..., rows * rank :].unflatten(-1, (rank, columns))
        m = (x * x).sum(-1, keepdim=True) / 2
        w = (A @ B).flatten(-2) / m

        def pull_back(gradient: Tensor) -> Tensor:
            G = self.weights(gradient)
            to_both = torch.cat([(G @ B.mT).flatten(-2), (A.mT @ G).flatten(-2)], -1)
            return (to_both - (gradient * w).sum(-1, keepdim=True) * x) / m

        return w, pull_back


class Spectral(Ball):
    def coordinates(self, x: Tensor, inside: bool) -> Tensor:
        W = self.weights(x)
        S, V = torch.linalg.eigh(W.mT @ W)
        lower = (1 - S).clamp_min(ROOM).sqrt().unsqueeze(-1) * V.mT
        return torch.cat([W, lower], -2).flatten(-2)

    def point(self, x: Tensor) -> tuple[Tensor, Pull]:
        rows, columns = self.shape
        U, S, Vh = torch.linalg.svd(x.unflatten(-1, (rows + columns, columns)), full_matrices=False)

        def pull_back(gradient: Tensor) -> Tensor:
            G = torch.nn.functional.pad(self.weights(gradient), (0, 0, 0, columns)) @ Vh.mT
            K = U.mT @ G
            turn = (K - K.mT) / (S.unsqueeze(-1) + S.unsqueeze(-2))
            return ((U @ turn + (G - U @ K) / S.unsqueeze(-2)) @ Vh).flatten(-2)

        return (U @ Vh)[..., :rows, :].flatten(-2), pull_back


def ball(norm: Norm, shape: tuple[int, ...]) -> Ball:
    """Return the unit ball of a norm, or refuse a norm that has no map here, by name."""
    norm.check(shape, "W")
    p = getattr(norm, "p", None)
    if p == 1:
        kind = Nuclear if isinstance(norm, Schatten) else SumOfGroups
    elif p == math.inf:
        kind = Spectral if isinstance(norm, Schatten) else LargestOfGroups
    else:
        kind = Smooth
    if not isinstance(norm, PNorm | Schatten | Grouped):
        kind = Smooth
        try:
            norm.dual.steepest  # noqa: B018
        except NotImplementedError:
            raise ValueError(
                "geometry must be PNorm, Schatten, Grouped, or a smooth norm with a `dual`, whose"
                f" steepest direction is the norm's gradient; got {norm!r}"
            ) from None
    return kind(norm, shape)


@dataclass(frozen=True)
class Balls:
    """A product of balls: the parts of points (..., N) have norms up to a radius (..., balls)."""

    parts: tuple[Ball, ...]

    @property
    def sizes(self) -> list[int]:
        return [part.size for part in self.parts]

    def split(self, points: Tensor) -> list[tuple[Ball, Tensor]]:
        return list(zip(self.parts, points.split(self.sizes, -1), strict=True))

    def norms(self, points: Tensor) -> Tensor:
        """The norm of each part, (..., balls)."""
        return torch.stack([part.norm(x) for part, x in self.split(points)], -1)

    def units(self, points: Tensor) -> Tensor:
        """Every part divided by its norm."""
        return torch.cat([x / part.norm(x).unsqueeze(-1) for part, x in self.split(points)], -1)

    def scale(self, units: Tensor, radius: Tensor) -> Tensor:
        """Every part times its radius."""
        parts = zip(self.split(units), radius.split(1, -1), strict=True)
        return torch.cat([r * x for (_, x), r in parts], -1)

    def minima_on_spheres(
        self, function: Function, directions: Tensor, radius: Tensor, tol: float
    ) -> Found:
        """Local minima on the spheres, as directions; in the balls if the norm is not smooth."""
        return self._minimize(function, self.units(directions), radius, tol, inside=False)

    def minima_inside(
        self, function: Function, points: Tensor, radius: Tensor, tol: float
    ) -> Found:
        """Local minima in the balls, from points inside."""
        R = radius.unsqueeze(1)
        units, values = self._minimize(function, self.scale(points, 1 / R), radius, tol, True)
        return self.scale(units, R), values

    def _minimize(
        self, function: Function, units: Tensor, radius: Tensor, tol: float, inside: bool
    ) -> Found:
        trials, starts, _ = units.shape
        R = radius.repeat_interleave(starts, 0)
        split = self.split(units.flatten(0, 1))
        first = [part.coordinates(x, inside) for part, x in split]
        sizes = [x.shape[-1] for x in first]

        def points(x: Tensor) -> tuple[Tensor, list[Pull]]:
            each = zip(self.parts, x.split(sizes, -1), strict=True)
            found, maps = zip(*(part.point(one) for part, one in each), strict=True)
            return torch.cat(found, -1), list(maps)

        def objective(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
            at, maps = points(x)
            value, gradient = function(self.scale(at, R[which]), which)
            slopes = self.split(self.scale(gradient, R[which]))
            pulled = [back(slope) for back, (_, slope) in zip(maps, slopes, strict=True)]
            return value, torch.cat(pulled, -1)

        found = minimize(objective, torch.cat(first, -1), tol)
        at, _ = points(found.x)
        return at.reshape(trials, starts, -1), found.value.reshape(trials, starts)
