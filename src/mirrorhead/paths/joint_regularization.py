"""The joint regularization path of head and attention (Theorem 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mirrorhead.paths.excess import Excess, log_loss
from mirrorhead.paths.lbfgs import minimize
from mirrorhead.paths.regularization import RegularizationPath, soft_radius, weight_minima
from mirrorhead.paths.spheres import (
    Directions,
    check_problem,
    check_radii,
    follow,
    lowest_first,
    on_sphere,
)
from mirrorhead.potentials import check_p, dual_exponent, lp_norm
from mirrorhead.problem import AttentionProblem

ROUNDS = 5  # of v given W and W given v, after both were moved together


def joint_regularization_path(
    problem: AttentionProblem,
    p: float,
    radii: Sequence[float] | Tensor,
    head_radii: Sequence[float] | Tensor,
    starts: int = 16,
    seed: int = 0,
) -> RegularizationPath:
    r"""lp-JointRP: min L(v, W) subject to ||W||_p <= R and ||v||_p <= r, R and r growing.

    Theorem 5: v(r)/r and W(R)/R tend to the lp-SVM and lp-AttSVM solutions of tokens for
    which Assumption B holds (`assumption_b`), those of the largest label margin.

    As `regularization_path`, with log L in place of log(L - L*), all starts at random, and
    problem.v not used. Once attention is nearly one-hot, log L no longer shows how W changes.
    So after a search in (v, W) together, v given W and W given v take turns, the latter by
    log(L - L*(v)), which has the same minimiser in W and does not cancel.

    Args:
        problem: with one head, labels +1 and -1 and the logistic loss.
        p: the norm, greater than 1.
        radii, head_radii: R and r, increasing, as many of one as of the other; each
            (radii,) or (radii, ...) where each trial has its own.
        starts, seed: as in `regularization_path`.
    """
    p = check_p(p)
    flat = check_problem(problem, starts)
    if problem.loss_name != "logistic":
        raise ValueError(f"problem must have the logistic loss, got {problem.loss_name}")
    radii = check_radii("radii", radii, problem.trials).to(flat.X.device)
    head_radii = check_radii("head_radii", head_radii, problem.trials).to(flat.X.device)
    if len(radii) != len(head_radii):
        raise ValueError(f"head_radii must be {len(radii)} like radii, got {len(head_radii)}")
    d = flat.X.shape[-1]
    draw = Directions(d * d + d, flat.X.new_zeros(len(flat.X), d * d + d), seed)
    both = torch.stack([radii, head_radii], -1).reshape(len(radii), -1, 2)  # (radii, trials, 2)
    soft = torch.stack([soft_radius(flat, p), _soft_head_radius(flat, p)], -1)

    def search(points: Tensor, radius: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        return _joint_minima(flat, points, radius, p, tol)

    ends = follow(search, draw, starts, both, soft)
    W, v = ends.points.split([d * d, d], -1)
    W = (ends.reach[..., :1] * W).reshape(len(radii), *problem.weight_shape)
    return RegularizationPath(
        p=p,
        radii=radii,
        W=W,
        log_excess=ends.values.reshape(radii.shape),
        norms=lp_norm(W, p, (-2, -1)),
        tokens=torch.stack([problem.select(w) for w in W]),
        all_log_excess=ends.all_values.reshape(len(radii), starts, *problem.trials),
        v=(ends.reach[..., 1:] * v).reshape(len(radii), *problem.v.shape),
        head_radii=head_radii,
    )


def _joint_minima(
    flat: AttentionProblem, points: Tensor, radius: Tensor, p: float, tol: float
) -> tuple[Tensor, Tensor]:
    """Local minima of log L(v, W) on both spheres; points hold W, then v."""
    trials, starts, _ = points.shape
    d = flat.X.shape[-1]
    R, r = (x.repeat_interleave(starts).unsqueeze(-1) for x in radius.unbind(-1))

    def together(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        (W, pull_W), (v, pull_v) = (on_sphere(part, p) for part in x.split([d * d, d], -1))
        at = (R[which] * W).unflatten(-1, (d, d)), r[which] * v
        value, to_W, to_v = log_loss(flat, *at, which // starts)
        parts = pull_W(R[which] * to_W.flatten(1)), pull_v(r[which] * to_v)
        return value, torch.cat(parts, -1)

    def head_given_weights(N: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = together(torch.cat([W[which], N], -1), which)
        return value, gradient[:, d * d :]

    x = minimize(together, _units(points.flatten(0, 1), d, p), tol).x
    W, v = _units(x, d, p).split([d * d, d], -1)
    for _ in range(ROUNDS):
        found = minimize(head_given_weights, v, tol)
        v = on_sphere(found.x, p)[0]
        heads = (r * v).reshape(trials, starts, 1, d, 1)
        scores = flat.y[:, None, :, None] * (flat.X.unsqueeze(1) @ heads).squeeze(-1)
        excess = Excess(flat, scores.flatten(0, 1))
        W = weight_minima(excess, W.reshape(trials, starts, -1), radius[:, :1], p, tol)[0]
        W = W.flatten(0, 1)
    x = torch.cat([W, v], -1)
    value, _ = together(x, torch.arange(len(x), device=x.device))
    return lowest_first(x.reshape(points.shape), value.reshape(trials, starts))


def _units(x: Tensor, d: int, p: float) -> Tensor:
    """Both parts of x at norm 1."""
    return torch.cat([on_sphere(part, p)[0] for part in x.split([d * d, d], -1)], -1)


def _soft_head_radius(flat: AttentionProblem, p: float) -> Tensor:
    """The head radius, (trials,), at which no score exceeds 1."""
    largest = lp_norm(flat.X, dual_exponent(p), -1).amax((-2, -1))
    return 1 / largest.where(largest > 0, 1.0)
