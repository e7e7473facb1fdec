"""The constraints of the margin problems, from checked data; A is never formed as a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mirrorhead._checks import as_floats, as_tensor, check_data, check_signs
from mirrorhead.margin._doubled import two_sum

# Temporary tensors of the chunked methods stay below this many numbers (64 MB).
_CHUNK = 1 << 23
# A plain SVM is cut into blocks of this many rows, which bounds the blocks of the
# preconditioner of large problems and costs the small ones nothing.
_SVM_BLOCK = 128
# The norms of rows that float64 can handle: weights are as large as their inverse.
SMALLEST, LARGEST = 1e-300, 1e300


@dataclass(frozen=True, eq=False)
class Constraints:
    """A w >= 1 on the live rows, and where each row belongs in the data."""

    A: ConstraintMatrix  # float64, the leading dimensions of the data flattened into one
    live: Tensor  # (B, m) bool
    position: Tensor  # (B, m), the index of a row in the flattened dual of `shape`
    lead: tuple[int, ...]  # the leading dimensions
    shape: tuple[int, ...]
    weights: tuple[int, ...]  # the shape of one problem's weights
    # What rounding took from A.left, of the problems named by an index; None if it is exact.
    rest: Callable[[Tensor], Tensor] | None = None

    def pull(self, lam: Tensor) -> Tensor:
        """A' lam in the shape of the weights, (B, ...)."""
        return self.A.adjoint(lam).view(self.A.batch, *self.weights)

    def spread(self, lam: Tensor) -> Tensor:
        """(B, m) values of the rows -> the shape of the data; 0 where there is no row."""
        size = math.prod(self.shape)
        flat = lam.new_zeros(self.A.batch, size + 1)  # the last place takes the padding
        flat.scatter_(1, self.position.where(self.live, size), lam)
        return flat[:, :size].reshape(*self.lead, *self.shape)

    def collect(self, values: Tensor) -> Tensor:
        """The inverse of `spread`: the shape of the data -> (B, m), 0 on padding."""
        flat = values.reshape(self.A.batch, math.prod(self.shape)).to(torch.float64)
        return flat.gather(1, self.position) * self.live


def attention_constraints(
    X: Tensor, z: Tensor, tokens: Tensor, mask: Tensor | None = None
) -> Constraints:
    """(x_i,sel - x_it)' W z_i >= 1 for every token t of sample i other than the selected one.

    The shapes are those of `attention_svm`.
    """
    X, z, mask = check_data(X, z, mask)
    X, z = X.detach(), z.detach()
    *lead, n, T, d = X.shape
    c = z.shape[-1]
    tokens = as_tensor("tokens", tokens, X)
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be integers, got {tokens.dtype}")
    _check_shape("tokens", tokens, X.shape[:-2], "X")
    if tokens.numel() and not bool(((tokens >= 0) & (tokens < T)).all()):
        given = f"{tokens.min()} to {tokens.max()}"
        raise ValueError(f"tokens must lie in 0..{T - 1}, got values from {given}")
    B = X[..., 0, 0, 0].numel()
    X, z, tokens = X.reshape(B, n, T, d), z.reshape(B, n, c), tokens.long().reshape(B, n)
    R = max(T - 1, 1)  # a lone token gets one row of padding
    other = torch.arange(R, device=X.device).expand(B, n, R)
    # All tokens but the selected one.
    other = (other + (other >= tokens.unsqueeze(-1))).clamp_max(T - 1)
    real = torch.full_like(other, T > 1, dtype=torch.bool)  # a lone token has no constraint
    if mask is not None:
        mask = mask.reshape(B, n, T)
        if not bool(mask.gather(2, tokens.unsqueeze(-1)).all()):
            raise ValueError("tokens selects a token that mask marks as padding")
        real &= mask.gather(2, other)
    selected = X.gather(2, tokens.view(B, n, 1, 1).expand(B, n, 1, d))
    left = selected - X.gather(2, other.unsqueeze(-1).expand(B, n, R, d))
    if mask is not None:
        left.masked_fill_(~real.unsqueeze(-1), 0)
    A = ConstraintMatrix(left, z)
    _check_range("(x_sel - x_t) z' of X and z", A)

    def rest(index: Tensor) -> Tensor:
        others = X[index].gather(2, other[index].unsqueeze(-1).expand(-1, -1, -1, d))
        _, lost = two_sum(selected[index], -others)
        return lost.masked_fill_(~real[index].unsqueeze(-1), 0)

    rows = torch.arange(n, device=X.device).view(n, 1) * T
    live, position = real.reshape(B, n * R), (other + rows).reshape(B, n * R)
    return Constraints(A, live, position, tuple(lead), (n, T), (d, c), rest)


