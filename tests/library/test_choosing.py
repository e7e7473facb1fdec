"""choose_geometry: against a plain loop, laws of the result, and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mirrorhead as mh
from margin_cases import generator

# Small samples seldom do; the test of the warning asks for it.
pytestmark = pytest.mark.filterwarnings("ignore:.*do not distinguish")


def planted(n: int, seed: int, sparse: bool = True, T: int = 5, d: int = 8) -> tuple[Tensor, ...]:
    """Samples whose tokens a W selects: with few entries, or with all."""
    g = generator(seed)
    X = torch.randn(n, T, d, generator=g, dtype=torch.float64)
    z = torch.randn(n, d, generator=g, dtype=torch.float64)
    W = torch.randn(d, d, generator=g, dtype=torch.float64)
    if sparse:
        W = W * (torch.rand(d, d, generator=g) < 0.05)
        W[0, 0] = 1.0
    return X, z, (X @ W @ z.unsqueeze(-1)).squeeze(-1).argmax(-1)


@pytest.mark.parametrize("padded", [False, True])
def test_the_curve_is_that_of_a_plain_loop(padded):
    """Leave out one fold, solve the rest, select tokens: 13 samples do not divide by 4."""
    X, z, tokens = planted(13, 1)
    mask = torch.ones(13, 5, dtype=torch.bool)
    if padded:
        mask = (torch.rand(13, 5, generator=generator(2)) < 0.7).scatter(1, tokens[:, None], True)
    choice = mh.choose_geometry(
        X, z, tokens, candidates=(1.2, 2, 5), folds=4, mask=mask if padded else None
    )
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0)).tolist()
    for k, p in enumerate((1.2, 2.0, 5.0)):
        right = torch.zeros(13, dtype=torch.float64)
        for fold in range(4):
            out = [sample for place, sample in enumerate(order) if place % 4 == fold]
            rest = [sample for sample in range(13) if sample not in out]
            W = mh.attention_svm(X[rest], z[rest], tokens[rest], p, 1e-6, mask=mask[rest]).W
            logits = (X[out] @ W @ z[out].unsqueeze(-1)).squeeze(-1)
            logits[~mask[out]] = -math.inf
            right[out] = (logits.argmax(-1) == tokens[out]).double()
        assert torch.equal(choice.correct[k], right)
        assert float(choice.accuracy[k]) == pytest.approx(float(right.mean()))
    assert float(choice.accuracy.max()) == float(choice.accuracy[choice.index])
    assert choice.norm == choice.candidates[int(choice.index)]
    assert int(choice.infeasible) == int(choice.unfinished) == 0


def test_a_sparse_matrix_asks_for_a_small_p():
    X, z, tokens = planted(60, 0)
    choice = mh.choose_geometry(X, z, tokens, candidates=(1.1, 2.0, 10.0))
    assert choice.norm == mh.PNorm(1.1)
    assert choice.distinguishable is True
    assert choice.similar.tolist()[0] is True and choice.similar.tolist()[2] is False
    assert bool((choice.accuracy.diff() < 0).all())
    assert repr(choice).startswith("GeometryChoice(PNorm(1.1), accuracy {PNorm(1.1): 0.")


def test_data_that_say_nothing_are_said_to_say_nothing():
    """Tokens drawn at random: no exponent can predict them."""
    g = generator(3)
    X = torch.randn(8, 3, 20, generator=g, dtype=torch.float64)
    z = torch.randn(8, 20, generator=g, dtype=torch.float64)
    tokens = torch.randint(0, 3, (8,), generator=g)
    with pytest.warns(UserWarning, match=r"8 samples do not distinguish PNorm\(.*a guess"):
        choice = mh.choose_geometry(X, z, tokens, candidates=(1.5, 2.0, 3.0))
    assert choice.distinguishable is False
    assert bool(choice.similar.all())
    assert "the data do not distinguish the candidates" in repr(choice)


@pytest.mark.slow
def test_exponents_that_are_equally_good_are_rarely_distinguished():
    """The chosen one is the best of eight, so the worst is behind it by chance alone."""
    g = generator(1)
    X = torch.randn(50, 40, 8, 20, generator=g, dtype=torch.float64)
    z = torch.randn(50, 40, 20, generator=g, dtype=torch.float64)
    tokens = torch.randint(0, 8, (50, 40), generator=g)
    norms = (1.1, 1.25, 1.5, 1.75, 2, 3, 5, 10)
    choice = mh.choose_geometry(X, z, tokens, norms, tol=1e-3)
    found = torch.as_tensor(choice.distinguishable)
    assert int(found.sum()) <= 3  # of 50 problems


def test_a_tie_of_tokens_is_not_a_selection():
    """A fold whose other samples have one token leaves W = 0: it selects nothing."""
    X = torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    mask = torch.tensor([[True, True], [True, False]])
    choice = mh.choose_geometry(
        X, X[:, 0], torch.tensor([0, 0]), candidates=(2.0,), folds=2, mask=mask
    )
    assert choice.correct.tolist() == [[0.0, 1.0]]
    junk = X.masked_fill(~mask.unsqueeze(-1), math.nan)
    again = mh.choose_geometry(
        junk, X[:, 0], torch.tensor([0, 0]), candidates=(2.0,), folds=2, mask=mask
    )
    assert torch.equal(again.correct, choice.correct)


def test_ties_go_to_the_first_candidate():
    X = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64).expand(4, 2, 2)
    z = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(4, 2)
    for candidates in ((1.1, 2, mh.Schatten(1)), (mh.Schatten(1), 2, 1.1)):
        choice = mh.choose_geometry(X, z, torch.zeros(4, dtype=torch.long), candidates)
        assert choice.accuracy.tolist() == [1.0] * 3 and choice.norm == choice.candidates[0]


def test_problems_are_solved_together_as_alone():
    cases = [planted(20, seed) for seed in range(3)]
    X, z, tokens = (torch.stack(parts) for parts in zip(*cases, strict=True))
    together = mh.choose_geometry(X, z, tokens, candidates=(1.2, 2.0), folds=3, seed=5)
    assert together.correct.shape == (3, 2, 20)
    assert isinstance(together.norm, list) and len(together.norm) == 3
    for k, case in enumerate(cases):
        alone = mh.choose_geometry(*case, candidates=(1.2, 2.0), folds=3, seed=5)
        assert torch.equal(alone.correct, together.correct[k])
        assert alone.norm == together.norm[k]
    assert repr(together).startswith("GeometryChoice(problems=(3,)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "best"),
    [("entries", mh.PNorm(1)), ("rows", mh.Grouped(1, dim=0)), ("rank", mh.Schatten(1))],
)
def test_the_geometry_that_was_planted_is_found(kind, best):
    """Fresh samples are the judge: the choice is within 2 points of the best fixed candidate."""
    trials, n, fresh, T, d = 3, 60, 400, 8, 8
    g = generator(11)
    W = torch.randn(trials, d, d, generator=g, dtype=torch.float64)
    if kind == "entries":
        W = W * (torch.rand(trials, d, d, generator=g).flatten(1).argsort(-1) < 4).view_as(W)
    if kind == "rows":
        W[:, 1:] = 0
    if kind == "rank":
        W = W[..., :1] @ torch.randn(trials, 1, d, generator=g, dtype=torch.float64)
    X = torch.randn(trials, n + fresh, T, d, generator=g, dtype=torch.float64)
    z = torch.randn(trials, n + fresh, d, generator=g, dtype=torch.float64)

    def selected(W):
        return (X @ W.unsqueeze(1) @ z.unsqueeze(-1)).squeeze(-1).argmax(-1)

    tokens = selected(W)
    seen = X[:, :n], z[:, :n], tokens[:, :n]
    choice = mh.choose_geometry(*seen, (2, 1, mh.Schatten(1), mh.Grouped(1, dim=0)))
    accuracy = torch.stack(
        [
            (selected(mh.attention_svm(*seen, norm, 1e-4).W) == tokens)[:, n:].double().mean(-1)
            for norm in choice.candidates
        ],
        -1,
    )
    found = accuracy.gather(-1, choice.index.unsqueeze(-1)).mean()
    assert float(found) >= float(accuracy.mean(0).max()) - 0.02
    assert choice.candidates[int(accuracy.mean(0).argmax())] == best


def test_the_ends_1_and_inf_are_exponents_too():
    choice = mh.choose_geometry(*planted(12, 4, d=4), candidates=(1, 2, math.inf))
    assert choice.candidates == tuple(map(mh.PNorm, (1, 2, math.inf)))
    assert bool(choice.accuracy.isfinite().all())


@pytest.mark.parametrize("masked", [False, True])
def test_samples_of_one_token_leave_no_choice(masked):
    X, z = torch.randn(6, 1, 3), torch.randn(6, 3)
    mask = torch.ones(6, 1, dtype=torch.bool) if masked else None
    choice = mh.choose_geometry(
        X, z, torch.zeros(6, dtype=torch.long), candidates=(2, 1.5), mask=mask
    )
    assert choice.norm == mh.PNorm(2)
    assert choice.accuracy.tolist() == [1, 1]
    assert not choice.infeasible


def test_infeasible_folds_are_counted():
    """Two equal samples with different tokens: only folds that leave one out have a solution."""
    X, z, tokens = planted(12, 6)
    X, z = X.clone(), z.clone()
    X[1], z[1] = X[0], z[0]
    tokens = tokens.clone()
    tokens[1] = (tokens[0] + 1) % 5
    choice = mh.choose_geometry(X, z, tokens, candidates=(1.5, 2.0), folds=6)
    apart = 4 if _folds_differ(12, 6) else 5
    assert int(choice.infeasible) == apart
    assert int((~choice.correct[0].isnan()).sum()) == 2 * (6 - apart)
    assert f"{apart} of 6 folds without a solution" in repr(choice)
    X[3], z[3] = X[2], z[2]
    X[5], z[5] = X[4], z[4]
    tokens[3], tokens[5] = (tokens[2] + 1) % 5, (tokens[4] + 1) % 5
    with pytest.raises(ValueError, match=r"no fold has a solution \(6 of 6 folds are infeasible\)"):
        mh.choose_geometry(X, z, tokens, candidates=(1.5, 2.0), folds=6)
    with pytest.raises(ValueError, match=r"no fold of problem \[1\] has a solution"):
        mh.choose_geometry(
            *(torch.stack(pair) for pair in zip(planted(12, 7), (X, z, tokens), strict=True)),
            candidates=(2.0,),
            folds=6,
        )


def _folds_differ(n: int, folds: int) -> bool:
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    return order.index(0) % folds != order.index(1) % folds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": (0.5, 2)}, "candidates must be a number from 1 to inf, got 0.5"),
        (
            {"candidates": (True, 2)},
            "candidates must be a number from 1 to inf or a Norm, got True",
        ),
        ({"candidates": (math.nan,)}, "candidates must be a number from 1 to inf, got nan"),
        ({"candidates": ()}, "candidates must be different norms, at least one"),
        ({"candidates": (2, mh.PNorm(2))}, "candidates must be different norms"),
        ({"candidates": 2}, "candidates must be a list of norms, got 2"),
        ({"candidates": (mh.KSupport(k=2),)}, "candidates must be a norm that has a solver"),
        ({"candidates": (mh.Grouped(1, dim=2),)}, "W has no dimension 2 for Grouped"),
        ({"folds": 13}, "folds must be at most the number of samples 12, got 13"),
        ({"folds": 1}, "folds must be an integer >= 2, got 1"),
        ({"folds": 2.0}, "folds must be an integer >= 2, got 2.0"),
        (
            {"tokens": torch.zeros(12)},
            r"tokens must be integers of shape \(12,\), got torch.float32",
        ),
        ({"tokens": torch.full((12,), 5)}, "tokens must be from 0 to 4, got 5"),
        ({"tokens": torch.zeros(3).long()}, r"tokens must be integers of shape \(12,\)"),
        ({"X": torch.zeros(12, 5)}, r"X must be \(..., n, T, d\) and not empty"),
        ({"X": torch.full((12, 5, 8), math.nan)}, "X must be finite"),
        ({"z": torch.zeros(11, 8)}, r"z must have shape \(12, 8\), got \(11, 8\); only its last"),
        ({"mask": torch.ones(12, 5)}, r"mask must be bool of shape \(12, 5\)"),
        (
            {"mask": torch.zeros(12, 5).bool()},
            r"tokens must not be padding, got padding at sample \[0\]",
        ),
        ({"seed": "a"}, "seed must be an integer, got 'a'"),
        ({"tol": 0.0}, "tol must be a number between 0 and 1"),
    ],
)
def test_bad_requests_are_refused(change, message):
    X, z, tokens = planted(12, 0)
    with pytest.raises((TypeError, ValueError), match=message):
        mh.choose_geometry(**({"X": X, "z": z, "tokens": tokens} | change))
