"""Figure 5: two entries of W along a path, against the direction of the max-margin solution.

The figure shows one trial; the verdict is about all of them. The entries are the two largest of
the l2-AttSVM for the tokens that the l2 path selects, the same for every p. (The authors' script
draws seed 1 from W(0) = 0, entries (1, 2) and (3, 4).)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mirrorhead import attention_svm, descend
from mirrorhead.paths.descent import recorded_steps
from mirrorhead.synthetic import random_problem, random_weights
from mirrorhead_lab.experiments.convergence import PathSettings
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, panels
from mirrorhead_lab.verdicts import Verdict, judge, of_each


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """scale: the standard deviation of W(0); tol: the certified gap of the solutions."""

    lr: float = 0.1
    scale: float = 1.0
    tol: float = 1e-12


def run(settings: Settings) -> dict[str, Tensor]:
    """For each p "path p", the two entries from step 0 on, (trials, records, 2), and "ray p",
    those of the solution, (trials, 2); entries: which they are, row by row, (trials, 2)."""
    problem = random_problem(settings.trials, first=settings.first)
    init = random_weights(problem, settings.scale, settings.first)
    paths, solutions = [], []
    for p, steps in zip(settings.p, settings.steps, strict=True):
        record = sorted(recorded_steps(steps) | {0})
        path = descend(problem, p, steps, settings.lr, init=init, record=record, progress=False)
        paths.append(path)
        solutions.append(attention_svm(problem.X, problem.z, path.tokens, p, settings.tol).W)
    entries = solutions[settings.p.index(2.0)].flatten(-2).abs().topk(2).indices  # (trials, 2)
    arrays = {"entries": entries}
    for path, W in zip(paths, solutions, strict=True):
        at = entries.expand(len(path.W), *entries.shape)
        arrays[f"path {path.p:g}"] = path.W.flatten(-2).gather(-1, at).transpose(0, 1)
        arrays[f"ray {path.p:g}"] = W.flatten(-2).gather(-1, entries)
    return arrays


def verdict(result: Result[Settings]) -> Verdict:
    """The angle between the two entries of W and those of the solution, at the start and at the
    end: the claim holds if it ends below 5 degrees in the median and below 15 in nine of ten."""
    angles = []  # each (trials, records), in degrees
    for pair in zip(result.each("path"), result.each("ray"), strict=True):
        path, ray = (entries[..., 0] + 1j * entries[..., 1] for entries in pair)
        angles.append(np.abs(np.degrees(np.angle(path * ray.conj()[:, None]))))
    start, end, most = (
        np.array([np.quantile(angle[:, k], share) for angle in angles])
        for k, share in ((0, 0.5), (-1, 0.5), (-1, 0.9))
    )
    words = [
        f"{a:.0f} to {b:.2g} degrees (nine of ten below {c:.2g})"
        for a, b, c in zip(start, end, most, strict=True)
    ]
    return judge(
        f"median angle to the solution, from start to end: {of_each(result.settings.p, words)}",
        bool((end < 5).all() and (most < 15).all()),
    )


def draw(result: Result[Settings]) -> Figure:
    """The first trial: one panel for each p, with the path and the ray of the solution."""
    exponents = result.settings.p
    figure, axes = panels(len(exponents))
    size = random_problem(1).X.shape[-1]
    names = [f"W[{k // size + 1}, {k % size + 1}]" for k in result["entries"][0].tolist()]
    lines = zip(axes, exponents, result.each("path"), result.each("ray"), strict=True)
    for axis, p, (path, *_), (ray, *_) in lines:
        far = np.abs(path).max() / np.abs(ray).max()
        axis.plot(*zip((0, 0), far * ray, strict=True), "--", color="C1", label="lp-AttSVM")
        axis.plot(*path.T, color="C0", label="path")
        axis.plot(*path[0], "o", color="C0", label="start")
        axis.set(xlabel=names[0], title=f"p = {p:g}")
        axis.set_aspect("equal", adjustable="datalim")
    axes[0].set_ylabel(names[1])
    axes[0].legend()
    return figure


EXPERIMENT = Experiment(
    group="The paper's figures",
    title="Figure 5: two entries of W along the path",
    claim="Any two entries of the attention weights move, in the end, along the straight line "
    "that the max-margin solution has in them.",
    equation=r"\frac{W_{ab}(k)}{W_{cd}(k)} \to \frac{W_{\mathrm{mm},ab}}{W_{\mathrm{mm},cd}}",
    quick=Settings(trials=20),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    extent=("steps",),
)
