r"""Two layers: an open question of the paper, answered by experiment.

The model is that of `two_layer_model.py`: self-attention W_1 for all queries, then attention W_2
with the query z. Both matrices start at zero and follow normalized lp-AttGD, each by its own
gradient. At the end layer 2 selects a row of H in every sample, and layer 1 selects a token for
that row. Does each matrix approach the lp-AttSVM of the tokens that it sees at the end?

    W_2:  tokens H_i, query z_i, selected row alpha_i
    W_1:  tokens X_i, query x_i,alpha_i, the token that layer 1 selects for it

W_1 is compared with the lp-AttSVM of all n T queries as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import MarginSolution, attention_svm
from mirrorhead.geometry import PNorm
from mirrorhead.paths._update_rules import Normalized
from mirrorhead.paths.descent import direction_divergence, recorded_steps
from mirrorhead.synthetic import random_problem
from mirrorhead_lab.experiments.convergence import PathSettings, joined
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.experiments.two_layer_model import TwoLayers
from mirrorhead_lab.plots import Figure, divergence_panels, legend_below, median_band
from mirrorhead_lab.verdicts import Verdict, judge, listed

ONE_HOT = 0.99  # attention above this on one token counts as one-hot


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """steps and lr of each path; n, T, d: the size of the problems; tol: the certified gap of
    the solutions."""

    steps: tuple[int, ...] = (3000, 3000, 3000)
    lr: tuple[float, ...] = (0.1, 0.1, 3.0)
    n: int = 4
    T: int = 4
    d: int = 8
    tol: float = 1e-9


def run(settings: Settings) -> dict[str, Tensor]:
    """For each p "layers p", the divergence of each layer to the lp-AttSVM of what it sees at the
    end, (trials, records, 2). cross: at the end, to the solutions of every exponent, in the
    geometry of the path, (trials, exponents of the path, 2, exponents of the solution);
    all_queries: of W_1 to the solution of all queries, (trials, exponents); one_hot: the share of
    samples with one-hot attention, (trials, exponents, 2). NaN where a layer's tokens have no
    solution."""
    size = (settings.n, settings.T, settings.d)
    problem = random_problem(settings.trials, *size, settings.first)
    X, model, rows = problem.X, TwoLayers(problem), []
    samples = X.unsqueeze(2).expand(-1, -1, settings.T, -1, -1).flatten(1, 2)  # for each query x_it
    for p, steps, lr in zip(settings.p, settings.steps, settings.lr, strict=True):
        weights = descend_both(model, p, steps, lr)  # (records, trials, 2, d, d)
        first, second, H = model.forward(*weights[-1].unbind(1))
        selected, row = first.argmax(-1), second.argmax(-1)  # (trials, n, query), (trials, n)
        query = X.take_along_dim(row[..., None, None], -2).squeeze(-2)
        # What each layer sees: its tokens, its queries and the token that it selects for each.
        seen = (X, query, _at(row, selected)), (H, problem.z, row)
        everything = (samples, X.flatten(1, 2), selected.flatten(1))
        layers = {}  # of the exponent of the solutions: (records, trials, 2)
        for r in settings.p:
            pairs = zip(weights.unbind(2), seen, strict=True)
            found = [_divergence(W, p, attention_svm(*x, r, settings.tol)) for W, x in pairs]
            layers[r] = torch.stack(found, -1)
        of_all = attention_svm(*everything, p, settings.tol)
        attention = _at(row, first.softmax(-1).amax(-1)), second.softmax(-1).amax(-1)
        measured = {
            "layers": layers[p].transpose(0, 1),
            "cross": torch.stack([divergence[-1] for divergence in layers.values()], -1),
            "all_queries": _divergence(weights[-1:, :, 0], p, of_all)[0],
            "one_hot": (torch.stack(attention, -1) > ONE_HOT).double().mean(-2),
        }
        rows.append(measured)
    return joined(settings.p, rows, "layers")


def descend_both(model: TwoLayers, p: float, steps: int, lr: float) -> Tensor:
    """W_1 and W_2 of all trials at the recorded steps, (records, trials, 2, d, d), from zero."""
    rule, X = Normalized(PNorm(p), lr, (-2, -1)), model.problem.X
    zero = X.new_zeros(len(X), X.shape[-1], X.shape[-1])
    states = [rule.start(zero) for _ in range(2)]
    wanted, records = recorded_steps(steps), []
    for step in range(1, steps + 1):
        gradients = model.gradients(*(rule.weights(state) for state in states))
        states = [rule.advance(*pair) for pair in zip(states, gradients, strict=True)]
        if step in wanted:
            records.append(torch.stack([rule.weights(state) for state in states], 1))
    return torch.stack(records)


def _at(row: Tensor, x: Tensor) -> Tensor:
    """The values x (trials, n, query) at a row of each sample, (trials, n)."""
    return x.take_along_dim(row.unsqueeze(-1), -1).squeeze(-1)


def _divergence(W: Tensor, p: float, solution: MarginSolution) -> Tensor:
    """The divergence of the directions of W (records, trials, d, d), NaN without a solution.

    It is measured in the geometry of the path's p, as in Figure 4: in those of the solutions it
    would have other scales, and could not be compared between them.
    """
    return direction_divergence(p, solution.W, W, 2).where(solution.optimal, torch.nan)


def verdict(result: Result[Settings]) -> Verdict:
    """It holds if the divergence of nearly every layer is small and still falling like a power,
    and smaller to the solution of its own p than to the others."""
    settings = result.settings
    pairs = list(zip(result.each("layers"), settings.tenths, strict=True))
    ends = np.array([np.nanmedian(values[:, -1], 0) for values, _ in pairs])  # (exponents, 2)
    fell = [(values[:, -1] < values[:, at] / 2).mean() for values, at in pairs]  # NaN has not
    cross = np.nanmedian(result["cross"], 0)  # (path, layer, solution)
    own = all(cross[k, layer].argmin() == k for k in range(len(settings.p)) for layer in range(2))
    others = np.nanmedian(result["all_queries"])
    layers = [listed(end, ".1e") for end in ends.T]
    off = np.array([np.delete(cross[k], k, -1) for k in range(len(settings.p))])
    lost = sum(int(np.isnan(values[:, -1]).any(-1).sum()) for values, _ in pairs)
    without = f"; {lost} of {len(pairs) * settings.trials} paths have no solution" if lost else ""
    return judge(
        f"p = {listed(settings.p, 'g')}: median D of layer 1 {layers[0]}, of layer 2 {layers[1]}; "
        f"to the solutions of the other exponents {off.min():.1e} to {off.max():.1e}; attention is "
        f"one-hot in {result['one_hot'][..., 0].mean():.0%} (layer 1) and "
        f"{result['one_hot'][..., 1].mean():.0%} (layer 2) of the samples{without}",
        bool(ends.max() < 0.01 and min(fell) >= 0.9 and own),
        "Layer 1 approaches the AttSVM of the queries that layer 2 selects, not of all queries "
        f"(median D {others:.2g}).",
    )


def draw(result: Result[Settings]) -> Figure:
    """The divergence of each layer to the AttSVM of what it sees, against the step."""
    settings = result.settings
    figure, axes = divergence_panels(settings.p)
    for axis, x, layers in zip(axes, settings.records, result.each("layers"), strict=True):
        for layer in range(2):
            median_band(axis, x, layers[..., layer], label=f"layer {layer + 1}")
    legend_below(figure, axes[0], columns=2)
    return figure


EXPERIMENT = Experiment(
    group="Open questions",
    title="Two layers (open question)",
    claim="Left open by the paper: in a model of two attention layers, the matrix of each layer "
    "converges to the max-margin solution of the tokens that it sees at the end of training.",
    equation=r"h_t = x_t + X^\top \mathrm{softmax}(X W_1 x_t), \qquad f = v^\top H^\top "
    r"\mathrm{softmax}(H W_2 z), \qquad \frac{W_l(k)}{\lVert W_l(k) \rVert_p} \to "
    r"\frac{W_{\mathrm{mm}}^{(l)}}{\lVert W_{\mathrm{mm}}^{(l)} \rVert_p}",
    quick=Settings(trials=10, steps=(500, 500, 500)),
    full=Settings(trials=50, n=6, T=8, d=10),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=25,
    may_be_nan=("layers 1.75", "layers 2", "layers 3", "cross", "all_queries"),
    extent=("steps",),
)
