"""Optimal tokens and the constants of the cones, against the definitions written out."""

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

import mirrorhead as mh
from margin_cases import generator, random_problem
from mirrorhead import synthetic
from mirrorhead.margin._certificate import active_constraints
from mirrorhead.margin._constraints import attention_constraints


@dataclass
class Data:
    X: torch.Tensor
    z: torch.Tensor
    y: torch.Tensor
    v: torch.Tensor


@dataclass
class Padded(Data):
    mask: torch.Tensor


def problem(*shape: int, seed: int = 0) -> tuple[Data, torch.Tensor]:
    X, z, tokens = random_problem(*shape, seed=seed)
    g = generator(seed + 7)
    y = torch.randint(0, 2, shape[:-2], generator=g).double() * 2 - 1
    v = torch.randn(*shape[:-3], shape[-1], generator=g, dtype=torch.float64)
    return Data(X, z, y, v), tokens


def test_scores_and_global_tokens():
    data, _ = problem(3, 4, 5, 6)
    scores = mh.token_scores(data)
    for b, i, t in product(range(3), range(4), range(5)):
        expected = data.y[b, i] * (data.v[b] @ data.X[b, i, t])
        assert scores[b, i, t] == pytest.approx(expected.item())
    best = mh.globally_optimal_tokens(data)
    assert best.shape == (3, 4)
    assert torch.equal(scores.gather(-1, best.unsqueeze(-1)).squeeze(-1), scores.amax(-1))


@pytest.mark.parametrize("p", [1.5, 2, 3])
def test_globally_optimal_tokens_are_locally_optimal(p):
    data, _ = problem(20, 4, 5, 6, seed=1)
    verdict = mh.locally_optimal(data, mh.globally_optimal_tokens(data), p)
    assert verdict
    assert set(verdict.reasons) == {""}
    assert repr(verdict) == "LocalOptimality(20 of 20)"


@pytest.mark.parametrize("p", [1.5, 2, 3])
def test_local_optimality_is_the_definition(p):
    data, _ = problem(30, 4, 5, 6, seed=2)
    best_two = mh.token_scores(data).topk(2, dim=-1).indices
    tokens = best_two[..., 0].clone()
    tokens[:, :2] = best_two[:, :2, 1]  # some remain locally optimal, some do not
    verdict = mh.locally_optimal(data, tokens, p)
    scores = mh.token_scores(data)
    seen = set()
    for b in range(30):
        W = verdict.solution.W[b]
        logits = data.X[b] @ W @ data.z[b].unsqueeze(-1)
        margins = logits[torch.arange(4), tokens[b]] - logits.squeeze(-1)
        near = (margins - 1).abs() < 1e-4
        assert torch.equal(near, verdict.solution.support[b])
        chosen = scores[b].gather(-1, tokens[b].unsqueeze(-1))
        expected = bool((scores[b].where(near, -math.inf) < chosen).all())
        assert bool(verdict.optimal[b]) is expected
        assert (verdict.reasons[b] == "") is expected
        seen.add(expected)
    assert seen == {True, False}
    assert torch.equal(verdict.solution.support, mh.support_tokens(data, tokens, p))


def vertex(lift: float) -> Data:
    """The solution is W z = (1, 0); token 2 scores higher and has the value 1 + lift there."""
    X = torch.tensor([[[0.0, 0.0], [-1.0, 0.0], [-1.0 - lift, -1.0]]], dtype=torch.float64)
    z, v = X.new_tensor([[1.0, 0.0]]), X.new_tensor([1.0, -2.0])
    return Data(X, z, X.new_ones(1), v)


