"""Choose the norm of the max-margin problem by cross-validation.

The nuclear norm is best if the true W has low rank, a group norm if few of its rows matter, a small
p if few entries do, and p = 2 if all matter alike.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mirrorhead._checks import check_data, check_integer, check_seed, check_tokens
from mirrorhead.geometry import Grouped, Norm, Schatten
from mirrorhead.margin import attention_svm
from mirrorhead.margin._problems import Status
from mirrorhead.margin._solvers import choose

CANDIDATES = (
    2, 1.5, 3, 1.1, 1, math.inf, Schatten(1), Grouped(1, dim=0), Grouped(1, dim=1)
)  # fmt: skip
#: How often norms that are equally good may be called distinguishable.
LEVEL = 0.05


@dataclass(frozen=True, eq=False, repr=False)
class GeometryChoice:
    """The norm that cross-validation chose, and the scores it was chosen from.

    candidates: the norms that were compared.
    correct: (..., candidates, n), 1 where the solution of the other folds selects the right token
        of a sample, else 0; NaN where those folds have no solution.
    folds: the number of folds.
    infeasible: (...), the number of folds for which no W selects the tokens of the other folds.
    unfinished: (...), the number of folds that the solver left unfinished for some candidate.

    Folds that are infeasible or unfinished are left out for all candidates.
    """

    candidates: tuple[Norm, ...]
    correct: Tensor
    folds: int
    infeasible: Tensor
    unfinished: Tensor

    @property
    def accuracy(self) -> Tensor:
        """The share of held-out samples with the right token, (..., candidates)."""
        return self.correct.nanmean(-1)

    @property
    def standard_error(self) -> Tensor:
        """The standard error of `accuracy`, (..., candidates)."""
        a = self.accuracy
        return (a * (1 - a) / (~self.correct.isnan()).sum(-1)).sqrt()

    @property
    def index(self) -> Tensor:
        """The place of the chosen norm in `candidates`, (...): the first of highest accuracy."""
        return self.accuracy.argmax(-1)

    @property
    def norm(self) -> Any:
        """The chosen norm; for several problems a list of them, nested like the problems."""
        norms = np.empty(len(self.candidates), dtype=object)
        norms[:] = self.candidates
        chosen = norms[self.index.numpy()]
        return chosen.tolist() if isinstance(chosen, np.ndarray) else chosen

    @property
    def similar(self) -> Tensor:
        """A mask of `candidates`: True for those that the data do not distinguish from the choice.

        Of shape (..., candidates); the chosen norm itself is True. For one problem these norms are
        `[norm for norm, same in zip(choice.candidates, choice.similar) if same]`.
        An exact two-sided sign test of the samples in which one alone is right. Its level is 5 %
        over the number of other candidates, because the chosen one is the best of all.
        """
        from scipy.stats import binom

        index = self.index[..., None, None].expand(*self.correct.shape[:-2], 1, self.n)
        difference = self.correct.gather(-2, index) - self.correct
        ahead, behind = (difference > 0).sum(-1), (difference < 0).sum(-1)
        tail = binom.sf(ahead.numpy() - 1, (ahead + behind).numpy(), 0.5)
        return torch.from_numpy(2 * tail > LEVEL / max(1, len(self.candidates) - 1))

    @property
    def distinguishable(self) -> bool | Tensor:
        """Whether the data distinguish the chosen norm from any other, (...)."""
        found = ~self.similar.all(-1)
        return bool(found) if found.dim() == 0 else found

    @property
    def n(self) -> int:
        """The number of samples."""
        return self.correct.shape[-1]

    def __repr__(self) -> str:
        if self.correct.dim() > 2:
            problems = tuple(self.correct.shape[:-2])
            return f"GeometryChoice(problems={problems}, {self.candidates}, n={self.n})"
        points = zip(self.candidates, self.accuracy.tolist(), strict=True)
        scores = ", ".join(f"{norm}: {a:.3f}" for norm, a in points)
        error = float(self.standard_error[int(self.index)])
        doubt = "" if self.distinguishable else "; the data do not distinguish the candidates"
        left_out = int(self.infeasible + self.unfinished)
        folds = f"; {left_out} of {self.folds} folds without a solution" if left_out else ""
        return f"GeometryChoice({self.norm}, accuracy {{{scores}}} +- {error:.3f}{doubt}{folds})"


def choose_geometry(
    X: Tensor,
    z: Tensor,
    tokens: Tensor,
    candidates: Sequence[float | Norm] = CANDIDATES,
    folds: int = 4,
    *,
    mask: Tensor | None = None,
    tol: float = 1e-4,
    seed: int = 0,
) -> GeometryChoice:
    r"""Choose a norm by how well max-margin solutions select tokens in held-out samples.

    The samples are divided into folds. For each fold and each norm, `attention_svm` solves

        min ||W||   subject to   (x_i,sel - x_it)' W z_i >= 1   for samples i of the other folds

    and the solution selects a token argmax_t x_t' W z in each sample of the fold. The norm that
    selects the given tokens most often is chosen. All folds of all problems are solved together.

    Args:
        X: (..., n, T, d) tokens; leading dimensions are separate problems.
        z: (..., n, d) queries; another width than that of X is allowed.
        tokens: (..., n) integers, the right token of each sample.
        candidates: the norms to compare, each with a solver; a number stands for `PNorm`. By
            default p = 1, 1.1, 1.5, 2, 3 and inf, the nuclear norm, and the sums of the 2-norms of
            rows and of columns. p = 1 and inf are linear programs, solved one at a time, and take
            two thirds of the time. Of equally accurate ones the first is chosen.
        folds: from 2 to n.
        mask: (..., n, T) bool, False on padding, which may hold anything.
        tol: the certified gap of every solution.
        seed: of the division into folds, which is the same for all problems.

    Warns if one problem does not distinguish the chosen norm from any other: then the choice is a
    guess. For several problems see `distinguishable`. Raises ValueError if a problem has no fold
    with a solution.

    >>> g = torch.Generator().manual_seed(0)
    >>> X, z = torch.randn(60, 8, 12, generator=g), torch.randn(60, 12, generator=g)
    >>> W = torch.zeros(12, 12)
    >>> W[torch.arange(4), torch.arange(4)] = 1.0  # 4 of 144 entries
    >>> tokens = (X @ W @ z.unsqueeze(-1)).squeeze(-1).argmax(-1)
    >>> choose_geometry(X, z, tokens, candidates=(2, 1.1, Schatten(1)))
    GeometryChoice(PNorm(1.1), accuracy {PNorm(2): 0.400, PNorm(1.1): 0.733, Schatten(1): 0.400}
        +- 0.057)
    """
    norms = _check_candidates(candidates)
    X, z, mask = check_data(X, z, mask)
    if 0 in X.shape:
        raise ValueError(f"X must be (..., n, T, d) and not empty, got {tuple(X.shape)}")
    for norm in norms:
        norm.check((X.shape[-1], z.shape[-1]), "W")
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
    for norm in norms:
        solution = attention_svm(*many, geometry=norm, tol=tol, mask=allowed)
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
    choice = GeometryChoice(norms, results, folds, infeasible.sum(-1), unfinished.sum(-1))
    if not lead and len(norms) > 1 and not choice.distinguishable:
        warnings.warn(
            f"{n} samples do not distinguish {choice.norm} from the other candidates: the choice is"
            " a guess",
            stacklevel=2,
        )
    return choice


def _check_candidates(candidates: Sequence[float | Norm]) -> tuple[Norm, ...]:
    try:
        given = tuple(candidates)
    except TypeError:
        raise TypeError(f"candidates must be a list of norms, got {candidates!r}") from None
    norms = tuple(choose(one, "candidates").norm for one in given)
    if not norms or len(set(norms)) < len(norms):
        raise ValueError(f"candidates must be different norms, at least one; got {given}")
    return norms
