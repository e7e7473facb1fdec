"""The linear map W -> (x_sel - x_t)' W z of the margin constraints, never formed as a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Temporary tensors of the chunked methods stay below this many numbers (64 MB).
_CHUNK = 1 << 23


@dataclass(frozen=True, eq=False)
class Blocks:
    r"""Constraints in blocks that share one factor: row (i, t) of A is vec(left_it right_i').

    With W of shape (a, c) the map and its adjoint are

        (A W)_it = left_it' W right_i            A' lam = sum_i (sum_t lam_it left_it) right_i'

    and a weighted Gram matrix A diag(h) A' has the blocks
    left_i diag(H (right_i o right_j)) left_j', H being h as a matrix. Forming A would take
    n R a c numbers; the two factors take n (R a + c).

    Attention has left = x_sel - x_t and right = z. A plain SVM has right = 1 and one block,
    or several of bounded size. The leading dimension is a batch of problems; vectors are
    (B, m) with m = n R, weights (B, N) with N = a c.

    left: (B, n, R, a); right: (B, n, c).

    >>> left = torch.tensor([[[[1.0, 0.0], [1.0, -1.0]]]])
    >>> A = Blocks(left, right=torch.tensor([[[2.0]]]))
    >>> A.apply(torch.tensor([[3.0, 1.0]]))
    tensor([[6., 4.]])
    >>> A.adjoint(torch.tensor([[1.0, 1.0]]))
    tensor([[ 4., -2.]])
    """

    left: Tensor
    right: Tensor

    @property
    def batch(self) -> int:
        return self.left.shape[0]

    @property
    def rows(self) -> int:
        """m, the number of constraints of one problem."""
        return self.left.shape[1] * self.left.shape[2]

    @property
    def columns(self) -> int:
        """N, the number of weights of one problem."""
        return self.left.shape[3] * self.right.shape[2]

    def take(self, keep: Tensor | slice) -> Blocks:
        """The sub-batch of the problems named by `keep`."""
        return Blocks(self.left[keep], self.right[keep])

    def narrow(self, index: Tensor) -> Blocks:
        """The rows named by index (B, n, fewer), which counts within each block."""
        a = self.left.shape[3]
        return Blocks(self.left.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, a)), self.right)

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
        left, right = self._factor_norms
        return (left * right.unsqueeze(-1)).view(self.batch, self.rows)

    @property
    def zero_rows(self) -> Tensor:
        """(B, m) bool, rows of zeros: one of the two factors is zero."""
        left, right = self._factor_norms
        return ((left == 0) | (right == 0).unsqueeze(-1)).view(self.batch, self.rows)

    def unit_rows(self) -> Blocks:
        """The same rows with Euclidean norm 1; zero rows stay zero."""
        left, right = (norm.where(norm > 0, 1).unsqueeze(-1) for norm in self._factor_norms)
        return Blocks(self.left / left, self.right / right)

    @cached_property
    def _factor_norms(self) -> tuple[Tensor, Tensor]:
        return _norm(self.left), _norm(self.right)

    def block_gram(self, h: Tensor) -> Tensor:
        """The diagonal blocks of A diag(h) A': (B, N) -> (B, n, R, R)."""
        B, n, R, a = self.left.shape
        weights = (self.right.square() @ h.view(B, a, -1).mT).unsqueeze(-2)  # (B, n, 1, a)
        out = self.left.new_empty(B, n, R, R)
        for at in self.chunks(R * a):
            left = self.left[:, at]
            torch.matmul(left * weights[:, at], left.mT, out=out[:, at])
        return out

    def column_sizes(self) -> Tensor:
        """Squared Euclidean norms of the columns of A, (B, N)."""
        B, n, R, a = self.left.shape
        squares = self.left.new_empty(B, n, a)
        for at in self.chunks(R * a):
            squares[:, at] = self.left[:, at].square().sum(-2)
        return (squares.mT @ self.right.square()).view(B, -1)

    def take_rows(self, index: Tensor) -> Tensor:
        """The rows of A named by index (B, k), as (B, k, N)."""
        B, n, R, a = self.left.shape
        c = self.right.shape[2]
        left = self.left.view(B, n * R, a).gather(1, index.unsqueeze(-1).expand(-1, -1, a))
        right = self.right.gather(1, (index // R).unsqueeze(-1).expand(-1, -1, c))
        return (left.unsqueeze(-1) * right.unsqueeze(-2)).view(B, -1, a * c)

    def take_columns(self, index: Tensor, at: slice) -> Tensor:
        """The columns of A named by index (k,), in the rows of the blocks `at`: (B, ., R, k)."""
        c = self.right.shape[2]
        return self.left[:, at][..., index // c] * self.right[:, at, None][..., index % c]

    def chunks(self, each: int) -> Iterator[slice]:
        """Slices of the blocks; `each` numbers a block and problem stay within bounds."""
        n = self.left.shape[1]
        size = max(1, _CHUNK // (self.batch * each))
        return (slice(k, k + size) for k in range(0, n, size))


def _norm(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1)
    return torch.linalg.vector_norm(x / scale, dim=-1) * largest.squeeze(-1)
