"""The accelerated rule: against a plain loop for one trial, and by its laws."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mirrorhead as mh
from mirrorhead.paths import _update_rules
from mirrorhead.paths._update_rules import Accelerated, State, grad_phi
from mirrorhead.synthetic import random_problem, random_weights


def run(problem: mh.AttentionProblem, p: float, steps: int) -> tuple[Accelerated, list[State]]:
    """All states of a run from zero."""
    norm = mh.PNorm(p)
    rule = Accelerated(norm, 0.1, (-2, -1), problem.reach(norm))
    states = [rule.start(torch.zeros(problem.weight_shape, dtype=torch.float64))]
    for _ in range(steps):
        states.append(rule.advance(states[-1], problem.gradient(rule.weights(states[-1]))))
    return rule, states


def slow_path(problem: mh.AttentionProblem, p: float, W: Tensor, steps: int) -> Tensor:
    """The docstring's formulas for one trial, with numbers for numbers."""
    q = p / (p - 1)

    def z_at(W: Tensor) -> Tensor:
        gradient = problem.gradient(W)
        assert gradient.mass is not None
        return -gradient.mantissa / gradient.mass

    def slope(u: Tensor) -> Tensor:
        norm = float(u.abs().pow(q).sum()) ** (1 / q)
        return norm ** (2 - q) * u.sign() * u.abs().pow(q - 1)

    floor = 0.1 / float(problem.reach(mh.PNorm(p))) ** 2
    z = x = z_at(W)
    s, B, at = floor, 0.0, {}
    for k in range(1, steps + 1):
        if k in (64, 128, 256):
            x, B = z, 0.0
        a = (s + math.sqrt(s * s + 4 * s * B)) / 2
        theta = a / (B + a)
        at[k] = W + a * slope((1 - theta) * x + theta * z)
        new_z = z_at(at[k])
        new_x = (1 - theta) * x + theta * new_z
        overshoot = float((slope(new_x) * (new_z - z)).sum())
        fits = overshoot <= 1e-13 * float((slope(new_x) * new_x).sum())
        if fits or s <= floor:
            W, x, z, B = at[k], new_x, new_z, B + a
        s = 1.05 * s if fits else max(s / 2, floor)
    half = max(j for j in (2**i for i in range(10)) if 2 * j <= steps)
    return at[steps] - at[half]


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.1, 1.5, 2.0, 3.0, 5.0])
def test_the_rule_equals_a_plain_loop(p: float) -> None:
    problem = random_problem(4, n=3, T=4, d=3)
    path = mh.descend(problem, p, 150, rule="accelerated", record=[50, 150])
    for k in range(4):
        for record, steps in enumerate((50, 150)):
            one = problem.trial(k)
            expected = slow_path(one, p, torch.zeros_like(path.W[0, 0]), steps)
            scale = float(expected.abs().max())
            torch.testing.assert_close(path.W[record, k], expected, rtol=0, atol=1e-7 * scale)


@given(seed=st.integers(0, 1000), loss=st.sampled_from(["logistic", "exponential", "linear"]))
def test_mass_is_the_slope_of_the_other_tokens(seed: int, loss: str) -> None:
    problem = random_problem(2, n=3, T=4, d=3, first=seed, loss=loss)
    W = random_weights(problem, 2.0, seed)
    h = problem.logits(W).requires_grad_()
    margin = (h.softmax(-1) * problem.scores()).sum(-1)
    problem.loss_function.value(margin).mean(-1).sum().backward()
    assert h.grad is not None
    others = h.grad.abs().scatter(-1, h.argmax(-1, keepdim=True), 0.0).sum((-2, -1))
    gradient = problem.gradient(W)
    assert gradient.mass is not None
    torch.testing.assert_close(gradient.mass * gradient.log_scale.exp(), others)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.1, 2.0, 5.0])
