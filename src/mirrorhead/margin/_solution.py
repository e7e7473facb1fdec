"""The result of a margin problem."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from mirrorhead.margin._certificate import FARKAS, Norm, certify, support_excess
from mirrorhead.margin._constraints import attention_constraints, svm_constraints

# Numbers recomputed from the same W, dual and data differ by less than this, relatively.
ROUNDED = 1e-11


class Status(IntEnum):
    """What is proved about a problem; the words of `MarginSolution.status` are these names."""

    OPTIMAL = 0
    INFEASIBLE = 1
    UNFINISHED = 2

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, eq=False)
class Check:
    """What `MarginSolution.check` found. All fields have the shape of the batch.

    valid: the status is proved, and norm, gap, support and the scale of dual are those that W,
        dual and the data give.
    margin: the smallest constraint value, at least 1 up to rounding where optimal.
    gap: ||W|| relative to the dual's lower bound, less 1, for W scaled to margin 1 if its margin
        is below 1.
    farkas: ||A' dual||_2 relative to the rows; 0 proves infeasibility.
    """

    valid: Tensor
    margin: Tensor
    gap: Tensor
    farkas: Tensor

    def __bool__(self) -> bool:
        return bool(self.valid.all())

    def __repr__(self) -> str:
        count = f"{int(self.valid.sum())} of {self.valid.numel()} valid"
        margin, gap = _finite(torch.min, self.margin, ".15g"), _finite(torch.max, self.gap, ".1e")
        return f"Check({count}, smallest margin {margin}, gap up to {gap})"


@dataclass(frozen=True, eq=False, repr=False)
class MarginSolution:
    r"""Weights of smallest norm that satisfy all margin constraints, with a certificate.

    W: (..., d, d) for attention, (..., d) for `svm` (also called `v`). It satisfies the
        constraints; the smallest constraint value is 1. NaN if no feasible W exists or was found.
    norm: (...), ||W||; inf where infeasible.
    dual: multipliers >= 0, (..., n, T) with 0 at the selected token, or (..., n) for `svm`.
        Where feasible, scaled to ||A' dual||_q = 1, so that dual.sum() is a lower bound of
        the norm and A' dual -> mirror(W) / ||W||^(p-1). Where infeasible, scaled to sum 1,
        with A' dual = 0: a Farkas certificate.
    gap: (...), ||W|| / dual.sum() - 1, recomputed from the data after the solve.
    status: "optimal" (gap <= tol), "infeasible" or "unfinished"; a list for a batch, nested
        like the leading dimensions.
    support: like dual, True on constraints that hold with equality: the share of the multiplier
        in the sum of dual exceeds the relative slack. At a degenerate vertex, where both are 0,
        this is decided by rounding; `locally_optimal` says "cannot tell" there.
    iterations, inner_iterations: (...), Newton steps and conjugate-gradient steps.
    """

    W: Tensor
    norm: Tensor
    dual: Tensor
    gap: Tensor
    support: Tensor
    iterations: Tensor
    inner_iterations: Tensor
    p: float
    tol: float
    kind: Norm
    codes: Tensor  # (...), values of `Status`

    @property
    def v(self) -> Tensor:
        """The same as `W`, under the name that `svm` uses."""
        return self.W

    @property
    def status(self) -> Any:
        """The word, or (nested) lists of words for a batch."""
        return _words(self.codes.tolist())

    @property
    def optimal(self) -> Tensor:
        """(...) bool, True where the status is "optimal"."""
        return self.codes == Status.OPTIMAL

    def check(self, *data: Tensor, mask: Tensor | None = None) -> Check:
        """Recompute status, norm, gap and support from W, dual and the data, and compare.

        data: the arguments of the solver, (X, z, tokens) or (features, labels).
        """
        if len(data) not in (2, 3):
            raise TypeError(f"check takes (X, z, tokens) or (features, labels), got {len(data)}")
        attention = len(data) == 3
        problem = attention_constraints(*data, mask=mask) if attention else svm_constraints(*data)
        if (shape := (*problem.lead, *problem.weights)) != self.W.shape:
            given = tuple(self.W.shape)
            raise ValueError(f"the data fit weights of shape {shape}, this solution has {given}")
        lam = problem.collect(self.dual)
        W = self.W.reshape(problem.A.batch, problem.A.columns)
        known = W.isfinite().all(-1)  # elsewhere no W was found
        proof = certify(problem, W.nan_to_num(), lam, self.kind)
        excess = support_excess(problem, W.nan_to_num(), lam)
        claimed = problem.collect(self.support) > 0
        gap = proof.gap_as_is()
        codes, norm, stated_gap = (x.reshape(-1) for x in (self.codes, self.norm, self.gap))
        signs = (self.dual >= 0).flatten(len(self.norm.shape)).all(-1).reshape(-1)
        # What every solution states of its own W and dual, whatever the status.
        bound = lam.sum(-1)
        stated = torch.where(
            known,
            _near(norm, torch.where(proof.margin < math.inf, proof.upper, proof.size))
            & _near(1 + stated_gap, 1 + gap)
            & (_near(bound, proof.lower, max(self.tol, ROUNDED)) | (bound == 0))
            & torch.where(claimed, excess > -ROUNDED, excess < ROUNDED).all(-1),
            (norm == math.inf) & (stated_gap == math.inf) & ~claimed.any(-1),
        )
        optimal = known & signs & (proof.margin >= 1 - self.tol) & (gap <= self.tol)
        infeasible = ~known & signs & (proof.farkas <= FARKAS)
        valid = stated & torch.where(
            codes == Status.OPTIMAL, optimal, (codes == Status.UNFINISHED) | infeasible
        )
        valid, margin, gap, farkas = (
            x.reshape(self.norm.shape) for x in (valid, proof.margin, gap, proof.farkas)
        )
        return Check(valid, margin, gap, farkas)

    def __repr__(self) -> str:
        norm = "nuclear norm" if self.kind.nuclear else f"p={self.p:g}"
        shape = "x".join(map(str, self.W.shape))
        if self.codes.dim() == 0:
            return (
                f"MarginSolution({norm}, W {shape}, {self.status}, norm {float(self.norm):.6g}, "
                f"gap {float(self.gap):.1e}, {int(self.iterations)} iterations)"
            )
        counts = {status.word: int((self.codes == status).sum()) for status in Status}
        words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        gap = _finite(torch.max, self.gap, ".1e")
        return f"MarginSolution({norm}, W {shape}, {words or 'empty'}, gap up to {gap})"


def _near(x: Tensor, y: Tensor, tol: float = ROUNDED) -> Tensor:
    """Whether x and y differ by at most tol, relatively; infinities are near to themselves."""
    return (x == y) | ((x - y).abs() <= tol * y.abs())


def _words(codes: Any) -> Any:
    return [_words(c) for c in codes] if isinstance(codes, list) else Status(codes).word


def _finite(extreme: Callable[[Tensor], Tensor], x: Tensor, style: str) -> str:
    x = x[x.isfinite()]
    return format(float(extreme(x)), style) if x.numel() else "none"
