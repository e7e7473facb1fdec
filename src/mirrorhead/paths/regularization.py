r"""Regularization paths: the best weights of each norm, as the norm grows (Theorems 1 and 5).

    lp-AttRP:    W(R)         = argmin L(W)      subject to  ||W||_p <= R
    lp-JointRP:  (v(r), W(R)) = argmin L(v, W)   subject to  ||W||_p <= R,  ||v||_p <= r

What is minimised is log(L - L*) (see `_excess_loss.py`), over M with W = R M / ||M||_p, by L-BFGS.

There are many local minima: nearly every set of tokens has one. At small radii they merge,
and at large ones a cold start stays on the plateau where it was put. So several starts are
carried from radius to radius, over inner radii too, and those that have met are drawn anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrorhead.margin import MarginSolution
from mirrorhead.paths._continuation import (
    COARSE,
    SAME,
    Directions,
    check_problem,
    check_radii,
    follow,
    lowest_first,
    on_sphere,
)
from mirrorhead.paths._excess_loss import Excess, log_loss
from mirrorhead.paths._lbfgs import minimize
from mirrorhead.paths.descent import direction_divergence
from mirrorhead.potentials import PNorm, check_p, dual_exponent, lp_norm
from mirrorhead.problem import AttentionProblem

ROUNDS = 5  # of v given W and W given v in a joint search, after both were moved together


@dataclass(frozen=True, eq=False, repr=False)
class RegularizationPath:
    """The best weights found at each radius; ... stands for the trials.

    p, radii: the norm, and the radii, (radii, ...).
    W: (radii, ..., d, d).
    log_excess: log(L(W) - L*), (radii, ...); for a joint path log L(v, W).
    norms: ||W||_p, (radii, ...): the radius, or less where more norm did not help.
    tokens: the token with the most attention, (radii, ..., n).
    all_log_excess: where each start ended, (radii, starts, ...), lowest first.
    v, head_radii: the same for the head, (radii, ..., d) and (radii,); None unless joint.
    """

    p: float
    radii: Tensor
    W: Tensor
    log_excess: Tensor
    norms: Tensor
    tokens: Tensor
    all_log_excess: Tensor
    v: Tensor | None = None
    head_radii: Tensor | None = None

    @property
    def spread(self) -> Tensor:
        """Highest minus lowest log-excess over the starts, (radii, ...): 0 if all agree."""
        return self.all_log_excess.amax(1) - self.all_log_excess.amin(1)

    @property
    def optima(self) -> Tensor:
        """How many different ends the starts came to, (radii, ...)."""
        return 1 + (self.all_log_excess.diff(dim=1) > SAME).sum(1)

    def divergence_to(self, solution: MarginSolution) -> Tensor:
        """D(W_mm, W(R)) of the directions to a solution of `attention_svm`, (radii, ...)."""
        return direction_divergence(solution.p, solution.W, self.W, 2)

    def head_divergence_to(self, solution: MarginSolution) -> Tensor:
        """The same for the head of a joint path and a solution of `svm`, (radii, ...)."""
        if self.v is None:
            raise ValueError("the head was fixed: this path has no v")
        return direction_divergence(solution.p, solution.v, self.v, 1)

    def __repr__(self) -> str:
        joint = ", joint" if self.v is not None else ""
        return (
            f"RegularizationPath(p={self.p:g}, trials={tuple(self.W.shape[1:-2])},"
            f" {len(self.W)} radii {float(self.radii.min()):.3g} to {float(self.radii.max()):.3g},"
            f" log-excess {float(self.log_excess[-1].median()):.4g} at the last,"
            f" {float(self.optima.double().mean()):.1f} optima seen{joint})"
        )


def regularization_path(
    problem: AttentionProblem,
    p: float,
    radii: Sequence[float] | Tensor,
    starts: int = 8,
    seed: int = 0,
) -> RegularizationPath:
    r"""lp-AttRP: W(R) = argmin L(W) subject to ||W||_p <= R, for growing radii R.

    Theorem 1: W(R)/R tends to the direction of the lp-AttSVM solution of the tokens with the
    highest scores. That solution is not used: no start comes from `attention_svm`.

    The starts are, at the first stage, the negative gradient at W = 0 and random directions;
    later, the ends of the stage before. Where several have met, one stays and the others are
    drawn anew. At every stage one more start is the minimiser of the excess's leading term, a
    convex function that does not stick to wrong tokens (`Excess.leading_term`). The best end
    is the path. A last sweep goes from the largest radius back to the smallest, since an optimum
    met late may have been the better one before.

    Args:
        problem: with one head and labels +1 and -1.
        p: the norm, greater than 1.
        radii: increasing, (radii,), or (radii, ...) where each trial has its own.
        starts: how many searches run side by side.
        seed: of the random directions, which are the same for all trials.

    The result is the best of local minima, not a proven global one: look at `spread`.

    >>> X = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])
    >>> problem = AttentionProblem(X, z=X[:, 0], y=[1.0], v=[1.0, 1.0])
    >>> path = regularization_path(problem, p=2, radii=[1.0, 10.0, 1000.0])
    >>> path.W[-1, :, 0]  # of norm 1000, along the lp-AttSVM solution (.2, 0; -.1, 0)
    tensor([ 894.4272, -447.2136], dtype=torch.float64)
    >>> path.log_excess, path.tokens.squeeze(-1)
    (tensor([   -6.6054,   -46.8483, -4474.2629], dtype=torch.float64), tensor([0, 0, 0]))
    """
    p = check_p(p)
    flat = check_problem(problem, starts)
    radii = check_radii("radii", radii, problem.trials).to(flat.X.device)
    scores = flat.scores()
    if bool((Excess(flat, scores).log_gap == -torch.inf).flatten(1).all(-1).any()):
        raise ValueError("problem has tokens of equal scores only: L does not depend on W")
    d = flat.X.shape[-1]

    def search(points: Tensor, radius: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        kept = points.shape[1]
        guide, _ = weight_minima(
            Excess(flat, scores).leading_term, points[:, :1], radius, p, COARSE
        )
        points = torch.cat([points, guide], 1)
        excess = Excess(flat, scores.repeat_interleave(kept + 1, 0))
        points, values = lowest_first(*weight_minima(excess, points, radius, p, tol))
        return points[:, :kept], values[:, :kept]

    gradient = flat.gradient(flat.X.new_zeros(len(flat.X), d, d))
    downhill = -PNorm(p).inverse(gradient.normalized(dual_exponent(p)).flatten(1))
    draw = Directions(d * d, downhill, seed)
    each = radii.reshape(len(radii), -1, 1)  # (radii, trials, 1)
    ends = follow(search, draw, starts, each, soft_radius(flat, p).unsqueeze(-1))
    W = (ends.reach * ends.points).reshape(len(radii), *problem.weight_shape)
    return RegularizationPath(
        p=p,
        radii=radii,
        W=W,
        log_excess=ends.values.reshape(radii.shape),
        norms=lp_norm(W, p, (-2, -1)),
        tokens=torch.stack([problem.select(w) for w in W]),
        all_log_excess=ends.all_values.reshape(len(radii), starts, *problem.trials),
    )


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


def soft_radius(flat: AttentionProblem, p: float) -> Tensor:
    """The radius, (trials,), at which no logit exceeds 1: |x' W z| <= R ||x||_q ||z||_q."""
    q = dual_exponent(p)
    largest = (lp_norm(flat.X, q, -1).amax(-1) * lp_norm(flat.z, q, -1)).amax(-1)
    return 1 / largest.where(largest > 0, 1.0)


def weight_minima(
    function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    points: Tensor,
    radius: Tensor,
    p: float,
    tol: float,
) -> tuple[Tensor, Tensor]:
    """Local minima of function(W, which) over ||W||_p = radius, (trials, 1), as a `Search`."""
    trials, starts, size = points.shape
    d = math.isqrt(size)
    R = radius.repeat_interleave(starts, 0)

    def objective(M: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        unit, pull_back = on_sphere(M, p)
        value, gradient = function((R[which] * unit).unflatten(-1, (d, d)), which)
        return value, pull_back(R[which] * gradient.flatten(1))

    found = minimize(objective, on_sphere(points.flatten(0, 1), p)[0], tol)
    ends = on_sphere(found.x, p)[0].reshape(points.shape)
    return ends, found.value.reshape(trials, starts)


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
