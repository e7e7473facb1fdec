"""The direction of the gradient as attention becomes one-hot: the plain formula and ours.

    python examples/gradient_accuracy.py [--out figure.svg]

prints the table of docs/model.md. The reference is the plain formula in mpmath with 5,000 digits.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import mpmath
import torch
from torch import Tensor

from mirrorhead.problem import AttentionProblem
from mirrorhead.synthetic import random_problem, random_weights

NORMS = [10, 100, 300, 1000, 2000, 3000, 10_000, 100_000, 400_000]


def truth(problem: AttentionProblem, W: Tensor) -> tuple[Tensor, float]:
    """Direction and log10 of the size of (1/n) sum l' X' (diag(s) - s s') a z'."""
    n, _, d = problem.X.shape
    with mpmath.workdps(5000):
        total = mpmath.zeros(d, d)
        for i in range(n):
            X, z = mpmath.matrix(problem.X[i].tolist()), mpmath.matrix(problem.z[i].tolist())
            scores = X * mpmath.matrix(problem.v.tolist()) * int(problem.y[i])
            h = X * (mpmath.matrix(W.tolist()) * z)
            e = [mpmath.exp(x - max(h)) for x in h]
            s = [x / mpmath.fsum(e) for x in e]
            margin = mpmath.fsum(a * b for a, b in zip(s, scores, strict=True))
            slope = -1 / (1 + mpmath.exp(margin))
            pull = mpmath.matrix([slope * a * (b - margin) for a, b in zip(s, scores, strict=True)])
            total += X.T * pull * z.T / n
        norm = mpmath.sqrt(mpmath.fsum(x * x for x in total))
        unit = torch.tensor([float(x / norm) for x in total], dtype=torch.float64)
        return unit.reshape(d, d), float(mpmath.log10(norm))


def plain(problem: AttentionProblem, W: Tensor) -> Tensor:
    """The direction by autograd of the loss, in the same float64; NaN where it is 0."""
    W = W.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.loss(W), W)
    return gradient / gradient.norm()


def table() -> list[tuple[int, float, float, float]]:
    """(||W||, log10 of the gradient's size, error of plain, error of ours) for each norm."""
    problem = random_problem(1, n=4, T=5, d=6)
    unit = random_weights(problem, 1.0)[0]
    unit, problem = unit / unit.norm(), problem.trial(0)
    rows = []
    for norm in NORMS:
        W = norm * unit
        exact, size = truth(problem, W)
        ours = float((problem.gradient(W).direction - exact).norm())
        rows.append((norm, size, float((plain(problem, W) - exact).norm()), ours))
    return rows


def draw(rows: list[tuple[int, float, float, float]], out: Path) -> None:
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "gradient"  # the same file for the same data
    norms, _, plains, ours = zip(*rows, strict=True)
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axes.loglog(norms, plains, "o-", color="tab:red", label="plain formula")
    axes.loglog(norms, ours, "s-", color="tab:blue", label="problem.gradient")
    axes.set(xlabel="||W||", ylabel="error of the direction", ylim=(1e-17, 10))
    axes.legend(loc="center right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="draw the figure to this file")
    out = parser.parse_args().out
    rows = table()
    print("  ||W||   size of gradient   plain formula   problem.gradient")
    for norm, size, error, ours in rows:
        plainly = f"{error:.1e}" if math.isfinite(error) else "underflow"
        print(f"{norm:7d}   {'1e' + format(size, '.0f'):>16}   {plainly:>13}   {ours:16.1e}")
    if out is not None:
        draw(rows, out)
        print(f"figure: {out}")


if __name__ == "__main__":
    main()
