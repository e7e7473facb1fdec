r"""Remark 1: how large a constant step may be.

The theorems need psi - eta L to stay convex along the path. At one W that is
eta Hess L(W) <= Hess psi(W) = diag((p-1)|w|^(p-2)), so the largest admissible step is

    eta(W) = 1 / lambda_max(S J' B J S),    S = diag(|w|^((2-p)/2)) / sqrt(p-1),

where J maps W to the logits h and B holds the Hessian of each sample's loss in its logits:

    B = l'' g g' + l' (diag(g) - g s' - s g'),   g_t = s_t (a_t - sum_tau s_tau a_tau).

The largest eigenvalue is that of B (J S^2 J'), a matrix of size nT whatever d is.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from mirrorhead._checks import as_floats
from mirrorhead.geometry import PNorm
from mirrorhead.geometry._choice import as_smooth_pnorm
from mirrorhead.problem import AttentionProblem, check_problem

# Tokens of a problem that `warn_if_too_large` checks: more would take longer than the descent.
CHECKED = 512


def largest_step(problem: AttentionProblem, W: Tensor, geometry: float | PNorm) -> Tensor:
    """Return the largest eta for which psi - eta L is convex at W, (...); inf if L is concave.

    For p-norms, 1 < p < inf, one head and labels +-1. For p > 2 it is zero where an entry of W is
    zero: Hess psi vanishes there. Needs two dense nT x nT matrices per trial, and their
    eigenvalues.

    >>> X = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])
    >>> problem = AttentionProblem(X, z=X[:, 0], y=[1.0], v=[1.0, 1.0])
    >>> largest_step(problem, torch.eye(2), geometry=2)
    tensor(23.8630, dtype=torch.float64)
    """
    return log_largest_step(problem, W, geometry).exp()


def log_largest_step(problem: AttentionProblem, W: Tensor, geometry: float | PNorm) -> Tensor:
    """Return the logarithm of `largest_step`, (...): far out in the paper's cones it is 1e9.

    The logits' slopes g are exp(m) times numbers of size one, where m is the lead of the second
    token (`problem.py`); so B is computed in units of its largest sample.
    """
    p = as_smooth_pnorm(geometry).p
    check_problem(problem, plain=True)
    X, z = problem.X, problem.z
    n, T = X.shape[-3:-1]
    W = as_floats("W", W, X)
    if not bool((problem.logits(W) < torch.inf).all()):  # also checks the shape of W
        raise ValueError("W must give finite logits X W z")
    forward = problem._forward(problem._weights(W))
    token, rest, tail, selected, gap, shortfall = (x.squeeze(-2) for x in forward[:6])
    s = (rest * tail).scatter(-1, token, 1.0) * selected
    g = (rest * (tail * shortfall - gap)).scatter(-1, token, shortfall) * selected  # over exp(m)
    margin = problem.scores().gather(-1, token) - tail * shortfall
    curvature = problem.loss_function.relative_curvature(margin) * tail
    B = curvature.unsqueeze(-1) * g.unsqueeze(-1) * g.unsqueeze(-2)
    mixed = g.unsqueeze(-1) * s.unsqueeze(-2)
    B = (B - torch.diag_embed(g) + mixed + mixed.mT) / n  # (..., n, T, T), over -l' exp(m)
    log_scale = forward.log_scale.squeeze(-1) - selected.squeeze(-1).log()
    largest = log_scale.amax(-1, keepdim=True)
    B = B * (log_scale - largest).exp()[..., None, None]

    inverse = W.abs().pow(2 - p) / (p - 1)
    # For p > 2 an entry at zero, or nearly, makes the step zero.
    flat = inverse.isinf().flatten(-2).any(-1)
    inverse = inverse.masked_fill(flat[..., None, None], 1.0)
    # (J S^2 J')_{it,ju} = sum_ab x_ita x_jua S^2_ab z_ib z_jb
    zz = z.unsqueeze(-2) * z.unsqueeze(-3)  # (..., n, n, d)
    inner = torch.einsum("...ab,...ijb->...ija", inverse, zz)
    gram = torch.einsum("...ita,...ija,...jua->...itju", X, inner, X)
    index = torch.arange(n, device=X.device)
    blocks = torch.zeros_like(gram)
    blocks[..., index, :, index, :] = B.movedim(-3, 0)
    gram, blocks = (x.reshape(*problem.trials, n * T, n * T) for x in (gram, blocks))
    # B G has the eigenvalues of R' B R with G = R R', which is symmetric.
    values, vectors = torch.linalg.eigh(gram)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    top = torch.linalg.eigvalsh(root.mT @ blocks @ root)[..., -1]
    log_step = torch.where(top > 0, -top.where(top > 0, 1).log(), torch.inf)
    return (log_step - largest.squeeze(-1)).masked_fill(flat, -torch.inf)


def warn_if_too_large(
    problem: AttentionProblem, p: float, lr: float, weights: dict[str, Tensor], step: int
) -> bool:
    """Warn if lr exceeds what Remark 1 allows at this step; return whether it does."""
    alone = "W" in weights and "v" not in weights and not problem.heads and not problem.classes
    if not alone or problem.X.shape[-3] * problem.X.shape[-2] > CHECKED:
        return False  # the remark is about W alone
    bound = float(largest_step(problem, weights["W"], p).min())
    if step == 0 and bound == 0:
        return False  # p > 2 and an entry at zero, as in the usual start: no step is small enough
    if lr > bound:
        warnings.warn(
            f"lr = {lr:g} exceeds the largest step {bound:.3g} that Remark 1 allows at step"
            f" {step}: the theorems do not cover this path",
            stacklevel=3,
        )
    return lr > bound
