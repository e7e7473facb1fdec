"""Queries of another width than the tokens: W is (d, c), everywhere.

A query with zeros appended poses the same problem with more columns of W, which stay zero. A token
with zeros appended does so with more rows.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import mirrorhead as mh
from mirrorhead.synthetic import random_problem, random_weights

# Small samples seldom distinguish norms.
pytestmark = pytest.mark.filterwarnings("ignore:.*do not distinguish")

d, c = 6, 4  # the narrower of the two is c


def narrow(wide_tokens: bool) -> tuple[mh.AttentionProblem, mh.AttentionProblem]:
    """A problem with W of (6, 4), or of (4, 6), and the square one with zeros appended."""
    whole = random_problem(2, n=3, T=4, d=d)
    X, z, v = whole.X, whole.z, whole.v
    if wide_tokens:
        z = z[..., :c]
    else:
        X, v = X[..., :c], v[..., :c]
    square = [pad(x, (0, d - x.shape[-1])) for x in (X, z, v)]
    return (
        mh.AttentionProblem(X, z, whole.y, v),
        mh.AttentionProblem(square[0], square[1], whole.y, square[2]),
    )


def cut(W: Tensor, problem: mh.AttentionProblem) -> Tensor:
    rows, columns = problem.weight_shape[-2:]
    assert not W[..., rows:, :].any()
    assert not W[..., columns:].any()
    return W[..., :rows, :columns]


pairs = pytest.mark.parametrize("wide_tokens", [True, False])


@pairs
def test_the_model_is_that_of_the_padded_problem(wide_tokens: bool) -> None:
    problem, square = narrow(wide_tokens)
    assert problem.weight_shape == ((2, d, c) if wide_tokens else (2, c, d))
    W = random_weights(problem, 3.0)
    assert W.shape == problem.weight_shape
    wide = pad(W, (0, d - W.shape[-1], 0, d - W.shape[-2]))
    torch.testing.assert_close(problem.loss(W), square.loss(wide))
    torch.testing.assert_close(problem.gradient(W).value, cut(square.gradient(wide).value, problem))
    torch.testing.assert_close(problem.reach(mh.PNorm(3)), square.reach(mh.PNorm(3)))
    torch.testing.assert_close(mh.largest_step(problem, W, 2), mh.largest_step(square, wide, 2))


@pairs
@pytest.mark.parametrize("rule", ["normalized", "constant", "accelerated"])
def test_descent_is_that_of_the_padded_problem(rule: str, wide_tokens: bool) -> None:
    problem, square = narrow(wide_tokens)
    path, wide = (mh.descend(x, 1.5, 60, 0.01, rule=rule) for x in (problem, square))
    torch.testing.assert_close(path.W, cut(wide.W, problem), rtol=1e-7, atol=1e-10)
    found, expected = mh.diagnose(path), mh.diagnose(wide)
    torch.testing.assert_close(found.divergence, expected.divergence, rtol=1e-5, atol=1e-7)
    assert found.optimality.reasons == expected.optimality.reasons


@pairs
def test_factors_have_the_widths_of_tokens_and_queries(wide_tokens: bool) -> None:
    problem, square = narrow(wide_tokens)
    rows, columns = problem.weight_shape[-2:]
    g = torch.Generator().manual_seed(0)
    K, Q = (torch.randn(2, size, 3, generator=g).double() for size in (rows, columns))
    path = mh.descend(problem, 2, 20, init=(K, Q))
    padded = [pad(x, (0, 0, 0, d - x.shape[-2])) for x in (K, Q)]
    wide = mh.descend(square, 2, 20, init=padded)
    torch.testing.assert_close(path.W, cut(wide.W, problem))
    for wrong, name in (((Q, Q), r"init\[0\]"), ((K, K), r"init\[1\]")):
        with pytest.raises(ValueError, match=name + r" must have shape \(2, [46], m\)"):
            mh.descend(problem, 2, 20, init=wrong)


@pytest.mark.slow
@pairs
def test_regularization_paths_are_those_of_the_padded_problem(wide_tokens: bool) -> None:
    problem, square = narrow(wide_tokens)
    path, wide = (mh.regularization_path(x, 2, [1.0, 20.0]) for x in (problem, square))
    torch.testing.assert_close(path.log_excess, wide.log_excess, rtol=1e-3, atol=1e-3)
    assert path.W.shape == (2, *problem.weight_shape)
    joint = mh.joint_regularization_path(problem, 2, [1.0], [1.0], starts=2)
    assert joint.W.shape == (1, *problem.weight_shape)


@pairs
def test_token_functions_are_those_of_the_padded_problem(wide_tokens: bool) -> None:
    problem, square = narrow(wide_tokens)
    tokens = mh.globally_optimal_tokens(problem)
    cones, wide = (mh.cone_constants(x, tokens, 1.5, 1e-11) for x in (problem, square))
    for name in ("delta", "A", "score_gap"):
        torch.testing.assert_close(
            getattr(cones, name), getattr(wide, name), rtol=1e-4, atol=1e-6, equal_nan=True
        )
    # The bound of the norms, ||W||_p <= (number of entries)^(1/p - 1/2) ||W||_2, twice.
    torch.testing.assert_close(cones.mu_0, wide.mu_0 * (d / c) ** (2 / 1.5 - 1), rtol=1e-3, atol=0)
    assert bool(cones.contains(5 * cones.solution.W, radius=0).all())


@pairs
def test_choosing_a_norm_is_that_of_the_padded_problem(wide_tokens: bool) -> None:
    g = torch.Generator().manual_seed(1)
    X, z = torch.randn(12, 4, d, generator=g), torch.randn(12, d, generator=g)
    X, z = (X, z[..., :c]) if wide_tokens else (X[..., :c], z)
    tokens = (X @ torch.randn(X.shape[-1], z.shape[-1], generator=g) @ z.unsqueeze(-1)).argmax(-2)
    wide_X, wide_z = (pad(x, (0, d - x.shape[-1])) for x in (X, z))
    found = mh.choose_geometry(X, z, tokens.squeeze(-1), (1.5, 2))
    assert torch.equal(
        found.correct, mh.choose_geometry(wide_X, wide_z, tokens.squeeze(-1), (1.5, 2)).correct
    )


@pytest.mark.parametrize("z", [torch.ones(3, 5), torch.ones(4, 0), torch.ones(4), torch.ones(())])
def test_the_same_queries_are_refused_everywhere(z: Tensor) -> None:
    X, tokens = torch.randn(4, 5, 6), torch.zeros(4, dtype=torch.long)
    calls = (
        lambda: mh.attention_svm(X, z, tokens),
        lambda: mh.AttentionProblem(X, z, torch.ones(4), torch.ones(6)),
        lambda: mh.choose_geometry(X, z, tokens),
    )
    messages = []
    for call in calls:
        with pytest.raises(ValueError, match=r"z must have shape \(4, \d\)") as caught:
            call()
        messages.append(str(caught.value))
    assert len(set(messages)) == 1
