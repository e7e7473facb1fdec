"""The paper's lemmas: each claim on generated data, and what is wrong in print."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mirrorhead as mh
from mirrorhead import theory
from mirrorhead.synthetic import example_2, random_problem, random_weights
from mirrorhead.theory import MirrorStep, Sides

DIMS = (-2, -1)
exponents = st.floats(1.05, 6)
seeds = st.integers(0, 10_000)


def holds(sides: Sides, slack: float = 1e-9) -> bool:
    """left >= right, up to rounding."""
    size = sides.left.abs().maximum(sides.right.abs())
    return bool((sides.left - sides.right >= -slack * size - 1e-300).all())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- numbers and norms ------------------------------------------------------------------------


@pytest.mark.slow
@given(exponents, seeds, st.integers(1, 5))
def test_lemma_2(p: float, seed: int, d: int) -> None:
    W = normal(20, d, d, seed=seed) * normal(20, d, d, seed=seed + 1) ** 4
    above, below = theory.lemma_2(W, p)
    assert holds(above) and holds(below)
    flat = torch.ones(d, d, dtype=torch.float64)  # both ends are reached
    one = torch.zeros(d, d, dtype=torch.float64)
    one[0, 0] = 1
    for x in (flat, one):
        assert min(float(side.left - side.right) for side in theory.lemma_2(x, p)) < 1e-12


@given(exponents, seeds, st.floats(-8, 0.3))
def test_lemma_3(p: float, seed: int, log_distance: float) -> None:
    """Also for close points, and for equal signs in the order that the proof leaves out."""
    psi, W1 = mh.PNorm(p), normal(50, 3, 3, seed=seed)
    W2 = W1 + 10**log_distance * normal(50, 3, 3, seed=seed + 1)
    W1, W2 = (x / psi.norm(x, DIMS)[..., None, None] for x in (W1, W2))
    assert holds(theory.lemma_3(W1, W2, p, DIMS), 1e-6)
    assert holds(theory.lemma_3(W1.abs(), W2.abs(), p, DIMS), 1e-6)


@given(st.floats(0, 1e3), st.floats(0, 1), exponents)
def test_lemma_4(x: float, share: float, p: float) -> None:
    one, two = torch.tensor(x).double(), torch.tensor(x * share).double()
    assert holds(theory.lemma_4(one, two, p), 1e-12 * (1 + p))


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1), st.floats(0.05, 6))
def test_lemma_5(x: float, share: float, q: float) -> None:
    sides = theory.lemma_5(torch.tensor(x).double(), torch.tensor(x * share).double(), q)
    assert holds(sides, 1e-9)


def test_the_printed_proof_of_lemma_5_ends_with_the_opposite_inequality() -> None:
    left, right = theory.lemma_5(torch.tensor(2.0), torch.tensor(1.0), 2)
    assert (left, right) == (4, 3)  # the proof says x^q - y^q >= q x^(q-1) (x - y): 3 >= 4


@pytest.mark.slow
@given(exponents, seeds)
def test_lemma_15(p: float, seed: int) -> None:
    w, w1, w2 = normal(3, 4, 4, seed=seed)
    left, right = theory.lemma_15(mh.PNorm(p), w, w1, w2)
    torch.testing.assert_close(left, right)


# -- the loss and its gradient ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["logistic", "exponential", "linear"])
@given(seeds, st.floats(-2, 3))
def test_lemmas_6_and_8(loss: str, seed: int, log_scale: float) -> None:
    problem = random_problem(4, first=seed, loss=loss)
    W = 10**log_scale * normal(4, 10, 10, seed=seed)
    assert all(holds(side) for side in theory.lemma_6(problem, W))
    gradient = problem.gradient(W).value
    for p in (1.2, 2.0, 6.0, math.inf):
        assert (mh.PNorm(p).norm(gradient, DIMS) <= theory.gradient_bound(problem, p)).all()


def test_attention_sums_and_the_printed_definition_of_Q() -> None:
    problem, p = random_problem(3), 2
    tokens = mh.globally_optimal_tokens(problem)
    solution = mh.attention_svm(problem.X, problem.z, tokens, p)
    W = 0.3 * normal(3, 10, 10)
    S, Q = theory.attention_sums(problem, solution, tokens, W)
    chosen = problem.attention(W).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(S + Q + chosen, torch.ones_like(S))
    assert (Q != S).any()  # as printed they would be equal


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.75, 2.0, 3.0])
def test_lemmas_10_and_11_from_their_radii_on(p: float) -> None:
    problem = random_problem(4)
    cone = mh.cone_constants(problem, mh.globally_optimal_tokens(problem), p, tol=1e-13)
    best, psi = cone.solution.W, mh.PNorm(p)
    pi = 0.05
    for seed in range(3):
        V, W = (_inside(cone, seed + k) for k in (0, 100))
        for radius in (cone.R_delta, 10 * cone.R_delta):
            size = (radius / psi.norm(W, DIMS))[..., None, None]
            correlation, bound = theory.lemma_10(problem, cone, 1.001 * size * W, V)
            assert (bound > -math.inf).all() and (correlation >= bound).all()
        far = (cone.R_pi(pi) / psi.norm(W, DIMS))[..., None, None] * W
        assert holds(theory.lemma_11(problem, cone, far, pi))
    # Below the radius the bound says nothing, and no V of the cone has the norm ||W_mm||.
    assert (theory.lemma_10(problem, cone, 2 * best, best).right == -math.inf).all()
    assert (cone.R_delta > cone.solution.norm).all()


def _inside(cone: mh.ConeConstants, seed: int) -> Tensor:
    """W_mm moved in a random direction as far as the cone of radius mu_0 allows."""
    psi, best = mh.PNorm(cone.solution.p), cone.solution.W
    step = cone.solution.norm[..., None, None] * normal(*best.shape, seed=seed)
    size = torch.ones_like(cone.mu_0)
    for _ in range(60):
        W = best + size[..., None, None] * step
        size = size.where(psi.direction_divergence(best, W, DIMS) <= cone.mu_0, size / 2)
    return best + size[..., None, None] * step


# -- steps ------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.sampled_from([1.3, 1.75, 2.0, 3.0]), seeds, st.floats(-1, 1.5), st.floats(-3, 1))
def test_lemmas_1_and_12_hold_for_every_step(
    p: float, seed: int, log_scale: float, log_lr: float
) -> None:
    problem = random_problem(2, first=seed)
    W = random_weights(problem, 10**log_scale, seed)
    step = MirrorStep(problem, W, p, log_lr)
    left, right = theory.lemma_1(step, normal(2, 10, 10, seed=seed))
    torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)
    assert holds(Sides(theory.lemma_12(step).left + 1e-12 * step.norm, theory.lemma_12(step).right))


@pytest.mark.parametrize("p", [1.75, 2.0, 3.0])
def test_a_step_is_that_of_descend_and_its_differences_are_the_plain_ones(p: float) -> None:
    problem = random_problem(3)
    W = random_weights(problem, 0.5)
    step = MirrorStep(problem, W, p, math.log(0.2))
    path = mh.descend(problem, p, 1, 0.2, "constant", init=W)
    torch.testing.assert_close(step.after, path.W[-1])
    old, new = (mh.PNorm(p).norm(x, DIMS) for x in (W, step.after))
    torch.testing.assert_close(step.power_gain, new**p - old**p, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(step.gain, new ** (p - 1) - old ** (p - 1), rtol=1e-6, atol=1e-12)
    plain = 0.2 * (problem.loss(step.after) - problem.loss(W))
    torch.testing.assert_close(step.loss_change, plain, rtol=1e-6, atol=1e-14)


def test_loss_changes_are_right_where_attention_is_one_hot() -> None:
    """Against mpmath, at logits near 60: the losses agree in 25 digits."""
    from mpmath import mp, mpf

    problem = random_problem(1, n=2, T=3, d=4)
    tokens = mh.globally_optimal_tokens(problem)
    W = 60 * mh.attention_svm(problem.X, problem.z, tokens, 2).W
    step = MirrorStep(problem, W, 2.0, 55.0)

    def loss(W: Tensor) -> Any:
        total = mpf(0)
        for i in range(2):
            h = [mpf(float(x)) for x in problem.logits(W)[0, i]]
            weights = [mp.exp(x) for x in h]
            scores = [mpf(float(x)) for x in problem.scores()[0, i]]
            margin = sum(w * s for w, s in zip(weights, scores, strict=True)) / sum(weights)
            total += mp.log(1 + mp.exp(-margin)) / 2
        return total

    with mp.workdps(60):
        expected = float(mp.exp(mpf(55)) * (loss(step.after) - loss(W)))
    assert expected < 0
    assert float(step.loss_change) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("p", [1.75, 2.0, 3.0])
def test_lemmas_13_and_14_hold_for_steps_that_remark_1_allows(p: float) -> None:
    problem = random_problem(5)
    W = random_weights(problem, 0.3).abs() + 0.1  # p = 3 allows no step where weights are 0
    lr = 0.3 * mh.largest_step(problem, W, p)
    assert (lr > 0).all()
    for _ in range(5):
        step = MirrorStep(problem, W, p, lr.log())
        assert holds(theory.lemma_13(step), 1e-12) and holds(theory.lemma_14(step))
        W = step.after


def test_too_large_a_step_breaks_lemmas_13_and_14() -> None:
    problem = random_problem(20)
    step = MirrorStep(problem, random_weights(problem, 3.0), 2.0, math.log(3e4))
    assert not holds(theory.lemma_13(step)) and not holds(theory.lemma_14(step))


def test_the_printed_bound_29_on_a_step_does_not_follow_from_lemma_8() -> None:
    """||W+|| <= ||W|| + eta L is right at p = 2. Else it is about ||W||^(p-1) and the q-norm."""
    p, size = 1.5, 0.01  # small tokens, so that ||W|| is large while attention is soft
    X = size * torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    problem = mh.AttentionProblem(X, torch.tensor([[1.0, 0.0]]), [1.0], [1.0, 0.0])
    W = torch.tensor([[75.0, 0.0], [-75.0, 0.0]], dtype=torch.float64)
    step = MirrorStep(problem, W, p, 0.0)
    grown = mh.PNorm(p).norm(step.after, DIMS) - step.norm
    assert grown > 3 * theory.gradient_bound(problem, p)
    assert step.gain <= theory.gradient_bound(problem, 3.0)  # q = 3


@pytest.mark.parametrize("p", [1.75, 2.0, 3.0])
def test_lemmas_16_and_17_far_out_in_the_cone(p: float) -> None:
    """At the radius of Lemma 17, where the gradient is exp(-1e9), and steps are as large."""
    problem = random_problem(3)
    cone = mh.cone_constants(problem, mh.globally_optimal_tokens(problem), p, tol=1e-13)
    solution, mu = cone.solution, cone.mu_0
    W = _inside(cone, 1)
    W = first = W * (1.01 * cone.R_mu() / mh.PNorm(p).norm(W, DIMS))[..., None, None]
    gradient = problem.gradient(W)
    # A step that moves logits by about 0.1
    moved = 0.1 * mh.PNorm(p).norm(W, DIMS) ** (p - 2) * solution.norm
    log_lr = moved.log() - gradient.log_norm_of(mh.PNorm(p).q)
    drop = torch.zeros_like(mu)
    for _ in range(4):
        step = MirrorStep(problem, W, p, log_lr)
        assert holds(theory.lemma_16(step, solution, mu / 3), 1e-6)
        assert (step.gain > 0).all() and (step.loss_change < 0).all()
        drop, W = drop - step.loss_change, step.after
    assert holds(theory.lemma_17(solution, first, W, mu / 3, drop), 1e-6)
    assert cone.contains(W, mu=1.001 * mu).all()


# -- Theorem 5 --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.75, 2.0, 3.0])
@given(st.floats(0.3, 4), st.floats(0.3, 4), seeds)
def test_the_bounds_of_theorem_5_hold(p: float, r: float, R: float, seed: int) -> None:
    problem, tokens = example_2(), torch.tensor([0, 0])
    weights = mh.attention_svm(problem.X, problem.z, tokens, p)
    head = mh.svm(problem.X[:, 0], problem.y, p)
    r, R, gamma = 10**r, float(R * weights.norm), 0.2
    bounds = theory.joint_bounds(problem, weights, head, r, R, gamma, nu=1e-9)
    W, v = R * weights.W / weights.norm, r * head.v / head.norm
    log_q = (1 - problem.attention(W)[:, 0]).max().log()
    assert bounds.q_best_low - 1e-9 <= log_q <= bounds.q_best_high + 1e-9
    log_loss = problem.with_head(v).loss(W).log()
    assert log_loss <= bounds.loss_best_high + 1e-9
    # Any W of that norm whose margin is (1 - gamma) of the best one, or less.
    other = normal(2, 2, seed=seed)
    other = R * other / mh.PNorm(p).norm(other)
    logits = problem.logits(other)
    margin = (logits[:, :1] - logits[:, 1:]).min()
    if margin <= (1 - gamma) * R / weights.norm:
        log_q = (1 - problem.attention(other)[:, 0]).max().log()
        assert log_q >= bounds.q_other_low - 1e-9


def test_the_printed_lower_bound_on_the_loss_lacks_a_factor() -> None:
    """(1/2n max exp(-m)) and log 2: the second needs 1/n, for one bad sample of ten."""
    n, margins = 10, torch.tensor([-2.0] + [50.0] * 9)
    loss = torch.nn.functional.softplus(-margins).mean()
    printed = min(float((-margins).exp().max()) / (2 * n), math.log(2))
    assert loss < printed and loss >= min(printed, math.log(2) / n)


def test_the_printed_M_of_theorem_5_has_the_wrong_norm() -> None:
    """|<a, v>| <= ||a||_p ||v||_p fails at p = 3; Hoelder's inequality needs ||a||_q."""
    a = torch.ones(4)
    p = mh.PNorm(3)
    assert a @ a > p.norm(a) * p.norm(a) and a @ a <= p.dual_norm(a) * p.norm(a) * (1 + 1e-6)
