"""Muon on one block of weights and Signum on the other: the margin of the hybrid norm.

The classes are scored by A x + B z, with the hybrid norm max(||A||_spectral, ||B||_max). No solver
of the library has this norm, so the largest margin is computed here: it is the value of the game

    max over (A, B) of norm 1,  min over lambda in the simplex,   <lambda, constraints of (A, B)>,

which extragradient steps approach from both sides. The gap of the two sides is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrorhead import (
    Gradient,
    LinearProblem,
    PNorm,
    Schatten,
    SteepestDescent,
    follow,
    margin_profile,
)
from mirrorhead.paths.descent import recorded_steps
from mirrorhead_lab.experiments.bias_optimizers import norms_named
from mirrorhead_lab.experiments.bias_problems import linear
from mirrorhead_lab.experiments.bias_runs import heat_map
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import Figure
from mirrorhead_lab.verdicts import Verdict, judge

SPECTRAL, MAX = Schatten(float("inf")), PNorm(float("inf"))
DIMS = (-2, -1)
STEP = 1.0  # of the game


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """steps, lr: of the optimizer, with rates lr / sqrt(1 + k/100); game: extragradient steps;
    norms: by name, of both blocks as one matrix."""

    steps: int = 10_000
    lr: float = 0.1
    game: int = 20_000
    norms: tuple[str, ...] = ("l1", "l2", "l3", "linf", "nuclear", "spectral")

    @property
    def records(self) -> list[int]:
        """The steps at which shares are measured."""
        return [k for k in sorted(recorded_steps(self.steps, 6)) if k >= 10]


class Blocks:
    """A linear problem whose weights are two blocks of columns, for `follow`."""

    def __init__(self, problem: LinearProblem) -> None:
        self.problem, self.cut = problem, problem.features.shape[-1] // 2
        self.trials, self.samples = problem.trials, problem.samples
        self.tensors = problem.tensors

    def start(self) -> dict[str, Tensor]:
        return self.split(self.problem.start()["W"])

    def part(self, samples: list[int]) -> Blocks:
        return Blocks(self.problem.part(samples))

    def gradients(self, weights: dict[str, Tensor]) -> dict[str, Gradient]:
        G = self.problem.gradients({"W": self.joined(weights)})["W"]
        return {name: Gradient(x, G.log_scale, 2) for name, x in self.split(G.mantissa).items()}

    def log_loss(self, weights: dict[str, Tensor]) -> Tensor:
        """The logarithm of the training loss."""
        return self.problem.log_loss({"W": self.joined(weights)})

    def split(self, W: Tensor) -> dict[str, Tensor]:
        return {"A": W[..., : self.cut], "B": W[..., self.cut :]}

    @staticmethod
    def joined(weights: dict[str, Tensor]) -> Tensor:
        return torch.cat([weights["A"], weights["B"]], -1)


def optimizers() -> dict[str, Any]:
    """Muon and Signum on both blocks alone, and one of each; parameters come block by block."""

    def hybrid(params: list[Any]) -> SteepestDescent:
        half = len(params) // 2
        groups = [
            {"params": params[:half], "geometry": SPECTRAL},
            {"params": params[half:], "geometry": MAX},
        ]
        return SteepestDescent(groups, 0.1, SPECTRAL, momentum=0.9)

    return {
        "Muon and Signum": hybrid,
        "Muon": lambda w: SteepestDescent(w, 0.1, SPECTRAL, momentum=0.9),
        "Signum": lambda w: SteepestDescent(w, 0.1, MAX, momentum=0.9),
    }


def run(settings: Settings) -> dict[str, Tensor]:
    """shares: of the hybrid norm and of the others, (trials, optimizers, records, 1 + norms); gap:
    of the hybrid norm's largest margin, relatively, (trials,)."""
    problem, _ = linear(settings.trials, settings.first)
    blocks = Blocks(problem)
    low, high = largest_margin(blocks, settings.game)
    shares = []
    for make in optimizers().values():
        path = follow(
            blocks, make, settings.steps, schedule=lambda k: (1 + k / 100) ** -0.5,
            record=settings.records, progress=False,
        )  # fmt: skip
        W = blocks.joined(path.weights)
        own = _margin(problem, W) / hybrid_norm(path.weights) / low
        labels = problem.labels.long()
        profile = margin_profile(
            W, problem.features, labels=labels, norms=norms_named(settings.norms)
        )
        shares.append(torch.cat([own.unsqueeze(-1), profile.shares], -1).transpose(0, 1))
    return {"shares": torch.stack(shares, 1), "gap": high / low - 1}


def hybrid_norm(weights: dict[str, Tensor]) -> Tensor:
    """max(||A||_spectral, ||B||_max)."""
    return torch.maximum(SPECTRAL.norm(weights["A"], DIMS), MAX.norm(weights["B"], DIMS))


