"""Lemmas 2 to 5 and 15 of the paper: norms, divergences, and powers of numbers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mirrorhead.geometry import PNorm, Potential
from mirrorhead.geometry._powers import Dims, check_p, total


class Sides(NamedTuple):
    """The two sides of a claim left >= right (or left = right, where the lemma is an identity)."""

    left: Tensor
    right: Tensor


def lemma_2(W: Tensor, p: float) -> tuple[Sides, Sides]:
    r"""Compare ||W||_p with ||W||_2 from above and from below, for square W (..., d, d).

        d^(2/p - 1) ||W||_2 <= ||W||_p <= ||W||_2   for p >= 2; the other way for p <= 2.

    >>> import torch
    >>> [bool(side.left >= side.right) for side in lemma_2(torch.randn(3, 3), p=3)]
    [True, True]
    """
    dims = (-2, -1)
    norm, euclidean = PNorm(check_p(p)).norm(W, dims), PNorm(2).norm(W, dims)
    scaled = W.shape[-1] ** (2 / p - 1) * euclidean
    low, high = (scaled, euclidean) if p >= 2 else (euclidean, scaled)
    return Sides(high, norm), Sides(norm, low)


def lemma_3(W1: Tensor, W2: Tensor, p: float, dims: Dims = None) -> Sides:
    """Bound D(W1, W2) of matrices with ||W1||_p = ||W2||_p = 1 from below by their distance.

        D >= ||W1 - W2||_p^p / (p 2^p) for p >= 2,   D >= (p-1)^2/p ||W1 - W2||_2^2 for p < 2.

    The proof for p < 2 leaves out W1 < W2 of equal signs; the claim holds there too.

    >>> import torch
    >>> lemma_3(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), p=2)
    Sides(left=tensor(1.), right=tensor(0.2500))
    """
    psi = PNorm(check_p(p))
    if p >= 2:
        bound = psi.norm(W1 - W2, dims) ** p / (p * 2**p)
    else:
        bound = (p - 1) ** 2 / p * PNorm(2).norm(W1 - W2, dims) ** 2
    return Sides(psi.divergence(W1, W2, dims), bound)


def lemma_4(x: Tensor, y: Tensor, p: float) -> Sides:
    """(p-1)/p (x^p - y^p) >= y (x^(p-1) - y^(p-1)) for x >= y >= 0."""
    return Sides((p - 1) / p * (x**p - y**p), y * (x ** (p - 1) - y ** (p - 1)))


def lemma_5(x: Tensor, y: Tensor, q: float) -> Sides:
    """q x^(q-1) (x - y) >= x^q - y^q for x >= y >= 0 and q >= 1; q y^(q-1) (x - y) for q < 1.

    The paper's proof derives the opposite inequality: the derivative of the bound in x is the
    larger one, not the smaller one.
    """
    base = x if q >= 1 else y
    return Sides(q * base ** (q - 1) * (x - y), x**q - y**q)


def lemma_15(psi: Potential, w: Tensor, w1: Tensor, w2: Tensor, dims: Dims = None) -> Sides:
    """The cosine law D(w, w1) = D(w, w2) + D(w2, w1) - <mirror(w1) - mirror(w2), w - w2>."""
    inner = total((psi.mirror(w1) - psi.mirror(w2)) * (w - w2), dims)
    through = psi.divergence(w, w2, dims) + psi.divergence(w2, w1, dims) - inner
    return Sides(psi.divergence(w, w1, dims), through)