@pytest.mark.parametrize("tol", [1e-4, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("p", [1.1, 1.5, 2, 3, 10])
def test_a_degenerate_vertex_is_never_called_optimal(p, tol):
    """The constraint of token 2 holds with equality and has the multiplier 0."""
    verdict = mh.locally_optimal(vertex(0), torch.tensor([0]), p, tol)
    assert not verdict
    assert not verdict.optimal
    if verdict.undecided:
        assert not verdict.rivals.any()
        assert repr(verdict) == (
            "LocalOptimality(cannot tell, sample 0: perhaps on the margin: token 2 scores 1, "
            "the selected token 0 scores 0)"
        )
    else:
        assert verdict.rivals.nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize("p", [1.1, 1.5, 2, 3, 10])
def test_near_a_degenerate_vertex_no_answer_is_wrong(p):
    answers = {}
    for size in (0.5, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-12):
        above, below = (mh.locally_optimal(vertex(s), torch.tensor([0]), p) for s in (size, -size))
        assert not below  # token 2 binds, with a multiplier of the order of the size
        if size > 1e-4:  # sqrt(gap) is at most 3e-5
            assert above or above.undecided
        answers[size] = (bool(above), bool(below.undecided))
    assert answers[0.5 if p > 4 else 1e-2] == (True, False)


def test_undecided_problems_in_a_batch_and_in_the_search():
    parts = [vertex(lift) for lift in (0.0, 0.1)]
    batch = Data(*(torch.stack([getattr(d, k) for d in parts]) for k in ("X", "z", "y", "v")))
    verdict = mh.locally_optimal(batch, torch.zeros(2, 1, dtype=torch.long), 10)
    assert verdict.optimal.tolist() == [False, True]
    assert verdict.undecided.tolist() == [True, False]
    assert repr(verdict) == "LocalOptimality(1 of 2, 1 undecided)"
    with pytest.warns(UserWarning, match="1 of 3 token sets are left out"):
        found = mh.locally_optimal_sets(vertex(0), 10)
    assert [0] not in found.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.2, 2, 4])
def test_what_the_certificate_decides_is_so(p):
    """A rough certificate against the margins of a solution to 1e-13."""
    X, z, tokens = random_problem(20, 6, 8, 10, seed=10)
    problem = attention_constraints(X, z, tokens)
    exact = problem.A.apply(mh.attention_svm(X, z, tokens, p, 1e-13).W.reshape(20, -1)) - 1
    for tol in (1e-2, 1e-5, 1e-9):
        rough = mh.attention_svm(X, z, tokens, p, tol)
        w, lam = rough.W.reshape(20, -1), problem.collect(rough.dual)
        every = torch.ones_like(problem.live)
        active, inactive = (torch.zeros_like(every) for _ in range(2))
        for k in range(every.shape[1]):  # one row at a time, so that none hides another
            asked = torch.zeros_like(every)
            asked[:, k] = True
            found = active_constraints(problem, w, lam, rough.geometry, asked)
            active, inactive = active | found[0], inactive | found[1]
        assert (exact[inactive] > 0).all()
        assert (exact[active] < tol**0.5).all()
        assert not (active & inactive).any()
    assert (active | inactive).double().mean() > 0.98  # hardly a random one is left open at 1e-9


def test_reasons():
    data, tokens = problem(4, 5, 6, seed=3)
    data.X[0, (tokens[0] + 1) % 5] = data.X[0, tokens[0]]
    verdict = mh.locally_optimal(data, tokens, 2)
    assert not verdict
    assert verdict.reasons == ("infeasible: no W makes attention prefer these tokens",)
    worst = mh.token_scores(problem(4, 5, 6, seed=4)[0]).argmin(-1)
    verdict = mh.locally_optimal(problem(4, 5, 6, seed=4)[0], worst, 2)
    assert verdict.reasons[0].startswith("sample 0: support token ")
    assert verdict.reasons[0] in repr(verdict)


