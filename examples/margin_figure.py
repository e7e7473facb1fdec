"""The margin in two dimensions, for docs/margin.md: python examples/margin_figure.py [out.svg]."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import mirrorhead as mh

ROWS = torch.tensor(
    [[0.5, 2.6], [2.2, 1.2], [3.1, 0.9], [1.4, 2.5], [2.5, 1.9], [3.2, 2.2]], dtype=torch.float64
)


def draw(axes: Axes, p: float) -> None:
    solution = mh.svm(ROWS, torch.ones(len(ROWS)), p, tol=1e-12)
    v, weights = solution.v.numpy(), solution.dual.numpy()
    margin = 1 / float(solution.norm)
    q = p / (p - 1)
    angle = np.linspace(0, 2 * np.pi, 721)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    ball = margin * circle / (np.abs(circle) ** q).sum(0) ** (1 / q)
    line = np.array([-3.2, 4.5])
    nearest = weights @ ROWS.numpy() / weights.sum()
    support = solution.support.numpy()
    axes.fill(*ball, color="tab:blue", alpha=0.25, lw=0)
    axes.plot(line, (1 - v[0] * line) / v[1], color="tab:blue", lw=1.5)
    axes.plot(*ROWS.numpy().T, "o", color="0.3", ms=4)
    axes.plot(*ROWS.numpy()[support].T, "o", mfc="none", mec="tab:red", ms=10, mew=1.5)
    axes.plot(*nearest, "D", color="tab:red", ms=5)
    axes.plot(0, 0, "+", color="0.3")
    axes.set(xlim=(-3.2, 3.9), ylim=(-3.2, 3.3), aspect="equal", xticks=[], yticks=[])
    axes.set_title(f"p = {p:g}, margin {margin:.3f}", fontsize=10)


def main(out: Path) -> None:
    mpl.rcParams["svg.hashsalt"] = "margin"  # the same file for the same data
    figure, panels = plt.subplots(1, 3, figsize=(9, 3.1), layout="constrained")
    for axes, p in zip(panels, (1.1, 2.0, 10.0), strict=True):
        draw(axes, p)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "docs" / "images" / "margin.svg"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
