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

from mirrorhead.lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead.lab.plots import Figure, legend_below, panels
from mirrorhead.lab.verdicts import Verdict, judge
from mirrorhead.margin import attention_svm, svm
from mirrorhead.paths.descent import Path, descend, recorded_steps
from mirrorhead.paths.diagnostics import selected_mass
from mirrorhead.potentials import lp_norm
from mirrorhead.problem import AttentionProblem
from mirrorhead.synthetic import example_2

VALUES = ("printed", "halved")


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """p: exponents; steps: of each path; lr: of W and of v; tol: the certified gap."""

    p: tuple[float, ...] = (1.75, 2.0, 3.0)
    steps: tuple[int, ...] = (1500, 2000, 20_000)
    lr: float = 0.1
    tol: float = 1e-12


def run(settings: Settings) -> dict[str, Tensor]:
    """For each p, with the printed and the halved values: "direction p", the entries of W and of
    v over their lp-norms, (1, 2, records, 6), and "limit p", those of the two solutions,
    (1, 2, 6); "divergence p" of W and of v, and "probability p", attention on the selected
    tokens and the probability of the labels, means over samples, each (1, 2, records, 2).
    tokens: selected, (1, 2, exponents, n); widest: those whose lp-SVM has the largest margin."""
    printed, halved = example_2(), example_2(halved=True)
    parts = [(e.X, e.z, e.y, e.v) for e in (printed, halved)]
    X, z, y, v = (torch.stack(part) for part in zip(*parts, strict=True))
    problem = AttentionProblem(X, z, y, v)
    arrays: dict[str, Tensor] = {}
    tokens, widest = [], []
    for p, steps in zip(settings.p, settings.steps, strict=True):
        record = _records(steps)
        path = descend(problem, p, steps, settings.lr, joint=True, record=record, progress=False)
        tokens.append(path.tokens)
        widest.append(_widest(problem, p))
        for name, value in _compare(path, settings.tol).items():
            arrays[f"{name} {p:g}"] = value.unsqueeze(0)
    chosen = {"tokens": tokens, "widest": widest}
    return arrays | {name: torch.stack(found, 1).unsqueeze(0) for name, found in chosen.items()}


def verdict(result: Result[Settings]) -> Verdict:
    """All four limits, with both kinds of values: divergences below .01 and still falling to a
    half or less over the last nine tenths of the steps, probabilities above .99."""
    settings = result.settings
    words, holds = [], True
    for p, steps in zip(settings.p, settings.steps, strict=True):
        divergence, probability = (result[f"{x} {p:g}"][0] for x in ("divergence", "probability"))
        tenth = np.searchsorted(_records(steps), steps / 10)
        last = divergence[:, -1]  # (printed and halved, W and v)
        holds &= bool((last < 0.01).all() and (last <= divergence[:, tenth] / 2).all())
        holds &= bool((probability[:, -1] > 0.99).all())
        pairs = [f"{W:.1e} / {v:.1e} ({name})" for (W, v), name in zip(last, VALUES, strict=True)]
        words.append(f"p = {p:g}: {', '.join(pairs)}")
    least = min(result[f"probability {p:g}"][0, :, -1].min() for p in settings.p)
    measured = f"D_W / D_v at the end, {'; '.join(words)}; smallest probability {least:.4f}"
    return judge(measured, holds, _remark(result))


def draw(result: Result[Settings]) -> Figure:
    """Printed values. Above: directions of W and v and their limits; below: probabilities."""
    settings = result.settings
    figure, axes = panels(len(settings.p), rows=2, height=5.2, sharex="col", sharey="row")
    for (above, below), p, steps in zip(axes.T, settings.p, settings.steps, strict=True):
        x = _records(steps)
        direction, limit = result[f"direction {p:g}"][0, 0], result[f"limit {p:g}"][0, 0]
        for k, (entries, end) in enumerate(zip(direction.T, limit, strict=True)):
            first = {0: "W / ||W||", 4: "v / ||v||"}.get(k, "_")
            colour = "C0" if k < 4 else "C1"
            above.plot(x, entries, color=colour, label=first)
            solution = "solutions" if k == 0 else "_"
            above.axhline(end, color="k", linestyle=":", linewidth=1, label=solution)
        for column, label in enumerate(("attention to selected", "label")):
            curve = result[f"probability {p:g}"][0, 0, :, column]
            below.plot(x, curve, color=f"C{2 + column}", label=label)
        above.set(xscale="log", title=f"p = {p:g}")
        below.set(xlabel="step")
    axes[0, 0].set_ylabel("entries of the direction")
    axes[1, 0].set_ylabel("mean probability")
    legend_below(figure, axes[0, 0], axes[1, 0], columns=5)
    return figure


