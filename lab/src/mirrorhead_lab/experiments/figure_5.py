"""Figure 5: two entries of W along a path, against the direction of the max-margin solution.

The figure shows one trial; the verdict is about all of them, drawn in two ways:

    authors'   their generator, whose seed 1 is the figure's, from W(0) = 0, and the entries (1, 2)
               and (3, 4) of W
    ours       our problems from normal weights, and the two largest entries of the l2-AttSVM for
               the tokens that the l2 path selects, the same for every p
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import AttentionProblem, attention_svm, descend
from mirrorhead.paths.descent import recorded_steps
from mirrorhead.synthetic import authors_problem, random_problem, random_weights
from mirrorhead_lab.experiments.convergence import PathSettings
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed, of_each

SIZE = 10  # d
AUTHORS_ENTRIES = [1, 2 * SIZE + 3]  # W[1, 2] and W[3, 4], row by row


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """scale: the standard deviation of W(0); tol: the certified gap of the solutions."""

    lr: float = 0.1
    scale: float = 1.0
    tol: float = 1e-12


def run(settings: Settings) -> dict[str, Tensor]:
    """For each p "path p", the two entries from step 0 on, (trials, records, 2), and "ray p",
    those of the solution, (trials, 2); the same of the authors' trials as "authors path p" and
    "authors ray p"; entries: which ours are, row by row, (trials, 2)."""
    problem = random_problem(settings.trials, first=settings.first)
    authors = authors_problem(settings.trials, first=settings.first + 1)
    init = random_weights(problem, settings.scale, settings.first)
    fixed = torch.tensor(AUTHORS_ENTRIES).expand(settings.trials, 2)
    ours = _paths(settings, problem, init)
    theirs = _paths(settings, authors, torch.zeros_like(init))
    largest = ours[settings.p.index(2.0)][1].flatten(-2).abs().topk(2).indices  # (trials, 2)
    arrays = {"entries": largest}
    for name, found, entries in (("", ours, largest), ("authors ", theirs, fixed)):
        for p, (path, W) in zip(settings.p, found, strict=True):
            at = entries.expand(len(path), *entries.shape)
            arrays[f"{name}path {p:g}"] = path.flatten(-2).gather(-1, at).transpose(0, 1)
            arrays[f"{name}ray {p:g}"] = W.flatten(-2).gather(-1, entries)
    return arrays


def _paths(
    settings: Settings, problem: AttentionProblem, init: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """For each p the recorded W, (records, trials, d, d), and the solution of the path's tokens."""
    found = []
    for p, steps in zip(settings.p, settings.steps, strict=True):
        record = sorted(recorded_steps(steps) | {0})
        path = descend(problem, p, steps, settings.lr, init=init, record=record, progress=False)
        solution = attention_svm(problem.X, problem.z, path.tokens, p, settings.tol)
        found.append((path.W, solution.W))
    return found


def verdict(result: Result[Settings]) -> Verdict:
    """The angle between the two entries of W and those of the solution, at the start and at the
    end: the claim holds if ours end below 5 degrees in the median and below 15 in nine of ten, and
    the authors' below 5 in the median."""
    angles, authors = (_angles(result, name) for name in ("", "authors "))
    start, end, most = (
        np.array([np.quantile(angle[:, k], share) for angle in angles])
        for k, share in ((0, 0.5), (-1, 0.5), (-1, 0.9))
    )
    words = [
        f"{a:.0f} to {b:.2g} degrees (nine of ten below {c:.2g})"
        for a, b, c in zip(start, end, most, strict=True)
    ]
    theirs = [np.median(angle[:, -1]) for angle in authors]
    seed = [angle[0, -1] for angle in authors]
    return judge(
        f"median angle to the solution, from start to end: {of_each(result.settings.p, words)}. "
        f"From zero, in the authors' entries: {listed(theirs)} degrees at the end (seed "
        f"{result.settings.first + 1}: {listed(seed)})",
        bool((end < 5).all() and (most < 15).all() and max(theirs) < 5),
    )


def _angles(result: Result[Settings], name: str) -> list[np.ndarray]:
    """In degrees, for each p (trials, records)."""
    angles = []
    for pair in zip(result.each(f"{name}path"), result.each(f"{name}ray"), strict=True):
        path, ray = (entries[..., 0] + 1j * entries[..., 1] for entries in pair)
        angles.append(np.abs(np.degrees(np.angle(path * ray.conj()[:, None]))))
    return angles


def draw(result: Result[Settings]) -> Figure:
    """The first trial, above the authors' and below ours: a panel for each p, with the path and
    the ray of the solution."""
    exponents = result.settings.p
    figure, axes = panels(len(exponents), rows=2, height=5.6)
    kinds = (("authors ", AUTHORS_ENTRIES), ("", result["entries"][0].tolist()))
    for row, (name, entries) in zip(axes, kinds, strict=True):
        labels = [f"W[{k // SIZE + 1}, {k % SIZE + 1}]" for k in entries]
        paths, rays = (result.each(f"{name}{part}") for part in ("path", "ray"))
        for axis, p, (path, *_), (ray, *_) in zip(row, exponents, paths, rays, strict=True):
            far = np.abs(path).max() / np.abs(ray).max()
            axis.plot(*zip((0, 0), far * ray, strict=True), "--", color="C1", label="lp-AttSVM")
            axis.plot(*path.T, color="C0", label="path")
            axis.plot(*path[0], "o", color="C0", label="start")
            axis.set(xlabel=labels[0], title=f"p = {p:g}")
            axis.set_aspect("equal", adjustable="datalim")
        row[0].set_ylabel(f"{'as published' if name else 'ours'}: {labels[1]}")
    axes[0, 0].legend(fontsize="small")
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
