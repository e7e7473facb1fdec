"""What is wrong in the paper as printed, where a small example shows it (docs/paper.md)."""

from __future__ import annotations

import math

import torch

import mirrorhead as mh
from mirrorhead.synthetic import random_problem


def test_the_softmax_of_the_model_runs_over_columns() -> None:
    """softmax(X W Z') X: only over the tokens of X is its first output that of (2)."""
    problem = random_problem(1)
    X, v = problem.X[0, 0], problem.v[0]
    W, Z = torch.randn(2, 10, 10, dtype=torch.float64)
    Z = Z[:8]
    logits = X @ W @ Z.mT  # (tokens of X, tokens of Z)
    one = mh.AttentionProblem(X[None], Z[:1], [1.0], v)
    output = one.output(W)[0]
    by_columns, by_rows = logits.softmax(0).mT @ X @ v, logits.softmax(1) @ X @ v
    torch.testing.assert_close(by_columns[0], output)
    assert (by_rows[0] - output).abs() > 1e-3


def test_support_tokens_depend_on_p() -> None:
    """Definition 3 takes them from (4), the problem at p = 2."""
    problem = random_problem(20)
    tokens = mh.globally_optimal_tokens(problem)
    two, three = (mh.support_tokens(problem, tokens, p) for p in (2, 3))
    assert (two != three).any()


def test_the_derivative_in_lemma_18_is_not_that_large() -> None:
    """(x+a)^(p-2) (log x - log c) at p = 4, c = e^2, x = 10, by the rule of products."""
    p, a, c, x = 4.0, 0.01, math.e**2, 10.0
    slope = (p - 2) * (x + a) ** (p - 3) * math.log(x / c) + (x + a) ** (p - 2) / x
    assert slope < (p - 2) / x * (x + a) ** (p - 2) * math.log(x)


def test_the_step_to_35b_fails_where_another_token_leads() -> None:
    """Sum of exp over the others / sum of all >= 1/T sum over the others / exp(h_alpha)?"""
    h = torch.tensor([0.0, 10.0])  # the selected token first
    lost, T = h.softmax(0)[1], len(h)
    assert lost < h[1].exp() / h[0].exp() / T
    assert lost >= (h[1] - h[0]).clamp_max(0).exp() / T  # the conclusion holds
