"""Theorem 1 in numbers: the regularization path against the lp-AttSVM solution.

    python examples/theorem_1.py [--trials 100] [--p 1.5 1.75 2 3] [--starts 8]

prints a table for each p; docs/evidence/paper.md discusses it.
"""

from __future__ import annotations

import argparse
import time

import torch

import mirrorhead as mh
from mirrorhead.synthetic import random_problem

SCALES = torch.tensor([1.0, 3.0, 10.0, 30.0, 100.0], dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--p", type=float, nargs="+", default=[1.5, 1.75, 2.0, 3.0])
    parser.add_argument("--starts", type=int, default=8)
    settings = parser.parse_args()
    problem = random_problem(settings.trials)
    best = mh.globally_optimal_tokens(problem)
    for p in settings.p:
        solution = mh.attention_svm(problem.X, problem.z, best, p, tol=1e-12)
        begin = time.process_time()
        radii = SCALES.unsqueeze(-1) * solution.norm  # (radii, trials)
        path = mh.regularization_path(problem, p, radii, settings.starts)
        seconds = time.process_time() - begin
        divergence = path.divergence_to(solution)
        optimal = (path.tokens == best).all(-1).double().mean(-1)
        print(f"p = {p:g}, {settings.trials} trials, {seconds:.0f} s of CPU time")
        print("  R/||W_mm||   D, median   D, largest   optimal tokens   optima seen   spread")
        for k, scale in enumerate(SCALES.tolist()):
            print(
                f"  {scale:10g}   {float(divergence[k].median()):9.2g}"
                f"   {float(divergence[k].max()):10.2g}   {float(optimal[k]):14.0%}"
                f"   {float(path.optima[k].double().mean()):11.1f}"
                f"   {float(path.spread[k].median()):6.2g}"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