@pytest.mark.slow
def test_search_lists_exactly_the_locally_optimal_sets():
    data, _ = problem(3, 4, 5, seed=5)
    found = mh.locally_optimal_sets(data, 1.5).tolist()
    expected = [
        list(chosen)
        for chosen in product(range(4), repeat=3)
        if mh.locally_optimal(data, torch.tensor(chosen), 1.5)
    ]
    assert found == expected
    assert mh.globally_optimal_tokens(data).tolist() in found
    assert 1 < len(found) < 64


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_cone_constants_are_their_formulas(p):
    data, _ = problem(2, 4, 5, 6, seed=6)
    tokens = mh.globally_optimal_tokens(data)
    constants = mh.cone_constants(data, tokens, p)
    q = p / (p - 1)
    scores = mh.token_scores(data)
    for b in range(2):
        W, support = constants.solution.W[b], constants.solution.support[b]
        least, largest = math.inf, 0.0
        for i, t in product(range(4), range(5)):
            x, z, sel = data.X[b, i], data.z[b, i], int(tokens[b, i])
            if t != sel and not support[i, t]:
                least = min(least, float((x[sel] - x[t]) @ W @ z) - 1)
            largest = max(largest, float(torch.outer(x[t], z).abs().pow(q).sum() ** (1 / q)))
        delta = min(0.25, least / 2)
        A = max(1.0, float(W.abs().pow(p).sum() ** (1 / p)) * largest)
        if p >= 2:
            mu = (delta / (8 * A)) ** p / p
        else:
            mu = (delta * (p - 1) / (4 * A * 6 ** (2 / p - 1))) ** 2 / p
        assert constants.delta[b].item() == pytest.approx(delta, rel=1e-6)
        assert constants.A[b].item() == pytest.approx(A, rel=1e-9)
        assert constants.mu_0[b].item() == pytest.approx(mu, rel=1e-6)
        for i in range(4):
            chosen, others = scores[b, i, tokens[b, i]], scores[b, i][support[i]]
            if len(others):
                assert constants.score_gap[b, i] == pytest.approx(float(chosen - others.max()))
                widest = float(chosen - others.min())
                assert constants.widest_score_gap[b, i] == pytest.approx(widest)
            else:
                assert constants.score_gap[b, i].isnan()
        spread = (scores[b].amax(-1) - scores[b].amin(-1)).max()
        assert constants.score_range[b] == pytest.approx(float(spread))


def test_membership_of_the_cones():
    data, _ = problem(4, 5, 6, seed=7)
    constants = mh.cone_constants(data, mh.globally_optimal_tokens(data), 2)
    W = constants.solution.W
    assert constants.contains(5 * W, radius=0)
    assert not constants.contains(-W, radius=0)
    assert not constants.contains(W + 0.1 * W.norm() * torch.eye(6), radius=0)
    assert constants.contains(W + 0.1 * W.norm() * torch.eye(6), mu=0.5, radius=0)
    assert constants.contains(5 * W, radius=4 * float(W.norm()))
    assert not constants.contains(5 * W, radius=6 * float(W.norm()))
    # By default the norm counts too: it is that of Lemma 17.
    assert not constants.contains(5 * W)
    least = constants.R_mu() / constants.solution.norm
    assert constants.contains(1.001 * least * W) and not constants.contains(0.999 * least * W)
    assert constants.R_mu(0.1 * constants.mu_0) > constants.R_mu()
    assert constants.R_mu(lr=1e30) > 10 * constants.R_mu()


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_the_radii_are_where_the_proofs_of_lemmas_10_and_11_turn_positive(p):
    """By loops: (18) with 1/n in both terms, and the last display of Lemma 11."""
    problem = synthetic.random_problem(1)
    tokens = mh.globally_optimal_tokens(problem)
    cone = mh.cone_constants(problem, tokens, p, tol=1e-12)
    n, T, pi = 6, 8, 0.02
    delta, A = float(cone.delta[0]), float(cone.A[0])
    slopes, gaps, spread = [], [], []
    for i in range(n):
        scores = problem.scores()[0, i]
        slopes.append([1 / (1 + math.exp(float(s))) for s in scores])
        gaps += [float(scores.max() - s) for s in scores[cone.solution.support[0, i]]]
        spread.append(float(scores.max() - scores.min()))
    total, least = sum(max(row) for row in slopes), min(min(row) for row in slopes)
    assert float(cone.slope_ratio[0]) == pytest.approx(total / least)

    def inner(N):  # Lemma 10, over exp(-(1 + delta/2) N)
        far = 2 * max(spread) * A * T * (T + 1) * math.exp(-delta * N) * total / n
        return least * min(gaps) / (n * T) * (1 - delta / 2) - far

    def outer(N):  # Lemma 11, over exp(-N)
        third = delta / 2 * max(gaps) * T * math.exp(-pi * N)
        far = 6 * max(spread) * A * T * (T + 1) * math.exp(-1.5 * delta * N)
        return pi / T * min(gaps) * least - (third + far) * total

    R_delta, R_pi = (float(x[0] / cone.solution.norm[0]) for x in (cone.R_delta, cone.R_pi(pi)))
    assert inner(1.0001 * R_delta) > 0 > inner(0.9999 * R_delta)
    assert outer(R_pi) > 0 > outer(0.3 * R_pi) and R_pi >= R_delta


