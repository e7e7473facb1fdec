"""The attention problem: its gradient against many digits and against autograd, and its laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mirrorhead as mh
from attention_reference import exact_gradients
from margin_cases import generator
from mirrorhead.problem import Gradient
from mirrorhead.synthetic import example_2, random_problem, random_weights

LOSSES = ("logistic", "exponential", "linear")


def make(
    *shape: int,
    seed: int = 0,
    loss: str = "logistic",
    heads: int | None = None,
    classes: int | None = None,
    masked: bool = False,
) -> mh.AttentionProblem:
    """A random problem of shape (..., n, T, d)."""
    *lead, n, T, d = shape
    g = generator(seed)
    X = torch.randn(*lead, n, T, d, generator=g, dtype=torch.float64)
    z = torch.randn(*lead, n, d, generator=g, dtype=torch.float64)
    head = [size for size in (heads, classes) if size is not None]
    v = torch.randn(*lead, *head, d, generator=g, dtype=torch.float64)
    y = torch.randint(0, classes or 2, (*lead, n), generator=g)
    mask = None
    if masked:
        mask = torch.rand(*lead, n, T, generator=g) < 0.6
        mask[..., 0] |= ~mask.any(-1)
    labels = y if classes else 2 * y - 1
    return mh.AttentionProblem(X, z, labels, v, loss, mask, heads, classes)


def weights(problem: mh.AttentionProblem, seed: int = 0) -> Tensor:
    return torch.randn(problem.weight_shape, generator=generator(seed + 99), dtype=torch.float64)


def of_size(problem: mh.AttentionProblem, log_size: float) -> Tensor:
    """Weights at which the gradient's logarithm is near `log_size`."""
    W = weights(problem)
    two = problem.logits(W).topk(min(2, problem.X.shape[-2]), -1).values
    gaps = (two[..., 0] - two[..., -1]).flatten()
    return -log_size / float(gaps[gaps.isfinite() & (gaps > 0)].min()) * W


def variant(**options: object):
    return pytest.param(options, id="-".join(f"{k}={v}" for k, v in options.items()) or "plain")


VARIANTS = [
    variant(),
    variant(loss="exponential"),
    variant(loss="linear"),
    variant(masked=True),
    variant(heads=2),
    variant(classes=3),
    variant(heads=2, classes=3, masked=True),
]


# -- the gradient, in all digits ----------------------------------------------------------------


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize(("log_size", "digits"), [(-2, 60), (-690.8, 400), (-4605.2, 2100)])
def test_gradients_are_exact_at_any_size(options, log_size, digits):
    problem = make(3, 4, 3, seed=1, **options)
    W = of_size(problem, log_size)
    ours, theirs = problem.gradients(W), exact_gradients(problem, W, digits)
    assert abs(theirs[0].log_norm - log_size) < 12  # the test reaches the size it is named for
    for got, exact in zip(ours, theirs, strict=True):
        assert (got.direction - exact.direction).abs().max() < 1e-10
        assert float(got.log_norm) == pytest.approx(exact.log_norm, rel=1e-12, abs=1e-10)
    again = problem.gradient(W)
    assert torch.equal(again.mantissa, ours[0].mantissa)


@pytest.mark.parametrize("options", [{}, {"loss": "exponential"}, {"heads": 2}, {"classes": 3}])
@pytest.mark.parametrize("size", [1e-200, 300.0])
def test_gradients_are_exact_for_heads_of_any_size(options, size):
    """A large head makes the slope of the loss underflow (or overflow), a small one the gaps."""
    problem = make(3, 4, 3, seed=1, **options)
    problem = problem.with_head(size * problem.v)
    W = of_size(problem, -690.8)
    for got, exact in zip(problem.gradients(W), exact_gradients(problem, W, 1200), strict=True):
        assert (got.direction - exact.direction).abs().max() < 1e-10
        assert float(got.log_norm) == pytest.approx(exact.log_norm, rel=1e-12, abs=1e-10)


def test_the_plain_formula_is_not():
    """What the test above guards against: autograd's direction is lost at 1e-16 already."""
    problem = make(3, 4, 3, seed=1)
    W = of_size(problem, -37.0).requires_grad_()
    (plain,) = torch.autograd.grad(problem.loss(W), W)
    exact = exact_gradients(problem, W.detach(), 60)[0]
    assert (plain / plain.norm() - exact.direction).abs().max() > 1e-3
    assert (problem.gradient(W.detach()).direction - exact.direction).abs().max() < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
