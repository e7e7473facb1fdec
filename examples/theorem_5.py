"""Theorem 5 on the paper's Example 2: the joint regularization path of head and attention.

    python examples/theorem_5.py [--p 1.75 2 3]

prints the numbers behind docs/evidence/paper.md: label margin and Assumption B's nu of each token
set that can be separated, then the path and its divergence from the solutions of the set with the
largest label margin.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch

import mirrorhead as mh
from mirrorhead.synthetic import example_2

SCALES = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--p", type=float, nargs="+", default=[1.75, 2.0, 3.0])
    problem = example_2()
    for p in parser.parse_args().p:
        print(f"p = {p:g}\n  tokens       label margin        nu")
        labels = {}
        for pair in product(range(3), repeat=2):
            tokens = torch.tensor(pair)
            labels[pair] = mh.svm(problem.X[torch.arange(2), tokens], problem.y, p, tol=1e-12)
            nu = float(mh.assumption_b(problem, tokens, p))
            print(f"  {name(pair)}   {1 / float(labels[pair].norm):12.4f}   {nu:7.4f}")
        best = min(labels, key=lambda pair: float(labels[pair].norm))
        label = labels[best]
        attention = mh.attention_svm(problem.X, problem.z, torch.tensor(best), p, tol=1e-12)
        path = mh.joint_regularization_path(
            problem, p, SCALES * attention.norm, SCALES * label.norm
        )
        weights, heads = path.divergence_to(attention), path.head_divergence_to(label)
        print(f"  R/||W_mm||, r/||v_mm||   selected    D_W to {name(best)}   D_v")
        for k, scale in enumerate(SCALES.tolist()):
            chosen = name(tuple(path.tokens[k].tolist()))
            print(f"  {scale:22g}   {chosen}   {float(weights[k]):17.1e}   {float(heads[k]):.1e}")


def name(pair: tuple[int, ...]) -> str:
    """The tokens as the paper counts them, (X11, X21) for (0, 0)."""
    return f"(X1{pair[0] + 1},X2{pair[1] + 1})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