def test_the_average_is_a_certificate_of_the_margin(p: float) -> None:
    """x is a mean of rows, so ||x||_q is at least the largest margin, 1/||W_mm||_p."""
    problem = random_problem(6)
    rule, states = run(problem, p, 900)
    tokens = problem.select(rule.weights(states[-1]))
    solution = mh.attention_svm(problem.X, problem.z, tokens, p, tol=1e-12)
    bound = mh.PNorm(p).dual_norm(states[-1]["x"], (-2, -1)) * solution.norm
    assert bool((bound > 1 - 1e-9).all())
    assert float(bound.median()) < 1 + 1e-4


@pytest.mark.slow
def test_a_step_is_taken_or_taken_back() -> None:
    problem = random_problem(20)
    rule, states = run(problem, 5.0, 300)
    floor = (0.1 / problem.reach(mh.PNorm(5)) ** 2)[:, None, None]
    kinds = {"longer": 0, "back": 0, "forced": 0}
    for count, (old, new) in enumerate(pairwise(states), 1):
        longer = new["step"] > old["step"]
        back = (new["step"] < old["step"]) & ~longer
        forced = ~longer & ~back
        kinds = {
            name: kinds[name] + int(kind.sum())
            for name, kind in zip(kinds, (longer, back, forced), strict=True)
        }
        assert bool((old["step"][forced] == floor[forced]).all())
        assert bool((new["step"] >= floor).all())
        trial = rule.weights(old)
        assert torch.equal(new["W"], old["W"].where(back, trial))
        assert torch.equal(new["z"].where(back, 0), old["z"].where(back, 0))
        if count in (64, 128, 256):
            assert torch.equal(new["x"], new["z"])
            assert not new["sum"].any()
        else:
            assert torch.equal(new["x"].where(back, 0), old["x"].where(back, 0))
            assert torch.equal(new["sum"], old["sum"] + old["a"].where(~back, 0))
    assert min(kinds.values()) > 50, kinds


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.1, 2.0, 5.0])
def test_units_do_not_matter(p: float) -> None:
    """Tokens 4 times as long, with the same scores: W is a quarter, to the last bit."""
    problem = random_problem(4)
    scaled = mh.AttentionProblem(4 * problem.X, problem.z, problem.y, problem.v / 4)
    path, other = (mh.descend(x, p, 200, rule="accelerated") for x in (problem, scaled))
    assert torch.equal(path.W, 4 * other.W)