def test_ties(loss, scale):
    """Tokens of equal score, tokens of equal logit, and both, at any size."""
    X = torch.tensor(
        [
            [[2.0, 0, 1], [1, 1, 1], [0, 2, 1], [1, -1, 0]],  # the first three score the same
            [[1.0, 0, 2], [1, 0, -1], [0, 1, 0], [0, 0, 3]],  # the first two have equal logits
            [[1.0, 0, 1], [1, 0, 1], [0, 1, 0], [1, 1, 0]],  # two tokens are the same
        ]
    )
    problem = mh.AttentionProblem(X, X[:, 0], [1, -1, 1], [1.0, 1.0, 0.5], loss)
    W = scale * torch.tensor([[3.0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.float64)
    logits = problem.logits(W)
    assert bool((logits[1, 0] == logits[1, 1]) & (logits[2, 0] == logits[2, 1]))
    for got, exact in zip(problem.gradients(W), exact_gradients(problem, W, 1500), strict=True):
        assert (got.direction - exact.direction).abs().max() < 1e-10
        assert float(got.log_norm) == pytest.approx(exact.log_norm, rel=1e-12, abs=1e-10)


def test_samples_with_one_token_pull_nothing():
    problem = make(3, 4, 3, seed=2)
    mask = torch.tensor([[True, False, False, False], [True] * 4, [False, False, True, False]])
    short = mh.AttentionProblem(problem.X, problem.z, problem.y, problem.v, mask=mask)
    W = of_size(problem, -300.0)
    exact = exact_gradients(short, W, 400)
    for got, expected in zip(short.gradients(W), exact, strict=True):
        assert (got.direction - expected.direction).abs().max() < 1e-10
        assert float(got.log_norm) == pytest.approx(expected.log_norm, rel=1e-12)
    only = mh.AttentionProblem(problem.X[1:2], problem.z[1:2], problem.y[1:2], problem.v)
    one_in_three = short.gradient(W)
    assert torch.allclose(one_in_three.direction, only.gradient(W).direction, atol=1e-13)
    assert float(only.gradient(W).log_norm - one_in_three.log_norm) == pytest.approx(math.log(3))


@pytest.mark.parametrize("heads", [None, 2])
def test_one_token_means_no_gradient(heads):
    problem = make(2, 3, 1, 4, heads=heads)
    W = weights(problem)
    gradient, to_head = problem.gradients(W)
    assert not gradient.value.any() and not gradient.direction.any()
    assert torch.equal(gradient.log_norm, torch.full((2,), -torch.inf, dtype=torch.float64))
    assert bool(to_head.log_norm.isfinite().all())
    assert torch.equal(problem.attention(W), torch.ones_like(problem.attention(W)))


def test_gradient_is_its_parts():
    problem = make(5, 3, 4, 3, heads=2)
    gradient = problem.gradient(weights(problem))
    for q in (1.5, 2.0, 3.0):
        norms = torch.linalg.vector_norm(gradient.value, q, (-3, -2, -1))
        assert torch.allclose(gradient.log_norm_of(q).exp(), norms)
        unit = torch.linalg.vector_norm(gradient.normalized(q), q, (-3, -2, -1))
        assert torch.allclose(unit, torch.ones_like(unit))
    assert torch.allclose(gradient.direction * gradient.log_norm.exp()[:, None, None, None],
                          gradient.value)  # fmt: skip
    zero = Gradient(torch.zeros(2, 3), torch.zeros(2), 1)
    assert not zero.direction.any() and bool(zero.log_norm.isinf().all())


# -- against autograd ---------------------------------------------------------------------------

shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4)
)  # trials, n, T, d


@given(
    shapes,
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, 2, 4]),
    st.sampled_from(LOSSES),
    st.booleans(),
    st.integers(0, 100),
)
@settings(max_examples=120)
def test_gradients_agree_with_autograd(shape, heads, classes, loss, masked, seed):
    loss = "logistic" if classes else loss
    problem = make(*shape, seed=seed, loss=loss, heads=heads, classes=classes, masked=masked)
    W = weights(problem, seed).requires_grad_()
    v = problem.v.clone().requires_grad_()
    total = problem.with_head(v).loss(W)
    assert total.shape == (shape[0],)
    expected = torch.autograd.grad(total.sum(), (W, v), allow_unused=True)
    got = problem.gradients(W.detach())
    for mine, theirs, like in zip(got, expected, (W, v), strict=True):
        theirs = torch.zeros_like(like) if theirs is None else theirs
        assert mine.value.shape == like.shape
        assert torch.allclose(mine.value, theirs, rtol=1e-9, atol=1e-12)


