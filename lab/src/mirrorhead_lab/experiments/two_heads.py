r"""Two heads: an open question of the paper, answered by experiment.

The model is the sum of two heads, f = sum_h v_h' X' s(X W_h z), each with its own v_h on the
unit sphere and its own weights; the step is normalised by the gradient of both together. If
each head separates its own tokens alpha_h, the pair (W_1, W_2) should tend to the direction of
the pair of max-margin solutions, and with it each head to its own.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mirrorhead import AttentionProblem, descend, locally_optimal
from mirrorhead.paths.descent import direction_divergence
from mirrorhead.synthetic import random_problem
from mirrorhead_lab.experiments.convergence import OpenQuestionSettings as Settings
from mirrorhead_lab.experiments.convergence import joined
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, divergence_panels, legend_below, median_band
from mirrorhead_lab.verdicts import Verdict, judge, listed


def run(settings: Settings) -> dict[str, Tensor]:
    """For each p "heads p", the divergence of each head to the solution of its tokens, (trials,
    records, 2), and "pair p", that of both as one direction, (trials, records). tokens:
    (trials, exponents, 2, n); local: whether each head's are locally optimal for it,
    (trials, exponents, 2)."""
    problem = random_problem(settings.trials, first=settings.first, heads=2)
    # One problem a head, (trials, 2, ...): the same data with the head's own v.
    X, z, y = (
        part.unsqueeze(1).expand(-1, 2, *part.shape[1:]).contiguous()
        for part in (problem.X, problem.z, problem.y)
    )
    each = AttentionProblem(X, z, y, problem.v)
    rows = []
    for p, steps, lr in zip(settings.p, settings.steps, settings.lr, strict=True):
        path = descend(problem, p, steps, lr, progress=False)
        found = locally_optimal(each, path.tokens, p, settings.tol)
        row = {
            "heads": path.divergence_to(found.solution).transpose(0, 1),
            "pair": direction_divergence(p, found.solution.W, path.W, 3).T,
            "tokens": path.tokens,
            "local": found.optimal,
        }
        rows.append(row)
    return joined(settings.p, rows, "heads", "pair")


def verdict(result: Result[Settings]) -> Verdict:
    """It holds if the divergence of nearly every head is small and still falling like a power."""
    settings = result.settings
    heads = result.each("heads")
    ends = [head[:, -1] for head in heads]  # (trials, 2) each
    middle = [np.median(end) for end in ends]
    tenths = zip(heads, settings.tenths, strict=True)
    fell = [(head[:, -1] < head[:, at] / 2).mean() for head, at in tenths]
    pair = [np.median(both[:, -1]) for both in result.each("pair")]
    differ = (result["tokens"][:, :, 0] != result["tokens"][:, :, 1]).mean()
    return judge(
        f"p = {listed(settings.p, 'g')}: median D of a head {listed(middle, '.1e')} (largest "
        f"{listed(map(np.max, ends), '.1e')}), of both as one direction {listed(pair, '.1e')}; "
        f"{result['local'].mean():.0%} of the heads are at locally optimal tokens, and the two "
        f"differ in {differ:.0%} of the samples",
        max(middle) < 0.01 and min(fell) >= 0.9,
    )


def draw(result: Result[Settings]) -> Figure:
    """The divergence of each head, and of both as one, against the step."""
    settings = result.settings
    figure, axes = divergence_panels(settings.p)
    lines = zip(axes, settings.records, result.each("heads"), result.each("pair"), strict=True)
    for axis, x, heads, pair in lines:
        for head in range(2):
            median_band(axis, x, heads[..., head], label=f"head {head + 1}")
        both = np.median(pair, 0)
        axis.plot(x, both, "--", color="black", linewidth=1, label="both as one direction")
    legend_below(figure, axes[0], columns=3)
    return figure


EXPERIMENT = Experiment(
    group="Open questions",
    title="Two heads (open question)",
    claim="Left open by the paper: with several heads, each head converges to the max-margin "
    "solution of its own tokens.",
    equation=r"f = \sum_h v_h^\top X^\top \mathrm{softmax}(X W_h z), \qquad \frac{W_h(k)}{\lVert "
    r"W_h(k) \rVert_p} \to \frac{W_{\mathrm{mm}}(\alpha_h)}{\lVert W_{\mathrm{mm}}(\alpha_h) "
    r"\rVert_p}",
    quick=Settings(trials=10, steps=(1500, 3000, 2000)),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=50,
    extent=("steps",),
)
