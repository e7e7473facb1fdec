r"""The cones of Theorems 2 to 4: how wide they are, and who lies inside.

The theorems speak of paths that start in S_mu(W_mm) with mu <= mu_0 of (9), and with a norm of at
least some R. Lemma 9 says what a cone of that width is for: every W in it, scaled to ||W_mm||,
separates the tokens almost as W_mm does,

    (x_alpha - x_t)' W z      within delta/2 of 1 for support tokens t,       (13c)
    (x_alpha - x_tau)' W z    at least 1 + 3 delta/2 for the others.          (13b)

    (x_t - x_tau)' W z        at least 3 delta/2.                             (13a)

Points on the cone's boundary are found by going from W_mm until the divergence is mu_0, along
the directions that move one of these margins fastest, up and down. The same search finds where
the lemma really ends along them.

R is at least R_delta, from which on the proof of Lemma 10 shows that the gradient points inwards,
and at least the R_mu of Lemma 17, which keeps paths inside (`ConeConstants`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import (
    AttentionProblem,
    ConeConstants,
    Path,
    PNorm,
    cone_constants,
    descend,
)
from mirrorhead.paths.descent import direction_divergence
from mirrorhead.synthetic import random_problem, random_weights
from mirrorhead_lab.experiments.convergence import PathSettings, joined
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import COLOURS, Figure, legend_below, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """The paths of Figure 4, whose ends are looked at; scale: the standard deviation of W(0)."""

    lr: float = 0.1
    scale: float = 1.0


def run(settings: Settings) -> dict[str, Tensor]:
    """All (trials, exponents): delta, A and mu_0 of the tokens that the path selected; start and
    end, the divergences of W(0) and of the last W; length: the norm of the last W over ||W_mm||;
    radius and outer: R_delta and R_mu over ||W_mm||, NaN where the tokens are not locally optimal;
    slack: how far
    (13) is from violated on the boundary, over delta; reach: the least divergence at which (13)
    was seen to fail."""
    problem = random_problem(settings.trials, first=settings.first)
    init = random_weights(problem, settings.scale, settings.first)
    paths = (
        descend(problem, p, steps, settings.lr, init=init, record=[0, steps], progress=False)
        for p, steps in zip(settings.p, settings.steps, strict=True)
    )
    return joined(settings.p, map(_measure, paths))


def verdict(result: Result[Settings]) -> Verdict:
    """The lemma holds if (13) does on the boundary; the remark counts who lies inside."""
    settings = result.settings
    mu_0, trials = result["mu_0"], settings.trials
    inside = [(result[name] <= mu_0).sum(0) for name in ("start", "end")]
    middle = {name: _medians(result[name]) for name in result.arrays}
    rare = max(part.max() for part in inside) <= 0.05 * trials
    least = (
        f" A cone also has a least norm: Lemma 10 needs a median of "
        f"{listed(middle['radius'], '.1e')} ||W_mm||, Lemma 17 {listed(middle['outer'], '.1e')} "
        f"||W_mm||, and the paths end at {listed(middle['length'], '.0f')} ||W_mm||."
        if np.isfinite(middle["radius"]).all()
        else ""
    )
    return judge(
        f"p = {listed(settings.p, 'g')}: medians of delta {listed(middle['delta'])}, of mu_0 "
        f"{listed(middle['mu_0'], '.0e')}, of the divergence at which (13) first fails "
        f"{listed(middle['reach'], '.0e')}; it fails on the boundary of "
        f"{(result['slack'] < 0).sum()} of {mu_0.size} cones",
        bool((result["slack"] >= 0).all()),
        f"The theorems say nothing about the paths of Figure 4, which start outside the cones. "
        f"Of the {trials} paths for each p {listed(inside[0], 'd')} start and "
        f"{listed(inside[1], 'd')} end within mu_0; they end at a median D of "
        f"{listed(middle['end'], '.1e')}.{least}" if rare else "",
    )  # fmt: skip


def draw(result: Result[Settings]) -> Figure:
    """Sorted over trials: the radius mu_0, where the lemma ends, where paths end and start."""
    settings = result.settings
    figure, axes = panels(len(settings.p), sharey=True, ylabel="divergence to the solution")
    lines = {
        "mu_0": "radius of the cone",
        "reach": "Lemma 9 fails",
        "end": "path of Figure 4, end",
        "start": "path of Figure 4, start",
    }
    share = (np.arange(settings.trials) + 0.5) / settings.trials
    for k, (axis, p) in enumerate(zip(axes, settings.p, strict=True)):
        for (name, label), colour in zip(lines.items(), COLOURS, strict=False):
            axis.plot(share, np.sort(result[name][:, k]), color=colour, label=label)
        axis.set(yscale="log", xlabel="trials, sorted", title=f"p = {p:g}")
        axis.xaxis.set_major_formatter("{x:.0%}")
    legend_below(figure, axes[0], columns=4)
    return figure


def _medians(values: np.ndarray) -> list[float]:
    """The median over trials for each exponent, of those that have a value."""
    kept = (column[~np.isnan(column)] for column in values.T)
    return [float(np.median(column)) if column.size else np.nan for column in kept]


def _measure(path: Path) -> dict[str, Tensor]:
    cone = cone_constants(path.problem, path.tokens, path.p, tol=1e-12)
    start, end = path.divergence_to(cone.solution)
    lemma = _Lemma(path.problem, path.tokens, cone)
    boundary = lemma.go(lambda W: lemma.divergence(W) <= cone.mu_0)
    edge = lemma.go(lambda W: lemma.slack(W) >= 0)
    return {
        "delta": cone.delta,
        "A": cone.A,
        "mu_0": cone.mu_0,
        "start": start,
        "end": end,
        "length": PNorm(path.p).norm(path.W[-1], (-2, -1)) / cone.solution.norm,
        "radius": cone.R_delta / cone.solution.norm,
        "outer": cone.R_mu() / cone.solution.norm,
        "slack": lemma.slack(boundary).amin(0),
        "reach": lemma.divergence(edge).amin(0),
    }


class _Lemma:
    """Lemma 9 around the solution of each trial, along the directions of its constraints."""

    def __init__(self, problem: AttentionProblem, tokens: Tensor, cone: ConeConstants) -> None:
        X, T = problem.X, problem.X.shape[-2]
        self.problem, self.cone = problem, cone
        self.chosen = tokens.unsqueeze(-1)  # (trials, n, 1)
        self.support = cone.solution.support  # (trials, n, T)
        self.far = ~self.support & (torch.arange(T) != self.chosen)
        # The direction of norm 1 along which <row, W> grows fastest is inverse(row).
        psi = PNorm(cone.solution.p)
        others = (self.chosen + torch.arange(1, T)) % T  # (trials, n, T-1)
        best, rest = (X.take_along_dim(at[..., None], -2) for at in (self.chosen, others))
        rows = (best - rest).unsqueeze(-1) * problem.z[..., None, None, :]
        rows = psi.inverse(rows).flatten(1, 2).transpose(0, 1)  # (n (T-1), trials, d, d)
        rows = rows / psi.norm(rows, (-2, -1))[..., None, None]
        self.directions = torch.cat([rows, -rows])

    def divergence(self, W: Tensor) -> Tensor:
        """D(W_mm, W) of the directions, (directions, trials)."""
        return direction_divergence(self.cone.solution.p, self.cone.solution.W, W, 2)

    def slack(self, W: Tensor) -> Tensor:
        """The least of what (13a) to (13c) leave, over delta, at W scaled to ||W_mm||."""
        solution, delta = self.cone.solution, self.cone.delta[..., None]
        W = W * (solution.norm / PNorm(solution.p).norm(W, (-2, -1)))[..., None, None]
        logits = torch.einsum("knta,...kab,knb->...knt", self.problem.X, W, self.problem.z)
        margin = logits.gather(-1, self.chosen.expand(*logits.shape[:-1], 1)) - logits
        near = margin.where(self.support, 1.0)
        far = margin.where(self.far, torch.inf).amin(-1)
        slacks = [
            delta / 2 - (near - 1).abs().amax(-1),
            far - 1 - 1.5 * delta,
            far - margin.where(self.support, -torch.inf).amax(-1) - 1.5 * delta,
        ]
        return torch.stack(slacks).amin((0, -1)) / self.cone.delta

    def go(self, inside: Callable[[Tensor], Tensor]) -> Tensor:
        """The last point inside along each direction, by bisection: (directions, trials, d, d)."""
        solution = self.cone.solution
        log_low = torch.full((len(self.directions), len(solution.W)), -30.0, dtype=torch.float64)
        log_high = torch.zeros_like(log_low)
        for _ in range(30):
            middle = (log_low + log_high) / 2
            within = inside(self._at(middle))
            log_low, log_high = middle.where(within, log_low), log_high.where(within, middle)
        return self._at(log_low)

    def _at(self, log_t: Tensor) -> Tensor:
        size = self.cone.solution.norm * log_t.exp()
        return self.cone.solution.W + size[..., None, None] * self.directions


EXPERIMENT = Experiment(
    group="The theory",
    title="The cones of Theorems 2 to 4: how wide they are",
    claim=r"Inside the cone of radius $\mu_0$ around the max-margin solution, where Theorems 2 to "
    r"4 start, all weights separate the tokens almost as that solution does (Lemma 9).",
    equation=r"\left| (x_\alpha - x_t)^\top W z - 1 \right| \leq \tfrac{\delta}{2} \;\text{ for "
    r"support tokens } t, \qquad (x_\alpha - x_\tau)^\top W z \geq 1 + \tfrac{3}{2} \delta "
    r"\;\text{ for the others}",
    quick=Settings(trials=10),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=50,
    may_be_nan=("radius", "outer"),
)