def test_the_loss_is_its_formula():
    problem = make(3, 4, 5, seed=3)
    W = weights(problem)
    total = 0.0
    for i in range(3):
        s = torch.softmax(problem.X[i] @ W @ problem.z[i], -1)
        assert torch.allclose(problem.attention(W)[i], s)
        f = problem.v @ problem.X[i].T @ s
        assert problem.output(W)[i] == pytest.approx(float(f))
        total += math.log1p(math.exp(-float(problem.y[i] * f))) / 3
    assert float(problem.loss(W)) == pytest.approx(total)
    assert torch.equal(problem.select(W), problem.attention(W).argmax(-1))
    assert torch.allclose(problem.scores(), mh.token_scores(problem))


def test_other_dtypes_are_promoted():
    problem = make(2, 3, 4, 5)
    small = mh.AttentionProblem(
        problem.X.float(), problem.z.half(), problem.y.int(), problem.v.tolist()
    )
    assert {x.dtype for x in (small.X, small.z, small.y, small.v)} == {torch.float64}
    W = weights(problem).float()
    assert small.loss(W).dtype == small.gradient(W).value.dtype == torch.float64
    assert torch.equal(small.gradient(W).value, small.gradient(W.double()).value)


# -- laws ---------------------------------------------------------------------------------------


def test_two_classes_are_one_label():
    """Cross-entropy over (v0, v1) is the logistic loss with the head v1 - v0."""
    two = make(3, 4, 5, 6, seed=4, classes=2)
    one = mh.AttentionProblem(two.X, two.z, 2 * two.y - 1, two.v[:, 1] - two.v[:, 0])
    for W in (weights(two), 400 * weights(two)):
        assert torch.allclose(two.loss(W), one.loss(W), rtol=1e-12)
        to_W, to_v = two.gradients(W)
        expected_W, expected_v = one.gradients(W)
        assert torch.allclose(to_W.direction, expected_W.direction, atol=1e-11)
        assert torch.allclose(to_W.log_norm, expected_W.log_norm, rtol=1e-12)
        assert torch.allclose(to_v.value[:, 1], expected_v.value, atol=1e-14)
        assert torch.allclose(to_v.value[:, 0], -expected_v.value, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"heads": 2}, {"classes": 3}])
def test_padding_is_as_if_it_were_not_there(options):
    short = make(3, 4, 5, seed=5, **options)
    for filler in (0.0, 7.0, 1.7e308):
        padding = torch.full((3, 2, 5), filler, dtype=torch.float64)
        X = torch.cat([padding, short.X, padding], -2)
        mask = torch.tensor([[False] * 2 + [True] * 4 + [False] * 2] * 3)
        padded = mh.AttentionProblem(X, short.z, short.y, short.v, mask=mask, **options)
        for W in (weights(short), 500 * weights(short)):
            assert torch.allclose(padded.loss(W), short.loss(W), rtol=1e-13)
            assert torch.equal(padded.select(W), short.select(W) + 2)
            assert torch.allclose(padded.attention(W)[..., 2:6], short.attention(W))
            assert not padded.attention(W)[..., :2].any()
            for got, expected in zip(padded.gradients(W), short.gradients(W), strict=True):
                assert torch.allclose(got.direction, expected.direction, atol=1e-12)
                assert torch.allclose(got.log_norm, expected.log_norm, rtol=1e-12)


def test_trials_do_not_know_of_each_other():
    problem = make(4, 3, 5, 6, seed=6, masked=True)
    scale = torch.tensor([1.0, 1e3, 1e-3, 30.0], dtype=torch.float64)[:, None, None]
    W = scale * weights(problem)
    together = problem.gradient(W)
    for k in range(4):
        alone = problem.trial(k)
        assert alone.trials == ()
        assert torch.allclose(alone.gradient(W[k]).direction, together.direction[k], atol=1e-12)
        assert float(alone.gradient(W[k]).log_norm) == pytest.approx(
            float(together.log_norm[k]), rel=1e-12
        )
    assert torch.allclose(problem.trial(slice(1, 3)).loss(W[1:3]), problem.loss(W)[1:3])
    grid = mh.AttentionProblem(
        problem.X.reshape(2, 2, 3, 5, 6), problem.z.reshape(2, 2, 3, 6),
        problem.y.reshape(2, 2, 3), problem.v.reshape(2, 2, 6),
        mask=problem.mask.reshape(2, 2, 3, 5) if problem.mask is not None else None,
    )  # fmt: skip
    assert grid.trials == (2, 2)
    assert torch.allclose(grid.loss(W.reshape(2, 2, 6, 6)).flatten(), problem.loss(W))


