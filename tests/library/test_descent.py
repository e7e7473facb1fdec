"""Paths against the formula, one trial at a time, with gradients by autograd."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from pathlib import Path as File

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mirrorhead as mh
from mirrorhead import native
from mirrorhead.losses import LOSSES
from mirrorhead.paths import _compiled, _update_rules, descent
from mirrorhead.paths._compiled import Loop, compiled_loop
from mirrorhead.paths._update_rules import Accelerated, Normalized, Rule, State, grad_phi
from mirrorhead.paths.diagnostics import fitted_slope, observed_rate, theorem_rate
from mirrorhead.paths.step_size import log_largest_step
from mirrorhead.problem import Gradient
from mirrorhead.synthetic import example_2, random_problem, random_weights

BOTH = (-2, -1)
needs_library = pytest.mark.skipif(not native.available(), reason="the C library was not built")
HALF_ZERO = torch.tensor([0.0, 1.0]).reshape(2, 1, 1).expand(2, 10, 3)  # in the first trial


def slow_path(
    problem: mh.AttentionProblem,
    p: float,
    steps: int,
    lr: float,
    rule: str,
    parameters: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The algorithm as the paper prints it, for one trial: autograd and two powers a step."""
    q = p / (p - 1)
    weights = {name: w.clone() for name, w in parameters.items()}
    for _ in range(steps):
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        W = leaves["W"] if "W" in leaves else leaves["K"] @ leaves["Q"].mT
        problem.with_head(leaves.get("v", problem.v)).loss(W).backward()
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            g = leaf.grad
            if rule == "normalized":
                g = g / g.abs().pow(q).sum().pow(1 / q)
            w = weights[name]
            u = w.sign() * w.abs().pow(p - 1) - lr * g
            weights[name] = u.sign() * u.abs().pow(1 / (p - 1))
    return weights


