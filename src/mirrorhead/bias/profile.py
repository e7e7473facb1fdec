r"""How large the margin of given weights is, relative to the largest possible one in each norm.

For weights W with the margin m(W), the smallest difference between the selected logit and another
one, and the certified solution W* of min ||W|| subject to margin 1,

    share = (m(W) / ||W||) / (1 / ||W*||) = m(W) ||W*|| / ||W||  <=  1,

with equality if and only if W points in a max-margin direction of that norm. The certificate puts
||W*|| between its lower bound and the norm that was found, so the exact share is between
share / (1 + gap) and share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrorhead._checks import as_floats, as_tensor, check_data, check_tokens
from mirrorhead.geometry import Norm, PNorm, Schatten, as_norm
from mirrorhead.margin import MarginSolution, attention_svm, multiclass_svm, svm

Norms = Sequence[float | Norm]

#: The norms by default; of a vector the last two are the 2-norm, and left out.
ENTRIES = (PNorm(1), PNorm(1.5), PNorm(2), PNorm(3), PNorm(math.inf))
SPECTRUM = (Schatten(1), Schatten(math.inf))


@dataclass(frozen=True, eq=False, repr=False)
class MarginProfile:
    """The share of the largest margin that weights have, in each norm.

    norms: the norms, in the order of the last dimension of the fields below.
    shares: (..., norms), 1 for a max-margin direction. Zero or negative where the weights do not
        separate; NaN where W is 0 or no solution was found, for example because the tokens cannot
        be separated.
    gaps: (..., norms), of the certificates: the exact share is at least shares / (1 + gaps).
    margins: (...), the smallest difference of logits, not divided by any norm.
    """

    norms: tuple[Norm, ...]
    shares: Tensor
    gaps: Tensor
    margins: Tensor

    @property
    def best(self) -> Any:
        """The norm with the largest share, None where no share is positive; nested for a batch."""
        order = self._known().argmax(-1).masked_fill(~(self._known() > 0).any(-1), -1)
        names = np.array([*self.norms, None], dtype=object)
        return names[order.cpu().numpy()] if not order.dim() else names[order.cpu()].tolist()

    @property
    def lead(self) -> Tensor:
        """(...), how far the largest share is above the second; NaN with fewer than two."""
        if len(self.norms) < 2:
            return torch.full_like(self.margins, math.nan)
        top = self._known().topk(2).values
        return (top[..., 0] - top[..., 1]).where(top.isfinite().all(-1), math.nan)

    @property
    def distinguishable(self) -> Tensor:
        """(...) bool, whether the best norm is certain, given the gaps of the certificates."""
        known = self._known()
        first = known.argmax(-1, keepdim=True)
        least = (known / (1 + self.gaps)).gather(-1, first)
        others = known.scatter(-1, first, -math.inf).amax(-1, keepdim=True)
        return ((least > others) & (least > 0)).squeeze(-1)

    def _known(self) -> Tensor:
        return self.shares.where(self.shares.isfinite(), -math.inf)

    def __repr__(self) -> str:
        shares = self.shares.reshape(-1, len(self.norms))
        known = self._known().reshape(shares.shape)
        counts = known.argmax(-1)[(known > 0).any(-1)].bincount(minlength=len(self.norms))
        lines = [f"{'norm':<18}share   best of {len(shares)}"]
        for k, norm in enumerate(self.norms):
            median = float(shares[:, k].nanmedian()) if shares[:, k].isfinite().any() else math.nan
            lines.append(f"{norm!r:<18}{median:5.3f}   {int(counts[k])}")
        return "\n".join(lines)


def margin_profile(
    W: Tensor,
    X: Tensor,
    z: Tensor | None = None,
    tokens: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    norms: Norms | None = None,
    tol: float = 1e-9,
) -> MarginProfile:
    r"""Return the share of the certified largest margin that W has, in each norm.

    The weights may come from anywhere: a path, a training in torch, a head of a model. Their
    leading dimensions may be more than those of the data: (records, trials, d, d), for example.

    Args:
        W: (..., d, d) for attention. With `labels`: (..., d) of a binary separator, or
            (..., classes, d).
        X: tokens (..., n, T, d) for attention; with `labels` the features, (..., n, d).
        z: queries (..., n, d); not with `labels`.
        tokens: the tokens to separate, (..., n); by default those that W selects. Problems with
            the same tokens are solved once.
        labels: (..., n), of a linear model in place of attention: +1 and -1, or integers 0, 1, ...
            for classes.
        mask: (..., n, T) bool, False at padding.
        norms: norms with a solver, and numbers for `PNorm`; by default p = 1, 1.5, 2, 3 and inf,
            and for matrices the nuclear and the spectral norm.
        tol: the gap that the solver is asked for, as in `attention_svm`.

    >>> from mirrorhead.paths import descend
    >>> from mirrorhead.synthetic import random_problem
    >>> problem = random_problem(trials=2)
    >>> W = descend(problem, 1.5, 2000).W[-1]
    >>> profile = margin_profile(W, problem.X, problem.z, norms=[1.5, 2, Schatten(math.inf)])
    >>> profile
    norm              share   best of 2
    PNorm(1.5)        0.998   2
    PNorm(2)          0.944   0
    Schatten(inf)     0.683   0
    >>> profile.best, bool(profile.distinguishable.all())
    ([PNorm(1.5), PNorm(1.5)], True)
    """
    if labels is None and z is None:
        raise TypeError("margin_profile needs queries z for attention, or labels of a linear model")
    if labels is not None:
        for name, given in (("z", z), ("tokens", tokens), ("mask", mask)):
            if given is not None:
                raise TypeError(f"{name} is of attention: it does not go with labels")
        features = as_floats("X", X)
        W = as_floats("W", W, features)
        return _linear(W, features, as_tensor("labels", labels, features), norms, tol)
    X, z, mask = check_data(X, z, mask)
    return _attention(as_floats("W", W, X), X, z, tokens, mask, norms, tol)


def _attention(
    W: Tensor,
    X: Tensor,
    z: Tensor,
    tokens: Tensor | None,
    mask: Tensor | None,
    norms: Norms | None,
    tol: float,
) -> MarginProfile:
    lead, (n, T) = tuple(X.shape[:-3]), X.shape[-3:-1]
    more = _more("W", W, lead, (X.shape[-1], z.shape[-1]))
    chosen = _norms(norms, (*ENTRIES, *SPECTRUM))
    kept = torch.ones_like(X[..., 0], dtype=torch.bool) if mask is None else mask
    logits = (X @ (W @ z.mT).mT.unsqueeze(-1)).squeeze(-1).masked_fill(~kept, -math.inf)
    if tokens is None:
        tokens = logits.argmax(-1)
    given = as_tensor("tokens", tokens, X)
    shape = (*more, *lead, n)
    if given.shape[-1:] != (n,) or given.dim() > len(shape):
        raise ValueError(f"tokens must have shape {shape}, got {tuple(given.shape)}")
    tokens = check_tokens(given.expand(shape), kept.expand(*more, *lead, n, T))
    place = tokens.unsqueeze(-1)
    rest = logits.gather(-1, place) - logits.scatter(-1, place, -math.inf)
    margins = rest.amin((-2, -1))

    # Problems with the same data and the same tokens are solved once.
    count = math.prod(lead)
    number = torch.arange(count, device=X.device).expand(math.prod(more), count).reshape(-1, 1)
    keys, which = torch.cat([number, tokens.reshape(-1, n)], -1).unique(dim=0, return_inverse=True)
    at, wanted = keys[:, 0], keys[:, 1:]
    data = X.reshape(count, n, T, -1)[at], z.reshape(count, n, -1)[at]
    masks = None if mask is None else mask.reshape(count, n, T)[at]
    found = [attention_svm(*data, wanted, norm, tol, mask=masks) for norm in chosen]
    return _shares(W, 2, margins, chosen, found, which)


def _linear(
    W: Tensor, features: Tensor, labels: Tensor, norms: Norms | None, tol: float
) -> MarginProfile:
    if features.dim() < 2 or labels.shape != features.shape[:-1] or not labels.numel():
        given = tuple(features.shape), tuple(labels.shape)
        raise ValueError(f"X must be (..., n, d) and labels (..., n), got {given}")
    lead, d = tuple(features.shape[:-2]), features.shape[-1]
    count = math.prod(lead)
    flat = features.reshape(count, -1, d), labels.reshape(count, -1)
    binary = bool((labels < 0).any()) or (
        not bool((labels == 0).any()) and W.dim() == len(lead) + 1
    )
    if binary:
        more = _more("W", W, lead, (d,))
        chosen = _norms(norms, ENTRIES)
        margins = (labels * (features @ W.unsqueeze(-1)).squeeze(-1)).amin(-1)
        found = [svm(*flat, norm, tol) for norm in chosen]
    else:
        classes = int(labels.max()) + 1
        more = _more("W", W, lead, (classes, d))
        chosen = _norms(norms, (*ENTRIES, *SPECTRUM))
        logits = features @ W.mT  # (..., n, classes)
        place = labels.expand(logits.shape[:-1]).unsqueeze(-1).long()
        rest = logits.gather(-1, place) - logits.scatter(-1, place, -math.inf)
        margins = rest.amin((-2, -1))
        found = [multiclass_svm(*flat, norm, tol) for norm in chosen]
    which = torch.arange(count, device=W.device).expand(math.prod(more), count).reshape(-1)
    return _shares(W, 1 if binary else 2, margins, chosen, found, which)


def _shares(
    W: Tensor,
    dims: int,
    margins: Tensor,
    norms: tuple[Norm, ...],
    found: list[MarginSolution],
    which: Tensor,
) -> MarginProfile:
    """The profile from solutions, one for each different problem; W has problem `which`."""
    along = tuple(range(-dims, 0))
    shares, gaps = [], []
    for norm, solution in zip(norms, found, strict=True):
        size = norm.norm(W, along)
        # A solution with a finite gap is feasible: also an unfinished one bounds the share.
        known = solution.gap.isfinite() & solution.norm.isfinite()
        best = solution.norm.where(known, math.nan)[which].reshape(size.shape)
        shares.append((margins / size * best).where(size > 0, math.nan))
        gaps.append(solution.gap[which].reshape(size.shape))
    return MarginProfile(norms, torch.stack(shares, -1), torch.stack(gaps, -1), margins)


def _norms(given: Norms | None, default: tuple[Norm, ...]) -> tuple[Norm, ...]:
    if given is None:
        return default
    if isinstance(given, Norm) or not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(f"norms must be a list of norms and numbers, got {given!r}")
    if not given:
        raise ValueError("norms must not be empty")
    return tuple(as_norm(norm, "norms") for norm in given)


def _more(name: str, W: Tensor, lead: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """The leading dimensions that W has beyond those of the data, or an error."""
    fits = (*lead, *own)
    extra = W.dim() - len(fits)
    if extra < 0 or tuple(W.shape[extra:]) != fits:
        raise ValueError(f"{name} must have shape (..., {str(fits)[1:]}, got {tuple(W.shape)}")
    return tuple(W.shape[:extra])
