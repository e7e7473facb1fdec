"""Scores that are given in place of y_i v' x_it: whatever sees the problem sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import mirrorhead as mh
from mirrorhead.synthetic import random_problem, random_weights

# The head prefers token 0, the given scores token 1.
X = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
PLAIN = mh.AttentionProblem(X, X[:, 0], [1.0], [1.0, 1.0])
GIVEN = mh.AttentionProblem(X, X[:, 0], [1.0], [1.0, 1.0], scores=torch.tensor([[0.0, 1.0]]))
SECOND = torch.tensor([1])


def both_signs(
    trials: int = 2, n: int = 6, T: int = 8, d: int = 10
) -> tuple[mh.AttentionProblem, mh.AttentionProblem]:
    """A problem with the negated scores of a head, and the same problem by its labels."""
    problem = random_problem(trials, n, T, d)
    flipped = mh.AttentionProblem(problem.X, problem.z, -problem.y, problem.v)
    given = mh.AttentionProblem(
        problem.X, problem.z, problem.y, problem.v, scores=-problem.scores()
    )
    return given, flipped


def test_descent_and_token_functions_select_the_same_token() -> None:
    path = mh.descend(GIVEN, 2, 1000)
    assert path.tokens.tolist() == [1]
    assert mh.token_scores(GIVEN).tolist() == [[0.0, 1.0]]
    assert mh.globally_optimal_tokens(GIVEN).tolist() == [1]
    assert mh.locally_optimal(GIVEN, SECOND, 2)
    assert not mh.locally_optimal(GIVEN, torch.tensor([0]), 2)
    assert mh.locally_optimal_sets(GIVEN, 2).tolist() == [[1]]
    assert mh.diagnose(path).optimality
    assert mh.globally_optimal_tokens(PLAIN).tolist() == [0]


def test_a_trial_keeps_its_scores() -> None:
    given, _ = both_signs(3)
    for index in (1, slice(1, 3)):
        assert torch.equal(given.trial(index).scores(), given.scores()[index])
    assert "given scores" in repr(given.trial(0))
    assert "given scores" not in repr(PLAIN)


def test_with_scores_is_the_constructor() -> None:
    given, _ = both_signs()
    problem = random_problem(2)
    again = problem.with_scores(-problem.scores())
    assert torch.equal(again.scores(), given.scores())
    assert torch.equal(again.with_scores(problem.scores()).scores(), problem.scores())
    assert problem.given_scores is None


def test_the_model_is_that_of_the_scores() -> None:
    given, flipped = both_signs()
    W = random_weights(given, 3.0)
    assert torch.equal(given.loss(W), flipped.loss(W))
    assert torch.equal(given.gradient(W).mantissa, flipped.gradient(W).mantissa)
    for p in (1.5, 2.0):
        assert torch.equal(mh.largest_step(given, W, p), mh.largest_step(flipped, W, p))


@pytest.mark.parametrize("rule", ["constant", "normalized", "accelerated"])
def test_paths_are_those_of_the_scores(rule: str) -> None:
    given, flipped = both_signs()
    paths = [mh.descend(problem, 1.5, 50, 0.01, rule=rule) for problem in (given, flipped)]
    assert torch.equal(paths[0].W, paths[1].W)
    found, expected = (mh.diagnose(path) for path in paths)
    assert found.optimality.reasons == expected.optimality.reasons
    assert found.in_cone is not None and expected.in_cone is not None
    assert torch.equal(found.in_cone, expected.in_cone)


def test_the_cones_are_those_of_the_scores() -> None:
    given, flipped = both_signs()
    tokens = mh.globally_optimal_tokens(flipped)
    found, expected = (mh.cone_constants(problem, tokens, 1.5) for problem in (given, flipped))
    for name in ("score_gap", "widest_score_gap", "score_range"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=0, atol=1e-14, equal_nan=True
        )


def test_regularization_paths_are_those_of_the_scores() -> None:
    given, flipped = both_signs(2, n=2, T=3, d=4)
    found, expected = (mh.regularization_path(x, 2, [5.0], starts=2) for x in (given, flipped))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.log_excess, expected.log_excess)
    single = mh.regularization_path(GIVEN, geometry=2, radii=[1000.0])
    assert single.tokens.tolist() == [[1]]


def test_a_checkpoint_belongs_to_the_scores(tmp_path: Path) -> None:
    file = tmp_path / "run.npz"
    plain = random_problem(2)
    given = plain.with_scores(-plain.scores())
    mh.descend(plain, 1.5, 100, checkpoint=file)
    with pytest.raises(ValueError, match=r"run\.npz belongs to another run"):
        mh.descend(given, 1.5, 100, checkpoint=file)
    own = tmp_path / "own.npz"
    short = mh.descend(given, 1.5, 50, checkpoint=own, record=[10])
    long = mh.descend(given, 1.5, 100, checkpoint=own, record=[10, 100])
    assert torch.equal(long.W[0], short.W[0])
    with pytest.raises(ValueError, match="belongs to another run"):
        mh.descend(plain.with_scores(-2 * plain.scores()), 1.5, 100, checkpoint=own)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mh.descend(GIVEN, 2, 10, joint=True),
        lambda: mh.joint_regularization_path(GIVEN, 2, [1.0], [1.0]),
        lambda: mh.assumption_b(GIVEN, SECOND, 2),
        lambda: GIVEN.with_head(torch.ones(2)),
        lambda: GIVEN.gradients(torch.zeros(2, 2)),
    ],
)
def test_a_head_without_meaning_is_not_trained(call) -> None:
    with pytest.raises(ValueError, match="problem must have the scores of its head v, got"):
        call()


def test_scores_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scores must have shape \(1, 2\), got \(2,\)"):
        PLAIN.with_scores(torch.zeros(2))
    with pytest.raises(ValueError, match="scores must be finite, got 1 bad"):
        PLAIN.with_scores(torch.tensor([[0.0, torch.nan]]))
    for problem in (random_problem(2, heads=2), random_problem(2, classes=2)):
        with pytest.raises(ValueError, match="problem must have one head and labels"):
            problem.with_scores(torch.zeros(2, 6, 8))


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 7.0])
def test_scores_of_padding_may_be_anything(junk: float) -> None:
    short, _ = both_signs()
    mask = torch.tensor([True] * 8 + [False] * 2).expand(2, 6, 10)

    def longer(x: Tensor, *more: int) -> Tensor:
        return torch.cat([x, x.new_full((2, 6, 2, *more), junk)], 2)

    assert short.given_scores is not None
    padded = mh.AttentionProblem(
        longer(short.X, 10), short.z, short.y, short.v, mask=mask, scores=longer(short.scores())
    )
    W = random_weights(short, 1.0)
    torch.testing.assert_close(padded.gradient(W).value, short.gradient(W).value)
    tokens = mh.globally_optimal_tokens(short)
    assert torch.equal(mh.globally_optimal_tokens(padded), tokens)
    for name in ("score_gap", "score_range"):
        found, expected = (
            getattr(mh.cone_constants(x, tokens, 2, 1e-11), name) for x in (padded, short)
        )
        torch.testing.assert_close(found, expected, equal_nan=True)
