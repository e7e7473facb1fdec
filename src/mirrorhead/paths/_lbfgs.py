"""L-BFGS for many small problems at once, each with its own step and stopping test."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# (points (k, N), which (k,)) -> values (k,), gradients (k, N): `which` are the instances asked for.
Function = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

MOST_STEPS = 500
MEMORY = 10  # pairs of steps and changes of the gradient


class Minimum(NamedTuple):
    """Where each instance ended: x (B, N), value (B,), gradient (B, N), iterations (B,)."""

    x: Tensor
    value: Tensor
    gradient: Tensor
    iterations: Tensor


def minimize(objective: Function, x: Tensor, tol: float = 1e-7) -> Minimum:
    """Local minima of B functions of N variables from the starts x, (B, N), not zero.

    The two-loop recursion of L-BFGS with the weak Wolfe conditions, found by doubling and
    bisection. An instance ends when ||x|| ||gradient|| <= tol (1 + |value|), when its line
    search finds no descent that floating point can see, or after MOST_STEPS steps. Ended
    instances cost nothing more.
    """
    x = x.clone()
    everyone = torch.arange(len(x), device=x.device)
    value, gradient = objective(x, everyone)
    iterations = torch.zeros_like(everyone)
    which = everyone[~_flat(x, value, gradient, tol)]
    history = _History(x[which])
    for _ in range(MOST_STEPS):
        if not len(which):
            break
        at, f, g = x[which], value[which], gradient[which]
        step = history.direction(g)
        slope = (step * g).sum(-1)
        uphill = ~(slope < 0)
        step = torch.where(uphill.unsqueeze(-1), -g, step)
        slope = torch.where(uphill, -(g * g).sum(-1), slope)
        length, new_f, new_g = _wolfe(objective, which, at, f, step, slope)
        new = at + length.unsqueeze(-1) * step
        x[which], value[which], gradient[which] = new, new_f, new_g
        iterations[which] += 1
        history.add(new - at, new_g - g)
        keep = (length > 0) & ~_flat(new, new_f, new_g, tol)
        if not bool(keep.all()):
            which = which[keep]
            history.keep(keep)
    return Minimum(x, value, gradient, iterations)


class _History:
    """The last pairs (s, y); a pair without curvature has rho = 0 and so no effect."""

    def __init__(self, x: Tensor) -> None:
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        # Before anything is known, the first step is a tenth of ||x|| long.
        self.first = 0.1 * x.norm(dim=-1)
        self.scale = torch.zeros_like(self.first)  # 0: not known

    def direction(self, g: Tensor) -> Tensor:
        d = g.clone()
        alphas = []
        for s, y, rho in reversed(self.pairs):
            alpha = rho * torch.linalg.vecdot(s, d).unsqueeze(-1)
            d = d - alpha * y
            alphas.append(alpha)
        scale = torch.where(self.scale > 0, self.scale, self.first / g.norm(dim=-1))
        d = d * scale.unsqueeze(-1)
        for (s, y, rho), alpha in zip(self.pairs, reversed(alphas), strict=True):
            d = d + s * (alpha - rho * torch.linalg.vecdot(y, d).unsqueeze(-1))
        return -d

    def add(self, s: Tensor, y: Tensor) -> None:
        sy, yy = torch.linalg.vecdot(s, y), torch.linalg.vecdot(y, y)
        bent = sy > 1e-12 * yy.sqrt() * s.norm(dim=-1)
        rho = torch.where(bent, 1 / sy, 0.0).unsqueeze(-1)
        self.scale = torch.where(bent, sy / yy, self.scale)
        self.pairs = [*self.pairs, (s, y, rho)][-MEMORY:]

    def keep(self, which: Tensor) -> None:
        self.pairs = [(s[which], y[which], rho[which]) for s, y, rho in self.pairs]
        self.first, self.scale = self.first[which], self.scale[which]


def _flat(x: Tensor, value: Tensor, gradient: Tensor, tol: float) -> Tensor:
    size = x.norm(dim=-1) * gradient.norm(dim=-1)
    return ~(size > tol * (1 + value.abs()))


def _wolfe(
    objective: Function, which: Tensor, x: Tensor, f: Tensor, step: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Step lengths that satisfy the weak Wolfe conditions; 0 where none is found."""
    length = torch.ones_like(f)
    low, high, best = torch.zeros_like(f), torch.full_like(f, torch.inf), torch.zeros_like(f)
    best_f, best_g = f.clone(), torch.zeros_like(x)
    todo = torch.arange(len(f), device=f.device)
    for _ in range(25):
        t = length[todo]
        value, gradient = objective(x[todo] + t.unsqueeze(-1) * step[todo], which[todo])
        new_slope = (gradient * step[todo]).sum(-1)
        lower = value <= f[todo] + 1e-4 * t * slope[todo]
        better = lower & (value < best_f[todo])
        chosen = todo[better]
        best[chosen], best_f[chosen], best_g[chosen] = t[better], value[better], gradient[better]
        high[todo] = torch.where(lower, high[todo], t)
        low[todo] = torch.where(lower, t, low[todo])
        done = lower & (new_slope >= 0.9 * slope[todo])
        todo = todo[~done]
        if not len(todo):
            break
        middle = (low[todo] + high[todo]) / 2
        length[todo] = torch.where(high[todo].isinf(), 2 * low[todo], middle)
    # A stuck instance keeps its old point; its gradient is asked for again, since it was not kept.
    stuck = (best == 0).nonzero().squeeze(-1)
    if len(stuck):
        best_g[stuck] = objective(x[stuck], which[stuck])[1]
    return best, best_f, best_g
