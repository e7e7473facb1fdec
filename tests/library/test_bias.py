"""Which max-margin problem an optimizer solves: docs/evidence/limits.md, computed again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mirrorhead as mh
from mirrorhead.margin import MarginSolution, attention_svm, svm
from mirrorhead.synthetic import random_problem, random_weights

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "limits.md"
NORMS = (1.1, 2.0, float("inf"))
TRIALS, STEPS = 6, 5000
#: The rows of the table, with the learning rate of the first step.
OPTIMIZERS: dict[str, tuple[float, Callable[..., torch.optim.Optimizer]]] = {
    "`MirrorAdam`, p = 1.1": (0.1, lambda w, lr: mh.MirrorAdam(w, lr, geometry=1.1)),
    "AdamW": (0.1, lambda w, lr: torch.optim.AdamW(w, lr, weight_decay=0.0)),
    "`MirrorAdam`, p = 1.1, `knee=None`": (
        0.1,
        lambda w, lr: mh.MirrorAdam(w, lr, geometry=1.1, knee=None),
    ),
    "`MirrorDescent`, p = 1.1": (1.0, lambda w, lr: mh.MirrorDescent(w, lr, geometry=1.1)),
}


def train(name: str, start: Tensor, direction: Callable[[Tensor], Tensor]) -> Tensor:
    """Follow the direction of the gradient with lr/sqrt(1 + k/100); each trial is a parameter."""
    lr, make = OPTIMIZERS[name]
    weights = [torch.nn.Parameter(w.clone()) for w in start]
    optimizer = make(weights, lr)
    for k in range(STEPS):
        optimizer.param_groups[0]["lr"] = lr / (1 + k / 100) ** 0.5
        gradients = direction(torch.stack([w.detach() for w in weights]))
        for w, gradient in zip(weights, gradients, strict=True):
            w.grad = gradient.contiguous()
        optimizer.step()
    return torch.stack([w.detach() for w in weights])


def linear(name: str) -> list[float]:
    """12 normal rows of 40 features, random labels; the exponential loss, whose gradient's
    direction is that of a softmax over the margins."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(TRIALS, 12, 40, generator=generator, dtype=torch.float64)
    y = torch.randn(TRIALS, 12, generator=generator, dtype=torch.float64).sign()
    rows = y.unsqueeze(-1) * X

    def direction(w: Tensor) -> Tensor:
        weights = torch.einsum("kid,kd->ki", -rows, w).softmax(-1)
        gradient = -torch.einsum("ki,kid->kd", weights, rows)
        return gradient / gradient.norm(dim=-1, keepdim=True)

    start = 0.01 * torch.randn(TRIALS, 40, generator=generator, dtype=torch.float64)
    w = train(name, start, direction)
    margin = torch.einsum("kid,kd->ki", rows, w).amin(-1)
    return shares(margin, w, (svm(X, y, p) for p in NORMS))


def attention(name: str) -> list[float]:
    """The problems of Figure 4; the margin is that of the tokens which W selects."""
    problem = random_problem(TRIALS)
    start = random_weights(problem, 0.01)
    W = train(name, start, lambda W: problem.gradient(W).direction)
    tokens = problem.select(W)
    logits = torch.einsum("knta,kab,knb->knt", problem.X, W, problem.z)
    chosen = logits.gather(-1, tokens.unsqueeze(-1))
    gaps = (chosen - logits).scatter(-1, tokens.unsqueeze(-1), torch.inf)
    margin = gaps.amin((-2, -1))
    solved = (attention_svm(problem.X, problem.z, tokens, p) for p in NORMS)
    return shares(margin, W.flatten(1), solved)


def shares(margin: Tensor, w: Tensor, solved: Iterable[MarginSolution]) -> list[float]:
    """The medians over trials of margin / ||w||_p over the largest possible, 1 / ||w*||_p."""
    found = []
    for solution in solved:
        assert bool(solution.optimal.all())
        norm = torch.linalg.vector_norm(w, solution.p, -1)
        found.append(float((margin / norm * solution.norm).median()))
    return found


def printed() -> dict[str, list[float]]:
    """Return the rows of the table: linear l1.1, l2, linf, then the same of attention."""
    table = re.search(r"\| optimizer \| linear, l1\.1 .*?\n\n", PAGE.read_text(), flags=re.S)
    assert table is not None
    rows = (line.strip("| ").split(" | ") for line in table[0].splitlines()[2:] if line)
    return {name: [float(cell) for cell in cells] for name, *cells in rows}


@pytest.mark.slow
def test_the_page_says_which_margin_each_optimizer_maximises() -> None:
    """With the knee MirrorAdam ends where AdamW does, at the margin in the maximum norm; without
    it, and with MirrorDescent, the margin in the norm of p is the nearest."""
    found = {name: [*linear(name), *attention(name)] for name in OPTIMIZERS}
    said = printed()
    assert list(said) == list(found)
    for name, row in found.items():
        assert row == pytest.approx(said[name], abs=0.006), name
    guide = " ".join((PAGE.parents[1] / "how-to-choose.md").read_text().split())
    docstring = " ".join((mh.MirrorAdam.__doc__ or "").split())
    for name in ("`MirrorAdam`, p = 1.1", "`MirrorAdam`, p = 1.1, `knee=None`"):
        numbers = "{:.2f}, {:.2f} and {:.2f}".format(*said[name][:3])
        assert numbers in guide and numbers in docstring
    knee, adamw, power, descent = (torch.tensor(row).view(2, 3) for row in found.values())
    assert (knee - adamw).abs().max() < 0.01
    assert (knee.argmax(1) == 2).all() and (knee[:, 2] > 0.9).all() and (knee[:, 0] < 0.6).all()
    for row in (power, descent):
        assert (row.argmax(1) == 0).all() and (row[:, 2] < 0.3).all()
    assert (descent[:, 0] > 0.99).all() and (power[:, 0] > 0.8).all()
