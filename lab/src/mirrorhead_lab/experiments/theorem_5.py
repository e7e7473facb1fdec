r"""Theorem 5: the joint regularization path of head and attention, on Example 2.

    (v(r), W(R)) = argmin L(v, W)   subject to  ||v||_p <= r,  ||W||_p <= R

tends to the directions of the lp-SVM and lp-AttSVM of tokens for which Assumption B holds: any
other attention costs label margin, at least nu times what it takes from the selected tokens.
So they are the tokens of the largest label margin 1 / ||v_mm||; with 3 x 3 token pairs all
margins can be computed. The paper trains Example 2 by lp-JointGD, which need not agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from mirrorhead import assumption_b, descend, joint_regularization_path
from mirrorhead.margin import MarginSolution, attention_svm, svm
from mirrorhead.synthetic import example_2
from mirrorhead_lab.experiments.convergence import PathSettings, joined
from mirrorhead_lab.experiments.experiment import Experiment, Result
from mirrorhead_lab.plots import COLOURS, GREY, Figure, panels
from mirrorhead_lab.verdicts import Verdict, judge, listed

PAIRS = tuple(product(range(3), repeat=2))


@dataclass(frozen=True, kw_only=True)
class Settings(PathSettings):
    """radii: in units of ||W_mm|| and ||v_mm|| of the tokens with the largest label margin;
    starts: of the search; steps, lr: of JointGD, as in the paper."""

    radii: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    starts: int = 16
    lr: float = 0.1


def run(settings: Settings) -> dict[str, torch.Tensor]:
    """margins: label margins of all token pairs, (1, exponents, pairs); nu of the best pair,
    (1, exponents); tokens, weights, head: the path's tokens and its divergences to the solutions
    of the best pair, (1, exponents, radii, 2) and (1, exponents, radii). The same of JointGD at
    its end, to the solutions of its own tokens: descent_tokens, descent_weights, descent_head."""
    problem, pairs = example_2(), torch.tensor(PAIRS)
    multiples = torch.tensor(settings.radii, dtype=torch.float64)

    def solve_weights(tokens: torch.Tensor, p: float) -> MarginSolution:
        return attention_svm(problem.X, problem.z, tokens, p, tol=1e-12)

    def solve_head(tokens: torch.Tensor, p: float) -> MarginSolution:
        return svm(problem.X[torch.arange(len(tokens)), tokens], problem.y, p, tol=1e-12)

    rows = []
    for p, steps in zip(settings.p, settings.steps, strict=True):
        margins = torch.stack([1 / solve_head(pair, p).norm for pair in pairs])
        best = pairs[int(margins.argmax())]
        weights, head = solve_weights(best, p), solve_head(best, p)
        radii = multiples * weights.norm, multiples * head.norm
        path = joint_regularization_path(problem, p, *radii, settings.starts)
        joint = descend(problem, p, steps, settings.lr, joint=True, record=[steps], progress=False)
        row = {
            "margins": margins,
            "nu": assumption_b(problem, best, p),
            "tokens": path.tokens,
            "weights": path.divergence_to(weights),
            "head": path.head_divergence_to(head),
            "descent_tokens": joint.tokens,
            "descent_weights": joint.divergence_to(solve_weights(joint.tokens, p))[-1],
            "descent_head": joint.head_divergence_to(solve_head(joint.tokens, p))[-1],
        }
        rows.append({name: value.unsqueeze(0) for name, value in row.items()})
    return joined(settings.p, rows)


def verdict(result: Result[Settings]) -> Verdict:
    """It holds if the path ends at the pair of the largest margin, near both solutions."""
    settings = result.settings
    margins, tokens, own = (result[name][0] for name in ("margins", "tokens", "descent_tokens"))
    weights, head = result["weights"][0], result["head"][0]  # (exponents, radii)
    chosen, descent = _index(tokens[:, -1]), _index(own)
    near = (weights[:, -1] < np.minimum(1e-3, weights[:, 0] / 10)) & (head[:, -1] < 1e-3)
    holds = (margins.argmax(-1) == chosen) & near & (result["nu"][0] > 0)
    apart = [
        f"at p = {p:g} JointGD ends at {_name(descent[k])}, of label margin "
        f"{margins[k, descent[k]]:.4f}, not {margins[k, chosen[k]]:.4f}, with D of W "
        f"{result['descent_weights'][0, k]:.1e} and of v "
        f"{result['descent_head'][0, k]:.1e} to the solutions there"
        for k, p in enumerate(settings.p)
        if descent[k] != chosen[k]
    ]
    return judge(
        f"p = {listed(settings.p, 'g')}: at {settings.radii[-1]:g} times the solutions' norms "
        f"the path is at {' / '.join(map(_name, chosen))}, with D of W "
        f"{listed(weights[:, -1], '.1e')} and of v {listed(head[:, -1], '.1e')}; the widest label "
        f"margin is {listed(margins.max(-1), '.4f')}, nu at most {listed(result['nu'][0])}",
        bool(holds.all()),
        f"JointGD need not select the same tokens: {'; '.join(apart)}." if apart else "",
    )


def draw(result: Result[Settings]) -> Figure:
    """Divergences of both parts against the radius; label margins, and who takes which."""
    settings = result.settings
    figure, (left, right) = panels(2)
    for k, (p, colour) in enumerate(zip(settings.p, COLOURS, strict=False)):
        for name, part, style in (("W", "weights", "o-"), ("v", "head", "s--")):
            line = {"color": colour, "label": f"{name}, p = {p:g}"}
            left.plot(settings.radii, result[part][0, k], style, **line)
    left.set(xscale="log", yscale="log", xlabel="radius over the norm of the solution")
    left.set_ylabel("divergence to the solution")
    left.legend(fontsize="small")
    margins = result["margins"][0]  # (exponents, pairs)
    place = np.arange(len(settings.p))
    first, second = np.argsort(-margins.max(0))[:2]
    shifts = {first: -0.15, second: 0.15}
    for (pair, shift), colour in zip(shifts.items(), ("black", GREY), strict=True):
        line = {"color": colour, "markersize": 22, "markeredgewidth": 3, "linestyle": ""}
        right.plot(place + shift, margins[:, pair], "_", label=_name(pair), **line)
    for tokens, label, line in (
        (result["tokens"][0, :, -1], "regularization path", {"marker": "o", "color": COLOURS[0]}),
        (result["descent_tokens"][0], "JointGD", {"marker": "x", "color": COLOURS[1]}),
    ):
        chosen = _index(tokens)
        shift = [shifts.get(pair, 0.0) for pair in chosen]
        line |= {"markersize": 11, "markeredgewidth": 2, "markerfacecolor": "none"}
        label = f"taken by {label}"
        right.plot(place + shift, margins[place, chosen], linestyle="", label=label, **line)
    right.set_xticks(place, [f"{p:g}" for p in settings.p])
    right.set_xlim(-0.5, len(place) - 0.5)
    right.set(xlabel="exponent p", ylabel="label margin")
    right.legend(fontsize="small", loc="upper left", markerscale=0.6)
    return figure


def _index(tokens: np.ndarray) -> np.ndarray:
    """The place in PAIRS of two tokens, (..., 2)."""
    return tokens @ np.array([3, 1])


def _name(pair: int) -> str:
    """A pair in the paper's names, which count from 1."""
    first, second = PAIRS[pair]
    return f"(X1{first + 1}, X2{second + 1})"


EXPERIMENT = Experiment(
    group="The theory",
    title="Theorem 5: the joint regularization path, on Example 2",
    claim="The head and the attention weights that have the smallest loss at given norms turn, as "
    "these grow, to the two max-margin directions of the tokens that Assumption B names: those "
    "with the largest label margin.",
    equation=r"\frac{W(R)}{R} \to \frac{W_{\mathrm{mm}}}{\lVert W_{\mathrm{mm}} \rVert_p}, \qquad "
    r"\frac{v(r)}{r} \to \frac{v_{\mathrm{mm}}}{\lVert v_{\mathrm{mm}} \rVert_p} \qquad \text{as "
    r"} r, R \to \infty",
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
