r"""Which p: an open question of the paper, answered by cross-validation.

A planted matrix W selects the tokens of n samples. For each p the lp-AttSVM solution of those
samples selects tokens in fresh samples. How often are they the tokens that W selects? And does
`choose_p`, which sees the n samples alone, find the p that is best for W?

Compared are each fixed p; the choice; an oracle, which takes the best p of each trial; and the
exponent with the smallest margin bound ||W||_p max ||(x_sel - x_t) z'||_q, the norm of the solution
times the radius of the data in the dual norm. "descent" is the accuracy of lp-AttGD (the
accelerated rule, from zero) in place of the max-margin solution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mirrorhead.cross_validation import choose_p
from mirrorhead.geometry._powers import dual_exponent, lp_norm
from mirrorhead.margin import attention_svm
from mirrorhead.paths.descent import descend
from mirrorhead.problem import AttentionProblem
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import Figure, legend_below, panels
from mirrorhead_lab.verdicts import Verdict, judge


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """kinds of W; n: numbers of samples; p: exponents; fresh: samples that measure accuracy;
    steps of descent; ends: 1 to measure p = 1 and inf as well, which are not chosen from."""

    kinds: tuple[str, ...] = ("sparse entries", "sparse rows", "dense", "signs", "low rank")
    n: tuple[int, ...] = (20, 60, 150)
    d: int = 20
    T: int = 8
    p: tuple[float, ...] = (1.1, 1.25, 1.5, 1.75, 2.0, 3.0, 5.0, 10.0)
    fresh: int = 400
    folds: int = 4
    steps: int = 1000
    tol: float = 1e-4
    ends: int = 0


def planted(kind: str, d: int, generator: torch.Generator) -> Tensor:
    """A matrix W, (d, d): 3 % of its entries, a tenth of its rows, all, signs, or of rank 2."""
    W = torch.randn(d, d, dtype=torch.float64, generator=generator)
    if kind == "sparse entries":
        order = torch.rand(d * d, generator=generator).argsort()
        return W.flatten().index_fill(0, order[max(1, round(0.03 * d * d)) :], 0.0).reshape(d, d)
    if kind == "sparse rows":
        order = torch.rand(d, generator=generator).argsort()
        return W.index_fill(0, order[max(1, d // 10) :], 0.0)
    if kind == "signs":
        return W.sign()
    if kind == "low rank":
        return W[:, :2] @ torch.randn(2, d, dtype=torch.float64, generator=generator)
    if kind == "dense":
        return W
    raise ValueError(f"there is no kind of W named {kind!r}")


def samples(settings: Settings, kind: str, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """X, z and tokens of all trials: n samples, then the fresh ones. (trials, samples, ...)."""
    parts = []
    for seed in settings.seeds:
        generator = torch.Generator().manual_seed(seed)
        W = planted(kind, settings.d, generator)
        count = n + settings.fresh
        X = torch.randn(count, settings.T, settings.d, dtype=torch.float64, generator=generator)
        z = torch.randn(count, settings.d, dtype=torch.float64, generator=generator)
        parts.append((X, z, _select(X, z, W)))
    X, z, tokens = (torch.stack(part) for part in zip(*parts, strict=True))
    return X, z, tokens


def run(settings: Settings) -> dict[str, Tensor]:
    """accuracy: on fresh samples, (trials, kinds, n, p and the ends); cross_validation: the curve
    that `choose_p` sees, (trials, kinds, n, p); chosen, bound: indices into p, (trials, kinds, n);
    distinguishable: (trials, kinds, n); descent: accuracy of lp-AttGD, (trials, kinds, n, p)."""
    names = ("accuracy", "cross_validation", "chosen", "bound", "distinguishable", "descent")
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for kind in settings.kinds:
        for n in settings.n:
            X, z, tokens = samples(settings, kind, n)
            seen, fresh = [x[:, :n] for x in (X, z, tokens)], [x[:, n:] for x in (X, z, tokens)]
            choice = choose_p(*seen, ps=settings.p, folds=settings.folds, tol=settings.tol)
            chosen = torch.as_tensor(choice.p).unsqueeze(-1) == torch.tensor(settings.p).double()
            rows["cross_validation"].append(choice.accuracy)
            rows["chosen"].append(chosen.int().argmax(-1))
            rows["distinguishable"].append(torch.as_tensor(choice.distinguishable))
            accuracy, bounds, descent = [], [], []
            for p in (*settings.p, *((1.0, math.inf) if settings.ends else ())):
                solution = attention_svm(*seen, geometry=p, tol=settings.tol)
                accuracy.append(_accuracy(fresh, solution.W))
                if p in settings.p:
                    bounds.append(solution.norm * _dual_radius(seen, p))
                    descent.append(_accuracy(fresh, _descended(seen, p, settings.steps)))
            rows["accuracy"].append(torch.stack(accuracy, -1))
            rows["bound"].append(torch.stack(bounds, -1).argmin(-1))
            rows["descent"].append(torch.stack(descent, -1))
    shape = (len(settings.kinds), len(settings.n))
    return {name: torch.stack(part, 1).unflatten(1, shape) for name, part in rows.items()}


def _select(X: Tensor, z: Tensor, W: Tensor) -> Tensor:
    return (X @ W @ z.unsqueeze(-1)).squeeze(-1).argmax(-1)


def _accuracy(fresh: list[Tensor], W: Tensor) -> Tensor:
    X, z, tokens = fresh
    return (_select(X, z, W.unsqueeze(1)) == tokens).double().mean(-1)


def _dual_radius(seen: list[Tensor], p: float) -> Tensor:
    """The largest ||(x_sel - x_t) z'||_q = ||x_sel - x_t||_q ||z||_q, (trials,)."""
    X, z, tokens = seen
    q = dual_exponent(p)
    best = X.take_along_dim(tokens[..., None, None], -2)
    return (lp_norm(best - X, q, -1).amax(-1) * lp_norm(z, q, -1)).amax(-1)


