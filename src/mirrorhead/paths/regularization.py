r"""Regularization paths: the best weights of each norm, as the norm grows (Theorems 1 and 5).

    AttRP:       W(R)         = argmin L(W)      subject to  ||W|| <= R
    lp-JointRP:  (v(r), W(R)) = argmin L(v, W)   subject to  ||W||_p <= R,  ||v||_p <= r

There are many local minima: nearly every set of tokens has one. At small radii they merge, and at
large radii a cold start stays on its plateau. So several searches are continued from radius to
radius (`_continuation.py`). docs/regularization.md tells more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mirrorhead._checks import as_tensor, check_integer, check_seed
from mirrorhead.geometry import Norm, PNorm, as_norm
from mirrorhead.geometry._choice import as_smooth_pnorm
from mirrorhead.losses import Logistic
from mirrorhead.margin import MarginSolution
from mirrorhead.paths._balls import Balls, ball
from mirrorhead.paths._continuation import COARSE, INSIDE, SAME, minima_in_balls
from mirrorhead.paths._excess_loss import ExcessLoss, log_loss
from mirrorhead.paths._lbfgs import Function
from mirrorhead.paths.descent import divergence_to, title
from mirrorhead.problem import AttentionProblem, check_problem

ROUNDS = 5  # of v given W and W given v in a joint search, after both were moved together


@dataclass(frozen=True, eq=False, repr=False)
class RegularizationPath:
    """The best weights found at each radius; ... stands for the trials.

    geometry, radii: the norm, and the radii, (radii, ...).
    W: (radii, ..., d, d).
    log_excess: log(L(W) - L*), (radii, ...); for a joint path log L(v, W).
    norms: ||W||, (radii, ...): the radius, or less where the minimum lies inside the ball;
        `active` says which.
    tokens: the token with the most attention, (radii, ..., n).
    all_log_excess: the final value of each start, (radii, starts, ...), lowest first.
    v, head_radii: the same for the head, (radii, ..., d) and (radii,); None unless joint.
    """

    geometry: Norm
    radii: Tensor
    W: Tensor
    log_excess: Tensor
    norms: Tensor
    tokens: Tensor
    all_log_excess: Tensor
    v: Tensor | None = None
    head_radii: Tensor | None = None

    @property
    def active(self) -> Tensor:
        """Whether ||W|| <= R is active, (radii, ...); False where W lies inside the ball.

        Theorem 1 assumes that some W selects the best tokens of all samples: then more norm helps.
        """
        return self.norms >= INSIDE * self.radii

    @property
    def spread(self) -> Tensor:
        """Highest minus lowest log-excess over the starts, (radii, ...): 0 if all agree."""
        return self.all_log_excess.amax(1) - self.all_log_excess.amin(1)

    @property
    def optima(self) -> Tensor:
        """The number of different results of the starts, (radii, ...)."""
        return 1 + (self.all_log_excess.diff(dim=1) > SAME).sum(1)

    def divergence_to(self, solution: MarginSolution) -> Tensor:
        """D(W_mm, W(R)) of the directions to a solution of `attention_svm`, (radii, ...)."""
        return divergence_to(solution, "W", self.W, 2)

    def head_divergence_to(self, solution: MarginSolution) -> Tensor:
        """The same for the head of a joint path and a solution of `svm`, (radii, ...)."""
        if self.v is None:
            raise ValueError("the head was fixed: this path has no v")
        return divergence_to(solution, "v", self.v, 1)

    def __repr__(self) -> str:
        joint = ", joint" if self.v is not None else ""
        return (
            f"RegularizationPath({title(self.geometry)}, trials={tuple(self.W.shape[1:-2])},"
            f" {len(self.W)} radii {float(self.radii.min()):.3g} to {float(self.radii.max()):.3g},"
            f" log-excess {float(self.log_excess[-1].median()):.4g} at the last,"
            f" {float(self.optima.double().mean()):.1f} optima seen{joint})"
        )


def regularization_path(
    problem: AttentionProblem,
    geometry: float | Norm,
    radii: Sequence[float] | Tensor,
    starts: int = 8,
    seed: int = 0,
) -> RegularizationPath:
    r"""Compute W(R) = argmin L(W) subject to ||W|| <= R, for growing radii R (lp-AttRP).

    Theorem 1: W(R)/R converges to the direction of the max-margin solution, in the same norm, of
    the tokens with the highest scores. No start comes from `attention_svm`.

    Searches on the sphere start from the negative gradient at W = 0 and random directions, and at
    later radii from the results at the previous one. Every radius has one more start: the minimiser
    of the leading term of the excess, a convex function that does not get stuck at wrong tokens. A
    second search looks inside the ball. Its result is used if it is lower: `norms` is then less
    than the radius, and `active` is False. This happens when no W selects the best tokens of all
    samples.

    Args:
        problem: with one head and labels +1 and -1.
        geometry: a norm: `PNorm`, `Schatten` or `Grouped` with exponents from 1 to inf, or a smooth
            norm of your own that has a `dual`. A number stands for `PNorm`.
        radii: increasing, (radii,), or (radii, ...) where each trial has its own.
        starts: the number of searches.
        seed: of the random directions, which are the same for all trials.

    The result is the best local minimum found, not a proven global one: check `spread`.

    >>> X = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])
    >>> problem = AttentionProblem(X, z=X[:, 0], y=[1.0], v=[1.0, 1.0])
    >>> path = regularization_path(problem, geometry=2, radii=[1.0, 10.0, 1000.0])
    >>> path.W[-1, :, 0]  # of norm 1000, along the lp-AttSVM solution (.2, 0; -.1, 0)
    tensor([ 894.4272, -447.2136], dtype=torch.float64)
    >>> path.log_excess, path.tokens.squeeze(-1)
    (tensor([   -6.6054,   -46.8483, -4474.2629], dtype=torch.float64), tensor([0, 0, 0]))
    """
    norm = as_norm(geometry, "geometry")
    shape = check_problem(problem, plain=True).weight_shape[-2:]
    balls, flat = Balls((ball(norm, shape),)), _flattened(problem)
    starts, seed = check_integer("starts", starts, 1), check_seed(seed)
    radii = _check_radii("radii", radii, problem.trials).to(flat.X.device)
    scores = flat.scores()
    if bool((ExcessLoss(flat, scores).log_gap == -torch.inf).flatten(1).all(-1).any()):
        raise ValueError("problem has tokens of equal scores only: L does not depend on W")

    def excess_of(count: int) -> Function:
        return _of_vectors(ExcessLoss(flat, scores.repeat_interleave(count, 0)), shape)

    def search(points: Tensor, radius: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        leading_term = _of_vectors(ExcessLoss(flat, scores).leading_term, shape)
        guide, _ = balls.minima_on_spheres(leading_term, points[:, :1], radius, COARSE)
        points = torch.cat([points, guide], 1)
        return balls.minima_on_spheres(excess_of(points.shape[1]), points, radius, tol)

    gradient = flat.gradient(flat.X.new_zeros(flat.weight_shape))
    downhill = -gradient.steepest(norm).flatten(1)
    each = radii.reshape(len(radii), -1, 1)  # (radii, trials, 1)
    soft = _soft_radii(flat.reach(norm)).unsqueeze(-1)
    W, values = minima_in_balls(search, excess_of, balls, downhill, starts, seed, each, soft)
    return _path(problem, norm, radii, W, values)


def joint_regularization_path(
    problem: AttentionProblem,
    geometry: float | PNorm,
    radii: Sequence[float] | Tensor,
    head_radii: Sequence[float] | Tensor,
    starts: int = 16,
    seed: int = 0,
) -> RegularizationPath:
    r"""Compute lp-JointRP: min L(v, W) subject to ||W||_p <= R and ||v||_p <= r, growing.

    Theorem 5: v(r)/r and W(R)/R tend to the lp-SVM and lp-AttSVM solutions of tokens for
    which Assumption B holds (`assumption_b`), those of the largest label margin.

    The search is that of `regularization_path` with log L instead of log(L - L*) and random
    starts only; problem.v is not used. Once attention is nearly one-hot, log L is insensitive to
    W. So searches in v given W and in W given v alternate. The latter minimise log(L - L*(v)),
    which has the same minimiser in W and does not cancel. Either part can have a smaller norm than
    its radius.

    Args:
        problem: with one head, labels +1 and -1 and the logistic loss.
        geometry: a p-norm, 1 < p < inf; a number stands for `PNorm`.
        radii, head_radii: R and r, increasing, as many of one as of the other; each
            (radii,) or (radii, ...) where each trial has its own.
        starts, seed: as in `regularization_path`.
    """
    norm = as_smooth_pnorm(geometry)
    flat = _flattened(check_problem(problem, plain=True, head=True))
    starts, seed = check_integer("starts", starts, 1), check_seed(seed)
    if type(problem.loss_function) is not Logistic:
        raise ValueError(f"problem must have the logistic loss, got {problem.loss_function!r}")
    radii = _check_radii("radii", radii, problem.trials).to(flat.X.device)
    head_radii = _check_radii("head_radii", head_radii, problem.trials).to(flat.X.device)
    if len(radii) != len(head_radii):
        raise ValueError(f"head_radii must be {len(radii)} like radii, got {len(head_radii)}")
    shape, d = flat.weight_shape[-2:], flat.X.shape[-1]
    size = math.prod(shape)
    balls = Balls((ball(norm, shape), ball(norm, (d,))))
    both = torch.stack([radii, head_radii], -1).reshape(len(radii), -1, 2)  # (radii, trials, 2)
    heads = norm.dual_norm(flat.X, -1).amax((-2, -1))  # |x' v| <= ||x||_q ||v||_p
    soft = _soft_radii(torch.stack([flat.reach(norm), heads], -1))

    def log_loss_of(count: int) -> Function:
        def function(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
            W, v = x.split(balls.sizes, -1)
            value, to_W, to_v = log_loss(flat, W.unflatten(-1, shape), v, which // count)
            return value, torch.cat([to_W.flatten(1), to_v], -1)

        return function

    def search(points: Tensor, radius: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        starts = points.shape[1]
        function, R = log_loss_of(starts), radius.repeat_interleave(starts, 0)
        W, v = balls.minima_on_spheres(function, points, radius, tol)[0].split(balls.sizes, -1)

        def of_head(v: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
            at = R[which, :1] * W.flatten(0, 1)[which]
            value, gradient = function(torch.cat([at, v], -1), which)
            return value, gradient[:, size:]

        for _ in range(ROUNDS):
            v, _ = Balls(balls.parts[1:]).minima_on_spheres(of_head, v, radius[:, 1:], tol)
            head = (radius[:, None, 1:] * v)[:, :, None, :, None]  # (trials, starts, 1, d, 1)
            scores = flat.y[:, None, :, None] * (flat.X.unsqueeze(1) @ head).squeeze(-1)
            excess = _of_vectors(ExcessLoss(flat, scores.flatten(0, 1)), shape)
            W, _ = Balls(balls.parts[:1]).minima_on_spheres(excess, W, radius[:, :1], tol)
        points = torch.cat([W, v], -1)
        at = balls.scale(points, radius.unsqueeze(1)).flatten(0, 1)
        value, _ = function(at, torch.arange(len(at), device=at.device))
        return points, value.reshape(-1, starts)

    anywhere = flat.X.new_zeros(len(flat.X), size + d)
    points, values = minima_in_balls(search, log_loss_of, balls, anywhere, starts, seed, both, soft)
    W, v = points.split(balls.sizes, -1)
    found = _path(problem, norm, radii, W, values)
    return replace(found, v=v.reshape(len(radii), *problem.v.shape), head_radii=head_radii)


def _path(
    problem: AttentionProblem, norm: Norm, radii: Tensor, W: Tensor, values: Tensor
) -> RegularizationPath:
    """The result of W (radii, trials, d d) with the values (radii, starts, trials)."""
    W = W.reshape(len(radii), *problem.weight_shape)
    tokens = torch.stack([problem.select(w) for w in W])
    values = values.reshape(*values.shape[:2], *problem.trials)
    return RegularizationPath(
        geometry=norm,
        radii=radii,
        W=W,
        log_excess=values[:, 0],
        norms=norm.norm(W, (-2, -1)),
        tokens=tokens,
        all_log_excess=values,
    )


def _soft_radii(largest: Tensor) -> Tensor:
    """The radii at which no logit and no score exceeds 1, from the largest ones at radius 1."""
    return 1 / largest.where(largest > 0, 1.0)


def _of_vectors(function: Function, shape: tuple[int, ...]) -> Function:
    """A function of matrices W (k, *shape) as one of vectors."""

    def flattened(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = function(x.unflatten(-1, shape), which)
        return value, gradient.flatten(1)

    return flattened


def _check_radii(name: str, radii: Sequence[float] | Tensor, trials: tuple[int, ...]) -> Tensor:
    """The radii as (radii, *trials), or an error that names them."""
    values = as_tensor(name, radii).to(torch.float64)
    if values.dim() == 1:
        values = values.reshape(-1, *(1 for _ in trials)).expand(-1, *trials)
    if values.dim() == 0 or values.shape[1:] != trials or values.numel() == 0:
        given = tuple(as_tensor(name, radii).shape)
        raise ValueError(f"{name} must be (radii,) or (radii, *{trials}), got shape {given}")
    if not bool(((values > 0) & values.isfinite()).all()) or bool((values.diff(dim=0) <= 0).any()):
        raise ValueError(f"{name} must be positive, finite and increasing, got {radii}")
    return values


def _flattened(problem: AttentionProblem) -> AttentionProblem:
    """The problem with one dimension of trials."""
    dims = len(problem.trials)
    return problem.mapped(lambda x: x.reshape(-1, *x.shape[dims:]))
