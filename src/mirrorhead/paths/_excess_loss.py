r"""The excess L - L* of the training loss over its infimum, as a logarithm that does not cancel.

L* is the loss with the token of the highest score selected in every sample; no W has a lower
one. For logits h, scores a_t, the best score b of a sample and the gaps b - a_t >= 0,

    e_i     = sum_t s_it (b_i - a_it),     log e = logsumexp(h + log gap) - logsumexp(h),
    L - L*  = (1/n) sum_i l(b_i - e_i) - l(b_i),

so log(L - L*) is accurate when L - L* is 1e-1000. Its slope in h_t is a positive number times
q_t - s_t, with q = softmax(h + log gap), which is 0 at the best token: nothing cancels there
either.

Several instances of W share the data of one trial: instance k belongs to trial k // starts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mirrorhead.problem import AttentionProblem


class ExcessLoss:
    """log(L - L*) of many instances, for scores (instances, n, T) and one dimension of trials."""

    def __init__(self, problem: AttentionProblem, scores: Tensor) -> None:
        self.problem = problem
        self.starts = len(scores) // len(problem.X)
        if problem.mask is not None:
            scores = scores.where(problem.mask.repeat_interleave(self.starts, 0), -torch.inf)
        best, self.token = scores.max(-1, keepdim=True)
        # Padding has an infinite gap but never any attention.
        self.log_gap = (best - scores).log().where(scores > -torch.inf, -torch.inf)
        self.best = best.squeeze(-1)

    def __call__(self, W: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """log(L - L*) and its gradient at W (k, d, d) for the instances `which`, (k,)."""
        loss, best = self.problem.loss_function, self.best[which]
        h = logits(self.problem, W, which // self.starts)
        log_total = h.logsumexp(-1, keepdim=True)
        log_e, share = self._shortfall(h, which, log_total)
        each = loss.log_excess(best, log_e)
        total = each.logsumexp(-1, keepdim=True)
        # d log(L - L*) / d log e_i; 0 where the loss is L* already and there is nothing to do
        weight = (loss.log_slope(best - log_e.exp()) + log_e - total).exp()
        weight = weight.where(total > -torch.inf, 0.0)
        pull = weight.unsqueeze(-1) * (share - (h - log_total).exp())
        return self._result(total, pull, which)

    def leading_term(self, W: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """log of (1/n) sum_i -l'(b_i) sum_t exp(h_t - h_best) (b_i - a_it), and its gradient.

        L - L* tends to it as attention becomes one-hot on the best tokens. It is convex in W, and
        where a wrong token is selected it grows with that token's lead, while L - L* is flat.
        """
        h, token = logits(self.problem, W, which // self.starts), self.token[which]
        log_e, share = self._shortfall(h, which, h.gather(-1, token))
        each = self.problem.loss_function.log_slope(self.best[which]) + log_e
        total = each.logsumexp(-1, keepdim=True)
        weight = (each - total).exp().where(total > -torch.inf, 0.0).unsqueeze(-1)
        pull = (weight * share).scatter_add_(-1, token, -weight)
        return self._result(total, pull, which)

    def _shortfall(self, h: Tensor, which: Tensor, log_total: Tensor) -> tuple[Tensor, Tensor]:
        """log e_i (k, n), and how much of it each token has (k, n, T)."""
        worse = h + self.log_gap[which]
        log_worse = worse.logsumexp(-1, keepdim=True)
        log_e = (log_worse - log_total).squeeze(-1)
        # A sample whose tokens all score the same has none.
        share = (worse - log_worse.where(log_worse > -torch.inf, 0.0)).exp()
        return log_e, share

    def _result(self, total: Tensor, pull: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        value = total.squeeze(-1) - math.log(pull.shape[-2])
        return value, from_logits(self.problem, pull, which // self.starts)


def logits(problem: AttentionProblem, W: Tensor, trial: Tensor) -> Tensor:
    """X W z, (k, n, T), of the data of trial k; -inf at padding."""
    Wz = problem.z[trial] @ W.mT  # (k, n, d)
    h = (problem.X[trial] @ Wz.unsqueeze(-1)).squeeze(-1)
    return h if problem.mask is None else h.masked_fill(~problem.mask[trial], -torch.inf)


def from_logits(problem: AttentionProblem, slope: Tensor, trial: Tensor) -> Tensor:
    """The gradient in W, (k, d, d), of a function with this slope in the logits, (k, n, T)."""
    rows = (slope.unsqueeze(-2) @ problem.X[trial]).squeeze(-2)  # (k, n, d)
    return rows.mT @ problem.z[trial]


def log_loss(
    problem: AttentionProblem, W: Tensor, v: Tensor, trial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log L of the logistic loss at (W, v), and its gradients in W (k, d, d) and v (k, d)."""
    X, y = problem.X[trial], problem.y[trial]
    s = logits(problem, W, trial).softmax(-1)  # (k, n, T)
    scores = y.unsqueeze(-1) * (X @ v[:, None, :, None]).squeeze(-1)
    margin = (s * scores).sum(-1, keepdim=True)
    each = log_logistic(margin.squeeze(-1))
    total = each.logsumexp(-1, keepdim=True)
    weight = -(problem.loss_function.log_slope(margin.squeeze(-1)) - total).exp()  # (k, n)
    pull = weight.unsqueeze(-1) * s * (scores - margin)
    features = (s.unsqueeze(-2) @ X).squeeze(-2)  # (k, n, d)
    value = total.squeeze(-1) - math.log(y.shape[-1])
    head = ((weight * y).unsqueeze(-2) @ features).squeeze(-2)
    return value, from_logits(problem, pull, trial), head


def log_logistic(x: Tensor) -> Tensor:
    """log(log(1 + exp(-x))), which is -x - exp(-x)/2 + ... for large x."""
    small = x > 12
    ratio = (-x).exp()
    series = -x - ratio / 2 + ratio * ratio * (5 / 24)
    return torch.where(small, series, softplus(-x.where(~small, 0.0)).log())
