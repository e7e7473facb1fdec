"""What `follow` costs, relative to the loop that everybody writes: exact gradient, optimizer step.

Prints milliseconds of a step of 100 trials in that loop, and the ratio of processor time for two
ways to hand gradients over. Both sides are timed in turn; medians of three.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

import mirrorhead as mh
from mirrorhead.synthetic import random_problem

STEPS, REPEATS = 300, 3
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda w: torch.optim.Adam(w, 0.03),
    "RMSprop": lambda w: torch.optim.RMSprop(w, 0.03),
    "MirrorDescent": lambda w: mh.MirrorDescent(w, 0.03, 1.5),
    "MirrorAdam": lambda w: mh.MirrorAdam(w, 0.03, 1.5),
    "Muon": lambda w: torch.optim.Muon(w, 0.03),
    "spectral descent": lambda w: mh.SteepestDescent(w, 0.03, mh.Schatten(math.inf)),
}


def plain(problem: mh.AttentionProblem, make: Make, layout: str) -> float:
    """Seconds of the plain loop, with the parameters that `follow` would make."""
    W = problem.X.new_zeros(problem.weight_shape)
    G = torch.zeros_like(W)
    pairs = [(W, G)] if layout == "one tensor" else list(zip(W, G, strict=True))
    params = [torch.nn.Parameter(w) for w, _ in pairs]
    for param, (_, gradient) in zip(params, pairs, strict=True):
        param.grad = gradient
    optimizer, start = make(params), time.process_time()
    with torch.no_grad():
        for _ in range(STEPS):
            G.copy_(problem.gradient(W).direction)
            optimizer.step()
    return time.process_time() - start


def followed(problem: mh.AttentionProblem, make: Make, gradient: str) -> tuple[float, str]:
    """Seconds of as many steps of `follow`, without its start, and the layout."""
    times, layout = [], ""
    for steps in (10, STEPS + 10):
        start = time.process_time()
        layout = mh.follow(
            problem, make, steps, gradient=gradient, record=[steps], progress=False
        ).layout
        times.append(time.process_time() - start)
    return times[1] - times[0], layout


def main() -> None:
    torch.set_num_threads(1)
    problem = random_problem(100)
    print(f"{'optimizer':<18}{'ms a step':>10}{'direction':>11}{'scaled':>8}  layout")
    for name, make in OPTIMIZERS.items():
        ratios: dict[str, list[float]] = {"direction": [], "scaled": []}
        base, layout = [], ""
        for _ in range(REPEATS):
            for gradient, found in ratios.items():
                if gradient == "scaled" and name == "MirrorDescent":
                    continue  # its steps depend on the size of the gradient
                seconds, layout = followed(problem, make, gradient)
                base.append(plain(problem, make, layout))
                found.append(seconds / base[-1])
        words = [f"{median(found):.2f}" if found else "-" for found in ratios.values()]
        milliseconds = 1e3 * median(base) / STEPS
        print(f"{name:<18}{milliseconds:>10.2f}{words[0]:>11}{words[1]:>8}  {layout}")


if __name__ == "__main__":
    main()
