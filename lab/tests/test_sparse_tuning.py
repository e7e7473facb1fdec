"""The ways to fine-tune of the study of patches: their formulas, against plain ones."""

from __future__ import annotations

import cvxpy
import numpy as np
import pytest
import torch

import mirrorhead as mh
from mirrorhead.geometry import PNorm
from mirrorhead_lab.training.sparse_tuning import CenteredAdam, identical, lp_link


@pytest.mark.parametrize(("change", "share"), [(0.0, 1.0), (1e-3, 0.75), (1.0, 0.5)])
def test_the_share_of_identical_weights(change: float, share: float) -> None:
    base = {"weight": torch.ones(2, 2), "frozen": torch.ones(2, 2), "bias": torch.ones(2)}
    tuned = {name: tensor.clone() for name, tensor in base.items()}
    tuned["bias"] += 1  # BitFit changes these alone, and no matrix
    assert identical(base, tuned) == {"F32": 1.0, "BF16": 1.0}
    tuned["weight"][0, 0] += change
    tuned["weight"][1, 1] += 1 if change == 1 else 0
    found = identical(base, tuned)
    assert found["F32"] == share and found["BF16"] == (1.0 if change < 1 else share)


@pytest.mark.parametrize("p", [1.5, 2.0])
def test_centred_mirror_descent_finds_the_closest_point(p: float) -> None:
    assert closest_point_error(p) < 1e-4


def closest_point_error(p: float, steps: int = 200_000) -> float:
    """Centred mirror descent on A w = b with 5 rows and 20 weights, against cvxpy's solution."""
    rng = np.random.default_rng(0)
    A, w0 = rng.normal(size=(5, 20)), rng.normal(size=20)
    b = A @ w0 + rng.normal(size=5)
    x = cvxpy.Variable(20)
    objective = cvxpy.Minimize(cvxpy.pnorm(x, p))  # pyright: ignore[reportArgumentType]
    cvxpy.Problem(objective, [A @ x == b - A @ w0]).solve()
    assert x.value is not None
    rows, target = torch.from_numpy(A), torch.from_numpy(b - A @ w0)
    potential, dual = PNorm(p), torch.zeros(20, dtype=torch.float64)
    rate = 0.5 * (p - 1) / float(torch.linalg.matrix_norm(rows, 2) ** 2)
    for _ in range(steps):
        residual = rows @ potential.inverse(dual) - target
        if float(residual.abs().max()) < 1e-10:
            break
        dual -= rate * (rows.T @ residual)
    found = potential.inverse(dual).numpy()
    return float(np.linalg.norm(found - x.value) / np.linalg.norm(x.value))


@pytest.mark.parametrize("p", [1.05, 1.1, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_form_of_the_step_is_the_optimizers(p: float, dtype: torch.dtype) -> None:
    start = torch.randn(50).to(dtype)
    plain, ours = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    # Twice as many steps as announced, so that the largest dual variable passes the reach.
    optimizers = (
        CenteredAdam([plain], 0.5, lp_link(p), steps=10),
        mh.CenteredAdam([ours], p, reach=0.5, total_steps=10),
    )
    for step in range(20):
        gradient = torch.linspace(-1, 1, 50) + torch.randn(50, generator=torch.manual_seed(step))
        for weight, optimizer in zip((plain, ours), optimizers, strict=True):
            weight.grad = gradient.to(dtype)
            optimizer.step()
        relative = 1e-4 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(ours, plain, rtol=relative, atol=1e-6)
    assert float((ours.detach() - start).abs().max()) > 0.5
