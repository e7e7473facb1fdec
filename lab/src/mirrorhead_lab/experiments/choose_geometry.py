r"""Which geometry: an open question of the paper, answered by cross-validation.

A planted matrix W selects the tokens of n samples. For each norm the max-margin solution of those
samples selects tokens in fresh samples. How often are they the tokens that W selects? And does
`choose_geometry`, which sees the n samples alone, find the norm that is best for W?

Compared are each fixed norm; the choice; an oracle, which takes the best norm of each trial; and
the norm with the smallest margin bound ||W|| max ||(x_sel - x_t) z'||_*, the norm of the solution
times the radius of the data in the dual norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import Grouped, Norm, PNorm, Schatten, attention_svm, choose_geometry
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import Figure, panels
from mirrorhead_lab.verdicts import Verdict, judge

GEOMETRIES: dict[str, Norm] = {
    **{f"p = {p:g}": PNorm(p) for p in (1, 1.1, 1.5, 2, 3, math.inf)},
    "nuclear": Schatten(1),
    "rows": Grouped(1, dim=0),
    "columns": Grouped(1, dim=1),
}


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """kinds of W; n: numbers of samples; geometries: names in GEOMETRIES, "p = 2" among them;
    fresh: samples that measure accuracy."""

    kinds: tuple[str, ...] = ("sparse entries", "sparse rows", "low rank", "dense")
    n: tuple[int, ...] = (60,)
    d: int = 20
    T: int = 8
    geometries: tuple[str, ...] = tuple(GEOMETRIES)
    fresh: int = 400
    folds: int = 4
    tol: float = 1e-4


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
    """accuracy: on fresh samples, (trials, kinds, n, geometries); cross_validation: the scores that
    `choose_geometry` sees, of the same shape; chosen, bound: indices into geometries, (trials,
    kinds, n); distinguishable: (trials, kinds, n)."""
    names = ("accuracy", "cross_validation", "chosen", "bound", "distinguishable")
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    norms = [GEOMETRIES[name] for name in settings.geometries]
    for kind in settings.kinds:
        for n in settings.n:
            X, z, tokens = samples(settings, kind, n)
            seen, fresh = [x[:, :n] for x in (X, z, tokens)], [x[:, n:] for x in (X, z, tokens)]
            choice = choose_geometry(
                *seen, candidates=norms, folds=settings.folds, tol=settings.tol
            )
            rows["cross_validation"].append(choice.accuracy)
            rows["chosen"].append(choice.index)
            rows["distinguishable"].append(torch.as_tensor(choice.distinguishable))
            accuracy, bounds = [], []
            for norm in norms:
                solution = attention_svm(*seen, geometry=norm, tol=settings.tol)
                accuracy.append(_accuracy(fresh, solution.W))
                bounds.append(solution.norm * _dual_radius(seen, norm))
            rows["accuracy"].append(torch.stack(accuracy, -1))
            rows["bound"].append(torch.stack(bounds, -1).argmin(-1))
    shape = (len(settings.kinds), len(settings.n))
    return {name: torch.stack(part, 1).unflatten(1, shape) for name, part in rows.items()}


def _select(X: Tensor, z: Tensor, W: Tensor) -> Tensor:
    return (X @ W @ z.unsqueeze(-1)).squeeze(-1).argmax(-1)


def _accuracy(fresh: list[Tensor], W: Tensor) -> Tensor:
    X, z, tokens = fresh
    return (_select(X, z, W.unsqueeze(1)) == tokens).double().mean(-1)


def _dual_radius(seen: list[Tensor], norm: Norm) -> Tensor:
    """The largest dual norm of (x_sel - x_t) z', (trials,)."""
    X, z, tokens = seen
    rows = X.take_along_dim(tokens[..., None, None], -2) - X
    return norm.dual_norm(rows.unsqueeze(-1) * z[..., None, None, :], (-2, -1)).amax((-2, -1))


def _at(accuracy: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The accuracy at the index of a geometry, (trials, kinds, n)."""
    return np.take_along_axis(accuracy, index[..., None], -1)[..., 0]


def verdict(result: Result[Settings]) -> Verdict:
    """It holds if the choice loses at most 2 points to the best fixed norm for every W."""
    settings, accuracy = result.settings, result["accuracy"]
    chosen = _at(accuracy, result["chosen"]).mean(0)  # (kinds, n)
    best = accuracy.mean(0).max(-1)  # the best fixed norm in hindsight
    oracle = (accuracy.max(-1).mean(0) - best).mean()
    lost, bound = best - chosen, best - _at(accuracy, result["bound"]).mean(0)
    two = accuracy.mean(0)[..., settings.geometries.index("p = 2")]
    cells = [
        f"{kind}, n = {n}: {chosen[i, j]:.1%}, best {best[i, j]:.1%} "
        f"({settings.geometries[accuracy.mean(0)[i, j].argmax()]}), p = 2 {two[i, j]:.1%}"
        for i, kind in enumerate(settings.kinds)
        for j, n in enumerate(settings.n)
    ]
    return judge(
        f"tokens of fresh samples that the choice selects: {'; '.join(cells)}; the choice loses"
        f" {lost.mean():.1%} to the best fixed norm on average and at most {lost.max():.1%}; an"
        f" oracle gains {oracle:.1%}; the margin bound loses {bound.mean():.1%} on average, at most"
        f" {bound.max():.1%}",
        bool(lost.max() <= 0.02),
    )


def draw(result: Result[Settings]) -> Figure:
    """Accuracy on fresh samples of each geometry for each kind of W, with what was chosen."""
    settings, accuracy = result.settings, result["accuracy"].mean(0)
    chosen = _at(result["accuracy"], result["chosen"]).mean(0)
    label = "tokens selected in fresh samples"
    figure, axes = panels(len(settings.kinds), sharey=True, ylabel=label)
    places = np.arange(len(settings.geometries))
    for k, (axis, kind) in enumerate(zip(axes, settings.kinds, strict=True)):
        for j, n in enumerate(settings.n):
            axis.plot(places, accuracy[k, j], "o", color=f"C{j}", label=f"n = {n}")
            axis.axhline(chosen[k, j], color=f"C{j}", linestyle="--", linewidth=1)
        axis.set(title=kind, xlabel="norm")
        axis.set_xticks(places, labels=settings.geometries, rotation=90)
    axes[0].legend()
    return figure


EXPERIMENT = Experiment(
    group="Open questions",
    title="Which geometry (open question)",
    claim="Left open by the paper: which $p$ to use, or which other norm. Cross-validated token "
    "selection by max-margin solutions chooses a norm that is nearly the best. Dashed: the choice.",
    equation=r"\hat{\|\cdot\|} = \mathrm{argmax}_{\|\cdot\|} \; \text{share of held-out samples "
    r"with } \mathrm{argmax}_t \, x_t^\top W_{\mathrm{mm}} z = \alpha",
    quick=Settings(trials=4, geometries=("p = 2", "p = 1.1", "nuclear", "rows"), d=12, fresh=200),
    full=Settings(trials=40),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=10,
)
