"""The p-norm of the 2-norms of rows, columns or heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mirrorhead.geometry._base import Norm, Potential
from mirrorhead.geometry._powers import Dims, all_dims, in_wide, lp_norm
from mirrorhead.geometry.pnorm import PNorm, entry_divergence


class Grouped(Norm, Potential):
    r"""The group norm :math:`\|W\| = (\sum_g \|W_g\|_2^p)^{1/p}`; at p = 1 whole groups become 0.

    As a potential, psi(W) = (1/p) sum ||W_g||_2^p for 1 < p < inf, with the mirror map
    W_g ||W_g||_2^(p-2).

    Args:
        p: from 1 to inf.
        dim: the dimension whose entries are the groups: 0 for rows of a matrix, 1 for columns.
        size: neighbours along `dim` that form a group together, such as the rows of a head.

    >>> W = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    >>> float(Grouped(1, dim=0).norm(W)), float(Grouped(2, dim=0).norm(W) ** 2)
    (7.0, 29.0)
    """

    def __init__(self, p: float, dim: int = 0, size: int = 1) -> None:
        for name, given in (("dim", dim), ("size", size)):
            if not isinstance(given, int) or isinstance(given, bool):
                raise TypeError(f"{name} must be a whole number, got {given!r}")
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self._entries = PNorm(p)  # of the groups' 2-norms
        self.p, self.q, self.dim, self.size = self._entries.p, self._entries.q, dim, size

    def __repr__(self) -> str:
        size = f", size={self.size}" if self.size > 1 else ""
        return f"Grouped({self.p:g}, dim={self.dim}{size})"

    def __eq__(self, other: object) -> bool:
        own = (self.p, self.dim, self.size)
        return isinstance(other, Grouped) and (other.p, other.dim, other.size) == own

    def __hash__(self) -> int:
        return hash((Grouped, self.p, self.dim, self.size))

    @property
    def limit(self) -> Norm:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self

    @property
    def dual(self) -> Grouped:
        return Grouped(self.q, self.dim, self.size)

    def check(self, shape: torch.Size | tuple[int, ...], name: str = "w") -> None:
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(
                f"{name} has no dimension {self.dim} for {self!r}: its shape is {tuple(shape)}"
            )
        if shape[self.dim] % self.size:
            raise ValueError(
                f"{name} has {shape[self.dim]} entries in dimension {self.dim}, no multiple of the"
                f" size {self.size} of {self!r}"
            )

    def norm(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return the p-norm of the groups' 2-norms."""
        return in_wide(lambda x: self._entries.norm(_lengths(self._groups(x, dims)), -1), w)

    def dual_norm(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the q-norm of the groups' 2-norms, q = p/(p-1)."""
        return in_wide(lambda x: self._entries.dual_norm(_lengths(self._groups(x, dims)), -1), u)

    def steepest(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return each group's direction, with lengths that are steepest in the p-norm."""
        return self._with_lengths(u, dims, lambda lengths: self._entries.steepest(lengths, -1))

    def mirror(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return each group times its length to the power p - 2."""
        return self._with_lengths(w, dims, self._entries.mirror)

    def inverse(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the inverse of `mirror`."""
        return self._with_lengths(u, dims, self._entries.inverse)

    def value(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return psi(W) = (1/p) sum ||W_g||^p."""
        return in_wide(lambda x: self._entries.value(_lengths(self._groups(x, dims)), -1), w)

    def divergence(self, w: Tensor, v: Tensor, dims: Dims = None) -> Tensor:
        """Return the Bregman divergence, as a sum of terms that are never negative.

        A group of lengths a, b and of directions x, y adds d(a, b) + a b^(p-1) ||x - y||^2 / 2,
        where d is the divergence of |x|^p/p.
        """

        def of_groups(w: Tensor, v: Tensor) -> Tensor:
            one, two = self._groups(w, dims), self._groups(v, dims)
            a, b = _lengths(one), _lengths(two)
            turned = (_units(one, a) - _units(two, b)).square().sum(-1) / 2
            # Two groups of which one is 0 have no angle: then a b^(p-1) is 0, too.
            return (entry_divergence(a, b, self.p) + a * self._entries.mirror(b) * turned).sum(-1)

        return in_wide(of_groups, w, v)

    def _groups(self, x: Tensor, dims: Dims) -> Tensor:
        """Return the groups of each of a batch, (..., groups, entries of a group)."""
        chosen = [d % x.dim() for d in all_dims(x, dims)]
        self.check(tuple(x.shape[d] for d in chosen))
        first = chosen[self.dim]
        order = (first, *(d for d in chosen if d != first))
        last = x.movedim(order, tuple(range(-len(order), 0)))
        lead = last.shape[: x.dim() - len(order)]
        return last.reshape(*lead, x.shape[first] // self.size, -1)

    def _with_lengths(self, x: Tensor, dims: Dims, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x with other lengths of its groups."""

        def changed(x: Tensor) -> Tensor:
            groups = self._groups(x, dims)
            lengths = _lengths(groups)
            new = _units(groups, lengths) * change(lengths)[..., None]
            chosen = [d % x.dim() for d in all_dims(x, dims)]
            first = chosen[self.dim]
            order = (first, *(d for d in chosen if d != first))
            back = tuple(range(-len(order), 0))
            return new.reshape(x.movedim(order, back).shape).movedim(back, order)

        return in_wide(changed, x)


def _lengths(groups: Tensor) -> Tensor:
    return lp_norm(groups, 2, -1)


def _units(groups: Tensor, lengths: Tensor) -> Tensor:
    """Return each group divided by its length; a group of zeros stays."""
    safe = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    return groups / safe[..., None]