@given(
    p=st.sampled_from([1.1, 1.5, 1.75, 2.0, 3.0, 5.0]),
    rule=st.sampled_from(["constant", "normalized"]),
    loss=st.sampled_from(["logistic", "exponential", "linear"]),
    heads=st.sampled_from([None, 1, 2]),
    classes=st.sampled_from([None, 2, 3]),
    joint=st.booleans(),
    factors=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_paths_equal_the_formula(p, rule, loss, heads, classes, joint, factors, seed) -> None:
    loss = "logistic" if classes else loss
    problem = random_problem(2, n=3, T=4, d=3, first=seed, loss=loss, heads=heads, classes=classes)
    W = random_weights(problem, 0.7, seed)
    init = (W, random_weights(problem, 0.9, seed + 99)) if factors else W
    lr = 0.05 * min(1, p - 1)  # attention stays soft, so that autograd can be believed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the constant rule may leave Remark 1's bound
        path = mh.descend(problem, p, 12, lr, rule, joint, init, record=[12])
    for k in range(2):
        start = {"K": W[k], "Q": init[1][k]} if factors else {"W": W[k]}
        if joint:
            start["v"] = problem.v[k]
        end = slow_path(problem.trial(k), p, 12, lr, rule, start)
        for name, w in end.items():
            got = getattr(path, name)
            torch.testing.assert_close(got[0, k], w, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_paths_go_on_where_the_plain_gradient_is_noise() -> None:
    """Attention is one-hot to 100 digits and the path still closes in on the solution."""
    problem = random_problem(20)
    path = mh.descend(problem, 1.75, 6000)
    solution = mh.attention_svm(problem.X, problem.z, path.tokens, 1.75, tol=1e-12)
    divergence = path.divergence_to(solution)
    assert float(problem.gradient(path.W[-1]).log_norm.max()) < -100 * np.log(10)
    late, middle = divergence[-1], divergence[int((path.steps < 600).sum())]
    assert float((late / middle).median()) < 0.05
    assert float(late.median()) < 1e-4


def test_normalized_steps_have_the_length_of_lr() -> None:
    problem = random_problem(3)
    path = mh.descend(problem, 3, 50, lr=0.2, record=range(51))
    psi = mh.PNorm(3)
    u = psi.mirror(path.W)
    length = psi.dual_norm(u[1:] - u[:-1], (-2, -1))
    torch.testing.assert_close(length, torch.full_like(length, 0.2), rtol=1e-9, atol=0)


def test_trials_do_not_touch_each_other() -> None:
    problem = random_problem(5)
    together = mh.descend(problem, 1.5, 100)
    alone = mh.descend(random_problem(1, first=3), 1.5, 100)
    torch.testing.assert_close(together.W[:, 3], alone.W[:, 0], rtol=1e-12, atol=1e-15)


def test_a_zero_gradient_changes_nothing() -> None:
    """All tokens score the same: nothing to learn, no NaN, under either rule."""
    X = torch.randn(2, 3, 4, dtype=torch.float64)
    X[..., 0] = 1.0
    problem = mh.AttentionProblem(X, X[:, 0], [1.0, -1.0], [1.0, 0.0, 0.0, 0.0])
    W = torch.randn(4, 4, dtype=torch.float64)
    for rule in ("constant", "normalized"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = mh.descend(problem, 3, 5, rule=rule, init=W)
        torch.testing.assert_close(path.W[-1], W, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_example_2_reaches_both_max_margin_solutions() -> None:
    problem = example_2()
    for p, steps in ((1.75, 1500), (2.0, 2000)):
        path = mh.descend(problem, p, steps, joint=True)
        features = problem.X.gather(1, path.tokens[:, None, None].expand(2, 1, 2)).squeeze(1)
        attention = mh.attention_svm(problem.X, problem.z, path.tokens, p, tol=1e-12)
        head = mh.svm(features, problem.y, p, tol=1e-12)
        assert float(path.divergence_to(attention)[-1]) < 1e-5
        assert float(path.head_divergence_to(head)[-1]) < 1e-5


def test_records_are_the_steps_asked_for() -> None:
    problem = random_problem(2)
    every = mh.descend(problem, 1.5, 40, record=range(41))
    some = mh.descend(problem, 1.5, 40, record=[0, 7, 40])
    assert some.steps.tolist() == [0, 7, 40]
    assert torch.equal(some.W, every.W[[0, 7, 40]])
    assert not some.W[0].any()
    solution = mh.attention_svm(problem.X, problem.z, some.tokens, 1.5)
    divergence = some.divergence_to(solution)
    assert divergence.shape == (3, 2)
    assert divergence[0].isnan().all()
    assert divergence[1:].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "joint"), [("normalized", True), ("constant", False), ("accelerated", False)]
)
def test_a_killed_run_resumes_to_the_same_bits(
    rule: str, joint: bool, tmp_path: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(3)
    file = tmp_path / "sub" / "run.npz"

    def go(steps: int = 60, **options: object) -> descent.Path:
        W = random_weights(problem, 0.5)
        return mh.descend(problem, 1.5, steps, rule=rule, joint=joint, init=W, **options)  # type: ignore[arg-type]

    whole = go()
    taken = 0
    real = descent._stepper

    def killed(*args: object) -> object:
        advance = real(*args)  # type: ignore[arg-type]

        def step(states: descent.States, count: int) -> descent.States:
            nonlocal taken
            if 37 <= taken < 60:
                taken = 60
                raise KeyboardInterrupt
            taken += count
            return advance(states, count)

        return step

    monkeypatch.setattr(descent, "_stepper", killed)
    with pytest.raises(KeyboardInterrupt):
        go(checkpoint=file, checkpoint_seconds=0)
    assert [f.name for f in file.parent.iterdir()] == ["run.npz"]
    resumed = go(checkpoint=file)
    assert taken < 60 + 60 - 30  # it resumed, and did not start again
    for name in ("steps", "W", "tokens") + (("v",) if joint else ()):
        assert torch.equal(getattr(resumed, name), getattr(whole, name))
    monkeypatch.undo()
    longer = go(90, checkpoint=file)
    assert torch.equal(longer.W, go(90).W)
    with pytest.raises(ValueError, match="steps must be at least 90"):
        go(60, checkpoint=file)
    with pytest.raises(ValueError, match="another run"):
        mh.descend(problem, 1.6, 60, checkpoint=file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a checkpoint of descend, or it is damaged"):
        go(checkpoint=file)


@pytest.mark.slow
@needs_library
@given(
    p=st.sampled_from([1.1, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0]),
    loss=st.sampled_from(list(LOSSES)),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 7)),
    scale=st.sampled_from([0.0, 0.1, 30.0]),
    seed=st.integers(0, 1000),
)
def test_the_compiled_loop_takes_the_same_steps(p, loss, shape, scale, seed) -> None:
    """Against torch, one step at a time: longer paths of small p amplify rounding."""
    n, T, d = shape
    problem = random_problem(3, n, T, d, seed, loss)
    u = mh.PNorm(p).mirror(random_weights(problem, scale, seed))
    rule = Normalized(mh.PNorm(p), 0.1, BOTH)
    fast = compiled_loop(problem, rule)
    assert fast is not None
    state = {"u": u}
    for _ in range(10):
        slow = rule.advance(state, problem.gradient(rule.weights(state)))
        torch.testing.assert_close(fast(state, 1), slow, rtol=1e-11, atol=1e-12)
        state = slow


def test_every_loss_that_c_has_has_a_code_of_its_own() -> None:
    codes = [loss.native for loss in LOSSES.values() if loss.native is not None]
    assert sorted(codes) == [0, 1, 2]


class Steeper(mh.Loss):
    """log(1 + exp(-2 x)) / 2: none of the three, and C does not have it."""

    def value(self, x):
        return LOSSES["logistic"].value(2 * x) / 2

    def log_slope(self, x):
        return LOSSES["logistic"].log_slope(2 * x)


@pytest.mark.parametrize("rule", ["normalized", "accelerated"])
def test_a_loss_of_ones_own_runs_as_itself(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(2, loss=Steeper())
    path = mh.descend(problem, 1.5, 20, rule=rule)
    monkeypatch.setattr(descent, "compiled_loop", lambda problem, rule: None)
    assert torch.equal(mh.descend(problem, 1.5, 20, rule=rule).W, path.W)
    # l(x) = logistic(2 x) / 2: the same as twice the scores with half of the step.
    same = random_problem(2).with_scores(2 * problem.scores())
    torch.testing.assert_close(mh.descend(same, 1.5, 20, rule=rule).W, path.W)
    for name in LOSSES:
        other = mh.descend(random_problem(2, loss=name), 1.5, 20, rule=rule)
        assert not torch.allclose(other.W, path.W, rtol=1e-6, atol=0)


def test_a_loss_derived_from_a_built_in_one_is_not_run_in_c() -> None:
    """It would be run as the one that it derives from."""

    class Halved(type(LOSSES["logistic"])):
        def value(self, x):
            return super().value(x) / 2

        def log_slope(self, x):
            return super().log_slope(x) - np.log(2)

        def log_excess(self, b, log_e):
            return super().log_excess(b, log_e) - np.log(2)

    assert Halved.native is None
    problem = random_problem(1, loss=Halved())
    W = mh.descend(problem, 2, 1, lr=1.0, rule="constant").W[-1]
    plain = mh.descend(random_problem(1), 2, 1, lr=0.5, rule="constant").W[-1]
    torch.testing.assert_close(W, plain)


@needs_library
def test_a_code_that_c_does_not_have_stops_the_path() -> None:
    class Wrong(Steeper):
        native = 3

    with pytest.raises(FloatingPointError, match="W is not finite"):
        mh.descend(random_problem(2, loss=Wrong()), 1.5, 5)


@pytest.mark.slow
@needs_library
@given(
    p=st.sampled_from([1.02, 1.1, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 10.0]),
    loss=st.sampled_from(list(LOSSES)),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 7)),
    scale=st.sampled_from([0.0, 0.1, 30.0]),
    before=st.sampled_from([0, 1, 60, 127, 1000]),
    seed=st.integers(0, 1000),
)
def test_the_compiled_accelerated_rule_takes_the_same_steps(
    p, loss, shape, scale, before, seed
) -> None:
    """One step at a time, from many moments of a path: restarts, anchors, and steps taken back."""
    n, T, d = shape
    problem = random_problem(3, n, T, d, seed, loss)
    rule = Accelerated(mh.PNorm(p), 0.1, BOTH, problem.reach(mh.PNorm(p)))
    fast = compiled_loop(problem, rule)
    assert fast is not None
    state = fast(rule.start(random_weights(problem, scale, seed)), before)
    for _ in range(6):
        W = rule.weights(state)
        gradient = problem.gradient(W)
        slow, quick = rule.advance(state, gradient), fast(state, 1)
        # How well logits are known; the gradient is a mean with their softmax as weights.
        noise = 1e-15 * (10 + problem.logits(W).abs().amax((-2, -1)))
        # Of a step at the edge of acceptance, rounding decides. Where the two best tokens are the
        # same, what is left of the gradient may have few digits, or none.
        alike = (quick["step"] == slow["step"]).flatten()
        assert gradient.mass is not None
        faint = (gradient.mass > 0) & (gradient.mass < 1e-290)
        assert (alike | faint | _at_the_edge(rule, state, gradient, noise)).all()
        alike &= ~faint
        for name, value in slow.items():
            if name == "count":
                assert torch.equal(quick[name], value)
                continue
            size = value.abs().amax((-2, -1))
            if name == "W":  # what it consists of may cancel
                size = size + (state["a"] * rule.reach[:, None, None]).flatten()
            error = (quick[name] - value).abs().amax((-2, -1))
            most = 1e3 * p / (p - 1) * noise * (size + rule.reach)  # powers amplify it
            assert (error <= most)[alike].all(), name
        state = slow


def _at_the_edge(rule: Accelerated, state: State, gradient: Gradient, noise: Tensor) -> Tensor:
    """Where the test of a step is decided by rounding, (trials,)."""
    assert gradient.mass is not None
    z = -gradient.mantissa / gradient.mass.where(gradient.mass > 0, 1)[:, None, None]
    x = state["x"] + state["theta"] * (z - state["x"])
    slope, step = grad_phi(x, rule.norm, BOTH)[0], z - state["z"]
    overshoot = (slope * step).sum((-2, -1)) - _update_rules.TOLERANCE * (slope * x).sum((-2, -1))
    return overshoot.abs() <= 1e3 * noise * rule.reach * slope.abs().sum((-2, -1))


@needs_library
@pytest.mark.parametrize("accelerated", [False, True])
def test_the_compiled_loop_can_be_cut_anywhere(accelerated: bool) -> None:
    problem = random_problem(4)

    def looped(problem: mh.AttentionProblem) -> tuple[Rule, Loop]:
        norm = mh.PNorm(1.4)
        faster = Accelerated(norm, 0.1, BOTH, problem.reach(norm))
        rule = faster if accelerated else Normalized(norm, 0.1, BOTH)
        loop = compiled_loop(problem, rule)
        assert loop is not None
        return rule, loop

    W = torch.randn(4, 10, 10, dtype=torch.float64)
    rule, loop = looped(problem)
    start = rule.start(W)
    before = {name: value.clone() for name, value in start.items()}
    whole = loop(start, 300)
    for name, value in before.items():
        assert torch.equal(start[name], value)
    parts = start
    for count in (1, 99, 150, 50):
        parts = loop(parts, count)
    own, alone = looped(problem.trial(2))
    one = alone(own.start(W[2]), 300)
    for name, value in whole.items():
        assert torch.equal(parts[name], value)
        assert torch.equal(one[name], value if name == "count" else value[2])


@pytest.mark.parametrize("rule", ["normalized", "accelerated"])
def test_without_the_c_library_torch_takes_over(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(3)
    fast = mh.descend(problem, 2, 500, rule=rule)
    solution = mh.attention_svm(problem.X, problem.z, fast.tokens, geometry=2)
    monkeypatch.setattr(_compiled, "_normalized_descent", lambda: None)
    monkeypatch.setattr(_compiled, "_accelerated_descent", lambda: None)
    assert compiled_loop(problem, Normalized(mh.PNorm(2), 0.1, BOTH)) is None
    slow = mh.descend(problem, 2, 500, rule=rule)
    assert torch.equal(slow.tokens, fast.tokens)
    if rule == "normalized":
        torch.testing.assert_close(slow.W, fast.W, rtol=1e-9, atol=1e-12)
    else:  # steps that are taken back amplify rounding, until the direction settles
        assert all((path.divergence_to(solution)[-1] < 1e-6).all() for path in (slow, fast))
        torch.testing.assert_close(slow.W[:30], fast.W[:30], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_what_a_kill_left_beside_a_checkpoint_is_removed(tmp_path: File) -> None:
    """A process killed while it writes leaves a temporary file; nothing else may be touched."""
    script = """
import os, sys
from pathlib import Path
import mirrorhead as mh
from mirrorhead.synthetic import random_problem
os.replace = lambda *_: os.kill(os.getpid(), 9)  # killed between writing and renaming
mh.descend(random_problem(1), 1.5, 20, checkpoint=Path(sys.argv[1]))
"""
    file = tmp_path / "run.npz"
    done = subprocess.run([sys.executable, "-c", script, str(file)], check=False)
    assert done.returncode == -9
    assert len(list(tmp_path.iterdir())) == 1 and not file.exists()
    others = [".git", ".run.npz.tmp", ".mirrorhead-tmp-abcd1234-other.npz", "run.npz.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    path = mh.descend(random_problem(1), 1.5, 20, checkpoint=file)
    assert torch.equal(path.W, mh.descend(random_problem(1), 1.5, 20).W)
    assert {entry.name for entry in tmp_path.iterdir()} == {*others, "run.npz"}


def test_a_checkpoint_keeps_the_records_that_were_asked_for(tmp_path: File) -> None:
    problem, file = random_problem(1), tmp_path / "run.npz"
    mh.descend(problem, 1.5, 20, record=[5, 20], checkpoint=file)
    longer = mh.descend(problem, 1.5, 30, record=[5, 30], checkpoint=file)
    assert torch.equal(longer.W, mh.descend(problem, 1.5, 30, record=[5, 30]).W)
    with pytest.raises(ValueError, match="record asks for step 6, which the checkpoint, at step"):
        mh.descend(problem, 1.5, 40, record=[6, 40], checkpoint=file)


def test_a_checkpoint_that_cannot_be_written_is_found_out_first(
    tmp_path: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(descent, "_stepper", lambda *_: pytest.fail("it ran"))
    with pytest.raises(OSError, match="file"):
        mh.descend(random_problem(1), 1.5, 20, checkpoint=tmp_path / "file" / "run.npz")
    array = tmp_path / "array.npz"
    with array.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(ValueError, match="not a checkpoint of descend, or it is damaged"):
        mh.descend(random_problem(1), 1.5, 20, checkpoint=array)


def test_remark_1_is_the_hessian_bound() -> None:
    problem = random_problem(3, n=4, T=3, d=4)
    W = random_weights(problem, 0.8)
    for p in (1.5, 2.0, 3.0):
        steps = mh.largest_step(problem, W, p)
        for k in range(3):
            one = problem.trial(k)
            H = torch.autograd.functional.hessian(
                lambda w, one=one: one.loss(w.reshape(4, 4)), W[k].reshape(-1)
            )
            psi = (p - 1) * W[k].reshape(-1).abs().pow(p - 2)
            # psi - eta L is convex just below the bound and not just above it.
            for factor, convex in ((1 - 1e-6, True), (1 + 1e-6, False)):
                lowest = torch.linalg.eigvalsh(torch.diag(psi) - factor * steps[k] * H)[0]
                assert bool(lowest > 0) is convex
    # Far out the step is as large as the gradient is small: in float64 its logarithm alone.
    near, far = (log_largest_step(problem, size * W, 2) for size in (1e4, 2e4))
    assert (far > 1.9 * near).all() and (near > 100).all() and far.isfinite().all()
    assert not mh.largest_step(problem, torch.zeros_like(W), 3).any()
    assert not mh.largest_step(problem, 1e-200 * W, 50).any()  # |w|^-48 is infinite
    with pytest.raises(ValueError, match="W must give finite logits"):
        mh.largest_step(problem, torch.full_like(W, 1e308), 2)


def test_the_constant_rule_warns_above_remark_1() -> None:
    problem = random_problem(2)
    W = random_weights(problem, 0.1)
    bound = float(mh.largest_step(problem, W, 2).min())
    with pytest.warns(UserWarning, match="exceeds the largest step") as warned:
        mh.descend(problem, 2, 3, lr=1.01 * bound, rule="constant", init=W, record=range(4))
    assert len(warned) == 1
    mh.descend(problem, 2, 1, lr=0.5 * bound, rule="constant", init=W, record=[0])
    # The start is checked, recorded or not: attention that is one-hot later allows any step.
    with pytest.warns(UserWarning, match="allows at step 0"):
        mh.descend(problem, 2, 10, lr=1e4, rule="constant")
    mh.descend(problem, 3, 10, lr=1e-3, rule="constant")  # at zero no step is small enough
    large = random_problem(1, n=9, T=64, d=2)  # not checked: it would take longer than the path
    mh.descend(large, 2, 1, lr=1e9, rule="constant", record=[0])


@pytest.mark.slow
def test_diagnostics_tell_what_the_path_did() -> None:
    problem = random_problem(10)
    report = mh.diagnose(mh.descend(problem, 2, 3000))
    assert report.solution.check(problem.X, problem.z, report.path.tokens)
    assert report.mass.shape == (len(report.path.steps), 10, 6)
    assert bool((report.mass[-1] > 0.999).all())
    assert bool((report.norm[1:] > 0).all())
    assert abs(float(report.rate.median()) - observed_rate(2)) < 0.3
    assert theorem_rate(1.5) == -0.5
    constant = mh.diagnose(mh.descend(problem, 2, 2000, lr=20, rule="constant"))
    gain = constant.growth / constant.solution.norm  # tends to 1, see experiment theorem-2
    assert bool((gain > 0.5).all() and (gain < 1.5).all())
    factors = (random_weights(problem, 0.3), random_weights(problem, 0.3, 50))
    with pytest.raises(ValueError, match="geometry must be given for a path of factors"):
        mh.diagnose(mh.descend(problem, 2, 2, init=factors))
    x = torch.logspace(0, 3, 40, dtype=torch.float64)
    y = torch.where(x < 50, 1e9, x**-1.5)  # only the last decade counts
    assert abs(float(fitted_slope(x, y)) + 1.5) < 1e-12
    assert fitted_slope(x[:2], y[:2]).isnan()


@pytest.mark.slow
def test_diagnostics_of_padding_of_a_trained_head_and_of_nothing_to_select() -> None:
    problem = random_problem(3, T=5)
    X = torch.cat([problem.X, 9 * torch.ones_like(problem.X[..., :2, :])], -2)
    mask = torch.arange(7).expand(3, 6, 7) < 5
    padded = mh.AttentionProblem(X, problem.z, problem.y, problem.v, mask=mask)
    path, other = (mh.descend(x, 2, 300) for x in (problem, padded))
    report, same = mh.diagnose(path), mh.diagnose(other)
    torch.testing.assert_close(report.divergence, same.divergence, rtol=1e-6, atol=1e-9)
    assert torch.equal(report.optimality.optimal, same.optimality.optimal)
    joint = mh.diagnose(mh.descend(problem, 2, 300, joint=True))
    assert joint.path.v is not None
    trained = mh.AttentionProblem(problem.X, problem.z, problem.y, joint.path.v[-1])
    expected = mh.locally_optimal(trained, joint.path.tokens, 2)
    assert joint.optimality.reasons == expected.reasons
    # One token has nothing to be told from: W = 0 is the solution and has no direction.
    alone = random_problem(2, T=1)
    nothing = mh.diagnose(mh.descend(alone, 2, 3))
    assert nothing.divergence.isnan().all()
    assert nothing.in_cone is not None and not nothing.in_cone.any()


def test_one_trial_without_a_solution_leaves_the_others_their_cones() -> None:
    problem = random_problem(2)
    solution = mh.attention_svm(problem.X, problem.z, mh.globally_optimal_tokens(problem), 2)
    X = problem.X.clone()
    X[1, :, 1:] = X[1, :, :1]  # nothing but equal tokens
    both = mh.AttentionProblem(X, problem.z, problem.y, problem.v)
    far = 1e14 * solution.W  # beyond the radius of the cone
    report = mh.diagnose(mh.descend(both, 2, 1, init=far, record=[0]))
    assert report.in_cone is not None and report.in_cone.tolist() == [[True, False]]


def test_a_bar_shows_on_a_terminal_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with descent.progress_bar("quick", 10) as tick:
        tick(3)
    assert screen.getvalue() == ""
    monkeypatch.setattr(descent, "PATIENCE", 0.0)
    with descent.progress_bar("slow", 10) as tick:
        tick(3)
    assert "slow" in screen.getvalue()
    assert "3/10" in screen.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"geometry": 1.0}, "geometry must be finite and greater than 1"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"lr": -1.0}, "lr must be a number > 0"),
        ({"lr": float("nan")}, "lr must be a number > 0"),
        ({"lr": True}, "lr must be a number > 0, got True"),
        ({"steps": True}, "steps must be an integer >= 1, got True"),
        ({"steps": 2.0}, "steps must be an integer >= 1, got 2.0"),
        ({"head_lr": 0.0}, "head_lr must be a number > 0"),
        ({"head_lr": 0.1}, "head_lr needs joint=True, .*; got head_lr=0.1"),
        ({"checkpoint_seconds": float("nan")}, "checkpoint_seconds must be a number >= 0, got nan"),
        ({"init": [torch.ones(2, 10, 3)]}, r"init must be W or a pair \(K, Q\), got 1 entries"),
        ({"init": [torch.ones(10, 3)] * 2}, r"init\[0\] must have shape \(2, 10, m\) with one m"),
        ({"rule": "fast"}, "rule must be one of constant, normalized"),
        ({"init": torch.zeros(3, 3)}, r"init must have shape \(2, 10, 10\)"),
        ({"init": torch.full((2, 10, 10), float("inf"))}, "init must be finite"),
        ({"init": (torch.zeros(2, 10, 3), torch.zeros(2, 10, 3))}, "init must not be a pair"),
        ({"init": (torch.ones(2, 10, 3), torch.ones(2, 10, 4))}, r"init\[1\] must have shape"),
        ({"record": [5, 11]}, "record must be steps from 0 to 10"),
        ({"record": []}, "record must be steps"),
        ({"init": (HALF_ZERO, HALF_ZERO)}, "init must not be a pair of zeros in any trial"),
    ],
)
def test_bad_input_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mh.descend(**({"problem": random_problem(2), "geometry": 1.5, "steps": 10} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"geometry": True}, "geometry must be a number greater than 1 or a Potential, got True"),
        ({"geometry": None}, "geometry must be a number greater than 1 or a Potential, got None"),
        ({"geometry": "abc"}, "geometry must be a number greater than 1 or a Potential, got 'abc'"),
        ({"joint": "no"}, "joint must be True or False, got 'no'"),
        ({"problem": None}, "problem must be an AttentionProblem, got NoneType"),
        ({"init": "zero"}, "init must be a tensor or an array of numbers"),
        ({"init": [[1.0], [1.0, 2.0]]}, "init must be a tensor or an array of numbers"),
        ({"init": torch.ones(2, 10, 10, dtype=torch.cfloat)}, "init must be real"),
        ({"record": [1.7]}, "record must be a list of integers"),
        ({"record": "12"}, "record must be a list of integers"),
        ({"record": 3}, "record must be a list of integers"),
    ],
)
def test_input_of_the_wrong_type_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        mh.descend(**({"problem": random_problem(2), "geometry": 1.5, "steps": 10} | arguments))


