"""Choose the exponent p of the max-margin problem by cross-validation.

A small p is best if few entries of the true W matter, and p = 2 if all do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mirrorhead._checks import (
    check_data,
    check_integer,
    check_seed,
    check_tokens,
    is_number,
)
from mirrorhead.margin import attention_svm
from mirrorhead.margin._problems import Status

PS = (1.1, 1.25, 1.5, 1.75, 2.0, 3.0, 5.0, 10.0)
#: How often exponents that are equally good may be called distinguishable.
LEVEL = 0.05


@dataclass(frozen=True, eq=False, repr=False)
class PChoice:
    """The exponent that cross-validation chose, and the curve it was chosen from.

    ps: the exponents that were compared.
    correct: (..., ps, n), 1 where the solution of the other folds selects the right token of a
        sample, else 0; NaN where those folds have no solution.
    folds: the number of folds.
    infeasible: (...), the number of folds for which no W selects the tokens of the other folds.
    unfinished: (...), the number of folds that the solver left unfinished for some p.

    Folds that are infeasible or unfinished are left out for all exponents.
    """

    ps: tuple[float, ...]
    correct: Tensor
    folds: int
    infeasible: Tensor
    unfinished: Tensor

    @property
    def accuracy(self) -> Tensor:
        """The share of held-out samples with the right token, (..., ps)."""
        return self.correct.nanmean(-1)

    @property
    def standard_error(self) -> Tensor:
        """The standard error of `accuracy`, (..., ps)."""
        a = self.accuracy
        return (a * (1 - a) / (~self.correct.isnan()).sum(-1)).sqrt()

    @property
    def p(self) -> float | Tensor:
        """The exponent of highest accuracy; a tensor (...) for several problems.

        Among exponents of equal accuracy it is the one nearest to 2.
        """
        chosen = torch.tensor(self.ps, dtype=torch.float64)[self._best]
        return float(chosen) if chosen.dim() == 0 else chosen

    @property
    def similar(self) -> Tensor:
        """A mask of `ps`: True for exponents that the data do not distinguish from the chosen one.

        Of shape (..., ps); the chosen exponent itself is True. For one problem the exponents are
        `[p for p, same in zip(choice.ps, choice.similar) if same]`.
        An exact two-sided sign test of the samples in which one alone is right. Its level is 5 %
        over the number of other exponents, because the chosen one is the best of all.
        """
        from scipy.stats import binom

        index = self._best[..., None, None].expand(*self.correct.shape[:-2], 1, self.n)
        difference = self.correct.gather(-2, index) - self.correct
        ahead, behind = (difference > 0).sum(-1), (difference < 0).sum(-1)
        tail = binom.sf(ahead.numpy() - 1, (ahead + behind).numpy(), 0.5)
        return torch.from_numpy(2 * tail > LEVEL / max(1, len(self.ps) - 1))

    @property
    def distinguishable(self) -> bool | Tensor:
        """Whether the data distinguish the chosen exponent from any other, (...)."""
        found = ~self.similar.all(-1)
        return bool(found) if found.dim() == 0 else found

    @property
    def n(self) -> int:
        """The number of samples."""
        return self.correct.shape[-1]

    @property
    def _best(self) -> Tensor:
        order = sorted(range(len(self.ps)), key=lambda k: abs(math.log(self.ps[k] / 2)))
        return torch.tensor(order)[self.accuracy[..., order].argmax(-1)]

    def __repr__(self) -> str:
        if self.correct.dim() > 2:
            return f"PChoice(problems={tuple(self.correct.shape[:-2])}, ps={self.ps}, n={self.n})"
        points = zip(self.ps, self.accuracy.tolist(), strict=True)
        curve = ", ".join(f"{p:g}: {a:.3f}" for p, a in points)
        error = float(self.standard_error[int(self._best)])
        doubt = "" if self.distinguishable else "; the data do not distinguish the exponents"
        left_out = int(self.infeasible + self.unfinished)
        folds = f"; {left_out} of {self.folds} folds without a solution" if left_out else ""
        return f"PChoice(p={self.p:g}, accuracy {{{curve}}} +- {error:.3f}{doubt}{folds})"


def choose_p(
    X: Tensor,
    z: Tensor,
    tokens: Tensor,
    ps: Sequence[float] = PS,
    folds: int = 4,
    *,
    mask: Tensor | None = None,
    tol: float = 1e-6,
    seed: int = 0,
) -> PChoice:
    r"""Choose p by how well max-margin solutions select tokens in held-out samples.

    The samples are divided into folds. For each fold and each p, `attention_svm` solves

        min ||W||_p   subject to   (x_i,sel - x_it)' W z_i >= 1   for samples i of the other folds

    and the solution selects a token argmax_t x_t' W z in each sample of the fold. The p that
    selects the given tokens most often is chosen. All folds of all problems are solved together.

    Args:
        X: (..., n, T, d) tokens; leading dimensions are separate problems.
        z: (..., n, d) queries; another width than that of X is allowed.
        tokens: (..., n) integers, the right token of each sample.
        ps: the exponents to compare, each from 1 to inf. 1 and inf are linear programs, solved one
            at a time.
        folds: from 2 to n.
        mask: (..., n, T) bool, False on padding, which may hold anything.
        tol: the certified gap of every solution.
        seed: of the division into folds, which is the same for all problems.

    Check `distinguishable`: with few samples, or if no exponent fits better than others, the
    choice is a guess. Raises ValueError if a problem has no fold with a solution.

    >>> g = torch.Generator().manual_seed(0)
    >>> X, z = torch.randn(60, 8, 12, generator=g), torch.randn(60, 12, generator=g)
    >>> W = torch.zeros(12, 12)
    >>> W[torch.arange(4), torch.arange(4)] = 1.0  # 4 of 144 entries
    >>> tokens = (X @ W @ z.unsqueeze(-1)).squeeze(-1).argmax(-1)
    >>> choose_p(X, z, tokens, ps=(1.1, 2))
    PChoice(p=1.1, accuracy {1.1: 0.733, 2: 0.400} +- 0.057)
    """
    exponents = _check_exponents(ps)
    X, z, mask = check_data(X, z, mask)
    if 0 in X.shape:
        raise ValueError(f"X must be (..., n, T, d) and not empty, got {tuple(X.shape)}")
    *lead, n, T, _ = X.shape
    if check_integer("folds", folds, 2) > n:
        raise ValueError(f"folds must be at most the number of samples {n}, got {folds}")
    kept = torch.ones(X.shape[:-1], dtype=torch.bool) if mask is None else mask
    tokens = check_tokens(tokens, kept)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(check_seed(seed)))
    fold = torch.empty(n, dtype=torch.long).scatter_(0, order, torch.arange(n) % folds)
    held_out = fold == torch.arange(folds).unsqueeze(-1)  # (folds, n)

    # A sample that keeps only its own token asks for nothing: that leaves out the fold.
    alone = one_hot(tokens, T).bool()
    allowed = torch.where(held_out.unsqueeze(-1), alone.unsqueeze(-3), kept.unsqueeze(-3))
    many = [x.unsqueeze(len(lead)) for x in (X, z, tokens)]
    many = [x.expand(*lead, folds, *x.shape[len(lead) + 1 :]) for x in many]
    at = many[2].unsqueeze(-1)
    correct, codes = [], []
    for p in exponents:
        solution = attention_svm(*many, geometry=p, tol=tol, mask=allowed)
        logits = many[0] @ solution.W.unsqueeze(-3) @ many[1].unsqueeze(-1)
        logits = logits.squeeze(-1).masked_fill(~kept.unsqueeze(-3), -math.inf)
        others = logits.scatter(-1, at, -math.inf).amax(-1)  # a tie is not a selection
        right = (logits.gather(-1, at).squeeze(-1) > others).double()  # (..., folds, n)
        codes.append(solution.codes)
        correct.append((right * held_out).sum(-2))
    infeasible = torch.stack([code == Status.INFEASIBLE for code in codes]).any(0)  # (..., folds)
    unfinished = torch.stack([code == Status.UNFINISHED for code in codes]).any(0) & ~infeasible
    lost = infeasible | unfinished
    if bool(lost.all(-1).any()):
        which = f" of problem {lost.all(-1).nonzero()[0].tolist()}" if lead else ""
        raise ValueError(
            f"tokens must be such that some W selects them: no fold{which} has a solution"
            f" ({int(infeasible.sum())} of {infeasible.numel()} folds are infeasible)"
        )
    unknown = (lost.unsqueeze(-1) & held_out).any(-2)  # (..., n)
    results = torch.stack(correct, -2).masked_fill(unknown.unsqueeze(-2), math.nan)
    return PChoice(exponents, results, folds, infeasible.sum(-1), unfinished.sum(-1))


def _check_exponents(ps: Sequence[float]) -> tuple[float, ...]:
    try:
        exponents = tuple(ps)
    except TypeError:
        raise TypeError(f"ps must be a list of exponents, got {ps!r}") from None
    if not exponents or len(set(exponents)) < len(exponents):
        raise ValueError(f"ps must be different exponents, at least one; got {exponents}")
    for p in exponents:
        if not is_number(p) or not p >= 1:
            raise ValueError(f"ps must be numbers from 1 to inf, got {p!r}")
    return tuple(map(float, exponents))