@given(st.permutations(range(5)))
@settings(max_examples=20)
def test_permuted_tokens_permute_attention(order):
    problem = make(2, 3, 5, 4, seed=7)
    moved = mh.AttentionProblem(problem.X[..., order, :], problem.z, problem.y, problem.v)
    W = 100 * weights(problem)
    assert torch.allclose(moved.attention(W), problem.attention(W)[..., order])
    assert torch.allclose(moved.gradient(W).direction, problem.gradient(W).direction, atol=1e-12)
    assert torch.allclose(moved.gradient(W).log_norm, problem.gradient(W).log_norm, rtol=1e-12)


def test_equal_heads_are_one_head_of_their_sum():
    one = make(3, 4, 5, seed=8)
    parts = torch.stack([0.2 * one.v, 0.5 * one.v, 0.3 * one.v])
    many = mh.AttentionProblem(one.X, one.z, one.y, parts, heads=3)
    W = 50 * weights(one)
    same = W.expand(3, 5, 5)
    assert float(many.loss(same)) == pytest.approx(float(one.loss(W)))
    assert torch.equal(many.select(same), one.select(W).expand(3, 3))
    gradient = many.gradient(same)
    summed = gradient.mantissa.sum(-3)
    assert torch.allclose(summed / summed.norm(), one.gradient(W).direction, atol=1e-11)
    # A head of weight c feels c times the pull.
    sizes = gradient.mantissa.flatten(1).norm(dim=-1)
    assert torch.allclose(sizes / sizes.sum(), torch.tensor([0.2, 0.5, 0.3]).double())
    # One head asked for as such is the plain problem.
    single = mh.AttentionProblem(one.X, one.z, one.y, one.v[None], heads=1)
    assert torch.equal(single.gradient(W[None]).direction[0], one.gradient(W).direction)


def test_with_head_is_a_new_problem():
    problem = make(2, 3, 4, 5, seed=9)
    problem.scores()  # now remembered
    other = problem.with_head(2 * problem.v)
    assert torch.allclose(other.scores(), 2 * problem.scores())
    fresh = mh.AttentionProblem(problem.X, problem.z, problem.y, 2 * problem.v)
    W = weights(problem)
    assert torch.equal(other.gradient(W).direction, fresh.gradient(W).direction)


def test_repr_says_what_it_is():
    assert repr(make(2, 3, 4, 5)) == "AttentionProblem(trials=(2,), n=3, T=4, d=5, logistic)"
    many = make(3, 4, 5, heads=2, classes=3, masked=True)
    assert repr(many) == (
        "AttentionProblem(trials=(), n=3, T=4, d=5, logistic, heads=2, classes=3, masked)"
    )


# -- where problems come from -------------------------------------------------------------------


def test_random_trials_depend_on_their_seed_alone():
    many, few = random_problem(4, n=3, T=4, d=5, first=7), random_problem(2, 3, 4, 5, first=9)
    for name in ("X", "z", "y", "v"):
        assert torch.equal(getattr(many, name)[2:], getattr(few, name))
    assert torch.allclose(many.X.norm(dim=-1), torch.ones(4, 3, 4, dtype=torch.float64))
    assert torch.allclose(many.v.norm(dim=-1), torch.ones(4, dtype=torch.float64))
    assert set(random_problem(20).y.flatten().tolist()) == {-1.0, 1.0}
    several = random_problem(2, heads=2, classes=3)
    assert several.v.shape == (2, 2, 3, 10) and set(several.y.flatten().tolist()) == {0, 1, 2}


