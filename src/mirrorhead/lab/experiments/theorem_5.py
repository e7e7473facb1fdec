r"""Theorem 5: the joint regularization path of head and attention, on Example 2.

    (v(r), W(R)) = argmin L(v, W)   subject to  ||v||_p <= r,  ||W||_p <= R

tends to the directions of the lp-SVM and lp-AttSVM of tokens for which Assumption B holds: any
other attention costs label margin, at least nu times what it takes from the selected tokens.
So they are the tokens of the largest label margin 1 / ||v_mm||; with 3 x 3 token pairs all
margins can be computed. The paper trains Example 2 by lp-JointGD, which need not agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from mirrorhead.lab.experiments.convergence import stacked
from mirrorhead.lab.experiments.experiment import Experiment, Result, TrialSettings
from mirrorhead.lab.plots import COLOURS, GREY, Figure, panels
from mirrorhead.lab.verdicts import Verdict, judge, listed
from mirrorhead.margin import MarginSolution, attention_svm, svm
from mirrorhead.paths._assumption_b import assumption_b
from mirrorhead.paths.descent import descend
from mirrorhead.paths.regularization import joint_regularization_path
from mirrorhead.problem import AttentionProblem
from mirrorhead.synthetic import example_2

PAIRS = tuple(product(range(3), repeat=2))


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSettings):
    """p: exponents; radii: in units of ||W_mm|| and ||v_mm|| of the tokens with the largest
    label margin; starts: of the search; steps, lr: of JointGD, as in the paper."""

    p: tuple[float, ...] = (1.75, 2.0, 3.0)
    radii: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    starts: int = 16
    steps: tuple[int, ...] = (1500, 2000, 20_000)
    lr: float = 0.1


def run(settings: Settings) -> dict[str, Tensor]:
    """margins: label margins of all token pairs, (1, exponents, pairs); nu of the best pair,
    (1, exponents); tokens, weights, head: the path's tokens and its divergences to the solutions
    of the best pair, (1, exponents, radii, 2) and (1, exponents, radii). The same of JointGD at
    its end, to the solutions of its own tokens: descent_tokens, descent_weights, descent_head."""
    problem = example_2()
    each = zip(settings.p, settings.steps, strict=True)
    rows = stacked((_measure(problem, p, steps, settings) for p, steps in each), 0)
    return {name: value.unsqueeze(0) for name, value in rows.items()}


def verdict(result: Result[Settings]) -> Verdict:
    """It holds if the path ends at the pair of the largest margin, near both solutions."""
    settings = result.settings
    names, holds, apart = [], [], []
    for k, p in enumerate(settings.p):
        margins, tokens = result["margins"][0, k], result["tokens"][0, k, -1]
        best, chosen = int(margins.argmax()), _index(tokens)
        near = result["weights"][0, k, -1] < min(1e-3, result["weights"][0, k, 0] / 10)
        near &= result["head"][0, k, -1] < 1e-3
        holds.append(best == chosen and near and result["nu"][0, k] > 0)
        names.append(_pair(tokens))
        descent = _index(result["descent_tokens"][0, k])
        if descent != chosen:
            apart.append(
                f"at p = {p:g} JointGD ends at {_pair(PAIRS[descent])}, of label margin "
                f"{margins[descent]:.4f}, not {margins[chosen]:.4f}, with D of W "
                f"{result['descent_weights'][0, k]:.1e} and of v "
                f"{result['descent_head'][0, k]:.1e} to the solutions there"
            )
    ends = [listed(result[name][0, :, -1], ".1e") for name in ("weights", "head")]
    return judge(
        f"p = {listed(settings.p, 'g')}: at {settings.radii[-1]:g} times the solutions' norms "
        f"the path is at {' / '.join(names)}, with D of W {ends[0]} and of v {ends[1]}; the widest "
        f"label margin is {listed(result['margins'][0].max(-1), '.4f')}, nu at most "
        f"{listed(result['nu'][0])}",
        all(holds),
        f"JointGD need not select the same tokens: {'; '.join(apart)}." if apart else "",
    )


def draw(result: Result[Settings]) -> Figure:
    """Divergences of both parts against the radius; label margins, and who takes which."""
    settings = result.settings
    figure, (left, right) = panels(2)
    for k, (p, colour) in enumerate(zip(settings.p, COLOURS, strict=False)):
        left.plot(
            settings.radii, result["weights"][0, k], "o-", color=colour, label=f"W, p = {p:g}"
        )
        left.plot(settings.radii, result["head"][0, k], "s--", color=colour, label=f"v, p = {p:g}")
    left.set(xscale="log", yscale="log", xlabel="radius over the norm of the solution")
    left.set_ylabel("divergence to the solution")
    left.legend(fontsize="small")
    margins = result["margins"][0]  # (exponents, pairs)
    place = np.arange(len(settings.p))
    contenders = [int(pair) for pair in np.argsort(-margins.max(0))[:2]]
    for shift, pair, colour in zip((-0.15, 0.15), contenders, ("black", GREY), strict=True):
        line = {"color": colour, "markersize": 22, "markeredgewidth": 3, "linestyle": ""}
        right.plot(place + shift, margins[:, pair], "_", label=_pair(PAIRS[pair]), **line)
    for tokens, label, line in (
        (result["tokens"][0, :, -1], "regularization path", {"marker": "o", "color": COLOURS[0]}),
        (result["descent_tokens"][0], "JointGD", {"marker": "x", "color": COLOURS[1]}),
    ):
        chosen = [_index(pair) for pair in tokens]
        shift = [{contenders[0]: -0.15, contenders[1]: 0.15}.get(pair, 0.0) for pair in chosen]
        line |= {"markersize": 11, "markeredgewidth": 2, "markerfacecolor": "none"}
        height = margins[np.arange(len(chosen)), chosen]
        right.plot(place + shift, height, linestyle="", label=f"taken by {label}", **line)
    right.set_xticks(place, [f"{p:g}" for p in settings.p])
    right.set_xlim(-0.5, len(place) - 0.5)
    right.set(xlabel="exponent p", ylabel="label margin")
    right.legend(fontsize="small", loc="upper left", markerscale=0.6)
    return figure


def _measure(
    problem: AttentionProblem, p: float, steps: int, settings: Settings
) -> dict[str, Tensor]:
    pairs = torch.tensor(PAIRS)
    margins = torch.stack([1 / _head(problem, pair, p).norm for pair in pairs])
    best = pairs[int(margins.argmax())]
    weights, head = _weights(problem, best, p), _head(problem, best, p)
    multiples = torch.tensor(settings.radii, dtype=torch.float64)
    path = joint_regularization_path(
        problem, p, multiples * weights.norm, multiples * head.norm, settings.starts
    )
    descent = descend(problem, p, steps, settings.lr, joint=True, record=[steps], progress=False)
    own = descent.tokens
    return {
        "margins": margins,
        "nu": assumption_b(problem, best, p),
        "tokens": path.tokens,
        "weights": path.divergence_to(weights),
        "head": path.head_divergence_to(head),
        "descent_tokens": own,
        "descent_weights": descent.divergence_to(_weights(problem, own, p))[-1],
        "descent_head": descent.head_divergence_to(_head(problem, own, p))[-1],
    }


def _weights(problem: AttentionProblem, tokens: Tensor, p: float) -> MarginSolution:
    return attention_svm(problem.X, problem.z, tokens, p, tol=1e-12)


def _head(problem: AttentionProblem, tokens: Tensor, p: float) -> MarginSolution:
    return svm(problem.X[torch.arange(len(tokens)), tokens], problem.y, p, tol=1e-12)


def _index(tokens: Sequence[int] | np.ndarray) -> int:
    return PAIRS.index((int(tokens[0]), int(tokens[1])))


def _pair(tokens: Sequence[int] | np.ndarray) -> str:
    """The tokens in the paper's names, which count from 1."""
    return f"(X1{int(tokens[0]) + 1}, X2{int(tokens[1]) + 1})"


EXPERIMENT = Experiment(
    name="theorem-5",
    title="Theorem 5: the joint regularization path, on Example 2",
    claim=(
        "The head and the attention weights that have the smallest loss at given norms turn, "
        "as these grow, to the two max-margin directions of the tokens that Assumption B "
        "names: those with the largest label margin."
    ),
    equation=(
        r"\frac{W(R)}{R} \to \frac{W_{\mathrm{mm}}}{\lVert W_{\mathrm{mm}} \rVert_p}, \qquad "
        r"\frac{v(r)}{r} \to \frac{v_{\mathrm{mm}}}{\lVert v_{\mathrm{mm}} \rVert_p} \qquad "
        r"\text{as } r, R \to \infty"
    ),
    quick=Settings(
        trials=1, radii=(1.0, 3.0, 10.0, 30.0, 100.0), starts=8, steps=(1500, 2000, 3000)
    ),
    full=Settings(trials=1),
    run=run,
    draw=draw,
    verdict=verdict,
    fixed_trials=True,
    extent=("radii", "starts", "steps"),
)
