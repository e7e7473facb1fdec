"""What the margin problems accept, and what they say to the rest."""

import dataclasses
import math
from typing import Any, cast

import pytest
import torch

import mirrorhead as mh
from margin_cases import random_problem

X, Z, TOKENS = random_problem(4, 5, 6)
BAD = [
    (
        lambda: mh.attention_svm(X[0, 0], Z, TOKENS),
        ValueError,
        r"X must be \(\.\.\., n, T, d\) and",
    ),
    (lambda: mh.attention_svm(X, Z[:3], TOKENS), ValueError, r"z must have shape .*\(3, 6\)"),
    (
        lambda: mh.attention_svm(X, Z[0], TOKENS),
        ValueError,
        r"z must have shape \(4, 6\), got \(6,\)",
    ),
    (lambda: mh.attention_svm(X, Z, TOKENS[:2]), ValueError, r"tokens must have shape \(4,\)"),
    (lambda: mh.attention_svm(X, Z, TOKENS + 5), ValueError, "tokens must lie in 0..4"),
    (lambda: mh.attention_svm(X, Z, TOKENS - 9), ValueError, "tokens must lie in 0..4"),
    (lambda: mh.attention_svm(X, Z, TOKENS.double()), TypeError, "tokens must be integers"),
    (lambda: mh.attention_svm(X * math.nan, Z, TOKENS), ValueError, "X must be finite"),
    (lambda: mh.attention_svm(X, Z / 0, TOKENS), ValueError, "z must be finite"),
    (lambda: mh.attention_svm("X", Z, TOKENS), TypeError, "X must be a tensor or an array"),  # pyright: ignore[reportArgumentType]
    (lambda: mh.attention_svm(X / 0, Z, TOKENS), ValueError, "X must be finite, got 120 bad"),
    (
        lambda: mh.attention_svm(X, Z, TOKENS, 0.5),
        ValueError,
        "geometry must be a number from 1 to inf",
    ),
    (lambda: mh.attention_svm(X, Z, TOKENS, math.nan), ValueError, "from 1 to inf, got nan"),
    (lambda: mh.attention_svm(X, Z, TOKENS, "2"), TypeError, "geometry must be a number"),  # pyright: ignore[reportArgumentType]
    (lambda: mh.attention_svm(X, Z, TOKENS, True), TypeError, "geometry must be a number"),
    (lambda: mh.svm(Z, torch.ones(4), True), TypeError, "geometry must be a number"),
    (lambda: mh.attention_svm(X, Z, TOKENS, 2, tol=True), ValueError, "tol must be a number"),
    (lambda: mh.attention_svm(X, Z, TOKENS, start=X), TypeError, "start must be a MarginSolution"),  # pyright: ignore[reportArgumentType]
    (lambda: mh.attention_svm(1e-170 * X, 1e-170 * Z, TOKENS), ValueError, "16 do not. Scale the"),
    (lambda: mh.attention_svm(1e170 * X, 1e170 * Z, TOKENS), ValueError, "norms from 1e-300 to"),
    (lambda: mh.svm(1e-310 * Z, torch.ones(4)), ValueError, "the rows of features must be 0 or"),
    (
        lambda: mh.attention_svm(X, Z, TOKENS).check(1e-170 * X, 1e-170 * Z, TOKENS),
        ValueError,
        "norms from 1e-300 to",
    ),
    (lambda: mh.attention_svm(X, Z, TOKENS, 2, tol=0.0), ValueError, "tol must be"),
    (lambda: mh.attention_svm(X, Z, TOKENS, 2, tol=1.0), ValueError, "tol must be"),
    (lambda: mh.attention_svm(X, Z, TOKENS, 2, tol=math.nan), ValueError, "tol must be"),
    (
        lambda: mh.attention_svm(X, Z, TOKENS, cast(Any, "nuclear")),
        TypeError,
        "geometry must be a .* or a Norm",
    ),
    (
        lambda: mh.attention_svm(X, Z, TOKENS, mh.KSupport(k=3)),
        ValueError,
        r"geometry must be a norm that has a solver, got KSupport.*Solvers know PNorm",
    ),
    (lambda: mh.svm(Z, torch.ones(4), mh.Schatten(1)), ValueError, "W must be a matrix for Scha"),
    (
        lambda: mh.attention_svm(X, Z, TOKENS, mh.Grouped(1.5, 2)),
        ValueError,
        r"W has no dimension 2 for Grouped",
    ),
    (
        lambda: mh.attention_svm(X, Z, TOKENS, mh.Grouped(1.5, 0, 4)),
        ValueError,
        "W has 6 entries in dimension 0, no multiple of the size 4",
    ),
    (
        lambda: mh.attention_svm(X, Z, TOKENS, mh.SoftThreshold(1.0)),  # pyright: ignore[reportArgumentType]
        TypeError,
        "geometry must be a norm; the limit of SoftThreshold",
    ),
    (lambda: mh.attention_svm(X[:0], Z[:0], TOKENS[:0]), ValueError, "X must be .* not empty"),
    (lambda: mh.attention_svm(X[:, :0], Z, TOKENS), ValueError, "X must be .* not empty"),
    (lambda: mh.attention_svm(X, Z, TOKENS, mask=torch.ones(4, 5)), TypeError, "mask must be bool"),
    (
        lambda: mh.attention_svm(X, Z, TOKENS, mask=torch.ones(4, 4, dtype=torch.bool)),
        ValueError,
        r"mask must be bool of shape \(4, 5\), got torch.bool \(4, 4\)",
    ),
    (
        lambda: mh.attention_svm(X, Z, TOKENS, mask=torch.zeros(4, 5, dtype=torch.bool)),
        ValueError,
        "marks as padding",
    ),
    (
        lambda: mh.svm(Z, torch.tensor([0, 1, 1, 0])),
        ValueError,
        r"labels must be \+1 or -1 everywhere, got 0; for labels 0 and 1 give 2 \* labels - 1",
    ),
    (
        lambda: mh.svm(Z, torch.tensor([True, False, True, True])),
        ValueError,
        "got False; for labels 0 and 1",
    ),
    (lambda: mh.svm(Z, torch.tensor([1, -1, 2, 1])), ValueError, "everywhere, got 2$"),
    (lambda: mh.svm(Z, torch.ones(3)), ValueError, r"labels must have shape \(4,\)"),
    (lambda: mh.svm(Z[:, :0], torch.ones(4)), ValueError, "at least one sample and one feature"),
    (lambda: mh.svm(Z[0], torch.ones(())), ValueError, "features must have at least 2"),
    (
        lambda: mh.attention_svm(X, Z, TOKENS, start=mh.attention_svm(X[:, :4], Z, TOKENS % 4)),
        ValueError,
        "start must solve a problem of the same shape",
    ),
    (
        lambda: mh.attention_svm(X, Z, TOKENS, start=mh.svm(Z, torch.ones(4))),
        ValueError,
        "start must solve a problem of the same shape",
    ),
    (lambda: mh.attention_svm(X, Z, TOKENS).check(X), TypeError, "check takes"),
    (lambda: mh.attention_svm(X, Z, TOKENS).check(Z, torch.ones(4)), ValueError, "the data fit"),
    (
        lambda: mh.attention_svm(X, Z, TOKENS).check(X[:2], Z[:2], TOKENS[:2]),
        ValueError,
        r"the data fit a dual of shape \(2, 5\), this solution has \(4, 5\)",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_arrays_and_lists_are_accepted():
    expected = mh.attention_svm(X, Z, TOKENS, 1.5)
    for convert in (torch.Tensor.numpy, torch.Tensor.tolist):
        data: Any = tuple(map(convert, (X, Z, TOKENS)))
        mask: Any = convert(torch.ones(4, 5, dtype=torch.bool))
        solution = mh.attention_svm(*data, geometry=1.5, mask=mask)
        assert torch.equal(solution.W, expected.W)
        assert solution.check(*data, mask=mask)
        classes: Any = (convert(Z), convert(TOKENS % 2 * 2 - 1))
        assert torch.equal(mh.svm(*classes).v, mh.svm(Z, TOKENS % 2 * 2 - 1).v)
    integers = (10 * X).long()
    assert torch.equal(
        mh.attention_svm(integers, Z, TOKENS).W, mh.attention_svm(integers.double(), Z, TOKENS).W
    )


def test_an_empty_batch_gives_an_empty_solution():
    solution = mh.attention_svm(X.expand(0, -1, -1, -1), Z.expand(0, -1, -1), TOKENS.expand(0, -1))
    assert solution.W.shape == (0, 6, 6)
    assert solution.status == []
    assert "empty" in repr(solution)


def test_one_token_asks_for_nothing():
    solution = mh.attention_svm(X[:, :1], Z, torch.zeros(4, dtype=torch.long), 1.5)
    assert solution.status == "optimal"
    assert torch.equal(solution.W, torch.zeros(6, 6, dtype=torch.float64))
    assert (solution.norm, solution.gap) == (0, 0)
    assert not solution.support.any()
    assert solution.dual.shape == (4, 1)
    assert solution.check(X[:, :1], Z, torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize(
    "p", [1, 1.5, 2, 3, math.inf, mh.Schatten(1), mh.Schatten(3), mh.Grouped(1.5, -1)]
)
def test_a_mask_does_not_give_a_lone_token_a_constraint(p):
    data = X[:, :1], Z, torch.zeros(4, dtype=torch.long)
    every = torch.ones(4, 1, dtype=torch.bool)
    # With T > 1 the mask may leave a sample its selected token only: one of them, or all.
    alone = torch.zeros(4, 5, dtype=torch.bool).scatter(1, TOKENS.unsqueeze(-1), True)
    some = alone.clone()
    some[2:] = True
    for given, mask in ((data, every), ((X, Z, TOKENS), alone)):
        solution = mh.attention_svm(*given, p, mask=mask)
        assert (solution.status, solution.norm, solution.gap) == ("optimal", 0, 0)
        assert not solution.W.any()
        assert solution.check(*given, mask=mask)
    solution = mh.attention_svm(X, Z, TOKENS, p, mask=some)
    without = mh.attention_svm(X[2:], Z[2:], TOKENS[2:], p)
    assert solution.check(X, Z, TOKENS, mask=some)
    assert solution.norm.item() == pytest.approx(without.norm.item(), rel=2e-9)


def test_without_constraints_only_zero_is_optimal():
    data = X[:, :1], Z, torch.zeros(4, dtype=torch.long)
    solution = mh.attention_svm(*data)
    for value in (7.0, 1e-300):
        W = torch.full((6, 6), value, dtype=torch.float64)
        wrong = dataclasses.replace(solution, W=W, norm=mh.PNorm(2).norm(W))
        assert not wrong.check(*data).supported


@pytest.mark.parametrize("scale", [1e-140, 1e-90, 1e140])
@pytest.mark.parametrize("p", [1, 1.05, 2, 20, math.inf])
def test_any_scale_that_float64_holds(scale, p):
    data = scale * X, scale * Z, TOKENS
    solution = mh.attention_svm(*data, p)
    assert solution.status == "optimal"
    assert solution.check(*data)
    # Multipliers that prove nothing are not taken for a Farkas certificate on this scale either.
    lie = dataclasses.replace(
        solution,
        codes=torch.ones_like(solution.codes),
        W=torch.full_like(solution.W, math.nan),
        norm=solution.norm.new_tensor(math.inf),
        gap=solution.gap.new_tensor(math.inf),
        support=torch.zeros_like(solution.support),
    )
    assert not lie.check(*data).supported


@pytest.mark.parametrize("p", [1, 1.3, 2, 4, math.inf])
def test_padding_changes_nothing(p):
    lengths = torch.tensor([5, 3, 1, 4])
    tokens = TOKENS % lengths
    mask = torch.arange(5) < lengths.unsqueeze(-1)
    junk = torch.where(mask.unsqueeze(-1), X, 1e3)
    solution = mh.attention_svm(junk, Z, tokens, p, tol=1e-11, mask=mask)
    assert solution.status == "optimal"
    assert solution.check(junk, Z, tokens, mask=mask)
    assert not solution.support[~mask].any()
    assert (solution.dual[~mask] == 0).all()
    # The same constraints without padding: every sample cut to its length, one by one.
    from mirrorhead.margin._constraints import attention_constraints

    rows = []
    for i, length in enumerate(lengths.tolist()):
        cut = attention_constraints(X[i : i + 1, :length], Z[i : i + 1], tokens[i : i + 1]).A
        rows.append(cut.take_rows(torch.arange(length - 1).unsqueeze(0))[0])
    plain = mh.svm(torch.cat(rows), torch.ones(int((lengths - 1).sum())), p, tol=1e-11)
    assert plain.norm.item() == pytest.approx(solution.norm.item(), rel=1e-10)


def test_padding_in_a_batch_with_an_empty_problem():
    data = random_problem(3, 4, 5, 6, seed=1)
    mask = torch.ones(3, 4, 5, dtype=torch.bool)
    mask[1] = torch.zeros(4, 5, dtype=torch.bool).scatter(1, data[2][1].unsqueeze(-1), True)
    solution = mh.attention_svm(*data, 1.5, mask=mask)
    assert solution.status == ["optimal"] * 3
    assert (solution.norm[1], solution.iterations[1]) == (0, 0)
    assert solution.check(*data, mask=mask)


def test_leading_dimensions():
    data = random_problem(2, 3, 4, 5, 6, seed=2)
    solution = mh.attention_svm(*data, 1.5)
    assert solution.W.shape == (2, 3, 6, 6)
    assert solution.dual.shape == solution.support.shape == (2, 3, 4, 5)
    assert solution.norm.shape == solution.gap.shape == solution.iterations.shape == (2, 3)
    assert solution.status == [["optimal"] * 3] * 2
    X, z, tokens = data
    one = mh.attention_svm(X[1, 2], z[1, 2], tokens[1, 2], 1.5)
    assert one.status == "optimal"
    assert one.norm.item() == pytest.approx(solution.norm[1, 2].item(), rel=1e-9)
    assert one.W.shape == (6, 6)


def test_a_batch_mixes_all_fates():
    X, z, tokens = random_problem(4, 4, 5, 6, seed=3)
    X[1, 0, (tokens[1, 0] + 1) % 5] = X[1, 0, tokens[1, 0]]
    X[2, 1], z[2, 1] = X[2, 0], z[2, 0]
    tokens[2, 1] = (tokens[2, 0] + 1) % 5
    solution = mh.attention_svm(X, z, tokens, 3)
    assert solution.status == ["optimal", "infeasible", "infeasible", "optimal"]
    check = solution.check(X, z, tokens)
    assert not check  # not all are certified optimal,
    assert check.optimal.tolist() == [True, False, False, True]
    assert check.supported.all()  # but the data support all four
    lie = dataclasses.replace(solution, norm=2 * solution.norm).check(X, z, tokens)
    assert not lie.optimal.any()
    assert lie.supported.tolist() == [False, True, True, False]
    assert "2 not supported" in repr(lie)
    assert repr(solution).startswith("MarginSolution(p=3, W 4x6x6, 2 optimal, 2 infeasible, gap")


def test_float32_is_promoted_and_gradients_are_left_alone():
    leaf = X.float().requires_grad_()
    solution = mh.attention_svm(leaf, Z.float(), TOKENS.int(), 1.5)
    assert solution.W.dtype == torch.float64
    assert not solution.W.requires_grad
    again = mh.attention_svm(X.float().double(), Z.float().double(), TOKENS, 1.5)
    torch.testing.assert_close(solution.W, again.W)


def test_queries_of_another_width():
    z = torch.randn(4, 3, dtype=torch.float64)
    for norm in (2, mh.Schatten(1), mh.Schatten(1.5), mh.Grouped(3, 1)):
        solution = mh.attention_svm(X, z, TOKENS, norm)
        assert solution.W.shape == (6, 3)
        assert solution.check(X, z, TOKENS)


@pytest.mark.parametrize("p", [1.2, 2, 4])
def test_warm_start_saves_steps_and_finds_the_same(p):
    data = random_problem(50, 6, 8, 10, seed=4)
    cold = mh.attention_svm(*data, p)
    near = mh.attention_svm(*data, 1 + 1.1 * (p - 1))
    warm = mh.attention_svm(*data, p, start=near)
    assert warm.check(*data)
    torch.testing.assert_close(warm.norm, cold.norm, rtol=1e-9, atol=0)
    assert warm.iterations.double().mean() < cold.iterations.double().mean()


def test_warm_start_from_other_tokens_and_from_nothing():
    X, z, tokens = random_problem(20, 6, 8, 10, seed=5)
    start = mh.attention_svm(X, z, tokens, 1.5)
    tokens[:, 0] = (tokens[:, 0] + 1) % 8
    assert mh.attention_svm(X, z, tokens, 1.5, start=start).optimal.all()
    X[:, 0, 0], tokens[:, 0] = X[:, 0, 1], 0
    failed = mh.attention_svm(X, z, tokens, 1.5)  # all infeasible: nothing to start from
    tokens[:, 0] = 2
    assert mh.attention_svm(X, z, tokens, 1.5, start=failed).optimal.all()


def test_repr_of_one_solution_and_of_a_check():
    solution = mh.attention_svm(X, Z, TOKENS, 1.5)
    text = repr(solution)
    assert text.startswith("MarginSolution(p=1.5, W 6x6, optimal, norm ")
    assert "iterations" in text
    assert repr(solution.check(X, Z, TOKENS)).startswith("Check(1 of 1 certified optimal, s")
    assert "(Schatten(1), W 6x6" in repr(mh.attention_svm(X, Z, TOKENS, mh.Schatten(1)))
