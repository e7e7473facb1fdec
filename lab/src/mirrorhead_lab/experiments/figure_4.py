r"""Figure 4: the divergence of every lq path to the lp-AttSVM of every p, in two protocols.

The paths are lq-AttGD with normalised gradients on 100 random problems (appendix H.2). What
they are compared with depends on the tokens, and those on the start:

    fair       all paths of a trial start at the same W(0); each is compared with the
               lp-AttSVM of the tokens that it selected itself
    authors'   as published: their generator and seeds; each path has a W(0) of its own, and the lq
               path is compared with the lp-AttSVM of the tokens that the lp path selected, which
               may be other ones
    zero       as the fair one, from W(0) = 0: the text says "near the origin", the code draws
               W(0) with standard deviation 1

The divergence is D(W_mm / ||W_mm||, W(k) / ||W(k)||) in the potential of the path's own exponent q,
as in the authors' code: one yardstick for all lines of a panel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch

from mirrorhead.margin import attention_svm
from mirrorhead.paths.descent import Path, descend, direction_divergence
from mirrorhead.problem import AttentionProblem
from mirrorhead.synthetic import authors_problem, random_problem, random_weights
from mirrorhead.tokens import globally_optimal_tokens, locally_optimal
from mirrorhead_lab.experiments.convergence import PathSettings, joined, lengths_needed
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, legend_below, mean_band, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed

FAIR, AUTHORS, ZERO = range(3)
ELSEWHERE = 1_000_000  # seeds of the authors' starts: apart from all others, and for each path


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """p: also of the problems; scale: the standard deviation of W(0); tol: the certified gap of
    the max-margin solutions; patience: a fair path whose tokens are not locally optimal may
    become this many times longer."""

    lr: float = 0.1
    scale: float = 1.0
    tol: float = 1e-12
    patience: int = 32


def run(settings: Settings) -> dict[str, torch.Tensor]:
    """For each path q "fair q" and "authors q", (trials, SVMs, records), and "zero q",
    (trials, records); limits: the divergence of each path's own solution to those of the other
    p for the same tokens, fair, (trials, paths, SVMs); tokens (trials, protocols, paths, n);
    local and global: whether those are optimal, (trials, protocols, paths); needed: how many
    times as long a fair path takes to locally optimal ones, 0 if too long, (trials, paths)."""
    problem = random_problem(settings.trials, first=settings.first)
    authors = authors_problem(settings.trials, first=settings.first + 1)
    others = authors.tensors
    stacked: Any = {k: torch.stack([x, others[k], x]) for k, x in problem.tensors.items()}
    thrice = AttentionProblem(**stacked)
    shared = random_weights(problem, settings.scale, settings.first)
    paths = []
    for k, (q, steps) in enumerate(zip(settings.p, settings.steps, strict=True)):
        own = random_weights(problem, settings.scale, settings.first + (k + 1) * ELSEWHERE)
        init = torch.stack([shared, own, torch.zeros_like(own)])
        paths.append(descend(thrice, q, steps, settings.lr, init=init, progress=False))
    # The lp-AttSVM of the tokens of each path, in each protocol: (3, trials, d, d).
    solved = {
        (path.p, p): attention_svm(thrice.X, thrice.z, path.tokens, p, settings.tol).W
        for path in paths
        for p in settings.p
    }

    def divergence(path: Path, p: float, tokens_of: float, protocol: int) -> torch.Tensor:
        target = solved[tokens_of, p][protocol]
        return direction_divergence(path.p, target, path.W[:, protocol], 2).T  # (trials, records)

    best, rows = globally_optimal_tokens(thrice), []
    for path in paths:
        q = path.p
        alone = replace(path, problem=problem, W=path.W[:, FAIR], tokens=path.tokens[FAIR])
        limits = [direction_divergence(q, solved[q, p], solved[q, q], 2) for p in settings.p]
        row = {
            "fair": torch.stack([divergence(path, p, q, FAIR) for p in settings.p], 1),
            "authors": torch.stack([divergence(path, p, p, AUTHORS) for p in settings.p], 1),
            "zero": divergence(path, q, q, ZERO),
            "limits": torch.stack(limits, -1)[FAIR],
            "tokens": path.tokens.transpose(0, 1),
            "local": locally_optimal(thrice, path.tokens, q).optimal.T,
            "needed": lengths_needed(alone, settings.patience),
            "global": (path.tokens == best).all(-1).T,
        }
        rows.append(row)
    found = joined(settings.p, rows, "fair", "authors", "zero")
    return found | {name: found[name].transpose(1, 2) for name in ("tokens", "local", "global")}


def verdict(result: Result[Settings]) -> Verdict:
    """Does each path go to its own solution, and so to no other?

    To its own: that one is the nearest, and its mean divergence falls to a half or less over
    the last nine tenths of the steps. To no other: the divergence to another solution tends to
    that between the two solutions, which is positive, and stays above half of it.
    """
    settings = result.settings
    same = np.eye(len(settings.p), dtype=bool)
    # Mean divergences, (paths, SVMs): at the end, and at a tenth of the steps.
    fair, authors = (
        np.stack([divergence[..., -1].mean(0) for divergence in result.each(name)])
        for name in ("fair", "authors")
    )
    tenths = zip(result.each("fair"), settings.tenths, strict=True)
    early = np.stack([divergence[..., at].mean(0) for divergence, at in tenths])
    fall = (fair / early)[same]
    limits = result["limits"].mean(0)[~same]
    own = bool((fair.argmin(1) == np.arange(len(fair))).all() and (fall <= 0.5).all())
    holds = own and bool((limits > 0).all() and (fair[~same] >= limits / 2).all())
    zero = [divergence[:, -1].mean() for divergence in result.each("zero")]
    least, most = (f(fair[~same] / limits) for f in (np.min, np.max))
    ratio = authors[~same] / fair[~same]
    pairs = zip(settings.p, fair, strict=True)
    rows = "; ".join(f"path {q:g}: {listed(row, '.1e')}" for q, row in pairs)
    local, best = (result[name].sum(0) for name in ("local", "global"))  # (protocols, paths)
    later, longest = (result["needed"] > 0).sum(0), result["needed"].max()
    spread = [
        (part[:, k, at].std(), part[:, k, -1].std())
        for k, (part, at) in enumerate(zip(result.each("authors"), settings.tenths, strict=True))
    ]
    shrinks = ", ".join(f"{early:.1e} to {end:.1e}" for early, end in spread)
    measured = (
        f"mean D to the SVMs of p = {listed(settings.p, 'g')}, fair: {rows}; to other SVMs that is "
        f"{least:.2f} to {most:.2f} times the divergence of the solutions. From W(0) = 0, to its "
        f"own: {listed(zero, '.1e')}. Locally optimal tokens in {listed(local[FAIR], 'g')} of "
        f"{settings.trials} trials (in at most {longest} times the steps {listed(later, 'g')}), "
        f"globally in {listed(best[FAIR], 'g')} (from zero {listed(best[ZERO], 'g')}). As "
        f"published, the standard deviation for p = q goes from {shrinks} over the last nine "
        f"tenths of the steps"
    )
    remark = (
        f"The authors' off-diagonals are {ratio.min():.1f} to {ratio.max():.1f} times the fair "
        f"ones: with a start of its own, a path selects other tokens than another in "
        f"{_differ(result, AUTHORS):.0%} of the pairs (fair: {_differ(result, FAIR):.0%}), and "
        f"different problems are compared."
    )
    return judge(measured, holds, remark if ratio.max() > 1.5 else "")


def draw(result: Result[Settings]) -> Figure:
    """A panel for each path: mean divergence to each solution. Above as published, with the
    standard deviation; below fair, with the middle 80 %."""
    settings = result.settings
    figure, axes = panels(len(settings.p), rows=2, height=5.6, sharex="col", sharey="row")
    for column, (q, x) in enumerate(zip(settings.p, settings.records, strict=True)):
        above, below = axes[:, column]
        authors, fair = result[f"authors {q:g}"], result[f"fair {q:g}"]
        for k, p in enumerate(settings.p):
            line = {"color": f"C{k}", "label": f"SVM of p = {p:g}"}
            middle, spread = authors[:, k].mean(0), authors[:, k].std(0)
            above.plot(x, middle, **line)
            low, high = (middle - spread).clip(0), middle + spread
            above.fill_between(x, low, high, color=f"C{k}", alpha=0.15, linewidth=0)
            mean_band(below, x, fair[:, k], **line)
        above.set(title=f"Path of p = {q:g}")
        below.set(xscale="log", yscale="log", xlabel="step")
        below.set_xlim(left=min(10, x[-1] / 10))
    axes[0, 0].set_ylabel("as published: divergence")
    axes[1, 0].set_ylabel("fair: divergence")
    legend_below(figure, axes[1, 0], columns=3)
    return figure


def _differ(result: Result[Settings], protocol: int) -> float:
    """How often two paths of a trial select different tokens."""
    tokens = result["tokens"][:, protocol]  # (trials, paths, n)
    pairs = combinations(range(tokens.shape[1]), 2)
    return float(np.mean([(tokens[:, a] != tokens[:, b]).any(-1) for a, b in pairs]))


EXPERIMENT = Experiment(
    group="The paper's figures",
    title="Figure 4: each path tends to its own max-margin solution",
    claim="Mirror descent in the $q$-norm turns the attention weights to the direction that "
    "separates the selected tokens with the largest margin in the same norm, $p = q$, and to that "
    "of no other $p$.",
    equation=r"D_{\psi_q}\!\left( \frac{W^{(p)}_{\mathrm{mm}}}{\lVert W^{(p)}_{\mathrm{mm}} "
    r"\rVert_q},\, \frac{W(k)}{\lVert W(k) \rVert_q} \right) \to 0 \quad \text{only for } p = q",
    quick=Settings(trials=40),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    extent=("steps",),
)
