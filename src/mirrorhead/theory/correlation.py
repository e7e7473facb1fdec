r"""Lemmas 6, 8, 10 and 11 of the paper: the loss, the size of its gradient, and where it points.

Inside the cones ||W|| is a thousand times ||W_mm|| or more, and gradients are exp(-1000) and
smaller. So Lemma 10 is stated in logarithms, and Lemma 11 in units of the gradient's scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mirrorhead.geometry import PNorm
from mirrorhead.geometry._powers import check_exponent, lp_norm
from mirrorhead.margin import MarginSolution
from mirrorhead.problem import AttentionProblem, check_problem
from mirrorhead.theory.inequalities import Sides
from mirrorhead.tokens import ConeConstants

DIMS = (-2, -1)


def attention_sums(
    problem: AttentionProblem, solution: MarginSolution, tokens: Tensor, W: Tensor
) -> tuple[Tensor, Tensor]:
    """Return S_i(W) and Q_i(W), (..., n): attention on support tokens, and on all other ones.

    The paper prints the same sum for both; its proofs use Q for the tokens that are neither
    selected nor support tokens.
    """
    attention, support = problem.attention(W), solution.support
    others = (~support).scatter(-1, tokens.unsqueeze(-1), False)
    return attention.where(support, 0).sum(-1), attention.where(others, 0).sum(-1)


def lemma_6(problem: AttentionProblem, W: Tensor) -> tuple[Sides, Sides]:
    """L_max >= L(W) >= L_min: the losses of the lowest and of the highest scores, (...)."""
    check_problem(problem, plain=True)
    value, scores, loss = problem.loss_function.value, problem.scores(), problem.loss(W)
    kept = torch.ones_like(scores, dtype=torch.bool) if problem.mask is None else problem.mask
    lowest, highest = (
        scores.where(kept, torch.inf).amin(-1),
        scores.where(kept, -torch.inf).amax(-1),
    )
    return Sides(value(lowest).mean(-1), loss), Sides(loss, value(highest).mean(-1))


def gradient_bound(problem: AttentionProblem, p: float) -> Tensor:
    r"""Return the constant L of Lemma 8, (...): ||grad L(W)||_p <= L for every W.

        L = (1/n) sum_i max |l'_i| Gamma_i/2 max_t ||x_it||_p ||z_i||_p,

    with the range Gamma_i of the scores of a sample: by Lemma 7 the gradient of a sample is
    l' sum_t s_t (gamma_t - gamma's) x_t z', and the mean deviation is at most half the range.
    The proofs need the dual norm of the gradient; for that give q = p/(p-1).

    >>> from mirrorhead.synthetic import random_problem
    >>> problem = random_problem(2)
    >>> W = torch.randn(2, 10, 10, dtype=torch.float64)
    >>> norm = PNorm(3).norm(problem.gradient(W).value, (-2, -1))
    >>> bool((norm <= gradient_bound(problem, 3)).all())
    True
    """
    check_problem(problem, plain=True)
    p, scores = check_exponent(p), problem.scores()
    kept = torch.ones_like(scores, dtype=torch.bool) if problem.mask is None else problem.mask
    lowest = scores.where(kept, torch.inf).amin(-1)
    spread = scores.where(kept, -torch.inf).amax(-1) - lowest
    slope = problem.loss_function.log_slope(lowest).exp()  # -l' decreases
    tokens = lp_norm(problem.X, p, -1).where(kept, 0).amax(-1)
    return (slope * spread / 2 * tokens * lp_norm(problem.z, p, -1)).mean(-1)


def lemma_10(problem: AttentionProblem, cone: ConeConstants, W: Tensor, V: Tensor) -> Sides:
    """Bound the logarithm of -<grad L(W), V> from below, for V scaled to ||W_mm||: (18).

    W lies in C_mu0,R_delta, V in S_mu0. (The paper has V in C_mu0,R_delta, too, where no V has
    the norm ||W_mm||.) Both terms of (18) are divided by n; the paper divides one. The right side
    is -inf where the bound is not positive, the left one where the correlation is not.
    """
    psi, solution, gradient = PNorm(cone.solution.p), cone.solution, problem.gradient(W)
    n, T, delta = problem.X.shape[-3], cone.tokens_per_sample, cone.delta
    V = V * (solution.norm / psi.norm(V, DIMS))[..., None, None]
    left = (-(gradient.mantissa * V).sum(DIMS)).clamp_min(0).log() + gradient.log_scale
    slopes = problem.loss_function.log_slope(problem.y * problem.output(W)).exp()
    gap = cone.score_gap.where(~cone.score_gap.isnan(), torch.inf).amin(-1)
    length = psi.norm(W, DIMS) / solution.norm  # R' of (16)
    near = slopes.amin(-1) * gap / (n * T) * (1 - delta / 2)
    far = 2 * cone.score_range * cone.A * T * (T + 1) * slopes.sum(-1) / n
    left_over = 1 - far / near * (-delta * length).exp()
    log = near.log() - (1 + delta / 2) * length + left_over.clamp_min(0).log()
    return Sides(left, log.where(left_over > 0, -torch.inf))


def lemma_11(
    problem: AttentionProblem, cone: ConeConstants, W: Tensor, pi: float | Tensor
) -> Sides:
    """<grad L(W), W/||W||> >= (1 + pi) <grad L(W), W_mm/||W_mm||> for W in C_mu0,R_pi.

    Both sides are in units of the exponential of the gradient's `log_scale`.
    """
    psi, solution, gradient = PNorm(cone.solution.p), cone.solution, problem.gradient(W)
    own, best = (
        (gradient.mantissa * x).sum(DIMS) / psi.norm(x, DIMS)
        for x in (W.to(torch.float64), solution.W)
    )
    return Sides(own, (1 + pi) * best)
