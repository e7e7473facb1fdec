"""Analyse your own arrays: descent path, selected tokens, certificate and a figure.

    python examples/own_data.py --data mine.npz --p 1.5 --out out

mine.npz holds X (n, T, d), the tokens of each sample; z (n, d), its query; and y (n), labels +1
or -1. It may also hold a head v (d), which is then kept fixed; otherwise v is trained with W.
Without --data, the script uses random data. Write your file with
numpy.savez("mine.npz", X=X, z=z, y=y).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import mirrorhead as mh


def load(file: Path | None) -> tuple[mh.AttentionProblem, bool]:
    """The problem, and whether its head is to be trained."""
    if file is None:
        from mirrorhead.synthetic import random_problem

        return random_problem(1, first=7).trial(0), False
    with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        missing = {"X", "z", "y"} - set(arrays.files)
        if missing:
            raise SystemExit(f"{file} must hold X, z and y; {', '.join(sorted(missing))} missing")
        X, z, y = (torch.from_numpy(arrays[name]) for name in "Xzy")
        v = torch.from_numpy(arrays["v"]) if "v" in arrays.files else None
    train_head = v is None
    head = torch.zeros(X.shape[-1], dtype=torch.float64) if v is None else v
    return mh.AttentionProblem(X, z, y, head), train_head


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a .npz file with X, z, y and perhaps v")
    parser.add_argument("--p", type=float, default=1.5, help="the exponent (default 1.5)")
    parser.add_argument("--steps", type=int, default=5000, help="steps of descent (default 5000)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder (default out)")
    args = parser.parse_args()

    problem, train_head = load(args.data)
    print(problem)

    # 1. The path: normalized mirror descent from W = 0.
    path = mh.descend(problem, args.p, args.steps, joint=train_head)
    if path.v is not None:
        problem = problem.with_head(path.v[-1])  # what tokens are worth to the trained head

    # 2. What it selected, and whether that is a place where a path can stay.
    print("selected tokens:", path.tokens.tolist())
    print("best scores at: ", mh.globally_optimal_tokens(problem).tolist())
    optimality = mh.locally_optimal(problem, path.tokens, args.p, tol=1e-12)
    print(optimality)

    # 3. The max-margin solution it should point to, with a proof of optimality.
    solution = optimality.solution
    print(solution)
    print(
        "certificate checked against the data:", solution.check(problem.X, problem.z, path.tokens)
    )
    divergence = path.divergence_to(solution)
    print(f"direction divergence at the end: {float(divergence[-1]):.2e}")

    # 4. The figure.
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "own_data.svg"
    draw(path, divergence, file)
    print("figure:", file)


def draw(path: mh.Path, divergence: torch.Tensor, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.loglog(path.steps.numpy(), divergence.numpy())
    left.set(xlabel="step", ylabel="divergence from max margin", title=f"p = {path.p:g}")
    problem = path.problem if path.v is None else path.problem.with_head(path.v[-1])
    picture = right.imshow(problem.attention(path.W[-1]).numpy(), vmin=0, vmax=1, cmap="Blues")
    right.set(xlabel="token", ylabel="sample", title="attention at the end")
    figure.colorbar(picture, ax=right)
    figure.savefig(file)


if __name__ == "__main__":
    main()
