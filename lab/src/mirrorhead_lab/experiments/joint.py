r"""JointGD and Assumption B on random problems, where every choice of tokens can be computed.

Example 2 is one problem. Here n = 4 samples have T = 3 tokens in d = 6 dimensions, so that the
label margins of all 81 choices are known. lp-JointGD starts from W = 0 and v = 0. Does it converge
to the two max-margin solutions of its own tokens? Are these the tokens of the largest label margin,
as the paper suggests? And does Assumption B, on which Theorem 5 rests, hold for any choice? Its nu
is bounded from above by search (`assumption_b`): a bound that is not positive refutes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import AttentionProblem, assumption_b, attention_svm, descend, svm
from mirrorhead.synthetic import random_problem
from mirrorhead_lab.experiments.convergence import PathSettings, joined
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, divergence_panels, legend_below, median_band
from mirrorhead_lab.verdicts import Verdict, judge, listed


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """n, T, d: sizes; steps, lr: of JointGD; samples: of the search for nu; tol: the gap."""

    n: int = 4
    T: int = 3
    d: int = 6
    steps: tuple[int, ...] = (6000, 12_000, 12_000)
    lr: tuple[float, ...] = (0.1, 0.1, 3.0)
    samples: int = 200
    tol: float = 1e-12


def run(settings: Settings) -> dict[str, Tensor]:
    """For each p "divergence p" of W and v to the solutions of their own tokens, (trials, records,
    2). (trials, exponents): margin, the label margin of JointGD's tokens over the largest of all
    choices; nu of its tokens and of the best ones, (..., 2)."""
    problem = random_problem(settings.trials, settings.n, settings.T, settings.d, settings.first)
    problem = problem.with_head(torch.zeros_like(problem.v))
    choices = torch.cartesian_prod(*[torch.arange(settings.T)] * settings.n)  # (T^n, n)
    rows = []
    for p, steps, lr in zip(settings.p, settings.steps, settings.lr, strict=True):
        path = descend(problem, p, steps, lr, joint=True, progress=False)
        weights = attention_svm(problem.X, problem.z, path.tokens, p, settings.tol)
        head = svm(_features(problem, path.tokens), problem.y, p, settings.tol)
        D = torch.stack([path.divergence_to(weights), path.head_divergence_to(head)], -1)
        every = problem.mapped(lambda x: x.unsqueeze(0).expand(len(choices), *x.shape))
        tokens = choices.unsqueeze(1).expand(len(choices), settings.trials, settings.n)
        margins = 1 / svm(_features(every, tokens), every.y, p).norm  # (choices, trials)
        best = choices[margins.argmax(0)]
        nu = [assumption_b(problem, chosen, p, settings.samples) for chosen in (path.tokens, best)]
        own = 1 / head.norm
        row = {"divergence": D[1:].transpose(0, 1), "margin": own / margins.amax(0)}
        rows.append(row | {"nu": torch.stack(nu, -1)})
    return joined(settings.p, rows, "divergence")


def _features(problem: AttentionProblem, tokens: Tensor) -> Tensor:
    return problem.X.take_along_dim(tokens[..., None, None], -2).squeeze(-2)


def verdict(result: Result[Settings]) -> Verdict:
    """JointGD converges if both divergences end small and falling in nine of ten trials."""
    settings = result.settings
    paths = result.each("divergence")
    ends = np.stack([D[:, -1] for D in paths], 1)  # (trials, exponents, 2)
    tenth = np.stack([D[:, at - 1] for D, at in zip(paths, settings.tenths, strict=True)], 1)
    small = (ends < 0.01) & (ends < tenth / 2)
    middle = np.median(ends, 0)
    widest = (result["margin"] > 1 - 1e-6).mean(0)
    fails = (result["nu"] <= 1e-8).mean(0)  # (exponents, 2)
    return judge(
        f"p = {listed(settings.p, 'g')}: D of W {listed(middle[:, 0], '.1e')} and of v "
        f"{listed(middle[:, 1], '.1e')} (medians), small and falling in {small.all(-1).mean():.0%} "
        f"of the paths",
        bool(small.all(-1).mean() >= 0.9),
        f"Its tokens have the largest label margin of all choices in {listed(widest, '.0%')} of "
        f"the trials. Assumption B is refuted (nu <= 0) for its tokens in "
        f"{listed(fails[:, 0], '.0%')}, and for those of the largest margin in "
        f"{listed(fails[:, 1], '.0%')}.",
    )


def draw(result: Result[Settings]) -> Figure:
    """The divergences of W and v to the solutions of their own tokens, against the step."""
    settings = result.settings
    figure, axes = divergence_panels(settings.p, ylabel="divergence to the solutions")
    for axis, p, records in zip(axes, settings.p, settings.records, strict=True):
        for k, label in enumerate(("W to the AttSVM", "v to the SVM")):
            median_band(axis, records[1:], result[f"divergence {p:g}"][..., k], label=label)
    legend_below(figure, axes[0], columns=2)
    return figure


EXPERIMENT = Experiment(
    group="The theory",
    title="JointGD and Assumption B on random problems",
    claim="Attention weights and head that are trained together turn to the two max-margin "
    "solutions of the tokens that they select.",
    equation=r"\frac{W(k)}{\lVert W(k) \rVert_p} \to \frac{W_{\mathrm{mm}}}{\lVert W_{\mathrm{mm}} "
    r"\rVert_p}, \qquad \Gamma - \Gamma'(s) \geq \nu \, (1 - s_{i\alpha_i}), \; \nu > 0",
    quick=Settings(trials=6, steps=(1000, 2000, 2000), samples=100),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    extent=("steps",),
)