def test_a_pair_may_be_a_list_and_numbers_may_be_numpys() -> None:
    problem = random_problem(2)
    pair = [random_weights(problem, 1.0, first=k)[..., :3] for k in (0, 7)]
    expected = mh.descend(problem, 1.5, 10, 0.1, init=(pair[0], pair[1]))
    assert torch.equal(mh.descend(problem, 1.5, 10, 0.1, init=pair).W, expected.W)
    assert expected.K is not None
    numbers = mh.descend(problem, np.float32(1.5), np.int64(10), np.float64(0.1), init=pair)  # type: ignore[arg-type]
    assert torch.equal(numbers.W, expected.W)


def test_other_things_than_solutions_and_paths_are_refused() -> None:
    path = mh.descend(random_problem(2), 1.5, 10)
    other = random_problem(1, d=4).trial(0)
    solution = mh.attention_svm(other.X, other.z, mh.globally_optimal_tokens(other))
    with pytest.raises(ValueError, match=r"a W of shape \(2, 10, 10\) like the path, got \(4, 4\)"):
        path.divergence_to(solution)
    with pytest.raises(TypeError, match="solution must come from attention_svm or svm"):
        path.divergence_to(path.W)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path must come from descend, got Tensor"):
        mh.diagnose(path.W)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("step", None),
        ("step", np.array("three")),
        ("step", np.array(-1)),
        ("state/W/u", None),
        ("state/W/u", np.zeros((1, 10, 10))),
        ("state/W/u", np.zeros((2, 10, 10), dtype=np.float32)),
        ("record/1/W", np.zeros((2, 10))),
        ("record/one/W", np.zeros((2, 10, 10))),
    ],
)
def test_a_damaged_checkpoint_is_refused(name: str, content: object, tmp_path: File) -> None:
    """A state of another size used to reach the C loop, which wrote past its end."""
    problem, file = random_problem(2), tmp_path / "run.npz"
    mh.descend(problem, 1.5, 10, checkpoint=file)
    with np.load(file) as stored:
        arrays = dict(stored)
    if content is None:
        del arrays[name]
    else:
        arrays[name] = np.asarray(content)
    np.savez(file, **arrays)
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"run.npz is .*damaged.*: give another file name"):
        mh.descend(problem, 1.5, 20, checkpoint=file)
    assert file.read_bytes() == before


def test_logits_that_overflow_are_no_zero_gradient() -> None:
    """The largest of NaN is nothing: the compiled loop once stood still without a word."""
    problem = random_problem(2)
    scaled = mh.AttentionProblem(1e100 * problem.X, 1e100 * problem.z, problem.y, problem.v)
    W = random_weights(problem, 1e120)
    for rule in ("normalized", "accelerated"):
        with pytest.raises(FloatingPointError, match="W is not finite at step"):
            mh.descend(scaled, 1.5, 10, rule=rule, init=W)


def test_a_path_that_overflows_says_so() -> None:
    problem = random_problem(1)
    with pytest.raises(FloatingPointError, match="W is not finite at step"):
        mh.descend(problem, 1.001, 1000, lr=1.0)
    path = mh.descend(problem, 2, 2)
    head = mh.svm(problem.X[0, :, 0], problem.y[0], 2)
    with pytest.raises(ValueError, match="has no v"):
        path.head_divergence_to(head)
