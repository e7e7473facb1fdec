"""The rules of the experiments on bias, on results that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from experiment_cases import TINY, doctored, tiny
from mirrorhead_lab.experiments.bias_optimizers import predicted


def with_best(name: str, wrong: str = "") -> np.ndarray:
    """Shares in which each optimizer has the most of its own norm, and `wrong` of another one."""
    settings = TINY[name]
    shares = np.array(tiny(name)[1]["shares"])
    shares[:] = 0.5
    for k, optimizer in enumerate(settings.optimizers):
        own = predicted(optimizer) or settings.norms[0]
        if optimizer == wrong:
            own = next(norm for norm in settings.norms if norm != own)
        shares[:, k, :, settings.norms.index(own)] = 0.99
    return shares


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bias-attention", "bias-linear"])
def test_the_named_norm_must_be_the_best_of_every_optimizer(name: str) -> None:
    assert doctored(name, shares=with_best(name)) == "holds"
    assert doctored(name, shares=with_best(name, wrong="Adam")) == "does not hold"
    assert doctored(name, shares=with_best(name, wrong="Adagrad")) == "holds"  # it has no norm
    divided = with_best(name)
    divided[0] = with_best(name, wrong="Muon")[0]  # in one of three trials
    assert doctored(name, shares=divided) == "not decided"


@pytest.mark.slow
def test_gradient_descent_on_factors_must_be_nearest_to_the_nuclear_norm() -> None:
    settings = TINY["bias-factored"]
    shares = np.full_like(tiny("bias-factored")[1]["shares"], 0.5)
    first = settings.optimizers.index("SGD")
    shares[:, first, :, settings.norms.index("nuclear")] = 0.9
    assert doctored("bias-factored", shares=shares) == "holds with a remark"
    shares[:, first, :, settings.norms.index("l2")] = 0.95
    assert doctored("bias-factored", shares=shares) == "does not hold"


@pytest.mark.slow
def test_single_samples_must_move_adam_and_leave_signum() -> None:
    settings = TINY["bias-batches"]
    linf, l2 = (settings.norms.index(norm) for norm in ("linf", "l2"))
    shares = np.full_like(tiny("bias-batches")[1]["shares"], 0.5)
    for k, (name, batch) in enumerate(settings.rows):
        alone = batch == min(settings.batches) and name != "Signum"
        shares[:, k, :, l2 if alone else linf] = 0.9
    assert doctored("bias-batches", shares=shares) == "holds"
    signum = settings.rows.index(("Signum", min(settings.batches)))
    shares[:, signum, :, l2] = 0.95
    assert doctored("bias-batches", shares=shares) == "does not hold"


@pytest.mark.slow
def test_margins_of_the_network_must_grow_from_the_first_fit() -> None:
    margins = np.array(tiny("bias-network")[1]["margins"])
    records = np.linspace(0.1, 1.0, margins.shape[2])[None, None, :, None]
    assert doctored("bias-network", margins=np.ones_like(margins) * records) != "does not hold"
    falls = np.ones_like(margins) * records[:, :, ::-1]
    assert doctored("bias-network", margins=falls) == "does not hold"


@pytest.mark.slow
def test_steepest_descent_must_reach_its_margin_at_the_rate() -> None:
    settings, shares = TINY["bias-rates"], np.array(tiny("bias-rates")[1]["shares"])
    steps = np.array(settings.records, float)
    fast = np.broadcast_to(1 - 0.3 * (steps / 10) ** -0.9, shares.shape)
    assert doctored("bias-rates", shares=fast) == "holds"
    slow = np.broadcast_to(0.97 - 0.01 * (steps / 10) ** -0.1, shares.shape)
    assert doctored("bias-rates", shares=slow) == "not decided"
    assert doctored("bias-rates", shares=np.full_like(shares, 0.4)) == "does not hold"


@pytest.mark.slow
def test_a_hybrid_norm_must_be_the_best_of_the_pair() -> None:
    shares = np.full_like(tiny("bias-hybrid")[1]["shares"], 0.5)
    shares[:, 0, :, 0] = 0.9
    assert doctored("bias-hybrid", shares=shares) == "holds with a remark"
    shares[:, 0, :, 1] = 0.95
    assert doctored("bias-hybrid", shares=shares) == "does not hold"
