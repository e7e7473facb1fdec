"""Assumption B of the paper's appendix G: how other tokens reduce the label margin."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from mirrorhead._checks import check_integer, check_seed, check_tokens
from mirrorhead.geometry import PNorm
from mirrorhead.geometry._choice import as_smooth_pnorm
from mirrorhead.margin import svm
from mirrorhead.problem import AttentionProblem, check_problem

ROUNDS, BEST = 4, 20  # of the local search, and how many points it starts from


def assumption_b(
    problem: AttentionProblem,
    tokens: Tensor,
    geometry: float | PNorm,
    samples: int = 2000,
    seed: int = 0,
) -> Tensor:
    r"""Return an upper bound on the nu of Assumption B, (...), found by search.

    With Gamma the label margin 1/||v_mm||_p of the selected tokens, and Gamma'(s) that of the
    features X_i' s_i (0 where they cannot be separated), the assumption asks for a nu > 0 with

        Gamma - Gamma'(s) >= nu (1 - s_i,tokens_i)   for all samples i and all attention s,

    so nu is the minimum of (Gamma - Gamma'(s)) / max_i (1 - s_i,tokens_i). Every s in the
    product of simplices is allowed here; some W comes near it when the logits X_i W z_i are
    free. The search looks at the limit s -> one-hot, which is exact, at other token sets (all of
    them where they are at most `samples`), at random attention, and at random changes of the best
    points found. The result is never less than the true nu. Zero (up to the solver's 1e-9) or a
    negative number shows that the assumption fails; a positive one proves nothing.

    Args:
        problem: with one head and labels +1 and -1; its v is not used.
        tokens: (..., n), selected tokens whose features can be separated.
        geometry: the p-norm of the head, 1 < p < inf.
        samples: how many points to try at least.
        seed: of the random ones.

    >>> X = torch.tensor([[[2.0, 0.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 1.0]]])
    >>> problem = AttentionProblem(X, z=X[:, 0], y=[1.0, 1.0], v=[0.0, 0.0])
    >>> assumption_b(problem, torch.tensor([0, 0]), geometry=2)  # 2/sqrt(5) - sqrt(2) for (0, 1)
    tensor(0.3536, dtype=torch.float64)
    >>> assumption_b(problem, torch.tensor([1, 0]), geometry=2) < 0
    tensor(True)
    """
    norm = as_smooth_pnorm(geometry)
    check_problem(problem, plain=True, head=True)
    samples, seed = check_integer("samples", samples, 1), check_seed(seed)
    lead, shape = problem.trials, problem.X.shape[:-1]
    valid = torch.ones(shape, dtype=torch.bool) if problem.mask is None else problem.mask
    tokens = check_tokens(tokens, valid)
    generator = torch.Generator().manual_seed(seed)
    dims = len(lead)
    X, y, tokens, valid = (
        x.reshape(-1, *x.shape[dims:]) for x in (problem.X, problem.y, tokens, valid)
    )
    parts = zip(X, y, tokens, valid, strict=True)
    found = [_search(*part, norm, samples, generator) for part in parts]
    return torch.stack(found).reshape(lead)


def _search(
    X: Tensor,
    y: Tensor,
    tokens: Tensor,
    valid: Tensor,
    norm: PNorm,
    samples: int,
    g: torch.Generator,
) -> Tensor:
    n, T, _ = X.shape
    selected = torch.zeros(n, T, dtype=X.dtype).scatter_(-1, tokens.unsqueeze(-1), 1.0)
    chosen = svm((selected.unsqueeze(-2) @ X).squeeze(-2), y, norm)
    if chosen.status != "optimal":
        raise ValueError(f"tokens must have features that can be separated, got {chosen.status}")
    margin = 1 / chosen.norm
    others = valid & (selected == 0)
    if not bool(others.any()):
        raise ValueError("problem must have a sample with more than one token")

    def ratio(s: Tensor) -> Tensor:
        """(Gamma - Gamma') / max(1 - s) of attention (m, n, T), inf near the selected tokens.

        There the margins differ by less than the solver's tolerance, and the slope is exact.
        """
        found = svm((s.unsqueeze(-2) @ X).squeeze(-2), y.expand(len(s), n), norm)
        moved = (s * others).sum(-1).amax(-1)
        return ((margin - 1 / found.norm) / moved).where(moved > 1e-2, torch.inf)

    # The slope at the selected tokens, lambda_i (gamma_i,tokens_i - gamma_it) for the hull weights
    # lambda and scores gamma of the unit head: 0 if a sample is not a support vector.
    hull = chosen.dual / chosen.dual.sum()
    scores = y.unsqueeze(-1) * (X @ (chosen.v * margin))
    gaps = scores.gather(-1, tokens.unsqueeze(-1)) - scores
    slope = (hull.unsqueeze(-1) * gaps).where(others, torch.inf).min()
    # Token sets, and attention between them and the selected tokens.
    sets = _token_sets(valid, samples, g)
    vertices = torch.nn.functional.one_hot(sets, T).to(X.dtype)  # (m, n, T)
    weights = torch.rand(len(sets), n, 1, dtype=X.dtype, generator=g)
    # Let about half of the samples stay where they are.
    weights = weights * (torch.rand(len(sets), n, 1, generator=g) < 0.5)
    points = torch.cat([vertices, selected + weights * (vertices - selected)])
    values = ratio(points)
    for _ in range(ROUNDS):
        best = values.topk(min(BEST, len(values)), largest=False).indices
        points, values = points[best], values[best]
        again = torch.randint(len(best), (samples // ROUNDS + 1,), generator=g)
        goal = vertices[torch.randint(len(vertices), (len(again),), generator=g)]
        step = torch.rand(len(again), n, 1, dtype=X.dtype, generator=g) ** 3
        step = step * (torch.rand(len(again), n, 1, generator=g) < 0.5)
        changed = points[again] + step * (goal - points[again])
        points, values = torch.cat([points, changed]), torch.cat([values, ratio(changed)])
    return torch.minimum(slope, values.min())


def _token_sets(valid: Tensor, samples: int, g: torch.Generator) -> Tensor:
    """All token sets (m, n) where they are few, else random ones."""
    if int(valid.sum(-1).double().log().sum().exp().round()) <= samples:
        return torch.tensor(list(product(*(row.nonzero().squeeze(-1).tolist() for row in valid))))
    return torch.multinomial(valid.double(), samples, replacement=True, generator=g).T