@pytest.mark.parametrize("distribution", ["normal", "uniform", "sparse", "rank-one"])
def test_random_weights(distribution):
    problem = random_problem(40, d=10)
    W = random_weights(problem, 0.5, distribution=distribution)
    assert W.shape == problem.weight_shape
    assert torch.equal(W[3:5], random_weights(problem.trial(slice(3, 5)), 0.5, 3, distribution))
    assert float(W.std()) == pytest.approx(0.5, rel=0.15)
    if distribution == "sparse":
        assert float((W == 0).double().mean()) == pytest.approx(0.9, abs=0.03)
    if distribution == "rank-one":
        assert bool((torch.linalg.matrix_rank(W) == 1).all())


def test_bad_requests_for_random_problems():
    with pytest.raises(ValueError, match="trials must be an integer >= 1, got 0"):
        random_problem(0)
    with pytest.raises(ValueError, match="distribution must be normal, uniform, sparse"):
        random_weights(random_problem(1), 1.0, distribution="cauchy")
    with pytest.raises(ValueError, match="random_weights needs one leading dimension"):
        random_weights(random_problem(1).trial(0), 1.0)


def test_example_2_has_the_printed_values():
    problem = example_2()
    assert problem.X[0, 0].tolist() == [-5.4, 2.4]
    assert torch.equal(problem.z, problem.X[:, 0])
    assert torch.equal(example_2(halved=True).X, problem.X / 2)


# -- bad input ----------------------------------------------------------------------------------

GOOD = make(3, 4, 5)
NAN = torch.full((3, 4, 5), torch.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": GOOD.X[0]}, r"X must be \(\.\.\., n, T, d\) and not empty, got \(4, 5\)"),
        ({"X": GOOD.X[:, :0]}, r"X must be .* not empty, got \(3, 0, 5\)"),
        ({"X": NAN}, "X must be finite, got 60 bad entries"),
        ({"X": GOOD.X + 0j}, "X must be real, got torch.complex128"),
        ({"X": "text"}, "X must be a tensor or an array of numbers"),
        ({"z": GOOD.z[:2]}, r"z must have shape \(3, 5\), got \(2, 5\)"),
        ({"z": GOOD.z / 0}, "z must be finite"),
        ({"y": [1, 0, -1]}, r"everywhere, got 0.0; for labels 0 and 1 give 2 \* y - 1; for class"),
        ({"y": [1, 1]}, r"y must have shape \(3,\), got \(2,\)"),
        ({"v": GOOD.v[:4]}, r"v must have shape \(5,\), got \(4,\)"),
        ({"v": [math.inf] * 5}, "v must be finite, got 5 bad entries"),
        (
            {"loss": "hinge"},
            "loss must be one of logistic, exponential, linear, or a .*; got 'hinge'",
        ),
        ({"mask": torch.ones(3, 4)}, r"mask must be bool of shape \(3, 4\), got torch.float32"),
        ({"mask": torch.ones(3, 5).bool()}, r"mask must be bool of shape \(3, 4\), got .*\(3, 5\)"),
        ({"mask": torch.zeros(3, 4).bool()}, "mask must keep at least one token of every sample"),
        ({"heads": 0}, "heads must be None or an integer >= 1, got 0"),
        ({"heads": 2}, r"v must have shape \(2, 5\), got \(5,\)"),
        ({"heads": True}, "heads must be None or an integer >= 1, got True"),
        ({"classes": 1}, "classes must be None or an integer >= 2, got 1"),
        ({"classes": 2.0}, "classes must be None or an integer >= 2, got 2.0"),
        ({"classes": 3}, r"v must have shape \(3, 5\), got \(5,\)"),
        ({"classes": 3, "loss": "linear"}, "loss must be 'logistic' with classes, got 'linear'"),
        (
            {"classes": 2, "v": torch.ones(2, 5), "y": [0, 1, 2]},
            "y must be integers from 0 to 1 with classes=2",
        ),
        (
            {"classes": 2, "v": torch.ones(2, 5), "y": [0, 0.5, 1]},
            "y must be integers from 0 to 1 with classes=2",
        ),
    ],
)
def test_bad_problems_are_refused(change, message):
    arguments = {"X": GOOD.X, "z": GOOD.z, "y": GOOD.y, "v": GOOD.v} | change
    with pytest.raises((TypeError, ValueError), match=message):
        mh.AttentionProblem(**arguments)


