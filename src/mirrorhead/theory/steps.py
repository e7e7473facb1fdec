r"""Lemmas 1, 12 to 14, 16 and 17 of the paper: one step of lp-AttGD, and the cone it stays in.

A step is u+ = u - eta grad L(W). Far out in the cones the gradient is exp(-10^9) and the steps that
Remark 1 allows are as large as it is small. So a step takes log(eta), and all differences between
W and W+ are computed from the step itself: ||W||^p does not change in its first ten digits.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from mirrorhead.geometry import PNorm
from mirrorhead.margin import MarginSolution
from mirrorhead.problem import AttentionProblem, check_problem
from mirrorhead.theory.inequalities import Sides

DIMS = (-2, -1)
SMALL = 1e-5  # below this the loss is its quadratic expansion to ten digits


class MirrorStep:
    """One step of lp-AttGD from W, (..., d, d), with the step size exp(log_lr).

    pull: -eta grad L(W); after: the next W; loss_change: eta (L(after) - L(W)), (...).

    >>> from mirrorhead.synthetic import random_problem
    >>> problem = random_problem(2)
    >>> step = MirrorStep(problem, torch.ones(2, 10, 10), p=2, log_lr=0.0)
    >>> left, right = lemma_13(step)
    >>> bool((left >= right).all())
    True
    """

    def __init__(
        self, problem: AttentionProblem, W: Tensor, p: float, log_lr: float | Tensor
    ) -> None:
        self.problem, self.psi = check_problem(problem, plain=True), PNorm(p)
        self.W = W.to(torch.float64)
        self.log_lr = torch.as_tensor(log_lr, dtype=torch.float64).expand(problem.trials)
        gradient = problem.gradient(self.W)
        scale = (self.log_lr + gradient.log_scale).exp()
        self.pull = -gradient.mantissa * scale[..., None, None]
        self.u = self.psi.mirror(self.W)
        self.after = self.psi.inverse(self.u + self.pull)

    @cached_property
    def norm(self) -> Tensor:
        """||W||_p, (...)."""
        return self.psi.norm(self.W, DIMS)

    @cached_property
    def power_gain(self) -> Tensor:
        """||W+||_p^p - ||W||_p^p, (...), from the change of each entry of u."""
        q, zero = self.psi.q, self.u == 0
        ratio = self.pull / self.u.where(~zero, 1)
        grown = self.u.abs() ** q * torch.expm1(q * torch.log1p(ratio.clamp_min(-1 + 1e-16)))
        other = (self.u + self.pull).abs() ** q - self.u.abs() ** q
        return torch.where(zero | (ratio < -0.5), other, grown).sum(DIMS)

    @cached_property
    def gain(self) -> Tensor:
        """||W+||_p^(p-1) - ||W||_p^(p-1), (...)."""
        p, old = self.psi.p, self.norm**self.psi.p
        share = self.power_gain / old.where(old > 0, 1)
        grown = self.norm ** (p - 1) * torch.expm1(torch.log1p(share) * (p - 1) / p)
        return torch.where(old > 0, grown, self.power_gain.clamp_min(0) ** ((p - 1) / p))

    @cached_property
    def loss_change(self) -> Tensor:
        """eta (L(W+) - L(W)), (...), without cancellation where attention is one-hot."""
        loss = self.problem.loss_function
        best, small, scaled, margin, token = zip(
            *(self._margins(x) for x in (self.W, self.after)), strict=True
        )
        near = (small[0].abs() < SMALL) & (small[1].abs() < SMALL) & (token[0] == token[1])
        slope = loss.log_slope(best[0]).exp()
        curvature = loss.relative_curvature(best[0])
        one, two = (s * (1 + curvature * e / 2) for s, e in zip(scaled, small, strict=True))
        plain = loss.value(margin[1]) - loss.value(margin[0])
        plain = torch.where(plain == 0, 0.0, plain * self.log_lr.exp().unsqueeze(-1))
        return torch.where(near, slope * (two - one), plain).mean(-1)

    def _margins(self, W: Tensor) -> tuple[Tensor, ...]:
        """Of each sample, (..., n): the score of the selected token; how far the margin is below
        it, plain and times eta; the margin; and the token."""
        forward = self.problem._forward(self.problem._weights(W))
        best = self.problem.scores().gather(-1, forward.token[..., 0, :]).squeeze(-1)
        log_tail = forward.log_scale.squeeze(-1) - forward.log_slope
        log_tail = log_tail - forward.selected[..., 0, 0].log()
        shortfall = forward.shortfall[..., 0, 0]
        below = log_tail.exp() * shortfall
        scaled = (log_tail + self.log_lr.unsqueeze(-1)).exp() * shortfall
        return best, below, scaled, best - below, forward.token[..., 0, 0]


def lemma_1(step: MirrorStep, V: Tensor) -> Sides:
    """The identity (3) for any V, (..., d, d): both sides, (...).

    D(V, W) = D(V, W+) + D_(psi - eta L)(W+, W) - eta <grad L(W), V - W> - eta L(W) + eta L(W+).
    """
    psi = step.psi
    between = psi.divergence(step.after, step.W, DIMS) - step.loss_change
    between = between - (step.pull * (step.after - step.W)).sum(DIMS)
    rest = (step.pull * (V - step.W)).sum(DIMS) + step.loss_change
    return Sides(
        psi.divergence(V, step.W, DIMS), psi.divergence(V, step.after, DIMS) + between + rest
    )


def lemma_12(step: MirrorStep) -> Sides:
    """||W+||^(p-1) - ||W||^(p-1) >= eta <-grad L(W), W> / ||W||; W is not zero."""
    return Sides(step.gain, (step.pull * step.W).sum(DIMS) / step.norm)


def lemma_13(step: MirrorStep) -> Sides:
    """eta <-grad L(W), W> >= (p-1)/p (||W+||^p - ||W||^p) + eta (L(W+) - L(W)), (24).

    The difference of the sides is D_(psi - eta L)(W+, W), which Remark 1 makes non-negative.
    """
    p = step.psi.p
    return Sides((step.pull * step.W).sum(DIMS), (p - 1) / p * step.power_gain + step.loss_change)


def lemma_14(step: MirrorStep) -> Sides:
    """0 >= eta (L(W+) - L(W)): the loss does not increase."""
    return Sides(torch.zeros_like(step.loss_change), step.loss_change)


def lemma_16(step: MirrorStep, solution: MarginSolution, pi: float | Tensor) -> Sides:
    """(25): what a step gains along W_mm, against what it gains in norm.

    <u+ - u, W_mm/||W_mm||> >= (||W+||^(p-1) - ||W||^(p-1)) / (1 + pi) + eta (L(W+) - L(W)) / ||W||
    """
    along = (step.pull * solution.W).sum(DIMS) / solution.norm
    return Sides(along, step.gain / (1 + pi) + step.loss_change / step.norm)


def lemma_17(
    solution: MarginSolution, first: Tensor, last: Tensor, pi: float | Tensor, loss_drop: Tensor
) -> Sides:
    """(27): the bound on D(W_mm, W(K)), and D itself, (...).

        r D(W_mm, W(0)) + pi/(1+pi) (1 - r) + eta (L(W(0)) - L(W(K))) / (||W(K)||^(p-1) ||W(0)||)

    with r = (||W(0)|| / ||W(K)||)^(p-1) and loss_drop = eta (L(W(0)) - L(W(K))).
    """
    psi = PNorm(solution.p)
    start, end = (psi.norm(W, DIMS) for W in (first, last))
    ratio = (start / end) ** (psi.p - 1)
    old, new = (psi.direction_divergence(solution.W, W, DIMS) for W in (first, last))
    bound = ratio * old + pi / (1 + pi) * (1 - ratio)
    return Sides(bound + loss_drop / (end ** (psi.p - 1) * start), new)
