"""Training key and query matrices: W = K Q' tends to the solution of least nuclear norm.

    python examples/key_query.py [--trials 4] [--steps 3000]

Attention in practice trains two factors K and Q instead of their product W. Gradient descent
(p = 2) on W tends to the solution of least Frobenius norm; on the factors it tends to that of
least nuclear norm, the sum of the singular values. For each trial the script prints the nuclear
norm of the trained W and of the Frobenius solution, both at margin 1 and divided by the certified
minimum. A path that reaches the minimum has 1.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import mirrorhead as mh
from mirrorhead.synthetic import random_problem, random_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    problem = random_problem(options.trials, n=4, T=6, d=6)
    K, Q = random_weights(problem, 1.0), random_weights(problem, 1.0, first=1000)
    path = mh.descend(problem, geometry=2, steps=options.steps, init=(K, Q))
    print("trial   trained K Q'   Frobenius solution   (nuclear norm over its minimum)")
    for k in range(options.trials):
        one, tokens = problem.trial(k), path.tokens[k]
        least = mh.attention_svm(one.X, one.z, tokens, mh.Schatten(1))
        frobenius = mh.attention_svm(one.X, one.z, tokens, geometry=2)
        ratios = [
            float(torch.linalg.svdvals(W).sum() / margin(one, tokens, W) / least.norm)
            for W in (path.W[-1, k], frobenius.W)
        ]
        print(f"{k:5d}   {ratios[0]:12.4f}   {ratios[1]:18.4f}")


def margin(problem: mh.AttentionProblem, tokens: Tensor, W: Tensor) -> Tensor:
    """The smallest lead of a selected token over another one of its sample, in logits."""
    logits, at = problem.logits(W), tokens.unsqueeze(-1)
    return (logits.gather(-1, at) - logits.scatter(-1, at, -torch.inf)).min()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