def _descended(seen: list[Tensor], p: float, steps: int) -> Tensor:
    """W at the end of lp-AttGD, where the given tokens score 1 and the others 0."""
    X, z, tokens = seen
    y, v = torch.ones(X.shape[:-2]), torch.zeros(len(X), X.shape[-1])
    problem = AttentionProblem(X, z, y, v).with_scores(one_hot(tokens, X.shape[-2]).double())
    path = descend(problem, p, steps, rule="accelerated", record=[steps], progress=False)
    return path.W[-1]


def _at(accuracy: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The accuracy at the index of an exponent, (trials, kinds, n)."""
    return np.take_along_axis(accuracy, index[..., None], -1)[..., 0]


def verdict(result: Result[Settings]) -> Verdict:
    """It holds if the choice loses at most 3 points to the best fixed p on average over all cells,
    and gains over p = 2 where few entries of W matter."""
    settings = result.settings
    accuracy = result["accuracy"][..., : len(settings.p)]
    chosen = _at(accuracy, result["chosen"])
    best = accuracy.mean(0).max(-1)  # (kinds, n), the best fixed exponent in hindsight
    regret = best - chosen.mean(0)
    bound = best - _at(accuracy, result["bound"]).mean(0)
    two = int(np.argmin(np.abs(np.array(settings.p) - 2)))
    gain = (chosen - accuracy[..., two])[:, 0, -1]  # the first kind, the most samples
    error = gain.std(ddof=1) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    descent = np.abs(result["descent"] - accuracy).mean()
    cell = np.unravel_index(regret.argmax(), regret.shape)
    worst = f"{settings.kinds[cell[0]]}, n = {settings.n[cell[1]]}"
    selected = chosen[:, 0, -1].mean(), accuracy[:, 0, -1, two].mean()
    oracle = (accuracy.max(-1).mean(0) - best).mean()  # the best exponent of each trial
    ends = result["accuracy"].mean(0)[..., len(settings.p) :]  # (kinds, n, p = 1 and inf)
    at_ends, beyond = "", ""
    if ends.size:
        at_ends = f", p = 1 {ends[0, -1, 0]:.1%} and p = inf {ends[0, -1, 1]:.1%}"
        more = ends.max(-1) - best
        cell = np.unravel_index(more.argmax(), more.shape)
        beyond = (
            f"; p = 1 or inf, which it does not choose from, are better than all of these in"
            f" {(more > 0).sum()} of {more.size} cells, by at most {more.max():.1%}"
            f" ({settings.kinds[cell[0]]}, n = {settings.n[cell[1]]})"
        )
    return judge(
        f"the choice loses {regret.mean():.1%} to the best fixed p on average, at most "
        f"{regret.max():.1%} ({worst}), and an oracle gains {oracle:.1%}; for {settings.kinds[0]} "
        f"and n = {settings.n[-1]} it selects {selected[0]:.1%} of the tokens of fresh samples, "
        f"p = {settings.p[two]:g} {selected[1]:.1%}{at_ends} (gain over p = {settings.p[two]:g} "
        f"{gain.mean():.1%} +- {error:.1%}); the margin bound loses "
        f"{bound.mean():.1%} on average, at most {bound.max():.1%}; descent differs from the "
        f"solutions by {descent:.1%} on average{beyond}",
        bool(regret.mean() <= 0.03 and gain.mean() > 2 * error),
        "The gain is large only where few entries of W matter.",
    )


def draw(result: Result[Settings]) -> Figure:
    """Accuracy on fresh samples against p for each kind of W, with what was chosen."""
    settings = result.settings
    label = "tokens selected in fresh samples"
    figure, axes = panels(len(settings.kinds), sharey=True, ylabel=label)
    accuracy = result["accuracy"][..., : len(settings.p)]
    chosen = _at(accuracy, result["chosen"])
    for k, (axis, kind) in enumerate(zip(axes, settings.kinds, strict=True)):
        for j, n in enumerate(settings.n):
            colour, mean = f"C{j}", accuracy[:, k, j].mean(0)
            axis.plot(settings.p, mean, "o-", color=colour, label=f"n = {n}")
            axis.axhline(chosen[:, k, j].mean(), color=colour, linestyle="--", linewidth=1)
        ticks = [p for p in (1.1, 2, 10) if settings.p[0] <= p <= settings.p[-1]]
        axis.set(xscale="log", xlabel="p", title=kind)
        axis.set_xticks(ticks, labels=[f"{p:g}" for p in ticks])
        axis.minorticks_off()
    legend_below(figure, axes[0], columns=len(settings.n))
    return figure


EXPERIMENT = Experiment(
    group="Open questions",
    title="Which p (open question)",
    claim="Left open by the paper: which $p$ to use. Cross-validated token selection by "
    "max-margin solutions chooses an exponent that is nearly the best one. Dashed: the choice.",
    equation=r"\hat{p} = \mathrm{argmax}_p \; \text{share of held-out samples with } "
    r"\mathrm{argmax}_t \, x_t^\top W_{\mathrm{mm}}^{(p)} z = \alpha",
    quick=Settings(
        trials=6, kinds=("sparse entries", "dense"), n=(20, 60), p=(1.1, 1.5, 2.0, 3.0, 10.0),
        fresh=200, steps=100,
    ),
    full=Settings(trials=100, ends=1),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=10,
)  # fmt: skip