def test_tokens_that_are_not_locally_optimal_have_no_radii():
    problem = synthetic.random_problem(1)
    tokens = problem.scores().argmin(-1)
    cone = mh.cone_constants(problem, tokens, 2)
    assert cone.R_delta.isnan().all() and cone.R_mu().isnan().all()
    assert not cone.contains(1e30 * cone.solution.W).any()


def test_all_tokens_support_gives_the_largest_delta():
    X = torch.eye(2, dtype=torch.float64).unsqueeze(0)
    data = Data(X, X[:, 0], torch.ones(1).double(), X[0, 0])
    constants = mh.cone_constants(data, torch.tensor([0]), 2)
    assert constants.delta == 0.25
    assert constants.score_gap == 1


def test_padding_is_no_token():
    data, _ = problem(3, 4, 5, seed=9)
    best = mh.globally_optimal_tokens(data)
    # Padding with the best score of all, and longer than any token.
    far = 50 * data.y[:, None, None] * data.v.expand(3, 2, 5)
    X = torch.cat([data.X, far], -2)
    mask = torch.arange(6).expand(3, 6) < 4
    padded = Padded(X, data.z, data.y, data.v, mask)
    assert torch.equal(mh.globally_optimal_tokens(padded), best)
    assert torch.equal(mh.support_tokens(padded, best, 2)[:, :4], mh.support_tokens(data, best, 2))
    assert mh.locally_optimal(padded, best, 2)
    assert torch.equal(mh.locally_optimal_sets(padded, 2), mh.locally_optimal_sets(data, 2))
    one, other = (mh.cone_constants(x, best, 2) for x in (data, padded))
    for name in ("delta", "A", "mu_0", "score_gap", "widest_score_gap", "score_range"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-6, atol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_a_sample_of_one_token_is_decided(masked):
    """With a mask there was a constraint 0 >= 1, and the problem was called infeasible."""
    data, tokens = problem(2, 3, 1, 4, seed=11)
    if masked:
        data = Padded(**vars(data), mask=torch.ones(2, 3, 1, dtype=torch.bool))
    verdict = mh.locally_optimal(data, tokens, 2)
    assert verdict
    assert not verdict.solution.W.any()
    assert mh.globally_optimal_tokens(data).eq(0).all()
    assert mh.cone_constants(data, tokens, 2).delta.eq(0.25).all()
    one = type(data)(**{name: x[0] for name, x in vars(data).items()})
    assert mh.locally_optimal_sets(one, 2).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_padding_of_any_data_may_be_nan(junk):
    data, _ = problem(3, 4, 5, seed=9)
    best = mh.globally_optimal_tokens(data)
    mask = torch.arange(6).expand(3, 6) < 4
    padded = Padded(
        torch.cat([data.X, data.X.new_full((3, 2, 5), junk)], -2), data.z, data.y, data.v, mask
    )
    assert torch.equal(mh.globally_optimal_tokens(padded), best)
    assert mh.locally_optimal(padded, best, 2)
    assert torch.equal(mh.locally_optimal_sets(padded, 2), mh.locally_optimal_sets(data, 2))
    one, other = (mh.cone_constants(x, best, 2, 1e-11) for x in (data, padded))
    for name in ("delta", "A", "mu_0", "score_gap", "widest_score_gap", "score_range"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-6, atol=0)
    solution = mh.attention_svm(padded.X, padded.z, best, 2, mask=mask)
    assert solution.check(padded.X, padded.z, best, mask=mask)
    with pytest.raises(ValueError, match="X must be finite, got 15 bad entries"):
        mh.attention_svm(
            padded.X, padded.z, best, 2, mask=mask.index_fill(1, torch.tensor(4), True)
        )


def test_p_is_checked_before_the_data():
    data, tokens = problem(4, 5, 6, seed=8)
    wrong = replace(data, y=torch.zeros(7), z=data.z * math.nan)
    real = mh.AttentionProblem(data.X, data.z, data.y, data.v)
    finite: Any = "geometry must be .*greater than 1.*, got "
    norm: Any = "geometry must be a number from 1 to inf.*, got "
    calls: Any = (
        (finite, lambda p: mh.cone_constants(wrong, tokens, p)),
        (finite, lambda p: mh.descend(wrong, p, 0)),  # type: ignore[arg-type]
        (finite, lambda p: mh.largest_step(wrong, torch.ones(1), p)),  # type: ignore[arg-type]
        (finite, lambda p: mh.assumption_b(wrong, tokens, p)),  # type: ignore[arg-type]
        (norm, lambda p: mh.regularization_path(wrong, p, [])),  # type: ignore[arg-type]
        (finite, lambda p: mh.joint_regularization_path(wrong, p, [], [])),  # type: ignore[arg-type]
        (finite, lambda p: mh.joint_regularization_path(real, p, [], [])),
        (norm, lambda p: mh.locally_optimal(wrong, tokens, p)),
        (norm, lambda p: mh.locally_optimal_sets(wrong, p)),
        (norm, lambda p: mh.support_tokens(wrong, tokens, p)),
        (norm, lambda p: mh.attention_svm(wrong.X, wrong.z, tokens, p)),
        (norm, lambda p: mh.svm(wrong.z, wrong.y, p)),
        (
            "candidates must be a number",
            lambda p: mh.choose_geometry(wrong.X, wrong.z, tokens, (p,)),
        ),
    )
    for message, call in calls:
        for p in (0, -1, 0.5, math.nan, -math.inf, "abc", None, True):
            with pytest.raises((TypeError, ValueError), match=f"{message}.*{p!r}"):
                call(p)
        if message is finite:
            for p in (1, math.inf):
                with pytest.raises(ValueError, match=f"{message}.*{p!r}"):
                    call(p)


def test_bad_input():
    data, tokens = problem(4, 5, 6, seed=8)
    with pytest.raises(ValueError, match=r"y must have shape \(4,\)"):
        mh.token_scores(replace(data, y=torch.ones(3)))
    with pytest.raises(ValueError, match=r"v must have shape \(6,\)"):
        mh.token_scores(replace(data, v=torch.ones(3)))
    with pytest.raises(ValueError, match=r"y must be \+1 or -1 everywhere, got 0.0; for labels 0"):
        mh.token_scores(replace(data, y=torch.zeros(4)))
    masked = Padded(**vars(data), mask=torch.ones(4, 6, dtype=torch.bool))
    for call in (mh.token_scores, mh.globally_optimal_tokens):
        with pytest.raises(ValueError, match=r"mask must be bool of shape \(4, 5\)"):
            call(masked)
    calls: Any = (mh.token_scores, lambda x: mh.locally_optimal(x, tokens, 2))
    calls += (lambda x: mh.support_tokens(x, tokens, 2), lambda x: mh.locally_optimal_sets(x, 2))
    for call in calls:
        with pytest.raises(
            TypeError, match=r"problem must have the tensors X, .*; got a Tensor with"
        ):
            call(data.X)
    for call in (mh.support_tokens, mh.locally_optimal):
        with pytest.raises(ValueError, match=r"geometry must be a number from 1 to inf, got 0\.5"):
            call(data, tokens, 0.5)
    cones = mh.cone_constants(data, tokens, 2)
    for W in (torch.ones(5, 5), torch.ones(6)):
        with pytest.raises(
            ValueError, match=r"W must have shape \(\.\.\., d, d\) like \(6, 6\), got"
        ):
            cones.contains(W)
    assert cones.contains(cones.solution.W.tolist(), radius=0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"more than limit=10"):
        mh.locally_optimal_sets(data, 2, limit=10)
    with pytest.raises(ValueError, match="limit must be an integer >= 1, got True"):
        mh.locally_optimal_sets(data, 2, limit=True)
    with pytest.raises(ValueError, match="must be one problem"):
        mh.locally_optimal_sets(problem(2, 4, 5, 6)[0], 2)
    data.X[0, (tokens[0] + 1) % 5] = data.X[0, tokens[0]]
    with pytest.raises(ValueError, match="must have an lp-AttSVM solution, got infeasible"):
        mh.cone_constants(data, tokens, 2)
