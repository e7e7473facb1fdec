"""The unit of the data, and rows and columns of very different size."""

import math
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import mirrorhead as mh
from margin_cases import HOPELESS, generator, hopeless, nasty, random_problem
from mirrorhead.margin._rounding import _nearest

ALL_P = (1, 1.02, 1.1, 1.5, 2, 3, 10, 50, 100, math.inf)


def measurements(seed: int) -> tuple[Tensor, Tensor]:
    """500 samples of 30 positive features from 1e-3 to 1e3, in groups that nearly depend.

    As in medical data: radius, perimeter and area of one thing, each with its mean and worst.
    """
    g = generator(seed)
    sizes = torch.randn(500, 10, generator=g, dtype=torch.float64).mul(0.3).exp()
    noise = torch.randn(500, 30, generator=g, dtype=torch.float64)
    features = sizes.repeat(1, 3) ** torch.tensor([1.0, 2.0, 1.0]).repeat_interleave(10)
    features = features * (1 + 0.03 * noise)
    units = 10 ** (6 * torch.rand(30, generator=g, dtype=torch.float64) - 3)
    direction = torch.randn(30, generator=g, dtype=torch.float64)
    mean = features.mean(0)
    direction -= (direction @ mean) / (mean @ mean) * mean  # both classes, close to each other
    labels = torch.where(features @ direction > 0, 1, -1)
    return features * units, labels


@pytest.mark.slow
@pytest.mark.parametrize("p", ALL_P)
@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_features_of_very_different_size_are_solved_in_every_unit(p, unit):
    for seed in range(3):
        features, labels = measurements(seed)
        solution = mh.svm(unit * features, labels, p)
        assert solution.status == "optimal", solution
        assert solution.check(unit * features, labels)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1, 2, 10, 50, math.inf])
def test_rows_and_columns_over_six_decades(p):
    for seed in range(30):
        g = generator(seed)
        n, d = (int(torch.randint(2, most, (1,), generator=g)) for most in (60, 15))
        features = torch.randn(n, d, generator=g, dtype=torch.float64) + 0.3
        direction = torch.randn(d, generator=g, dtype=torch.float64)
        labels = torch.where(features @ direction > 0, 1, -1)
        rows, columns = torch.rand(n, 1, generator=g), torch.rand(d, generator=g)
        features = features * 10 ** (6 * rows.double() - 3) * 10 ** (6 * columns.double() - 3)
        solution = mh.svm(features, labels, p)
        assert solution.status == "optimal", solution
        assert solution.check(features, labels)


@pytest.mark.parametrize("p", [1, math.inf])
def test_near_duplicates_of_the_selected_token_at_the_ends_of_p(p):
    data = nasty("near-duplicate of the selected token", 40)
    solution = mh.attention_svm(*data, p)
    assert solution.optimal.all(), solution
    assert solution.check(*data)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    p=st.sampled_from(ALL_P),
    decades=st.floats(-200, 200),
    kind=st.sampled_from(["random", "near-infeasible", "six decades of row norms", *HOPELESS]),
    seed=st.integers(0, 1000),
)
def test_no_status_depends_on_the_unit_of_the_data(p, decades, kind, seed):
    if kind == "random":
        X, z, tokens = random_problem(2, 6, 8, 10, seed=seed)
    else:
        X, z, tokens = (hopeless if kind in HOPELESS else nasty)(kind, 2, seed)
    unit = 10.0**decades
    base, scaled = (mh.attention_svm(x, z, tokens, p) for x in (X, unit * X))
    assert base.status == scaled.status
    assert "unfinished" not in base.status
    assert scaled.check(unit * X, z, tokens).supported.all()
    norms = scaled.norm[base.optimal] * unit
    torch.testing.assert_close(norms, base.norm[base.optimal], rtol=3e-9, atol=0)


def test_multipliers_rounded_together_miss_a_goal_by_far_less():
    g = generator(0)
    rows = torch.ones(4, 4).double() + 1e-3 * torch.randn(4, 4, generator=g, dtype=torch.float64)
    rows[::2] *= -1  # nearly dependent: large multipliers cancel
    lam = torch.tensor([3e6, 2e6, 1e6, 3e3], dtype=torch.float64)
    rest = 1e-10 * torch.randn(4, generator=g, dtype=torch.float64)
    alone = lam + torch.linalg.solve(rows.mT, rest)
    together = lam + _nearest(rows, lam, rest)

    def miss(new: Tensor) -> float:
        """By how much rows' (new - lam) differs from `rest`, in exact arithmetic."""
        change = [
            Fraction(x) - Fraction(y) for x, y in zip(new.tolist(), lam.tolist(), strict=True)
        ]
        columns = [[Fraction(x) for x in column] for column in rows.mT.tolist()]
        sums = [sum(x * y for x, y in zip(change, column, strict=True)) for column in columns]
        return float(sum(abs(x - Fraction(y)) for x, y in zip(sums, rest.tolist(), strict=True)))

    assert miss(together) < 0.1 * miss(alone)
