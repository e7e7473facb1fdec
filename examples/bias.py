"""Which margin does an optimizer of your own maximise? Here: Lion, written from its paper.

Run it: python examples/bias.py [steps]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch

import mirrorhead as mh
from mirrorhead.synthetic import random_problem


class Lion(torch.optim.Optimizer):
    """The sign of a mean of gradients (Chen et al. 2023)."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            fast, slow = group["betas"]
            for w in group["params"]:
                mean = self.state[w].setdefault("mean", torch.zeros_like(w))
                w -= group["lr"] * torch.lerp(w.grad, mean, fast).sign()
                mean.lerp_(w.grad, 1 - slow)


def main(steps: int = 2000) -> None:
    """Print the share of the largest margin in each norm, and along the path in the best one."""
    problem = random_problem(trials=10)
    path = mh.follow(
        problem,
        lambda params: Lion(params, lr=0.1, betas=(0.9, 0.99)),
        steps,
        schedule=lambda k: (1 + k / 100) ** -0.5,
    )
    print(path.profile())
    curve = path.profile([float("inf")], records=True).shares[..., 0].nanmedian(1).values
    for step, share in list(zip(path.steps.tolist(), curve.tolist(), strict=True))[::4]:
        print(f"step {step:6d}: {share:.3f} of the largest margin in the maximum norm")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
