"""What a geometry is: a norm, a potential, or both.

A norm measures weights, and says in which direction to step. A potential has a gradient, the mirror
map, and so turns gradients into steps in another way. `limit` ties the two together: it is the norm
whose max-margin direction mirror descent tends to, and it depends on the shape of the potential at
infinity alone (Pesme et al. 2024, arXiv 2406.12763).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from mirrorhead.geometry._powers import Dims, expand, in_wide, total


class _OfEach:
    """Calls methods on each of a batch, also where a user's method knows nothing of batches."""

    _batched: ClassVar[dict[str, bool]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        own = [name for name in ("steepest", "mirror", "inverse") if name in vars(cls)]
        takes = {name: "dims" in inspect.signature(getattr(cls, name)).parameters for name in own}
        cls._batched = {**cls._batched, **takes}

    def of_each(self, method: str, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return what a method gives for each of a batch; `dims` are those of one of them.

        A method with an argument `dims` gets it. Any other one sees one of the batch at a time.
        """
        call: Callable[..., Tensor] = getattr(self, method)
        if self._batched[method]:
            return call(x, dims)
        lead = x.dim() - len(dims)
        if not lead:
            return call(x)
        each = [call(one) for one in x.flatten(0, lead - 1)]
        return torch.stack(each).reshape(x.shape)


class Norm(_OfEach, ABC):
    """A norm of weights. A norm of your own defines `norm`, `dual_norm` and `steepest`.

    `dims` are the dimensions of one set of weights, all of them by default; leading dimensions
    are a batch.

    >>> class Weighted(Norm):  # ||w|| = ||s w||_2
    ...     def __init__(self, s): self.s = s
    ...     def norm(self, w, dims=None): return torch.linalg.vector_norm(self.s * w, dim=dims)
    ...     def dual_norm(self, u, dims=None): return torch.linalg.vector_norm(u / self.s, dim=dims)
    ...     def steepest(self, u):
    ...         size = self.dual_norm(u)
    ...         return u / self.s**2 / torch.where(size > 0, size, 1.0)  # 0 where u is 0
    >>> norm, u = Weighted(torch.tensor([1.0, 2.0])), torch.tensor([3.0, 4.0])
    >>> norm.norm(norm.steepest(u)), (u * norm.steepest(u)).sum() == norm.dual_norm(u)
    (tensor(1.), tensor(True))
    """

    @abstractmethod
    def norm(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return the norm of the weights."""

    @abstractmethod
    def dual_norm(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the dual norm of u, the largest <u, d> over directions d of norm 1."""

    @abstractmethod
    def steepest(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the direction d of norm 1 with the largest <u, d>; 0 where u is 0."""

    @property
    def dual(self) -> Norm:
        """The dual norm, as a norm."""
        raise NotImplementedError(f"{self!r} does not say what its dual is")

    def check(self, shape: torch.Size | tuple[int, ...], name: str = "w") -> None:
        """Refuse weights that have no such norm; `name` says which they are."""


class Potential(_OfEach, ABC):
    """A potential psi. One of your own sets `limit`, and defines `mirror`, `inverse` and `value`.

    The default `divergence` subtracts values, so it has no digits where it is below 1e-16 of
    them; the potentials of this package have formulas that do not cancel.

    >>> from mirrorhead import PNorm
    >>> class Quartic(Potential):  # 1/4 |w|^4, entry by entry
    ...     limit = PNorm(4)
    ...     def mirror(self, w): return w**3
    ...     def inverse(self, u): return u.sign() * u.abs() ** (1 / 3)
    ...     def value(self, w, dims=None): return (w**4 / 4).sum(dims)
    >>> Quartic().divergence(torch.tensor([2.0]), torch.tensor([1.0]))
    tensor(2.7500)
    """

    #: The norm whose max-margin direction mirror descent tends to.
    limit: Norm

    def __getattr__(self, name: str) -> Any:
        if name == "limit":
            raise AttributeError(
                f"{type(self).__name__} has no limit: set it to the norm that the potential grows"
                " like, such as limit = PNorm(2)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    #: Whether u says more than the weights do, as where small entries of u count as 0. Optimizers
    #: then keep u when the potential is exchanged for another of its class.
    dense_dual: ClassVar[bool] = False

    def lift(self, w: Tensor) -> Tensor:
        """Return the u from which training that starts at w begins."""
        return self.mirror(w)

    @abstractmethod
    def mirror(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return the gradient of the potential; one of your own may leave `dims` out."""

    @abstractmethod
    def inverse(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the weights whose mirror image is u."""

    @abstractmethod
    def value(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return psi(w)."""

    def divergence(self, w: Tensor, v: Tensor, dims: Dims = None) -> Tensor:
        """Return the Bregman divergence psi(w) - psi(v) - <mirror(v), w - v>, never negative."""
        mirrored = self.mirror(v, dims) if self._batched["mirror"] else self.mirror(v)
        inner = total(mirrored * (w - v), dims)
        return (self.value(w, dims) - self.value(v, dims) - inner).clamp_min(0)

    def direction_divergence(self, w: Tensor, v: Tensor, dims: Dims = None) -> Tensor:
        """Return the divergence of w and v, each divided by its norm in `limit`.

        Raises ValueError if w or v is zero or not finite and so has no direction.
        """
        w, v = unit(self.limit, w, "w", dims), unit(self.limit, v, "v", dims)
        return self.divergence(w, v, dims)

    def check(self, shape: torch.Size | tuple[int, ...], name: str = "w") -> None:
        """Refuse weights that this potential cannot measure; `name` says which they are."""


class Separable(Potential):
    """A potential that is a sum over entries; `mirror` and `inverse` act entry by entry.

    It defines `entry_value`, `entry_divergence` and `curvature`, the second derivative.
    """

    @abstractmethod
    def entry_value(self, w: Tensor) -> Tensor:
        """Return what each entry adds to the value."""

    @abstractmethod
    def entry_divergence(self, w: Tensor, v: Tensor) -> Tensor:
        """Return what each entry adds to the divergence of w from v, never negative."""

    @abstractmethod
    def curvature(self, w: Tensor) -> Tensor:
        """Return the derivative of `mirror`, entry by entry."""

    def value(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return psi(w)."""
        return in_wide(lambda x: total(self.entry_value(x), dims), w)

    def divergence(self, w: Tensor, v: Tensor, dims: Dims = None) -> Tensor:
        """Return the Bregman divergence psi(w) - psi(v) - <mirror(v), w - v>, never negative."""
        return in_wide(lambda a, b: total(self.entry_divergence(a, b), dims), w, v)


def unit(norm: Norm, x: Tensor, name: str, dims: Dims = None) -> Tensor:
    """Return x divided by its norm, or a ValueError if it has none that is positive and finite."""
    size = norm.norm(x, dims)
    if not bool(((size > 0) & (size < math.inf)).all()):
        raise ValueError(f"{name} has a zero, infinite or NaN slice, which has no direction")
    return x / expand(size, x, dims)