def test_trials_do_not_touch_each_other() -> None:
    together = mh.descend(random_problem(5), 3, 60, rule="accelerated")
    alone = mh.descend(random_problem(1, first=3).trial(0), 3, 60, rule="accelerated")
    torch.testing.assert_close(together.W[:, 3], alone.W, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_padding_does_not_matter() -> None:
    problem = random_problem(2)
    X = torch.cat([problem.X, 100 * torch.ones_like(problem.X[..., :3, :])], -2)
    mask = torch.arange(11).expand(2, 6, 11) < 8
    padded = mh.AttentionProblem(X, problem.z, problem.y, problem.v, mask=mask)
    path, other = (mh.descend(x, 3, 60, rule="accelerated") for x in (problem, padded))
    torch.testing.assert_close(path.W, other.W, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_nothing_to_learn_changes_nothing() -> None:
    X = torch.randn(2, 3, 4, dtype=torch.float64)
    X[..., 0] = 1.0  # all tokens score the same
    W = torch.randn(4, 4, dtype=torch.float64)
    for tokens in (X, X[:, :1], X[:, :1].expand(2, 3, 4)):
        problem = mh.AttentionProblem(tokens, X[:, 0], [1.0, -1.0], [1.0, 0.0, 0.0, 0.0])
        path = mh.descend(problem, 3, 100, rule="accelerated", init=W)
        assert torch.equal(path.W, W.expand_as(path.W))


@pytest.mark.slow
def test_a_large_start_is_forgotten_only_when_it_is_small() -> None:
    problem = random_problem(10)
    W = random_weights(problem, 5.0)
    path = mh.descend(problem, 2, 2000, rule="accelerated", init=W, record=[0, 2, 2000])
    assert torch.equal(path.W[0], W)
    assert float((path.W[1] - W).norm()) < 0.2 * float(W.norm())
    solution = mh.attention_svm(problem.X, problem.z, path.tokens, 2.0, tol=1e-12)
    assert float(path.divergence_to(solution)[-1].median()) < 1e-8


@pytest.mark.slow
@given(p=st.sampled_from([1.1, 2.0, 5.0]), seed=st.integers(0, 1000))
def test_reach_bounds_what_weights_can_do(p: float, seed: int) -> None:
    problem = random_problem(3, n=2, T=4, d=3, first=seed)
    W = random_weights(problem, 1.0, seed)
    logits = problem.logits(W)
    moved = (logits - logits.mean(-1, keepdim=True)).abs().amax((-2, -1))
    bound = problem.reach(mh.PNorm(p)) * mh.PNorm(p).norm(W, (-2, -1))
    assert bool((moved <= bound * (1 + 1e-12)).all())
    one = mh.AttentionProblem(problem.X[:, :1, :1], problem.z[:, :1], problem.y[:, :1], problem.v)
    assert not one.reach(mh.PNorm(2)).any()
    assert grad_phi(torch.zeros(3, 3), mh.PNorm(5), (-1,))[0].eq(0).all()
    u = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert torch.equal(grad_phi(u, mh.PNorm(2), (-1,))[0], u)
    squared = mh.PNorm(5).dual_norm(u) ** 2  # <grad phi(u), u> = ||u||_q^2
    torch.testing.assert_close(grad_phi(u, mh.PNorm(5), (-1,))[0] @ u, squared)


@pytest.mark.slow
def test_each_head_goes_to_its_own_solution() -> None:
    problem = random_problem(4, heads=2)
    path = mh.descend(problem, 2, 1000, rule="accelerated", record=[1000])
    X, z = (x.unsqueeze(1).expand(4, 2, *x.shape[1:]) for x in (problem.X, problem.z))
    solution = mh.attention_svm(X, z, path.tokens, 2.0, tol=1e-12)
    assert float(path.divergence_to(solution).median()) < 1e-8


def test_it_trains_weights_alone() -> None:
    problem = random_problem(2)
    factors = (torch.ones(2, 10, 3), torch.ones(2, 10, 3))
    for options in ({"joint": True}, {"init": factors}):
        with pytest.raises(ValueError, match="trains W alone"):
            mh.descend(problem, 2, 5, rule="accelerated", **options)  # type: ignore[arg-type]


def test_the_step_cannot_run_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one row to separate no step is too long: it stops at its ceiling."""
    monkeypatch.setattr(_update_rules, "GROWTH", 2.0)
    X = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    problem = mh.AttentionProblem(X, X[:, 0], [1.0], [1.0, 0.0])
    rule, states = run(problem, 1.5, 400)
    ceiling = _update_rules.LONGEST * 0.1 / problem.reach(mh.PNorm(1.5)) ** 2
    torch.testing.assert_close(states[-1]["step"].squeeze(), ceiling)
    assert bool(rule.recorded(states[-1]).isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.1, 1.5, 3.0])
def test_eight_digits_in_a_few_thousand_steps(p: float) -> None:
    problem = random_problem(9)
    path = mh.descend(problem, p, 5000 if p == 1.1 else 3000, rule="accelerated")
    solution = mh.attention_svm(problem.X, problem.z, path.tokens, p, tol=1e-12)
    assert solution.status == ["optimal"] * 9
    assert float(path.divergence_to(solution)[-1].median()) < 1e-8


@pytest.mark.slow
def test_every_path_arrives_at_p_5() -> None:
    problem = random_problem(8)
    path = mh.descend(problem, 5, 10_000, rule="accelerated", record=[10_000])
    solution = mh.attention_svm(problem.X, problem.z, path.tokens, 5, tol=1e-12)
    assert solution.status == ["optimal"] * 8
    assert float(path.divergence_to(solution)[-1].max()) < 1e-6