def svm_constraints(features: Tensor, labels: Tensor) -> Constraints:
    """y_i v' x_i >= 1 for every sample. features: (..., n, d); labels: (..., n) of +-1."""
    features = _floating("features", features, 2)
    *lead, n, d = features.shape
    if min(n, d) == 0:
        given = tuple(features.shape)
        raise ValueError(
            f"features must have at least one sample and one feature; got shape {given}"
        )
    labels = as_tensor("labels", labels, features)
    _check_shape("labels", labels, features.shape[:-1], "features")
    check_signs("labels", labels)
    B = features[..., 0, 0].numel()
    R = min(n, _SVM_BLOCK)
    blocks = -(-n // R)
    left = features.new_zeros(B, blocks * R, d)
    left[:, :n] = (labels.unsqueeze(-1) * features).reshape(B, n, d)
    place = torch.arange(blocks * R, device=features.device).expand(B, -1)
    A = ConstraintMatrix(left.view(B, blocks, R, d), features.new_ones(B, blocks, 1))
    _check_range("the rows of features", A)
    return Constraints(A, place < n, place.clamp_max(n - 1), tuple(lead), (n,), (d,))


def _check_range(name: str, A: ConstraintMatrix) -> None:
    """Refuse rows that float64 cannot scale to 1: their weights would overflow or underflow."""
    left, right = A.factor_norms
    zero = ((left == 0) | (right == 0).unsqueeze(-1)).view_as(A.row_norms)
    wrong = ((A.row_norms < SMALLEST) & ~zero) | ~(A.row_norms <= LARGEST)
    if bool(wrong.any()):
        raise ValueError(
            f"{name} must be 0 or have norms from {SMALLEST:g} to {LARGEST:g}; "
            f"{int(wrong.sum())} do not. Scale the data: W scales with the inverse"
        )


def _floating(name: str, given: object, dims: int, like: Tensor | None = None) -> Tensor:
    """Finite float64 numbers with at least `dims` dimensions."""
    x = as_floats(name, given, like).detach()
    if x.dim() < dims:
        raise ValueError(f"{name} must have at least {dims} dimensions, got shape {tuple(x.shape)}")
    return x


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...], data: str) -> None:
    if x.shape != shape:
        given = tuple(x.shape)
        raise ValueError(f"{name} must have shape {tuple(shape)} to fit {data}; got {given}")