def _margin(problem: LinearProblem, W: Tensor) -> Tensor:
    return _rest(problem, W).amin((-2, -1))


def _rest(problem: LinearProblem, W: Tensor) -> Tensor:
    """The logit of the true class less each other one, inf at the true one, (..., n, classes)."""
    logits = problem.features @ W.mT
    place = problem.labels.long().unsqueeze(-1).expand(*logits.shape[:-1], 1)
    return (logits.gather(-1, place) - logits).scatter(-1, place, torch.inf)


def largest_margin(blocks: Blocks, steps: int) -> tuple[Tensor, Tensor]:
    """Return the margin of feasible weights of hybrid norm 1, and an upper bound, (trials,)."""
    problem = blocks.problem
    W = problem.start()["W"]
    place = problem.labels.long().unsqueeze(-1)
    one = torch.nn.functional.one_hot(place.squeeze(-1), W.shape[-2]).to(W)
    weights = (1 - one) / (1 - one).sum((-2, -1), keepdim=True)  # lambda
    mean_W, mean_lam = torch.zeros_like(W), torch.zeros_like(weights)

    def pulled(lam: Tensor) -> Tensor:  # sum lambda (e_true - e_k) x'
        return (one * lam.sum(-1, keepdim=True) - lam).mT @ problem.features

    def projected(W: Tensor) -> Tensor:
        parts = blocks.split(W)
        left, s, right = torch.linalg.svd(parts["A"], full_matrices=False)
        A = (left * s.clamp_max(1).unsqueeze(-2)) @ right
        return torch.cat([A, parts["B"].clamp(-1, 1)], -1)

    def moved(W: Tensor, lam: Tensor, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        values = _rest(problem, at[0])
        new = lam.clamp_min(1e-300).log() - STEP * values
        new = (new - new.logsumexp((-2, -1), keepdim=True)).exp()
        return projected(W + STEP * pulled(at[1])), new

    for _ in range(steps):
        middle = moved(W, weights, (W, weights))
        W, weights = moved(W, weights, middle)
        mean_W, mean_lam = mean_W + middle[0], mean_lam + middle[1]
    found = [(W, weights), (mean_W / steps, mean_lam / steps)]
    lows = [_margin(problem, one) / hybrid_norm(blocks.split(one)) for one, _ in found]
    highs = [
        Schatten(1).norm(parts["A"], DIMS) + PNorm(1).norm(parts["B"], DIMS)
        for parts in (blocks.split(pulled(lam)) for _, lam in found)
    ]
    return torch.maximum(*lows), torch.minimum(*highs)


def verdict(result: Result[Settings]) -> Verdict:
    """The claim holds if the hybrid norm has the largest share of all norms in nine of ten trials
    of "Muon and Signum", and does not if another norm has; the gap of the game is in the remark."""
    shares = np.nan_to_num(result["shares"][:, :, -1], nan=-np.inf)
    own = (shares[:, 0].argmax(-1) == 0).mean()
    names = ("hybrid", *result.settings.norms)
    words = [
        f"{name} {', '.join(f'{x:.3f} of {norm}' for x, norm in zip(row, names, strict=True))}"
        for name, row in zip(optimizers(), np.median(shares, 0), strict=True)
    ]
    measured = f"median shares: {'; '.join(words)}; hybrid is the best norm in {own:.0%}"
    claimed = True if own >= 0.9 else False if own <= 0.1 else None
    gap = result["gap"].max()
    return judge(measured, claimed, f"The largest hybrid margin is known to {gap:.1e}.")


def draw(result: Result[Settings]) -> Figure:
    """The heat map, and the share of the hybrid norm against steps."""
    from matplotlib.figure import Figure as NewFigure

    settings = result.settings
    figure = NewFigure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=(1.6, 3))
    names = list(optimizers())
    medians = np.nanmedian(result["shares"], 0)  # (optimizers, records, norms)
    heat_map(axes[0], medians[:, -1], names, ("hybrid", *settings.norms))
    for name, curve in zip(names, medians[..., 0], strict=True):
        axes[1].plot(settings.records, curve, label=name)
    axes[1].set(xscale="log", xlabel="step", ylabel="share of the hybrid margin")
    axes[1].legend()
    return figure


EXPERIMENT = Experiment(
    group="Bias of optimizers",
    title="Muon and Signum together: the hybrid norm",
    claim="Muon on one block of weights and Signum on the other maximise the margin in the larger "
    "of the blocks' norms (arXiv 2602.16340).",
    equation=r"\max(\lVert A \rVert_{S_\infty}, \lVert B \rVert_\infty)",
    quick=Settings(trials=20, steps=500, game=1000),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    may_be_nan=("shares",),
    extent=("steps",),
    chunk=50,
)
