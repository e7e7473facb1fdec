r"""When the max-margin problem has a solution: d >= max(T - 1, n), as the paper says.

Feasibility does not depend on p: it asks for one W with (x_alpha - x_t)' W z > 0. If the n queries
are linearly independent, W z_i can be chosen for each sample alone; if the T - 1 differences of a
sample are, some vector has a positive product with all of them. Both hold for almost all data
where d >= n and d >= T - 1. Random tokens of random data are selected here, not the best ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mirrorhead import attention_svm
from mirrorhead.synthetic import random_problem
from mirrorhead_lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead_lab.plots import Figure, legend_below, panels
from mirrorhead_lab.verdicts import Verdict, judge


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """sizes: (n, T) of the problems; d goes from 2 to one more than max(T - 1, n)."""

    sizes: tuple[tuple[int, int], ...] = ((6, 8), (10, 4), (3, 10), (8, 8))

    def dimensions(self, n: int, T: int) -> range:
        """The dimensions that are tried for one size."""
        return range(2, max(T - 1, n) + 2)


def run(settings: Settings) -> dict[str, Tensor]:
    """For each size "optimal n x T" and "infeasible n x T", as certified: (trials, dimensions)."""
    arrays = {}
    for n, T in settings.sizes:
        optimal, infeasible = [], []
        for d in settings.dimensions(n, T):
            problem = random_problem(settings.trials, n, T, d, settings.first)
            tokens = torch.zeros(settings.trials, n, dtype=torch.long)  # as random as the data
            codes = attention_svm(problem.X, problem.z, tokens, 2.0)
            optimal.append(codes.optimal)
            infeasible.append(torch.tensor([word == "infeasible" for word in codes.status]))
        arrays[f"optimal {n} x {T}"] = torch.stack(optimal, -1)
        arrays[f"infeasible {n} x {T}"] = torch.stack(infeasible, -1)
    return arrays


def verdict(result: Result[Settings]) -> Verdict:
    """It holds if every problem with d >= max(T - 1, n) has a certified solution."""
    settings, words, above = result.settings, [], []
    for n, T in settings.sizes:
        share, bound = result[f"optimal {n} x {T}"], max(T - 1, n)
        at = list(settings.dimensions(n, T)).index(bound)
        above.append(share[:, at:])
        below = share[:, at - 1].mean()
        half = settings.dimensions(n, T)[int((share.mean(0) >= 0.5).argmax())]
        words.append(
            f"(n, T) = ({n}, {T}): {below:.0%} at d = {bound - 1}, half from d = {half} on"
        )
    counts = sum(part.sum() for part in above), sum(part.size for part in above)
    unknown = sum(
        (~result[f"optimal {n} x {T}"] & ~result[f"infeasible {n} x {T}"]).sum()
        for n, T in settings.sizes
    )
    good = counts[0] == counts[1]
    return judge(
        f"{counts[0]} of {counts[1]} problems with d >= max(T - 1, n) are feasible; below that, "
        f"{'; '.join(words)}; {unknown} problems are undecided",
        bool(good),
        "The bound is sufficient, not necessary: with random data half of the problems are "
        "feasible at a smaller d."
        if good
        else "",
    )


def draw(result: Result[Settings]) -> Figure:
    """The share of feasible problems against d - max(T - 1, n)."""
    settings = result.settings
    figure, (axis,) = panels(1)
    for n, T in settings.sizes:
        d = np.array(settings.dimensions(n, T)) - max(T - 1, n)
        axis.plot(d, 100 * result[f"optimal {n} x {T}"].mean(0), "o-", label=f"n = {n}, T = {T}")
    axis.axvline(0, color="black", linestyle=":", label="the paper's bound")
    axis.set(xlabel="d - max(T - 1, n)", ylabel="% of problems with a solution")
    legend_below(figure, axis, columns=5)
    return figure


EXPERIMENT = Experiment(
    group="The theory",
    title="Feasibility: when the max-margin problem has a solution",
    claim="With at least as many dimensions as samples and as tokens but one, almost every choice "
    "of tokens can be separated.",
    equation=r"d \geq \max(T - 1, n) \;\Rightarrow\; \text{the } \ell_p\text{-AttSVM is feasible}",
    quick=Settings(trials=20),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
)
