"""The k-support norm: weights of which k are not 0, trained with a dense dual variable."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mirrorhead import native
from mirrorhead._checks import check_integer, is_number
from mirrorhead.geometry._base import Norm, Potential
from mirrorhead.geometry._powers import Dims, all_dims, in_wide, lp_norm


class KSupport(Norm, Potential):
    r"""The k-support norm, and its potential psi(w) = 1/2 ||w||^2 (Argyriou et al. 2012).

    The unit ball is the convex hull of the vectors with at most k entries and 2-norm 1. The dual
    norm is the 2-norm of the k largest entries, and the inverse mirror map keeps the k largest
    entries of u: weights are exactly sparse while u stays dense. With |w|_1 >= |w|_2 >= ... the
    norm is

    .. math::
        \|w\|^2 = \sum_{i < k-r} |w|_i^2 + \frac{1}{r+1} \Bigl(\sum_{i \ge k-r} |w|_i\Bigr)^2,

    with the one r from 0 to k-1 for which |w|_{k-r-1} > mean > = |w|_{k-r}, where mean is that sum
    divided by r + 1.

    The potential is not strictly convex: on separable data the last iterate of mirror descent may
    move between supports for ever.

    Args:
        share: of the entries that stay, above 0 and at most 1; or k: their number.
        group: patterns such as 2:4. k or the share is that of each `group` neighbours along the
            last dimension, and the norm is the 2-norm of the groups' norms.

    >>> norm = KSupport(k=2)
    >>> norm.inverse(torch.tensor([3.0, -1.0, 4.0]))
    tensor([3., 0., 4.])
    >>> norm.dual_norm(torch.tensor([3.0, -1.0, 4.0]))
    tensor(5.)
    >>> KSupport(k=2, group=4).inverse(torch.tensor([3.0, -1.0, 4.0, 0.5, 0.1, 0.2, 0.3, 0.4]))
    tensor([3.0000, 0.0000, 4.0000, 0.0000, 0.0000, 0.0000, 0.3000, 0.4000])
    """

    dense_dual = True

    def __init__(
        self, share: float | None = None, k: int | None = None, group: int | None = None
    ) -> None:
        if (share is None) == (k is None):
            raise TypeError("give either share or k")
        if share is not None and (not is_number(share) or not 0 < share <= 1):
            raise ValueError(f"share must be above 0 and at most 1, got {share!r}")
        if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
            raise ValueError(f"k must be a whole number of at least 1, got {k!r}")
        if group is not None:
            check_integer("group", group, 2)
            if k is not None and k > group:
                raise ValueError(f"k must be at most group = {group}, got {k}")
        self.share, self.k, self.group = share, k, group

    def __repr__(self) -> str:
        size = f"{self.share:g}" if self.share is not None else f"k={self.k}"
        return f"KSupport({size}, group={self.group})" if self.group else f"KSupport({size})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KSupport) and other._key == self._key

    def __hash__(self) -> int:
        return hash((KSupport, *self._key))

    @property
    def _key(self) -> tuple[float | None, int | None, int | None]:
        return self.share, self.k, self.group

    def check(self, shape: torch.Size | tuple[int, ...], name: str = "w") -> None:
        """Refuse weights whose last dimension does not consist of whole groups."""
        if self.group and (not shape or shape[-1] % self.group):
            given = tuple(shape)
            raise ValueError(
                f"{name} must have groups of {self.group} along its last dimension,"
                f" got shape {given}"
            )

    @property
    def limit(self) -> Norm:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self

    def count(self, entries: int) -> int:
        """Return k for a group, or weights, of this number of entries: at least 1, at most all."""
        k = self.k if self.share is None else round(self.share * entries)
        assert k is not None
        return min(max(k, 1), entries)

    def lift(self, w: Tensor) -> Tensor:
        """Return w: the first weights are then the k largest of those that training starts at."""
        return w

    def norm(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return the k-support norm."""

        def of_flat(x: Tensor) -> Tensor:
            flat = self._flat(x, dims)
            head, mean, r = self._split(flat)
            return self._together((head + mean.square() * (r + 1)).sqrt() * _scale(flat)[..., 0])

        return in_wide(of_flat, w)

    def dual_norm(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the 2-norm of the k largest entries."""

        def of_flat(x: Tensor) -> Tensor:
            flat = self._flat(x, dims).abs()
            kept = flat.topk(self.count(flat.shape[-1]), -1).values
            return self._together(lp_norm(kept, 2, -1))

        return in_wide(of_flat, u)

    def steepest(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the k largest entries of u, divided by their 2-norm."""

        def direction(x: Tensor) -> Tensor:
            kept = self.inverse(x, dims)
            flat = _flat(kept, dims)
            size = lp_norm(flat, 2, -1, keepdim=True)
            return _back(flat / torch.where(size > 0, size, torch.ones_like(size)), x, dims)

        return in_wide(direction, u)

    def mirror(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return the gradient of 1/2 ||w||^2, with 0 where w is 0.

        It is w where at most k entries are not 0. Otherwise the smaller entries count alike.
        """

        def gradient(x: Tensor) -> Tensor:
            flat = self._flat(x, dims)
            _, mean, _ = self._split(flat)
            floor = mean[..., None] * _scale(flat)
            sparse = (flat != 0).sum(-1, keepdim=True) <= self.count(flat.shape[-1])
            lifted = flat.sign() * torch.maximum(flat.abs(), floor)
            return self._back(torch.where(sparse, flat, lifted), x, dims)

        return in_wide(gradient, w)

    def inverse(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return u with all but its k largest entries set to 0."""

        def kept(x: Tensor) -> Tensor:
            flat = self._flat(x, dims)
            return self._back(_largest(flat, self.count(flat.shape[-1])), x, dims)

        return in_wide(kept, u)

    def value(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return 1/2 ||w||^2."""
        return in_wide(lambda x: self.norm(x, dims).square() / 2, w)

    def _flat(self, x: Tensor, dims: Dims) -> Tensor:
        """Return x with `dims`, or each group of them, as one last dimension."""
        if self.group is None:
            return _flat(x, dims)
        self.check(tuple(x.shape[k] for k in all_dims(x, dims)))
        return _flat(x, dims).unflatten(-1, (-1, self.group))

    def _back(self, flat: Tensor, x: Tensor, dims: Dims) -> Tensor:
        """Undo `_flat`."""
        return _back(flat if self.group is None else flat.flatten(-2), x, dims)

    def _together(self, norms: Tensor) -> Tensor:
        """Return the norm of the weights from those of the groups."""
        return norms if self.group is None else lp_norm(norms, 2, -1)

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of squares of the large entries, the mean of the others, and r.

        Entries are measured by `_scale`, and mean is the sum of the small ones over r + 1.
        """
        k = self.count(flat.shape[-1])
        size = (flat.abs() / _scale(flat)).sort(-1, descending=True).values
        squares = torch.cat([torch.zeros_like(size[..., :1]), size.square().cumsum(-1)], -1)
        # Sums from each place to the end, smallest first so that they lose no digits.
        tails = size.flip(-1).cumsum(-1).flip(-1)
        r = torch.arange(k, device=flat.device)  # a candidate each
        start = k - 1 - r  # the first of the small entries, counted from 0
        means = tails[..., start] / (r + 1)
        before = torch.where(start > 0, size[..., (start - 1).clamp_min(0)], torch.inf)
        fits = (before > means) & (means >= size[..., start])
        place = fits.long().argmax(-1, keepdim=True)  # one fits, but for rounding
        return (
            squares[..., start].gather(-1, place)[..., 0],
            means.gather(-1, place)[..., 0],
            r[place[..., 0]],
        )


def _largest(flat: Tensor, k: int) -> Tensor:
    """Return the k largest entries of each row, and 0 in the place of the others."""
    in_c = flat.dtype == torch.float32 and flat.device.type == "cpu" and not flat.requires_grad
    keep = _keep_in_c() if in_c and flat.numel() else None
    if keep is None:
        places = flat.abs().topk(k, -1).indices
        return torch.zeros_like(flat).scatter(-1, places, flat.gather(-1, places))
    flat, count = flat.contiguous(), flat.shape[-1]
    out = torch.empty_like(flat)
    keep(flat.data_ptr(), out.data_ptr(), flat.numel() // count, count, k)
    return out


@functools.cache
def _keep_in_c() -> Callable[..., None] | None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return native.function("keep_largest", [pointer, pointer, number, number, number])


def _scale(flat: Tensor) -> Tensor:
    """Return the largest entry, or 1 where all are 0."""
    largest = flat.detach().abs().amax(-1, keepdim=True)
    return torch.where(largest > 0, largest, torch.ones_like(largest))


def _flat(x: Tensor, dims: Dims) -> Tensor:
    """Return x with `dims` as one last dimension."""
    chosen = all_dims(x, dims)
    return x.movedim(chosen, tuple(range(-len(chosen), 0))).flatten(x.dim() - len(chosen))


def _back(flat: Tensor, x: Tensor, dims: Dims) -> Tensor:
    """Undo `_flat`."""
    chosen = all_dims(x, dims)
    last = tuple(range(-len(chosen), 0))
    return flat.reshape(x.movedim(chosen, last).shape).movedim(last, chosen)
