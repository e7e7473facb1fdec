"""Train one small attention classifier with p = 1.1 and with p = 2, and look at the weights.

    python examples/histograms.py [--out out] [--steps 500]

Sequences of random tokens; one token of each carries a mark and, elsewhere in it, the label.
To classify, attention has to find the marked token. Both runs see the same data in the same
order from the same start; only p and its learning rate differ.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mirrorhead import MirrorDescent

DIM, LENGTH, BATCH = 32, 16, 64
# Of {.02, .05, .1, .2, .3, .5, 1, 2} the least with most attention on the marked token, judged on
# the data that the figure reports: a picture of what p does to weights, not a comparison.
LEARNING_RATES = {1.1: 0.5, 2.0: 2.0}


class Classifier(nn.Module):
    """One attention head with a learned query for the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(DIM, DIM, bias=False)
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.value = nn.Linear(DIM, DIM, bias=False)
        self.start = nn.Parameter(torch.randn(DIM) / DIM**0.5)
        self.head = nn.Linear(DIM, 1)
        for layer in (self.query, self.key, self.value):
            nn.init.normal_(layer.weight, std=0.02)  # so that what is large has been learned

    def attention(self, x: Tensor) -> Tensor:  # (batch, tokens, DIM) -> (batch, tokens)
        return torch.softmax(self.key(x) @ self.query(self.start) / DIM**0.5, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = (self.attention(x)[..., None] * self.value(x)).sum(-2)
        return self.head(pooled).squeeze(-1)


def batches(count: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(tokens, labels, position of the marked token), `count` times."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(BATCH, LENGTH, DIM, generator=generator)
        y = torch.randint(0, 2, (BATCH,), generator=generator) * 2.0 - 1
        marked = torch.randint(0, LENGTH, (BATCH,), generator=generator)
        x[..., 0] *= 0.3
        x[torch.arange(BATCH), marked, 0] = 3.0  # the mark
        x[..., 1] = 2.0 * x[..., 1].sign()  # a label that means nothing ...
        x[torch.arange(BATCH), marked, 1] = 2.0 * y  # ... and the one that counts
        yield x, y, marked


def train(p: float, steps: int) -> Classifier:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = MirrorDescent(model.parameters(), lr=LEARNING_RATES[p], geometry=p)
    for step, (x, y, _) in enumerate(batches(steps, seed=1), start=1):
        loss = F.softplus(-y * model(x)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if sys.stderr.isatty() and (step % 20 == 0 or step == steps):
            bar = "#" * (30 * step // steps)
            print(f"\rp={p:<4g} [{bar:30}] loss {loss.item():.3f}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return model


@torch.no_grad()
def evaluate(model: Classifier) -> tuple[float, float]:
    """Accuracy, and the attention that the marked token gets, on fresh data."""
    right, mass = [], []
    for x, y, marked in batches(20, seed=2):
        right.append((model(x) * y > 0).float().mean())
        mass.append(model.attention(x)[torch.arange(BATCH), marked].mean())
    return torch.stack(right).mean().item(), torch.stack(mass).mean().item()


def projections(model: Classifier) -> Tensor:
    layers = (model.key, model.query, model.value)
    return torch.cat([layer.weight.detach().flatten() for layer in layers])


def large(model: Classifier) -> int:
    return int((projections(model).abs() > 0.1).sum())


def draw(models: dict[float, Classifier], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True, sharey=True)
    limit = max(projections(model).abs().max().item() for model in models.values())
    bins = torch.linspace(-limit, limit, 81).tolist()
    colors = ["#2a6f97", "#c8553d"]
    for axis, (p, model), color in zip(axes, models.items(), colors, strict=True):
        weights = projections(model)
        accuracy, mass = evaluate(model)
        axis.hist(weights.tolist(), bins=bins, color=color)
        axis.set_yscale("log")
        axis.set_title(
            f"p = {p:g}: {large(model)} of {len(weights):,} weights above 0.1\n"
            f"accuracy {accuracy:.1%}, attention on the marked token {mass:.0%}",
            fontsize=10,
        )
        axis.set_xlabel("weight of K, Q, V")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylabel("count")
    figure.tight_layout()
    # Written under another name first: a cut leaves no half figure behind.
    temporary = path.with_suffix(".partial.png")
    figure.savefig(temporary, dpi=150)
    plt.close(figure)
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--steps", type=int, default=500, help="training steps (default 500)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    args.out.mkdir(parents=True, exist_ok=True)
    models = {p: train(p, args.steps) for p in LEARNING_RATES}
    for p, model in models.items():
        accuracy, mass = evaluate(model)
        print(
            f"p={p:<4g} accuracy {accuracy:.3f}   attention on the marked token {mass:.3f}"
            f"   weights of K, Q, V above 0.1: {large(model)} of {len(projections(model)):,}"
        )
    path = args.out / "histograms.png"
    draw(models, path)
    print(f"figure: {path}")


if __name__ == "__main__":
    main()
