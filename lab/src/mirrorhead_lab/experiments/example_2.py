"""Example 2 (Figures 6 and 7): lp-JointGD trains attention and head together.

W should go to the lp-AttSVM of the tokens it selects, v to the lp-SVM of those tokens; attention
on them and the probability of the labels should go to 1. The example is run as printed and, as
the authors' code has it, on half of the printed values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import AttentionProblem, attention_svm, descend, svm
from mirrorhead.geometry._powers import lp_norm
from mirrorhead.paths.descent import recorded_steps
from mirrorhead.paths.diagnostics import selected_mass
from mirrorhead.synthetic import example_2
from mirrorhead_lab.experiments.convergence import PathSettings, joined
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, legend_below, panels
from mirrorhead_lab.verdicts import Verdict, judge, of_each

VALUES = ("printed", "halved")


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """lr: of W and of v; tol: the certified gap."""

    lr: float = 0.1
    tol: float = 1e-12


def run(settings: Settings) -> dict[str, Tensor]:
    """For each p, with the printed and the halved values: "direction p", the entries of W and of
    v over their lp-norms, (1, 2, records, 6), and "limit p", those of the two solutions,
    (1, 2, 6); "divergence p" of W and of v, (1, 2, records, 2); "probability p", means over
    samples of attention on the selected tokens, of the probability of the labels, and of the
    latter by the scores of the selected tokens, as in Figure 7, (1, 2, records, 3); "plane p", the
    first row of W and v, (1, 2, records, 4), and "ray p", those of the solutions, (1, 2, 4).
    tokens: selected, (1, 2, exponents, n); widest: those whose lp-SVM has the largest margin."""
    parts = [(e.X, e.z, e.y, e.v) for e in (example_2(), example_2(halved=True))]
    X, z, y, v = (torch.stack(part) for part in zip(*parts, strict=True))
    problem = AttentionProblem(X, z, y, v)
    rows = []
    for p, steps in zip(settings.p, settings.steps, strict=True):
        record = _records(steps)
        path = descend(problem, p, steps, settings.lr, joint=True, record=record, progress=False)
        assert path.v is not None
        weights = attention_svm(problem.X, problem.z, path.tokens, p, settings.tol)
        head = svm(_features(problem, path.tokens), problem.y, p, settings.tol)
        divergences = path.divergence_to(weights), path.head_divergence_to(head)
        pairs = zip(path.W, path.v, strict=True)
        margins = [problem.y * problem.with_head(v).output(W) for W, v in pairs]
        features = _features(problem, path.tokens)
        scores = problem.y * torch.einsum("snd,ksd->ksn", features, path.v)
        probabilities = [x.sigmoid().mean(-1) for x in (torch.stack(margins), scores)]
        probabilities = [selected_mass(path).mean(-1), *probabilities]
        row = {
            "direction": _directions(path.W, path.v, p).transpose(0, 1),
            "limit": _directions(weights.W, head.v, p),
            "divergence": torch.stack(divergences, -1).transpose(0, 1),
            "probability": torch.stack(probabilities, -1).transpose(0, 1),
            "plane": torch.cat([path.W[..., 0, :], path.v], -1).transpose(0, 1),
            "ray": torch.cat([weights.W[..., 0, :], head.v], -1),
            "tokens": path.tokens,
            "widest": _widest(problem, p),
        }
        rows.append(row)
    found = joined(
        settings.p, rows, "direction", "limit", "divergence", "probability", "plane", "ray"
    )
    return {name: value.unsqueeze(0) for name, value in found.items()}


def verdict(result: Result[Settings]) -> Verdict:
    """All four limits, with both kinds of values: divergences below .01 and still falling to a
    half or less over the last nine tenths of the steps, probabilities above .99."""
    settings = result.settings
    words, holds = [], True
    for divergence, steps in zip(result.each("divergence"), settings.steps, strict=True):
        tenth = np.searchsorted(_records(steps), steps / 10)
        last = divergence[0, :, -1]  # (printed and halved, W and v)
        holds &= bool((last < 0.01).all() and (last <= divergence[0, :, tenth] / 2).all())
        pairs = [f"{W:.1e} / {v:.1e} ({name})" for (W, v), name in zip(last, VALUES, strict=True)]
        words.append(", ".join(pairs))
    least = min(probability[0, :, -1].min() for probability in result.each("probability"))
    words = of_each(settings.p, words)
    measured = f"D_W / D_v at the end, {words}; smallest probability {least:.4f}"
    return judge(measured, holds and bool(least > 0.99), _remark(result))


def draw(result: Result[Settings]) -> Figure:
    """Above Figures 6 and 7 as published, on half of the printed values: iterates in the plane with
    the rays of the solutions, and probabilities. Below ours, on the printed values: directions."""
    settings = result.settings
    figure, axes = panels(len(settings.p), rows=3, height=8)
    for (plane, chance, below), p, steps in zip(axes.T, settings.p, settings.steps, strict=True):
        x = _records(steps)
        path, ray = result[f"plane {p:g}"][0, 1], result[f"ray {p:g}"][0, 1]
        for k, label in enumerate(("W[1, 1], W[1, 2]", "v")):
            entries, goal = path[:, 2 * k : 2 * k + 2], ray[2 * k : 2 * k + 2]
            far = np.abs(entries).max() / np.abs(goal).max()
            plane.plot(*entries.T, color=f"C{k}", label=label)
            label = "_" if k else "SVM directions"
            plane.plot(*zip((0, 0), far * goal, strict=True), "--", color="black", label=label)
        for k, label in enumerate(("attention to selected", "label", "label, by scores")):
            curve = result[f"probability {p:g}"][0, 1, :, k]
            chance.plot(x, curve, "--" if k == 2 else "-", color=f"C{2 + k}", label=label)
        direction, limit = result[f"direction {p:g}"][0, 0], result[f"limit {p:g}"][0, 0]
        for k, (entries, end) in enumerate(zip(direction.T, limit, strict=True)):
            label = {0: "W / ||W||", 4: "v / ||v||"}.get(k, "_")
            below.plot(x, entries, color="C0" if k < 4 else "C1", label=label)
            label = "_" if k else "solutions"
            below.axhline(end, color="k", linestyle=":", linewidth=1, label=label)
        plane.set(xlabel="first entry", title=f"p = {p:g}")
        chance.set(xlabel="step", xscale="log")
        below.set(xscale="log", xlabel="step")
    axes[0, 0].set_ylabel("Figure 6: second entry")
    axes[1, 0].set_ylabel("Figure 7: mean probability")
    axes[2, 0].set_ylabel("ours: entries of the direction")
    legend_below(figure, *axes[:, 0], columns=4)
    return figure


def _records(steps: int) -> list[int]:
    # v starts at zero, so W has no direction before the second step.
    return sorted(recorded_steps(steps) - {1})


def _widest(problem: AttentionProblem, p: float) -> Tensor:
    """The tokens whose lp-SVM has the largest margin, of all choices: (2, n)."""
    n, T = problem.X.shape[-3:-1]
    choices = torch.cartesian_prod(*[torch.arange(T)] * n)  # (T^n, n)
    features = (_features(problem, tokens.expand(2, n)) for tokens in choices)
    norms = [svm(tokens, problem.y, p, 1e-12).norm for tokens in features]
    return choices[torch.stack(norms).argmin(0)]  # an infeasible choice has norm inf


def _features(problem: AttentionProblem, tokens: Tensor) -> Tensor:
    """The selected token of each sample, (..., n, d)."""
    return problem.X.take_along_dim(tokens[..., None, None], -2).squeeze(-2)


def _directions(W: Tensor, v: Tensor, p: float) -> Tensor:
    """The entries of W and of v over their lp-norms, (..., 6)."""
    return torch.cat([w / lp_norm(w, p, -1, keepdim=True) for w in (W.flatten(-2), v)], -1)


def _remark(result: Result[Settings]) -> str:
    """Where the selected tokens are not those of the largest label margin."""
    tokens, widest = (result[name][0, 0] for name in ("tokens", "widest"))  # (exponents, n)
    exponents = [f"{p:g}" for p in result.settings.p]
    names = [", ".join(f"X{i + 1}{t + 1}" for i, t in enumerate(row)) for row in tokens.tolist()]
    chosen = [f"({name}) at p = {p}" for p, name in zip(exponents, names, strict=True)]
    wrong = (tokens != widest).any(-1)
    missed = [p for p, miss in zip(exponents, wrong, strict=True) if miss]
    if len(set(names)) == 1 and not missed:
        return ""
    end = f"; at p = {', '.join(missed)} that is not the largest label margin" if missed else ""
    return f"The tokens depend on p: {', '.join(chosen)}{end}."


EXPERIMENT = Experiment(
    group="The paper's figures",
    title="Example 2: attention and head trained together",
    claim="Attention weights $W$ and head $v$ are trained together (JointGD). $W$ turns to the "
    "direction that separates the selected tokens with the largest margin, and $v$ to the one "
    "that separates the labels; attention to these tokens and the probability of the labels tend "
    "to 1.",
    equation=r"\frac{W(k)}{\lVert W(k) \rVert_p} \to \frac{W_{\mathrm{mm}}}{\lVert "
    r"W_{\mathrm{mm}} \rVert_p}, \qquad \frac{v(k)}{\lVert v(k) \rVert_p} \to "
    r"\frac{v_{\mathrm{mm}}}{\lVert v_{\mathrm{mm}} \rVert_p}",
    quick=Settings(trials=1, steps=(1500, 2000, 5000)),
    full=Settings(trials=1),
    run=run,
    draw=draw,
    verdict=verdict,
    fixed_trials=True,
    extent=("steps",),
)