@dataclass(frozen=True, eq=False)
class ConstraintMatrix:
    r"""Constraints in blocks that share one factor: row (i, t) of A is vec(left_it right_i').

    With W of shape (a, c) the map and its adjoint are

        (A W)_it = left_it' W right_i            A' lam = sum_i (sum_t lam_it left_it) right_i'

    and a weighted Gram matrix A diag(h) A' has the blocks
    left_i diag(H (right_i o right_j)) left_j', H being h as a matrix. Forming A would take
    n R a c numbers; the two factors take n (R a + c).

    Attention has left = x_sel - x_t and right = z. A plain SVM has right = 1 and one block,
    or several of bounded size. The leading dimension is a batch of problems; vectors are
    (B, m) with m = n R, weights (B, N) with N = a c.
    """

    left: Tensor  # (B, n, R, a)
    right: Tensor  # (B, n, c)

    @property
    def batch(self) -> int:
        return self.left.shape[0]

    @property
    def rows(self) -> int:
        """m, the number of constraints of one problem."""
        return self.left.shape[1] * self.left.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        """(a, c), the shape of the weights of one problem."""
        return self.left.shape[3], self.right.shape[2]

    @property
    def columns(self) -> int:
        """N, the number of weights of one problem."""
        return math.prod(self.shape)

    def take(self, keep: Tensor | slice) -> ConstraintMatrix:
        """The sub-batch of the problems named by `keep`."""
        return ConstraintMatrix(self.left[keep], self.right[keep])

    def turned(self, left: Tensor, right: Tensor) -> ConstraintMatrix:
        """The constraints on V where W = left V right'."""
        return ConstraintMatrix(self.left @ left.unsqueeze(1), self.right @ right)

    def keep_rows(self, index: Tensor) -> ConstraintMatrix:
        """The rows named by index (B, n, fewer), which counts within each block."""
        index = index.unsqueeze(-1).expand(-1, -1, -1, self.left.shape[3])
        return ConstraintMatrix(self.left.gather(2, index), self.right)

    def apply(self, w: Tensor) -> Tensor:
        """A w: (B, N) -> (B, m)."""
        B, n, R, a = self.left.shape
        image = torch.bmm(self.right, w.view(B, a, self.right.shape[2]).mT)  # W right_i
        return torch.bmm(self.left.view(B * n, R, a), image.view(B * n, a, 1)).view(B, n * R)

    def adjoint(self, lam: Tensor) -> Tensor:
        """A' lam: (B, m) -> (B, N)."""
        B, n, R, a = self.left.shape
        pulled = torch.bmm(lam.view(B * n, 1, R), self.left.view(B * n, R, a))
        return torch.bmm(pulled.view(B, n, a).mT, self.right).view(B, self.columns)

    @cached_property
    def row_norms(self) -> Tensor:
        """Euclidean norms of the rows of A, (B, m); they neither over- nor underflow."""
        left, right = self.factor_norms
        return (left * right.unsqueeze(-1)).view(self.batch, self.rows)

    def unit_rows(self) -> ConstraintMatrix:
        """The same rows with Euclidean norm 1; zero rows stay zero."""
        left, right = (norm.where(norm > 0, 1).unsqueeze(-1) for norm in self.factor_norms)
        return ConstraintMatrix(self.left / left, self.right / right)

    @cached_property
    def factor_norms(self) -> tuple[Tensor, Tensor]:
        return euclidean(self.left), euclidean(self.right)

    def block_gram(self, h: Tensor) -> Tensor:
        """The diagonal blocks of A diag(h) A': (B, N) -> (B, n, R, R)."""
        B, n, R, a = self.left.shape
        weights = (self.right.square() @ h.view(B, a, -1).mT).unsqueeze(-2)  # (B, n, 1, a)
        out = self.left.new_empty(B, n, R, R)
        for at in self.chunks(R * a):
            left = self.left[:, at]
            torch.matmul(left * weights[:, at], left.mT, out=out[:, at])
        return out

    def gram(self, h: Tensor, swap: Tensor | None = None) -> Tensor:
        """A H A', (B, m, m), where H multiplies weights (a, c) by h entry by entry.

        With `swap`, (B, s, s) and symmetric, H also adds swap_ij w_ji to the entries i, j < s.
        """
        B, n, R, a = self.left.shape
        rows = self.left.reshape(B, 1, n * R, a)
        out = self.left.new_empty(B, n, R, n * R)
        for at in self.chunks(n * R * a):
            own = self.right[:, at].unsqueeze(2)
            weights = (own * self.right.unsqueeze(1)) @ h.mT.unsqueeze(1)  # (B, ., n, a)
            scaled = weights.repeat_interleave(R, 2).mul_(rows)
            if swap is not None:
                s = swap.shape[-1]
                turned = (rows[..., :s] * own[..., :s]) @ swap.unsqueeze(1)
                turned *= self.right[:, None, :, :s].repeat_interleave(R, 2)
                scaled[..., :s] += turned
            out[:, at] = self.left[:, at] @ scaled.mT
        return out.view(B, n * R, n * R)

    def column_sizes(self) -> Tensor:
        """Squared Euclidean norms of the columns of A, (B, N)."""
        _, _, R, a = self.left.shape
        squares = [self.left[:, at].square().sum(-2) for at in self.chunks(R * a)]
        return (torch.cat(squares, 1).mT @ self.right.square()).view(self.batch, -1)

    def take_rows(self, index: Tensor) -> Tensor:
        """The rows of A named by index (B, k), as (B, k, N)."""
        B, n, R, a = self.left.shape
        index = index.unsqueeze(-1)
        left = self.left.view(B, n * R, a).gather(1, index.expand(-1, -1, a))
        right = self.right.gather(1, (index // R).expand(-1, -1, self.right.shape[2]))
        return (left.unsqueeze(-1) * right.unsqueeze(-2)).view(B, -1, self.columns)

    def take_columns(self, index: Tensor, at: slice) -> Tensor:
        """The columns of A named by index (k,), in the rows of the blocks `at`: (B, ., R, k)."""
        c = self.right.shape[2]
        return self.left[:, at][..., index // c] * self.right[:, at, None][..., index % c]

    def chunks(self, each: int) -> Iterator[slice]:
        """Slices of the blocks; `each` numbers a block and problem stay within bounds."""
        size = max(1, _CHUNK // (self.batch * each))
        return (slice(k, k + size) for k in range(0, self.left.shape[1], size))


def euclidean(x: Tensor) -> Tensor:
    """Euclidean norms over the last dimension; they neither over- nor underflow."""
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1)
    return torch.linalg.vector_norm(x / scale, dim=-1) * largest.squeeze(-1)