def test_bad_weights_are_refused():
    for method in (GOOD.logits, GOOD.loss, GOOD.gradient, GOOD.gradients, GOOD.select):
        with pytest.raises(ValueError, match=r"W must have shape \(5, 5\), got \(4, 4\)"):
            method(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"v must have shape \(5,\), got \(4,\)"):
        GOOD.with_head(torch.ones(4))
    with pytest.raises(ValueError, match="scores are defined for labels"):
        make(3, 4, 5, classes=3).scores()
    with pytest.raises(
        ValueError, match=r"trial needs one leading dimension, the problem has \(\)"
    ):
        GOOD.trial(0)


@pytest.mark.parametrize("q", [0, 0.5, math.nan])
def test_exponents_of_no_norm_are_refused(q):
    gradient = GOOD.gradient(torch.zeros(5, 5))
    for call in (gradient.normalized, gradient.log_norm_of):
        with pytest.raises(ValueError, match="q must be a number from 1 to inf, got"):
            call(q)


def test_the_largest_entry_is_a_norm():
    gradient = GOOD.gradient(torch.zeros(5, 5))
    assert gradient.normalized(math.inf).abs().max() == 1
    f = gradient.log_norm_of
    torch.testing.assert_close(f(math.inf), f(1e4), rtol=1e-3, atol=1e-3)


def test_padding_may_hold_anything():
    short = random_problem(2, n=3, T=4, d=5)
    junk = torch.full((2, 3, 2, 5), math.nan, dtype=torch.float64)
    mask = torch.tensor([True] * 4 + [False] * 2).expand(2, 3, 6)
    padded = mh.AttentionProblem(
        torch.cat([short.X, junk], -2), short.z, short.y, short.v, mask=mask
    )
    W = random_weights(short, 1.0)
    assert torch.equal(padded.loss(W), short.loss(W))
    with pytest.raises(ValueError, match="X must be finite, got 30 bad entries"):
        mh.AttentionProblem(
            padded.X.index_fill(-2, torch.tensor([0]), math.nan), *_others(short, mask)
        )


def _others(problem, mask):
    return problem.z, problem.y, problem.v, "logistic", mask


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": ["logistic"]}, "loss must be one of logistic, exponential, linear"),
        ({"mask": "none"}, "mask must be a tensor or an array"),
        ({"X": None}, "X must be a tensor or an array of numbers"),
        ({"z": torch.zeros(3, 5, dtype=torch.cfloat)}, "z must be real"),
    ],
)
def test_odd_arguments_are_named(arguments, message):
    whole = random_problem(1, n=3, T=4, d=5).trial(0)
    given = {"X": whole.X, "z": whole.z, "y": whole.y, "v": whole.v} | arguments
    with pytest.raises((TypeError, ValueError), match=message):
        mh.AttentionProblem(**given)


def test_odd_weights_are_named():
    problem = random_problem(1, n=3, T=4, d=5).trial(0)
    for W in (None, "W", torch.ones(5, 5, dtype=torch.cfloat)):
        with pytest.raises(TypeError, match="W must be"):
            problem.gradient(W)  # type: ignore[arg-type]
    for scale in (math.nan, -1.0, True):
        with pytest.raises(ValueError, match="scale must be a finite number >= 0"):
            random_weights(random_problem(1), scale)


def test_lists_of_numbers_lose_no_digits():
    X = [[[0.1, 0.2], [0.3, 0.4]]]
    problem = mh.AttentionProblem(X, [[0.1, 0.7]], [1], [0.1, 0.3])  # type: ignore[arg-type]
    assert torch.equal(problem.X, torch.tensor(X, dtype=torch.float64))
    assert torch.equal(problem.v, torch.tensor([0.1, 0.3], dtype=torch.float64))


def test_scores_can_be_given():
    """With the scores of a head they are that head's problem; other shapes are refused."""
    problem = random_problem(2, n=3, T=4, d=5)
    W = random_weights(problem, 3.0)
    same = problem.with_scores(problem.scores())
    assert torch.equal(same.gradient(W).mantissa, problem.gradient(W).mantissa)
    assert torch.equal(same.loss(W), problem.loss(W))
    other = problem.with_scores(-problem.scores())
    flipped = mh.AttentionProblem(problem.X, problem.z, -problem.y, problem.v)
    torch.testing.assert_close(other.gradient(W).value, flipped.gradient(W).value)
    torch.testing.assert_close(other.loss(W), flipped.loss(W))
    with pytest.raises(ValueError, match=r"scores must have shape \(2, 3, 4\), got \(2, 3\)"):
        problem.with_scores(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="problem must have one head"):
        random_problem(2, heads=2).with_scores(torch.zeros(2, 6, 8))
