"""The paper's problems: drawn as its authors draw them, and as it prints them."""

from __future__ import annotations

import pytest
import torch

import mirrorhead as mh
from mirrorhead.synthetic import authors_problem, example_1, example_2, random_problem


def test_the_authors_trials_are_drawn_in_their_order_and_precision() -> None:
    problem = authors_problem(3, n=2, T=3, d=4, first=5)
    for k in range(3):
        g = torch.Generator()
        g.manual_seed(5 + k)
        v, y = torch.randn(4, generator=g), torch.randn(2, generator=g)
        X, z = torch.randn(2, 3, 4, generator=g), torch.randn(2, 4, generator=g)
        assert torch.equal(problem.v[k], (v / v.norm()).double())
        assert torch.equal(problem.y[k], y.sign().double())
        assert torch.equal(problem.X[k], (X / X.norm(dim=-1, keepdim=True)).double())
        assert torch.equal(problem.z[k], (z / z.norm(dim=-1, keepdim=True)).double())


def test_a_trial_does_not_depend_on_the_number_of_trials() -> None:
    for draw in (authors_problem, random_problem):
        whole, last = draw(4, first=1), draw(1, first=4)
        assert all(torch.equal(x[3], last.tensors[name][0]) for name, x in whole.tensors.items())


def test_example_1_is_printed_for_p_2_without_the_token_at_the_origin() -> None:
    """The printed matrix (1/26, -.2/26) solves that reading for p = 2, none for p = 3."""
    printed = torch.tensor([[0.03846, 0.0], [-0.00769, 0.0]], dtype=torch.float64)
    for origin in (True, False):
        problem, tokens = example_1(origin), torch.tensor([0, 0])
        for p in (2.0, 3.0):
            found = mh.attention_svm(problem.X, problem.z, tokens, p, 1e-12, mask=problem.mask).W
            near = bool(((found - printed).abs() < 5e-5).all())
            assert near == (p == 2 and not origin)
            if origin:
                expected = torch.tensor([[0.04, 0], [0, 0]], dtype=torch.float64)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_selected_tokens_of_the_examples() -> None:
    assert mh.globally_optimal_tokens(example_1()).tolist() == [0, 0]
    assert torch.equal(example_2(halved=True).X, example_2().X / 2)


@pytest.mark.parametrize("name", ["trials", "n", "T", "d", "first"])
def test_bad_sizes_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        authors_problem(**{name: -1})