def _records(steps: int) -> list[int]:
    # v starts at zero, so W has no direction before the second step.
    return sorted(recorded_steps(steps) - {1})


def _compare(path: Path, tol: float) -> dict[str, Tensor]:
    """A path against the two solutions for its tokens, trials first."""
    problem, p, v = path.problem, path.p, path.v
    assert v is not None
    attention = attention_svm(problem.X, problem.z, path.tokens, p, tol)
    head = svm(_features(problem, path.tokens), problem.y, p, tol)
    pairs = zip(path.W, v, strict=True)
    margins = [problem.y * problem.with_head(head).output(W) for W, head in pairs]
    label = torch.stack(margins).sigmoid().mean(-1)  # (records, 2)
    mass = selected_mass(path).mean(-1)
    found = {
        "direction": torch.cat([_unit(path.W.flatten(-2), p), _unit(v, p)], -1),
        "divergence": torch.stack(
            [path.divergence_to(attention), path.head_divergence_to(head)], -1
        ),
        "probability": torch.stack([mass, label], -1),
    }
    limit = torch.cat([_unit(attention.W.flatten(-2), p), _unit(head.v, p)], -1)
    return {name: x.transpose(0, 1) for name, x in found.items()} | {"limit": limit}


def _widest(problem: AttentionProblem, p: float) -> Tensor:
    """The tokens whose lp-SVM has the largest margin, of all choices: (2, n)."""
    n, T = problem.X.shape[-3:-1]
    choices = torch.cartesian_prod(*[torch.arange(T)] * n)  # (T^n, n)
    norms = [
        svm(_features(problem, tokens.expand(2, n)), problem.y, p, 1e-12).norm for tokens in choices
    ]
    return choices[torch.stack(norms).argmin(0)]  # an infeasible choice has norm inf


def _features(problem: AttentionProblem, tokens: Tensor) -> Tensor:
    """The selected token of each sample, (..., n, d)."""
    return problem.X.take_along_dim(tokens[..., None, None], -2).squeeze(-2)


def _unit(w: Tensor, p: float) -> Tensor:
    return w / lp_norm(w, p, -1, keepdim=True)


def _remark(result: Result[Settings]) -> str:
    """Where the selected tokens are not those of the largest label margin."""
    tokens, widest = (result[name][0, 0] for name in ("tokens", "widest"))  # (exponents, n)
    names = [", ".join(f"X{i + 1}{t + 1}" for i, t in enumerate(row)) for row in tokens.tolist()]
    chosen = [f"({name}) at p = {p:g}" for p, name in zip(result.settings.p, names, strict=True)]
    missed = [
        f"{p:g}"
        for p, wrong in zip(result.settings.p, (tokens != widest).any(-1), strict=True)
        if wrong
    ]
    if len(set(names)) == 1 and not missed:
        return ""
    end = f"; at p = {', '.join(missed)} that is not the largest label margin" if missed else ""
    return f"The tokens depend on p: {', '.join(chosen)}{end}."


EXPERIMENT = Experiment(
    name="example-2",
    title="Example 2: attention and head trained together",
    claim=(
        "Attention weights $W$ and head $v$ are trained together (JointGD). $W$ turns to the "
        "direction that separates the selected tokens with the largest margin, and $v$ to "
        "the one that separates the labels; attention to these tokens and the probability of "
        "the labels tend to 1."
    ),
    equation=(
        r"\frac{W(k)}{\lVert W(k) \rVert_p} \to \frac{W_{\mathrm{mm}}}{\lVert W_{\mathrm{mm}} "
        r"\rVert_p}, \qquad \frac{v(k)}{\lVert v(k) \rVert_p} \to "
        r"\frac{v_{\mathrm{mm}}}{\lVert v_{\mathrm{mm}} \rVert_p}"
    ),
    quick=Settings(trials=1, steps=(1500, 2000, 5000)),
    full=Settings(trials=1),
    run=run,
    draw=draw,
    verdict=verdict,
    fixed_trials=True,
    extent=("steps",),
)
