r"""The quantities (35) to (38) of the proof of Theorem 5, the joint regularization path.

With Xi = 1/||W_mm|| and Gamma = 1/||v_mm|| the proof compares the loss of the scaled solutions
(r Gamma v_mm, R Xi W_mm) with that of any pair whose attention margin is at most (1 - gamma) Xi R:

    non-optimality of W_mm      exp(-Xi R)/T <= q*_max <= T exp(-Xi R)                  (35a), (35c)
    that of the other W         q_max >= exp(-(1 - gamma) Xi R) / T                     (35b)
    loss of the solutions       L <= exp(r M T exp(-Xi R) - r Gamma)                      (37)
    loss of the other pair      L >= exp(r nu/T exp(-(1-gamma) Xi R) - r Gamma) / (2n), or log(2)/n

M is the largest distance of two tokens of a sample in the dual norm; the paper has the p-norm, for
which the proof's Hoelder inequality fails at p > 2. It also prints log(2) in place of log(2)/n.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mirrorhead.geometry import PNorm
from mirrorhead.margin import MarginSolution
from mirrorhead.problem import AttentionProblem, check_problem


class JointBounds(NamedTuple):
    """Logarithms of the bounds, (...); see the module. radius: from this R on the solutions win."""

    q_best_low: Tensor
    q_best_high: Tensor
    q_other_low: Tensor
    loss_best_high: Tensor
    loss_other_low: Tensor
    radius: Tensor


def joint_bounds(
    problem: AttentionProblem,
    weights: MarginSolution,
    head: MarginSolution,
    r: float | Tensor,
    R: float | Tensor,
    gamma: float,
    nu: float | Tensor,
) -> JointBounds:
    """Return (35) to (37) for the norms r of v and R of W, a margin lost gamma, and nu > 0.

    Args:
        problem: of one head and labels +1 and -1, with the logistic loss.
        weights, head: the lp-AttSVM and the lp-SVM of the selected tokens.
        nu: of Assumption B.

    >>> from mirrorhead import attention_svm, svm
    >>> from mirrorhead.synthetic import example_2
    >>> problem, tokens = example_2(), torch.tensor([0, 0])
    >>> weights = attention_svm(problem.X, problem.z, tokens, 2)
    >>> head = svm(problem.X[:, 0], problem.y, 2)
    >>> far = joint_bounds(problem, weights, head, r=1e9, R=1.2, gamma=0.5, nu=0.005)
    >>> bool(far.loss_best_high < far.loss_other_low), bool(far.radius < 1.2)
    (True, True)
    """
    check_problem(problem, plain=True, head=True)
    n, T = problem.X.shape[-3:-1]
    r, R, nu = (torch.as_tensor(x, dtype=torch.float64) for x in (r, R, nu))
    xi, margin = 1 / weights.norm, 1 / head.norm
    apart = problem.X.unsqueeze(-2) - problem.X.unsqueeze(-3)  # (..., n, T, T, d)
    M = PNorm(weights.p).dual_norm(apart, -1).amax((-3, -2, -1))
    best, other = -xi * R, -(1 - gamma) * xi * R
    lower = r * nu / T * other.exp() - r * margin - math.log(2 * n)
    return JointBounds(
        q_best_low=best - math.log(T),
        q_best_high=best + math.log(T),
        q_other_low=other - math.log(T),
        loss_best_high=r * M * T * best.exp() - r * margin,
        loss_other_low=lower.clamp_max(math.log(math.log(2) / n)),
        radius=(M * T**2 / nu).log() / (gamma * xi),
    )
