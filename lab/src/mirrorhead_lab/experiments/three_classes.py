r"""Three classes: an open question of the paper, answered by experiment.

With outputs f = V' X' s in R^3 and cross-entropy, the loss of a sample is convex in its
attention s. Two classes leave only one direction to go, and a token is always best. Three do
not: the loss may be lowest at a mixture of tokens. A token t is best of all mixtures if and
only if no other token is a direction of descent from it,

    (softmax(f_t) - e_y)' (f_tau - f_t) >= 0   for all tau,     f_t = V' x_t,

which is checked exactly here, sample by sample, and compared with what the paths do.
"""

from __future__ import annotations

import numpy as np
import torch

from mirrorhead import AttentionProblem, attention_svm, descend
from mirrorhead.synthetic import random_problem
from mirrorhead_lab.experiments.convergence import OpenQuestionSettings as Settings
from mirrorhead_lab.experiments.convergence import joined
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import Figure, median_band, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed

ONE_HOT = 0.999  # the least mass of a selected token


def run(settings: Settings) -> dict[str, torch.Tensor]:
    """For each p "divergence p" to the AttSVM of the selected tokens, (trials, records). mass:
    the attention on the selected token, (trials, exponents, n); local: whether no support token
    is a direction of descent from it, as in Definition 3, (trials, exponents); pure: whether a
    single token is best of all mixtures, (trials, n)."""
    problem = random_problem(settings.trials, first=settings.first, classes=3)
    change = _change(problem)
    rows = []
    for p, steps, lr in zip(settings.p, settings.steps, settings.lr, strict=True):
        path = descend(problem, p, steps, lr, progress=False)
        solution = attention_svm(problem.X, problem.z, path.tokens, p, settings.tol)
        chosen = path.tokens[..., None, None]
        descends = change.take_along_dim(chosen, -2).squeeze(-2) <= 0  # (trials, n, tau)
        row = {
            "divergence": path.divergence_to(solution).T,
            "mass": problem.attention(path.W[-1]).amax(-1),
            "local": ~(descends & solution.support).any(-1).any(-1),
        }
        rows.append(row)
    pure = (change.amin(-1) >= -1e-12).any(-1)
    return {**joined(settings.p, rows, "divergence"), "pure": pure}


def verdict(result: Result[Settings]) -> Verdict:
    """It would hold if nearly all trials became one-hot and converged."""
    settings = result.settings
    one_hot = result["mass"].min(-1) > ONE_HOT  # in every sample, (trials, exponents)
    good, bad, converge = [], [], []
    paths = zip(result.each("divergence"), settings.tenths, one_hot.T, strict=True)
    for divergence, tenth, chosen in paths:
        end = divergence[:, -1]
        if chosen.any():
            good.append(np.median(end[chosen]))
            fell = (end < divergence[:, tenth] / 2)[chosen].mean()
            converge.append(good[-1] < 0.01 and fell >= 0.9)
        if not chosen.all():
            bad.append(np.median(end[~chosen]))
    exponents, counts = listed(settings.p, "g"), listed(one_hot.sum(0), "d")
    measured = f"p = {exponents}: {counts} of {settings.trials} trials become one-hot"
    if good:
        measured += f", with a median D of {listed(good, '.1e')}"
    if bad:
        measured += f"; the others end at {listed(bad, '.1e')}"
    pure = result["pure"].all(1)
    soft = (result["mass"] <= ONE_HOT).mean()
    remark = (
        f"Cross-entropy of three classes is lowest at a mixture of tokens in "
        f"{1 - result['pure'].mean():.0%} of the samples, and {soft:.0%} stay soft. Where a token "
        f"is best in every sample, {one_hot[pure].sum()} of {one_hot[pure].size} paths become "
        f"one-hot, elsewhere {one_hot[~pure].sum()} of {one_hot[~pure].size}; "
        f"{result['local'][one_hot].sum()} of these {one_hot.sum()} at locally optimal tokens."
    )
    if converge:
        remark += f" Paths that become one-hot {'do' if all(converge) else 'do not all'} converge."
    holds = bool(one_hot.mean() >= 0.95 and converge and all(converge))
    return judge(measured, holds, remark)


def draw(result: Result[Settings]) -> Figure:
    """The divergence along the path of each kind of trial; the least mass of each trial."""
    settings = result.settings
    at = settings.p.index(2.0) if 2.0 in settings.p else 0
    one_hot, divergence = result["mass"][:, at].min(-1) > ONE_HOT, result.each("divergence")[at]
    figure, (left, right) = panels(2)
    for kind, colour, label in ((one_hot, "C0", "became one-hot"), (~one_hot, "C1", "did not")):
        if kind.any():
            line = {"color": colour, "label": f"{label} ({kind.sum()})"}
            median_band(left, settings.records[at], divergence[kind], **line)
    left.set(xscale="log", yscale="log", xlabel="step", ylabel="divergence to the AttSVM")
    left.set_title(f"p = {settings.p[at]:g}")
    left.legend()
    share = (np.arange(settings.trials) + 0.5) / settings.trials
    for k, p in enumerate(settings.p):
        least = np.sort(result["mass"][:, k].min(-1))
        right.plot(share, least, color=f"C{k + 2}", label=f"p = {p:g}")
    right.set(xlabel="trials, sorted", ylabel="least attention on a selected token")
    right.set_title("at the end")
    right.xaxis.set_major_formatter("{x:.0%}")
    right.legend()
    return figure


def _change(problem: AttentionProblem) -> torch.Tensor:
    """(softmax(f_t) - e_y)' (f_tau - f_t), (trials, n, t, tau): the slope from t towards tau."""
    outputs = torch.einsum("kntd,kcd->kntc", problem.X, problem.v)
    true = torch.nn.functional.one_hot(problem.y.long(), outputs.shape[-1])
    slope = outputs.softmax(-1) - true.unsqueeze(-2)  # (trials, n, T, classes)
    return slope @ outputs.mT - (slope * outputs).sum(-1, keepdim=True)


EXPERIMENT = Experiment(
    group="Open questions",
    title="Three classes (open question)",
    claim="Left open by the paper: with three classes, too, attention comes to rest on one token "
    "of each sample, and the weights converge to the max-margin solution of these tokens.",
    equation=r"f = V^\top X^\top \mathrm{softmax}(X W z) \in \mathbb{R}^3, \qquad \max_t "
    r"\mathrm{softmax}(X W(k) z)_t \to 1",
    quick=Settings(trials=16, steps=(1500, 2000, 2000)),
    full=Settings(trials=100),
    run=run,
    draw=draw,
    verdict=verdict,
    chunk=50,
)
