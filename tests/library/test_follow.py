"""`follow`: any torch optimizer on exact gradients, without mixing trials, far below 1e-300."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

import mirrorhead as mh
from mirrorhead.problem import Gradient
from mirrorhead.synthetic import random_problem, random_weights

Params = list[torch.nn.Parameter]


class Lamb(torch.optim.Optimizer):
    """Steps of a length relative to the tensor's norm, as LAMB has them: it mixes trials."""

    def __init__(self, params: Params, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for w in group["params"]:
                m = self.state[w].setdefault("m", torch.zeros_like(w))
                m.mul_(0.9).add_(w.grad, alpha=0.1)
                w.sub_(group["lr"] * (w.norm() + 1) * m / (m.norm() + 1e-30))


class GlobalNorm(torch.optim.SGD):
    """Clips by the norm of all parameters together: one optimizer for each trial is needed."""

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        params = [w for group in self.param_groups for w in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        super().step()


class Replaces(torch.optim.Optimizer):
    """Gives its parameters new tensors, as careless code does."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for w in group["params"]:
                w.data = w.data - group["lr"] * w.grad.sign()
                w.grad = None


OPTIMIZERS: dict[str, tuple[Callable[[Params], torch.optim.Optimizer], str]] = {
    "SGD": (lambda w: torch.optim.SGD(w, 0.1, momentum=0.9), "one tensor"),
    "Adam": (lambda w: torch.optim.Adam(w, 0.05), "one tensor"),
    "AMSGrad": (lambda w: torch.optim.AdamW(w, 0.05, amsgrad=True), "one tensor"),
    "Adagrad": (lambda w: torch.optim.Adagrad(w, 0.05), "one tensor"),
    "RMSprop": (lambda w: torch.optim.RMSprop(w, 0.05, momentum=0.5, centered=True), "one tensor"),
    "Adamax": (lambda w: torch.optim.Adamax(w, 0.05), "one tensor"),
    "NAdam": (lambda w: torch.optim.NAdam(w, 0.05), "one tensor"),
    "Rprop": (lambda w: torch.optim.Rprop(w, 0.05), "one tensor"),
    "MirrorDescent": (lambda w: mh.MirrorDescent(w, 0.1, 1.5), "one tensor"),
    "MirrorAdam": (lambda w: mh.MirrorAdam(w, 0.05, 1.5), "a parameter each"),
    "Muon": (lambda w: torch.optim.Muon(w, 0.05), "a parameter each"),
    "Adafactor": (lambda w: torch.optim.Adafactor(w, 0.05), "a parameter each"),
    "Lamb": (Lamb, "a parameter each"),
    "Replaces": (Replaces, "one tensor"),
    "GlobalNorm": (lambda w: GlobalNorm(w, 0.1), "an optimizer each"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trials_do_not_influence_each_other(name: str) -> None:
    make, layout = OPTIMIZERS[name]
    problem = random_problem(3)
    init = random_weights(problem, 0.1)
    path = mh.follow(problem, make, 20, init=init, schedule=lambda k: 1 / (1 + k))
    assert path.layout == layout
    for k in range(3):
        alone = mh.follow(problem.trial(k), make, 20, init=init[k], schedule=lambda k: 1 / (1 + k))
        torch.testing.assert_close(path.W[:, k], alone.W, rtol=1e-12, atol=1e-14)


def by_hand(
    problem: mh.AttentionProblem,
    make: Callable[[Params], torch.optim.Optimizer],
    steps: int,
    gradient: Callable[[Gradient], Tensor],
) -> Tensor:
    """The loop that everybody writes, for one trial."""
    W = torch.nn.Parameter(torch.zeros(problem.weight_shape, dtype=torch.float64))
    optimizer = make([W])
    for _ in range(steps):
        W.grad = gradient(problem.gradient(W.detach()))
        optimizer.step()
    return W.detach()


@pytest.mark.parametrize("mode", ["direction", "value"])
def test_it_is_the_loop_that_everybody_writes(mode: str) -> None:
    problem, make = random_problem(1).trial(0), OPTIMIZERS["Adam"][0]
    found = mh.follow(problem, make, 100, gradient=mode)
    expected = by_hand(problem, make, 100, lambda g: getattr(g, mode))
    torch.testing.assert_close(found.W[-1], expected, rtol=1e-13, atol=1e-15)
    assert found.steps.tolist()[-1] == 100 and found.W.shape == (len(found.steps), 10, 10)


@pytest.mark.parametrize(
    "name", ["Adam", "AMSGrad", "Adagrad", "RMSprop", "Adamax", "NAdam", "Muon", "Lamb"]
)
def test_scaled_gradients_make_the_steps_of_true_ones_until_these_underflow(name: str) -> None:
    small = {
        "Adam": lambda w: torch.optim.Adam(w, 0.05, eps=1e-200),
        "AMSGrad": lambda w: torch.optim.AdamW(w, 0.05, amsgrad=True, eps=1e-200),
        "Adagrad": lambda w: torch.optim.Adagrad(w, 0.05, eps=1e-200),
        "RMSprop": lambda w: torch.optim.RMSprop(w, 0.05, eps=1e-200),
        "Adamax": lambda w: torch.optim.Adamax(w, 0.05, eps=1e-200),
        "NAdam": lambda w: torch.optim.NAdam(w, 0.05, eps=1e-200),
        "Muon": lambda w: torch.optim.Muon(w, 0.05, eps=1e-200),
    }
    make = small.get(name, Lamb)
    problem = random_problem(3)
    runs = [mh.follow(problem, make, 60, gradient=mode) for mode in ("value", "scaled")]
    # torch's Muon computes its direction in bfloat16, where a last bit is 0.4 %.
    rtol = 3e-2 if name == "Muon" else 1e-9
    torch.testing.assert_close(runs[0].W, runs[1].W, rtol=rtol, atol=rtol * 1e-2)


def adam_with_600_digits(problem: mh.AttentionProblem, lr: float, steps: int) -> Tensor:
    """Adam with eps = 0 on one trial, in arithmetic that does not underflow."""
    with mpmath.workdps(600):

        def exact(x: Tensor) -> Any:
            return mpmath.matrix(x.tolist())

        X, z, v = [exact(x) for x in problem.X], [exact(x) for x in problem.z], exact(problem.v)
        y, d = problem.y.tolist(), problem.X.shape[-1]
        W = m = s = mpmath.zeros(d, d)
        b1, b2 = mpmath.mpf(0.25), mpmath.mpf(0.125)
        for k in range(1, steps + 1):
            g = mpmath.zeros(d, d)
            for Xi, zi, yi in zip(X, z, y, strict=True):
                h = [mpmath.exp(x) for x in Xi * W * zi]
                a = [x / mpmath.fsum(h) for x in h]
                score = [yi * x for x in Xi * v]
                f = mpmath.fsum(p * q for p, q in zip(a, score, strict=True))
                slope = -1 / (1 + mpmath.exp(f)) / len(y)
                pull = [slope * p * (q - f) for p, q in zip(a, score, strict=True)]
                g += Xi.T * mpmath.matrix(pull) * zi.T
            m = b1 * m + (1 - b1) * g
            s = b2 * s + (1 - b2) * g.apply(lambda x: x**2)
            for i in range(d):
                for j in range(d):
                    root = mpmath.sqrt(s[i, j] / (1 - b2**k))
                    W[i, j] = W[i, j] - mpmath.mpf(lr) * m[i, j] / (1 - b1**k) / root
        return torch.tensor([[float(x) for x in W[i, :]] for i in range(d)], dtype=torch.float64)


@pytest.mark.slow
def test_scaled_gradients_are_exact_far_below_the_smallest_number() -> None:
    # With beta2 = .999 no loss falls faster than .999^(k/2): the memory of large gradients
    # holds Adam back. A short memory reaches 1e-350 in 800 steps.
    problem, steps = random_problem(1, n=2, T=3, d=2, first=3).trial(0), 800

    def adam(eps: float) -> Callable[[Params], torch.optim.Optimizer]:
        return lambda w: torch.optim.Adam(w, 5.0, betas=(0.25, 0.125), eps=eps)

    exact = adam_with_600_digits(problem, 5.0, steps)
    assert float(problem.gradient(exact).log_norm) < math.log(1e-300) - 100
    path = mh.follow(problem, adam(1e-100), steps, gradient="scaled")
    assert float((path.W[-1] / exact - 1).abs().max()) < 1e-11
    # A usual eps is relative to the gradient.
    usual = mh.follow(problem, adam(1e-8), steps, gradient="scaled").W[-1]
    assert float((usual / exact - 1).abs().max()) < 1e-6
    # The plain value underflows, and Adam stops.
    plain = mh.follow(problem, adam(1e-150), steps, gradient="value").W[-1]
    assert not bool(((plain / exact - 1).abs() < 1e-3).all())


def test_single_samples_are_a_pass_over_the_data_in_a_new_order_each_time() -> None:
    problem = random_problem(2)
    make = OPTIMIZERS["Adam"][0]
    one, again, other = (
        mh.follow(problem, make, 30, batch=1, seed=seed).W[-1] for seed in (0, 0, 1)
    )
    assert bool((one == again).all()) and bool((one != other).any())
    # With a tiny rate a pass of plain descent is a step on the full gradient.
    sgd = lambda w: torch.optim.SGD(w, 1e-7)  # noqa: E731
    parts = mh.follow(problem, sgd, problem.X.shape[-3], batch=1, gradient="value").W[-1]
    whole = mh.follow(problem, sgd, 1, gradient="value").W[-1] * problem.X.shape[-3]
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-13)


def test_factors_are_trained_as_descend_trains_them() -> None:
    problem = random_problem(2)
    K, Q = (random_weights(problem, 0.3, first) for first in (0, 9))
    sgd = lambda w: torch.optim.SGD(w, 0.2)  # noqa: E731
    path = mh.follow(problem, sgd, 40, gradient="value", init=(K, Q), record=[0, 40])
    expected = mh.descend(problem, 2, 40, 0.2, "constant", init=(K, Q), record=[0, 40])
    torch.testing.assert_close(path.W, expected.W, rtol=1e-12, atol=1e-14)
    assert set(path.weights) == {"K", "Q"}


@pytest.mark.parametrize("name", ["Adam", "Muon", "MirrorAdam", "MirrorDescent", "GlobalNorm"])
def test_a_run_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    make, problem, file = OPTIMIZERS[name][0], random_problem(2), tmp_path / "run.npz"
    options = {"schedule": lambda k: (1 + k) ** -0.5, "batch": 4, "record": [3, 10]}
    scaled = "scaled" if name in ("Adam", "MirrorAdam") else "direction"
    whole = mh.follow(problem, make, 20, gradient=scaled, **options)
    mh.follow(problem, make, 10, gradient=scaled, checkpoint=file, **options)
    parts = mh.follow(problem, make, 20, gradient=scaled, checkpoint=file, **options)
    assert bool((whole.W == parts.W).all())
    with pytest.raises(ValueError, match="another run"):
        mh.follow(problem, OPTIMIZERS["RMSprop"][0], 20, checkpoint=file, **options)
    with pytest.raises(ValueError, match="at least 20"):
        mh.follow(problem, make, 10, gradient=scaled, checkpoint=file, **options)


class Vanishing(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for w in self.param_groups[0]["params"]:
            w.data = w.data.flatten()


class Wrong(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for w in self.param_groups[0]["params"]:
            w.data.fill_(math.nan)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        closure()


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (torch.optim.LBFGS, {}, TypeError, "LBFGS needs a closure"),
        (lambda w: NeedsClosure(w, 0.1), {}, TypeError, "NeedsClosure needs a closure"),
        (lambda w: 3, {}, TypeError, "returned 3"),
        ("Adam", {}, TypeError, "optimizer must be a function"),
        (lambda w: Vanishing(w, 0.1), {}, ValueError, "Vanishing changed the shape"),
        (lambda w: Wrong(w, 0.1), {}, FloatingPointError, "steps of Wrong"),
        (lambda w: torch.optim.SparseAdam(w), {}, ValueError, "first steps.*SparseAdam"),
        (torch.optim.SGD, {"gradient": "scaled"}, ValueError, "SGD depend on the size"),
        (torch.optim.Adam, {"gradient": "sign"}, ValueError, "gradient must be one of"),
        (torch.optim.Adam, {"batch": 7}, ValueError, "batch must be at most 6"),
        (torch.optim.Adam, {"schedule": 0.1}, TypeError, "schedule must be a function"),
        (torch.optim.Adam, {"schedule": lambda k: -1}, ValueError, "schedule must return"),
        (torch.optim.Adam, {"record": [11]}, ValueError, "record must be steps from 0 to 10"),
        (torch.optim.Adam, {"init": torch.zeros(2, 2)}, ValueError, "init must have shape"),
        (torch.optim.Adam, {"steps": 0}, ValueError, "steps must be"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    make: object, options: dict, error: type[Exception], words: str
) -> None:
    given = {"steps": 10, **options}
    with pytest.raises(error, match=words):
        mh.follow(random_problem(2), make, **given)  # pyright: ignore[reportArgumentType]


def test_a_trial_without_a_gradient_stays() -> None:
    problem = random_problem(2)
    v = problem.v.clone()
    v[0] = 0  # all scores are 0, and so is the gradient
    for mode in ("direction", "value", "scaled"):
        path = mh.follow(problem.with_head(v), OPTIMIZERS["Adam"][0], 5, gradient=mode)
        assert bool((path.W[-1, 0] == 0).all()) and bool((path.W[-1, 1] != 0).any())


def test_a_linear_problem_has_the_gradient_of_autograd() -> None:
    g = torch.Generator().manual_seed(0)
    features = torch.randn(3, 5, 4, generator=g, dtype=torch.float64)
    for labels, shape in (
        (torch.tensor([1, -1, 1, 1, -1]).expand(3, 5), (3, 4)),
        (torch.tensor([0, 1, 2, 1, 0]).expand(3, 5), (3, 3, 4)),
    ):
        problem = mh.LinearProblem(features, labels)
        W = torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
        if problem.classes is None:
            outputs = (features * W.unsqueeze(-2)).sum(-1) * labels
            loss = torch.nn.functional.softplus(-outputs).mean(-1)
        else:
            outputs = features @ W.mT
            loss = -outputs.log_softmax(-1).gather(-1, labels[..., None])[..., 0].mean(-1)
        (expected,) = torch.autograd.grad(loss.sum(), W)
        found = problem.gradients({"W": W.detach()})["W"]
        torch.testing.assert_close(found.value, expected, rtol=1e-12, atol=1e-14)
        log_loss = problem.log_loss({"W": W.detach()})
        torch.testing.assert_close(log_loss, loss.detach().log(), rtol=1e-10, atol=1e-12)
        assert problem.part([1, 2]).samples == 2
