"""Shares of the largest margin: against an independent solver, and by their laws."""

from __future__ import annotations

import math
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mirrorhead as mh
from margin_cases import dense_rows, generator
from mirrorhead.synthetic import random_problem

NORMS = (1, 1.5, 2, 3, math.inf, mh.Schatten(1), mh.Schatten(math.inf))


def smallest_norm(rows: np.ndarray, shape: tuple[int, ...], norm: mh.Norm) -> float:
    """min ||W|| over rows W >= 1, by cvxpy and Clarabel."""
    W = cp.Variable(shape)
    if isinstance(norm, mh.Schatten):
        size = cp.normNuc(W) if norm.p == 1 else cp.sigma_max(W)
    else:
        assert isinstance(norm, mh.PNorm)
        p: Any = "inf" if norm.p == math.inf else norm.p
        size = cp.norm(cp.vec(W, "C"), p)
    problem = cp.Problem(cp.Minimize(size), [rows @ cp.vec(W, "C") >= 1])
    problem.solve(cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
    return float(size.value)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_shares_agree_with_cvxpy_on_200_problems() -> None:
    count = 200
    problem = random_problem(count, n=3, T=4, d=4)
    W = torch.randn(count, 4, 4, generator=generator(0), dtype=torch.float64)
    tokens = problem.select(W)
    profile = mh.margin_profile(W, problem.X, problem.z, norms=NORMS)
    for k in range(count):
        rows = dense_rows(problem.X[k], problem.z[k], tokens[k]).numpy()
        margin = (rows @ W[k].numpy().ravel()).min()
        norm = profile.norms[k % len(NORMS)]
        expected = margin * smallest_norm(rows, (4, 4), norm) / float(norm.norm(W[k]))
        assert profile.shares[k, k % len(NORMS)] == pytest.approx(expected, abs=1e-6)
    assert bool((profile.gaps < 1e-8).all())


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 1e3), p=st.sampled_from(NORMS))
def test_a_share_is_at_most_one_and_does_not_depend_on_the_scale(
    seed: int, scale: float, p: float | mh.Norm
) -> None:
    problem = random_problem(1, n=3, T=4, d=4, first=seed).trial(0)
    W = torch.randn(4, 4, generator=generator(seed), dtype=torch.float64)
    one, other = (mh.margin_profile(w, problem.X, problem.z, norms=[p]) for w in (W, scale * W))
    assert 0 < float(one.shares) <= float(1 + one.gaps) + 1e-12
    torch.testing.assert_close(one.shares, other.shares, rtol=1e-12, atol=0)


@pytest.mark.parametrize("norm", NORMS)
def test_the_solution_of_a_norm_has_all_of_its_margin(norm: float | mh.Norm) -> None:
    problem = random_problem(2)
    tokens = mh.globally_optimal_tokens(problem)
    W = mh.attention_svm(problem.X, problem.z, tokens, norm, 1e-10).W
    profile = mh.margin_profile(W, problem.X, problem.z, tokens, norms=[norm])
    torch.testing.assert_close(profile.shares, torch.ones(2, 1).double(), rtol=1e-8, atol=0)
    assert profile.lead.isnan().all()


def test_records_and_trials_are_profiled_together_and_with_tokens_of_their_own() -> None:
    problem = random_problem(3)
    path = mh.descend(problem, 2, 300, record=[1, 10, 300])
    together = mh.margin_profile(path.W, problem.X, problem.z, norms=[2, math.inf])
    assert together.shares.shape == (3, 3, 2) and together.margins.shape == (3, 3)
    for record in range(3):
        for k in range(3):
            W, X, z = path.W[record, k], problem.X[k], problem.z[k]
            alone = mh.margin_profile(W, X, z, norms=[2, math.inf])
            torch.testing.assert_close(together.shares[record, k], alone.shares)
            assert together.best[record][k] == alone.best


def test_a_linear_model_of_two_and_of_more_classes() -> None:
    g = generator(1)
    features = torch.randn(2, 5, 8, generator=g, dtype=torch.float64)
    signs = torch.tensor([1, -1, 1, -1, 1]).expand(2, 5)
    v = mh.svm(features, signs, 1.5).v
    profile = mh.margin_profile(v, features, labels=signs)
    assert profile.best == [mh.PNorm(1.5)] * 2 and len(profile.norms) == 5
    assert bool(profile.distinguishable.all())
    classes = torch.tensor([0, 1, 2, 0, 1]).expand(2, 5)
    W = mh.multiclass_svm(features, classes, mh.Schatten(1)).W
    profile = mh.margin_profile(torch.stack([W, -W]), features, labels=classes)
    assert profile.best == [[mh.Schatten(1)] * 2, [None] * 2]
    assert bool((profile.shares[1] < 0).all())


def test_padding_and_a_lone_token_take_no_part() -> None:
    problem = random_problem(2)
    mask = torch.ones(2, 6, 8, dtype=torch.bool)
    mask[..., 5:] = False
    W = torch.randn(2, 10, 10, generator=generator(3), dtype=torch.float64)
    padded = mh.margin_profile(W, problem.X, problem.z, mask=mask, norms=[2])
    short = mh.margin_profile(W, problem.X[..., :5, :], problem.z, norms=[2])
    torch.testing.assert_close(padded.shares, short.shares)
    assert "best of 2" in repr(padded)


def test_no_share_where_there_is_no_direction_or_no_solution() -> None:
    problem = random_problem(1, n=3, T=4, d=4).trial(0)
    zero = mh.margin_profile(torch.zeros(4, 4), problem.X, problem.z, norms=[2])
    assert bool(zero.shares.isnan().all()) and zero.best is None
    X = torch.tensor([[[1.0], [-1.0], [0.0]]])  # a token between two others
    between = mh.margin_profile(torch.ones(1, 1), X, torch.ones(1, 1), torch.tensor([2]))
    assert bool(between.shares.isnan().all()) and not bool(between.distinguishable)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"z": None}, TypeError, "needs queries z"),
        ({"labels": torch.ones(3)}, TypeError, "does not go with labels"),
        ({"W": torch.zeros(3, 4)}, ValueError, r"W must have shape \(..., 4, 4\)"),
        ({"W": torch.full((4, 4), math.nan)}, ValueError, "W must be finite"),
        ({"tokens": torch.zeros(2, dtype=torch.long)}, ValueError, "tokens must have shape"),
        ({"tokens": torch.full((3,), 9)}, ValueError, "tokens must be from 0 to 3"),
        ({"norms": []}, ValueError, "norms must not be empty"),
        ({"norms": 2}, TypeError, "norms must be a list"),
        ({"norms": [0.5]}, ValueError, "norms must be a number from 1"),
    ],
)
def test_bad_input_is_named(change: dict, error: type[Exception], words: str) -> None:
    problem = random_problem(1, n=3, T=4, d=4).trial(0)
    arguments = {"W": torch.eye(4), "X": problem.X, "z": problem.z, **change}
    with pytest.raises(error, match=words):
        mh.margin_profile(**arguments)  # pyright: ignore[reportArgumentType]
