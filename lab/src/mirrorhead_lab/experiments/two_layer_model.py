r"""Two layers of softmax attention, with gradients that stay right when attention is one-hot.

Layer 1 lets every token attend to all tokens of its sample, with a residual connection; layer 2 has
one query z for each sample:

    h_t = x_t + X' s(X W_1 x_t),     f(X, z) = v' H' s(H W_2 z),     L = (1/n) sum_i l(y_i f_i).

Both gradients are sums of one form. Let s = softmax(logits), a the scores of the tokens, and alpha
the selected token. The slope of sum_t s_t a_t in the logits is s_t (a_t - sum_tau s_tau a_tau). It
is computed relative to alpha, with its scale as a logarithm (`softmax_slope`; see `problem.py`).

    layer 2:  scores y v' h_t;  dL/dW_2 = (1/n) sum_i l'_i sum_t slope_t h_t z_i'
    layer 1:  dL/dh_t = l' s_t (y v + (a_t - sum_tau s_tau a_tau) W_2 z) =: l' s_t g_t with the
              attention s and scores a of layer 2; so query x_t has the scores X g_t and the weight
              l' s_t, which is kept as a logarithm too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mirrorhead.problem import AttentionProblem, Gradient, check_problem


def softmax_slope(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slope of sum_t s_t a_t in the logits, (..., T), as exp(log_scale) * slope.

    Returns slope (..., T), log_scale (...), and gap (..., T), which is a_t - sum_tau s_tau a_tau.
    """
    top, token = logits.max(-1, keepdim=True)
    others = (logits - top).scatter(-1, token, -torch.inf)
    log_tail = others.amax(-1, keepdim=True)
    rest = (others - log_tail).exp()  # 0 at the selected token
    tail = log_tail.exp()
    selected = 1 / (1 + tail * rest.sum(-1, keepdim=True))
    behind = scores.gather(-1, token) - scores  # a_alpha - a_t
    lead = tail * selected * (rest * behind).sum(-1, keepdim=True)  # a_alpha - sum s a
    gap = lead - behind
    slope = rest * gap
    slope = slope.scatter(-1, token, -slope.sum(-1, keepdim=True))
    return slope, (log_tail + selected.log()).squeeze(-1), gap


@dataclass(frozen=True)
class TwoLayers:
    """The two-layer model on the data of a problem with trials, one head and labels +1 and -1."""

    problem: AttentionProblem

    def __post_init__(self) -> None:
        check_problem(self.problem, plain=True, head=True)

    def forward(self, W1: Tensor, W2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logits of layer 1, (..., n, query, T), of layer 2, (..., n, T), and H."""
        X, z = self.problem.X, self.problem.z
        first = X @ W1.mT.unsqueeze(-3) @ X.mT  # row t: the query x_t against all tokens
        H = X + first.softmax(-1) @ X
        second = (H @ W2.unsqueeze(-3) @ z.unsqueeze(-1)).squeeze(-1)
        return first, second, H

    def loss(self, W1: Tensor, W2: Tensor) -> Tensor:
        """The training loss, (...); autograd differentiates it while attention is soft."""
        _, second, H = self.forward(W1, W2)
        scores = self._scores(H)
        margin = (second.softmax(-1) * scores).sum(-1)
        return self.problem.loss_function.value(margin).mean(-1)

    def gradients(self, W1: Tensor, W2: Tensor) -> tuple[Gradient, Gradient]:
        """The gradients of the loss in W_1 and W_2, with their directions right at any size."""
        X, z, n = self.problem.X, self.problem.z, self.problem.X.shape[-3]
        first, second, H = self.forward(W1, W2)
        scores = self._scores(H)
        log_attention = second.log_softmax(-1)
        slope, log_scale, gap = softmax_slope(second, scores)
        margin = (log_attention.exp() * scores).sum(-1)
        log_slope = self.problem.loss_function.log_slope(margin)  # log(-l'), (..., n)
        rows = (slope.unsqueeze(-2) @ H).squeeze(-2)  # (..., n, d)
        to_W2 = _sum_of_products(rows, z, log_slope + log_scale, n)

        Wz = (W2.unsqueeze(-3) @ z.unsqueeze(-1)).squeeze(-1)  # (..., n, d)
        yv = self.problem.y.unsqueeze(-1) * self.problem.v.unsqueeze(-2)  # (..., n, d)
        g = yv.unsqueeze(-2) + gap.unsqueeze(-1) * Wz.unsqueeze(-2)  # (..., n, query, d)
        slope, log_scale, _ = softmax_slope(first, g @ X.mT)
        weight = log_slope.unsqueeze(-1) + log_attention + log_scale  # (..., n, query)
        flat = [x.flatten(-3, -2) for x in (slope @ X, X)]  # (..., n query, d)
        to_W1 = _sum_of_products(flat[0], flat[1], weight.flatten(-2), n)
        return to_W1, to_W2

    def _scores(self, H: Tensor) -> Tensor:
        return self.problem.y.unsqueeze(-1) * (H @ self.problem.v[..., None, :, None]).squeeze(-1)


def _sum_of_products(rows: Tensor, queries: Tensor, log_weights: Tensor, n: int) -> Gradient:
    """-(1/n) sum_k exp(log_weight_k) row_k query_k' as a scaled gradient, (..., d, d)."""
    largest = log_weights.amax(-1, keepdim=True)
    share = (log_weights - largest).exp() / -n
    return Gradient((rows * share.unsqueeze(-1)).mT @ queries, largest.squeeze(-1), 2)
