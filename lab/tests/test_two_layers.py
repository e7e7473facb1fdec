"""The two-layer model: its gradients against autograd and many digits; the experiment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

import mirrorhead as mh
from experiment_cases import doctored, tiny
from mirrorhead.paths.descent import recorded_steps
from mirrorhead.synthetic import random_problem, random_weights
from mirrorhead_lab.experiments import two_layers
from mirrorhead_lab.experiments.two_layer_model import TwoLayers, softmax_slope
from mirrorhead_lab.experiments.two_layers import descend_both


@pytest.mark.parametrize("loss", ["logistic", "exponential", "linear"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_gradients_agree_with_autograd_while_attention_is_soft(loss: str, scale: float) -> None:
    problem = random_problem(3, n=3, T=4, d=5, loss=loss)
    model = TwoLayers(problem)
    weights = [random_weights(problem, scale, first=k).requires_grad_() for k in (0, 50)]
    model.loss(weights[0], weights[1]).sum().backward()
    found = model.gradients(weights[0].detach(), weights[1].detach())
    for w, gradient in zip(weights, found, strict=True):
        assert w.grad is not None
        torch.testing.assert_close(gradient.value, w.grad, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_directions_are_right_when_attention_is_one_hot(scale: float) -> None:
    """Against differences of the loss with 900 digits, where the plain formula is noise."""
    problem = random_problem(1, n=2, T=3, d=2, first=7)
    model = TwoLayers(problem)
    W = [scale * random_weights(problem, 1.0, first=k) for k in (3, 4)]
    found = model.gradients(W[0], W[1])
    one = problem.trial(0)
    with mpmath.workdps(900):
        matrices = [_matrix(w[0]) for w in W]
        step = mpmath.mpf(10) ** -400
        for layer, gradient in enumerate(found):
            exact = []
            for entry in ((0, 0), (0, 1), (1, 0), (1, 1)):
                ends = []
                for sign in (1, -1):
                    moved = [m.copy() for m in matrices]
                    moved[layer][entry] += sign * step
                    ends.append(_exact_loss(one, *moved))
                exact.append((ends[0] - ends[1]) / (2 * step))
            size = mpmath.sqrt(mpmath.fsum(x * x for x in exact))
            assert float(gradient.log_norm) == pytest.approx(float(mpmath.log(size)), abs=1e-9)
            unit = torch.tensor([float(x / size) for x in exact], dtype=torch.float64)
            torch.testing.assert_close(gradient.direction.flatten(), unit, rtol=0, atol=1e-9)
    if scale == 1000:
        assert all(float(gradient.log_norm) < -100 for gradient in found)


def _matrix(x: Tensor) -> Any:
    return mpmath.matrix(x.tolist())


def _exact_loss(problem: mh.AttentionProblem, W1: Any, W2: Any) -> Any:
    """The formula of the model, as it is written."""
    total = mpmath.mpf(0)
    v = mpmath.matrix(problem.v.tolist())
    for tokens, query, label in zip(problem.X, problem.z, problem.y.tolist(), strict=True):
        X, z = _matrix(tokens), mpmath.matrix(query.tolist())
        rows = [X[t, :].T for t in range(X.rows)]
        H = [row + _attend(rows, W1 * row) for row in rows]
        f = (_attend(H, W2 * z).T * v)[0]
        total += mpmath.log1p(mpmath.exp(-label * f)) / len(problem.y)
    return total


def _attend(rows: list[Any], direction: Any) -> Any:
    logits = [(row.T * direction)[0] for row in rows]
    powers = [mpmath.exp(x - max(logits)) for x in logits]
    total = mpmath.matrix(len(rows[0]), 1)
    for row, power in zip(rows, powers, strict=True):
        total += row * (power / mpmath.fsum(powers))
    return total


def test_the_slope_of_a_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, scores = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    (logits.softmax(-1) * scores).sum().backward()
    slope, log_scale, gap = softmax_slope(logits.detach(), scores)
    torch.testing.assert_close(slope * log_scale.exp().unsqueeze(-1), logits.grad)
    mean = (logits.detach().softmax(-1) * scores).sum(-1, keepdim=True)
    torch.testing.assert_close(gap, scores - mean)


def test_descent_takes_normalized_mirror_steps() -> None:
    problem = random_problem(2, n=2, T=3, d=4)
    model, psi = TwoLayers(problem), mh.PNorm(1.5)
    records = descend_both(model, 1.5, 20, 0.1)
    assert records.shape == (len(recorded_steps(20)), 2, 2, 4, 4)
    W = [torch.zeros(2, 4, 4, dtype=torch.float64)] * 2
    for _ in range(20):
        u = [
            psi.mirror(w) - 0.1 * g.normalized(psi.q)
            for w, g in zip(W, model.gradients(W[0], W[1]), strict=True)
        ]
        W = [psi.inverse(x) for x in u]
    torch.testing.assert_close(records[-1], torch.stack(W, 1), rtol=1e-8, atol=1e-10)


def test_given_scores_are_refused() -> None:
    """The first layer is trained by the head v, which has no meaning beside given scores."""
    problem = random_problem(1, n=2, T=3, d=4)
    with pytest.raises(ValueError, match="problem must have the scores of its head v, got"):
        TwoLayers(problem.with_scores(torch.zeros(1, 2, 3)))


def test_divergences_of_a_path_are_in_its_own_geometry() -> None:
    """In the geometry of each solution they have other scales, and the nearest means nothing."""
    settings = two_layers.Settings(trials=2, p=(1.5, 3.0), steps=(30, 30), lr=(0.1, 1.0), n=2, T=3)
    found = two_layers.run(settings)
    problem = random_problem(2, n=2, T=3, d=8)
    for k, (p, lr) in enumerate(zip(settings.p, settings.lr, strict=True)):
        W1, W2 = descend_both(TwoLayers(problem), p, 30, lr)[-1].unbind(1)
        _, second, H = TwoLayers(problem).forward(W1, W2)
        for j, r in enumerate(settings.p):
            best = mh.attention_svm(H, problem.z, second.argmax(-1), r, settings.tol)
            expected = mh.PNorm(p).direction_divergence(best.W, W2, (-2, -1))
            expected = expected.where(best.optimal, torch.nan)
            torch.testing.assert_close(found["cross"][:, k, 1, j], expected, equal_nan=True)


def test_layers_that_stand_still_or_prefer_another_p_do_not_hold() -> None:
    _, result = tiny("two-layers")
    steps = np.array(sorted(recorded_steps(60)), float)
    good = {
        f"layers {p:g}": np.broadcast_to(steps[:, None] ** -2, result[f"layers {p:g}"].shape)
        for p in (1.75, 2.0, 3.0)
    }
    own = np.broadcast_to(1 - np.eye(3)[:, None, :], result["cross"].shape)
    assert doctored("two-layers", **good, cross=own) == "holds with a remark"
    assert doctored("two-layers", **good, cross=1 - own) == "does not hold"
    one_lost = good["layers 2"].copy()
    one_lost[0] = np.nan
    experiment, result = tiny("two-layers")
    arrays = {**result.arrays, **good, "layers 2": one_lost, "cross": own}
    measured = experiment.verdict(replace(result, arrays=arrays)).measured
    assert measured.endswith(f"; 1 of {3 * len(one_lost)} paths have no solution")
    for bad in (np.full_like(good["layers 2"], 1e-3), 1e3 * good["layers 2"]):
        assert doctored("two-layers", **{**good, "layers 2": bad}, cross=own) == "does not hold"
