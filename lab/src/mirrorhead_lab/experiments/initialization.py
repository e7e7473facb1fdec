"""Robustness to the start: from where does descent find locally optimal tokens, and how soon?

The theorems ask that W(0) lies in a narrow cone around a locally optimal solution, with a large
norm (`cones` shows how narrow and how large); no start here does. Starts differ in scale and in
distribution, on the problems of Figure 4. A path whose tokens are not locally optimal at the
paper's number of steps is continued, up to `patience` times as long.

The normalised rule moves the dual variable u by lr at each step, so that a start with a large
||u(0)||, such as normal 10, is left behind late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mirrorhead import attention_svm, descend, globally_optimal_tokens
from mirrorhead.synthetic import random_problem, random_weights
from mirrorhead_lab.experiments.convergence import PathSettings, joined, lengths_needed, repeated
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, legend_below, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed, of_each


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """starts: distribution and standard deviation of W(0); patience: how many times as long a
    path may take; tol: the certified gap."""

    starts: tuple[tuple[str, float], ...] = (
        *(("normal", scale) for scale in (0.0, 0.01, 0.1, 1.0, 10.0)),
        *((distribution, 1.0) for distribution in ("uniform", "sparse", "rank-one")),
    )
    patience: int = 256
    lr: float = 0.1
    tol: float = 1e-12


def run(settings: Settings) -> dict[str, torch.Tensor]:
    """All (trials, starts, exponents): divergence to the path's own solution and global, whether
    its tokens are globally optimal, after `steps`; needed: the multiple of `steps` after which its
    tokens were locally optimal (1, 2, 4, ...), 0 if they were not within `patience`."""
    one = random_problem(settings.trials, first=settings.first)
    problem = repeated(one, len(settings.starts))
    draws = [random_weights(one, scale, settings.first, name) for name, scale in settings.starts]
    init, rows = torch.stack(draws), []
    for p, steps in zip(settings.p, settings.steps, strict=True):
        path = descend(problem, p, steps, settings.lr, init=init, record=[steps], progress=False)
        solution = attention_svm(problem.X, problem.z, path.tokens, p, settings.tol)
        row = {
            "divergence": path.divergence_to(solution)[-1],
            "global": (path.tokens == globally_optimal_tokens(problem)).all(-1),
            "needed": lengths_needed(path, settings.patience),
        }
        rows.append({name: value.T for name, value in row.items()})
    return joined(settings.p, rows, dim=-1)


def verdict(result: Result[Settings]) -> Verdict:
    """The claim holds if 98 % of all paths come to locally optimal tokens in the end; the remark
    says when, and what the start changes."""
    settings, needed = result.settings, result["needed"]
    mean, best = (result[name].mean(0) for name in ("divergence", "global"))  # (starts, exponents)
    soon, at_last = ((needed == 1).mean(0), (needed > 0).mean(0))
    far = int(mean.max(1).argmax())
    near = np.delete(mean, far, 0)
    words = [
        f"{low:.1e} to {high:.1e}, from {_name(settings.starts[far])} {alone:.1e}"
        for low, high, alone in zip(near.min(0), near.max(0), mean[far], strict=True)
    ]
    exponents = ", ".join(f"{p:g}" for p in settings.p)
    zero, one = (listed(best[settings.starts.index(("normal", scale))], ".0%") for scale in (0, 1))
    remark = (
        f"Tokens are locally optimal at the paper's length in {soon.mean():.1%} of the paths "
        f"(without {_name(settings.starts[far])} {np.delete(soon, far, 0).mean():.1%}), within "
        f"{settings.patience} times that in {(needed > 0).sum():,} of {needed.size:,}. They are "
        f"globally optimal in {zero} from zero (p = {exponents}), in {one} from normal starts of "
        f"scale 1."
    )
    measured = f"mean D at the paper's length by start, {of_each(settings.p, words)}"
    return judge(measured, bool(at_last.mean() >= 0.98), remark)


def draw(result: Result[Settings]) -> Figure:
    """For each start and p: the divergence, and how many tokens are locally, globally optimal."""
    settings, needed = result.settings, result["needed"]
    figure, axes = panels(2, height=4.2, sharey=True, width_ratios=(1.2, 1))
    places = np.arange(len(settings.starts), dtype=float)
    for k, p in enumerate(settings.p):
        y = places + 0.22 * (k - (len(settings.p) - 1) / 2)
        divergence = result["divergence"][:, :, k]
        low, high = np.quantile(divergence, (0.1, 0.9), axis=0)
        axes[0].hlines(y, low, high, color=f"C{k}", linewidth=1.5, alpha=0.5)
        axes[0].plot(divergence.mean(0), y, "o", color=f"C{k}", label=f"p = {p:g}")
        local, best = (100 * share[:, :, k].mean(0) for share in (needed == 1, result["global"]))
        axes[1].plot(local, y, "o", color=f"C{k}", fillstyle="none")
        axes[1].plot(best, y, "o", color=f"C{k}")
    axes[0].set(xscale="log", xlabel="divergence at the end (mean, middle 80 %)", ylabel="W(0)")
    axes[0].set_yticks(places, [_name(start) for start in settings.starts])
    axes[0].invert_yaxis()
    axes[1].set(xlim=(-4, 104), xlabel="% of trials with optimal tokens")
    axes[1].plot([], [], "ko", fillstyle="none", label="locally optimal")
    axes[1].plot([], [], "ko", label="globally optimal")
    legend_below(figure, axes[0], axes[1], columns=5)
    return figure


def _name(start: tuple[str, float]) -> str:
    distribution, scale = start
    return f"{distribution} {scale:g}" if scale else "zero"


EXPERIMENT = Experiment(
    group="The theory",
    title="Initialisation: from any start to locally optimal tokens",
    claim="Wherever the weights start, their direction goes to the max-margin solution of locally "
    "optimal tokens. (The theorems promise it from inside a cone; the paper's figures show it "
    "from random starts.)",
    equation=r"\frac{W(k)}{\lVert W(k) \rVert_p} \to \frac{W_{\mathrm{mm}}(\alpha)}{\lVert "
    r"W_{\mathrm{mm}}(\alpha) \rVert_p}, \quad \alpha \text{ locally optimal}",
    quick=Settings(trials=8, patience=16),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    extent=("steps", "patience"),
)
