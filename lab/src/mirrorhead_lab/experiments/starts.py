r"""Where to start without knowing a solution: the summary's open question on initialisation.

The theorems start in a cone around a solution, which nobody knows beforehand. Six starts need none:

    zero              W(0) = 0
    normal            of standard deviation .01
    one step          one normalised step of length 1 from zero
    large p           20 normalised steps with p = 6 from zero
    accelerated       100 steps of the accelerated rule from zero
    p = 2 solution    the l2-AttSVM of the tokens that 100 accelerated steps at p = 2 select

on planted problems: W* selects the tokens of the highest score, in samples to train on and in
fresh ones. A start is good if the path then selects locally optimal tokens, settles on them soon,
comes near their certified solution, and selects the right tokens in fresh samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import AttentionProblem, attention_svm, descend, locally_optimal
from mirrorhead.paths.descent import recorded_steps
from mirrorhead.synthetic import random_weights
from mirrorhead_lab.experiments.choose_geometry import planted
from mirrorhead_lab.experiments.convergence import PathSettings, joined, repeated
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, legend_below, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed, of_each

STARTS = ("zero", "normal .01", "one step", "large p", "accelerated", "p = 2 solution")
MEASURES = ("divergence", "local", "accuracy", "settled")


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """n training samples and `fresh` others of T tokens in d dimensions; kind of W*; lr of the
    normalised rule."""

    p: tuple[float, ...] = (1.5, 2.0, 3.0)
    steps: tuple[int, ...] = (1000, 1000, 4000)
    lr: tuple[float, ...] = (0.3, 0.3, 3.0)
    n: int = 12
    T: int = 8
    d: int = 10
    fresh: int = 400
    kind: str = "sparse entries"


def samples(settings: Settings) -> tuple[AttentionProblem, Tensor, Tensor, Tensor]:
    """The problems, and X, z and tokens of the fresh samples, (trials, fresh, ...)."""
    parts = []
    for seed in settings.seeds:
        generator = torch.Generator().manual_seed(seed)
        W, count = planted(settings.kind, settings.d, generator), settings.n + settings.fresh
        shape = (count, settings.T, settings.d)
        X = torch.randn(shape, dtype=torch.float64, generator=generator)
        z = torch.randn(count, settings.d, dtype=torch.float64, generator=generator)
        tokens = (X @ W @ z.unsqueeze(-1)).squeeze(-1).argmax(-1)
        scores = torch.rand(shape[:2], dtype=torch.float64, generator=generator)
        parts.append(
            (X, z, tokens, scores.scatter_add(-1, tokens[:, None], torch.ones(count, 1).double()))
        )
    X, z, tokens, scores = (torch.stack(part) for part in zip(*parts, strict=True))
    n, y = settings.n, torch.ones(settings.trials, settings.n)
    problem = AttentionProblem(X[:, :n], z[:, :n], y, torch.zeros(settings.trials, settings.d))
    return problem.with_scores(scores[:, :n]), X[:, n:], z[:, n:], tokens[:, n:]


def run(settings: Settings) -> dict[str, Tensor]:
    """(trials, exponents, starts): the divergence at the end to the certified solution of the
    path's tokens; local, whether these are locally optimal; accuracy, how often the right tokens
    are selected in fresh samples; settled, the first recorded step from which on the tokens of the
    training samples stay the same."""
    problem, X, z, right = samples(settings)
    many, rows = repeated(problem, len(STARTS)), []
    for p, steps, lr in zip(settings.p, settings.steps, settings.lr, strict=True):
        init = torch.stack(_starts(problem, p, settings.first))
        record = sorted(recorded_steps(steps) | {0})
        path = descend(many, p, steps, lr, init=init, record=record, progress=False)
        found = locally_optimal(many, path.tokens, p, 1e-10)
        chosen = torch.stack([many.select(W) for W in path.W])
        moving = (chosen != path.tokens).any(-1).flip(0).int().cummax(0).values.flip(0).sum(0)
        logits = torch.einsum("knta,skab,knb->sknt", X, path.W[-1], z)
        row = {
            "divergence": path.divergence_to(found.solution)[-1],
            "local": found.optimal,
            "accuracy": (logits.argmax(-1) == right).double().mean(-1),
            "settled": path.steps[moving],  # `moving` leaves out the last record
        }
        rows.append({name: value.T for name, value in row.items()})
    return joined(settings.p, rows)


def _starts(problem: AttentionProblem, p: float, first: int) -> list[Tensor]:
    """W(0) of each of `STARTS`, (trials, d, d)."""

    def after(steps: int, exponent: float, rule: str, lr: float = 0.1) -> Tensor:
        return descend(problem, exponent, steps, lr, rule, record=[steps], progress=False).W[-1]

    euclidean = problem.select(after(100, 2, "accelerated"))
    return [
        torch.zeros(problem.weight_shape, dtype=torch.float64),
        random_weights(problem, 0.01, first),
        after(1, p, "normalized", 1.0),
        after(20, 6, "normalized"),
        after(100, p, "accelerated"),
        attention_svm(problem.X, problem.z, euclidean, 2).W,
    ]


def verdict(result: Result[Settings]) -> Verdict:
    """Whether zero is as good a start as any: as many locally optimal tokens, and an accuracy that
    is at most two points below that of the best other start."""
    settings = result.settings
    D, local, accuracy, settled = (result[name] for name in MEASURES)
    near = np.nanmedian(D, 0)  # (exponents, starts)
    shares, right, soon = local.mean(0), accuracy.mean(0), np.median(settled, 0)
    words = [
        ", ".join(f"{name} {d:.0e}, {a:.1%}" for name, d, a in zip(STARTS, row, acc, strict=True))
        for row, acc in zip(near, right, strict=True)
    ]
    gain = 100 * (right[:, 1:].max(-1) - right[:, 0])
    return judge(
        f"median D to the certified solution, and the right tokens in fresh samples: "
        f"{of_each(settings.p, words)}. Zero loses {listed(gain, '.1f')} points to the best other "
        f"start and has locally optimal tokens in {listed(shares[:, 0], '.0%')} of the trials (all "
        f"others at least {listed(shares[:, 1:].min(-1), '.0%')})",
        bool((gain <= 2).all() and (shares[:, 0] >= shares[:, 1:].max(-1) - 0.05).all()),
        f"Its tokens settle after {listed(soon[:, 0], 'g')} steps, those of the accelerated start "
        f"after {listed(soon[:, 4], 'g')}, those of the p = 2 solution after "
        f"{listed(soon[:, 5], 'g')} (medians).",
    )


def draw(result: Result[Settings]) -> Figure:
    """For each start and p: the divergence at the end, and the accuracy on fresh samples."""
    settings = result.settings
    figure, axes = panels(2, height=3.6, sharey=True)
    places = np.arange(len(STARTS), dtype=float)
    for k, p in enumerate(settings.p):
        y = places + 0.2 * (k - (len(settings.p) - 1) / 2)
        D, accuracy = result["divergence"][:, k], 100 * result["accuracy"][:, k]
        axes[0].plot(np.nanmedian(D, 0), y, "o", color=f"C{k}", label=f"p = {p:g}")
        axes[1].hlines(y, *np.quantile(accuracy, (0.1, 0.9), axis=0), color=f"C{k}", alpha=0.5)
        axes[1].plot(accuracy.mean(0), y, "o", color=f"C{k}")
    axes[0].set_yticks(places, STARTS)
    axes[0].invert_yaxis()
    axes[0].set(xscale="log", xlabel="divergence at the end (median)", ylabel="start")
    axes[1].set(xlabel="% right tokens in fresh samples (mean, middle 80 %)")
    legend_below(figure, axes[0], columns=3)
    return figure


EXPERIMENT = Experiment(
    group="Open questions",
    title="Where to start (open question)",
    claim="A start that needs no solution is as good as any: from zero, descent selects locally "
    "optimal tokens, comes near their max-margin solution, and selects the right tokens in fresh "
    "samples as often as from better informed starts.",
    equation=r"W(0) = 0",
    quick=Settings(trials=10, steps=(500, 500, 1500)),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    may_be_nan=("divergence",),
    extent=("steps",),
)
