"""Minima over spheres of growing radius, from several starts that are carried along."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mirrorhead.potentials import lp_norm, signed_power
from mirrorhead.problem import AttentionProblem

FINE, COARSE = 1e-7, 1e-3  # tolerance at the radii asked for, and at those in between
GROWTH = 1.9  # the most by which the radius grows from one stage to the next
WARM_UP = 2  # stages before the first radius, from where attention is still soft
SAME = 1e-3  # starts whose values are that near have met

# From directions (trials, starts, N), radii (trials, spheres) and a tolerance to directions of
# norm 1 and values (trials, starts), lowest first.
Search = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Ends:
    """The best of each radius, and all.

    points: (radii, trials, N), of norm 1 on each sphere; values: (radii, trials);
    reach: (radii, trials, spheres), the radii they stand for, less than asked for where a
    smaller one was better; all_values: (radii, starts, trials), lowest first.
    """

    points: Tensor
    values: Tensor
    reach: Tensor
    all_values: Tensor


def follow(search: Search, draw: Directions, starts: int, radii: Tensor, soft: Tensor) -> Ends:
    """Minima at the radii (radii, trials, spheres), continued from the radii `soft` on.

    Starts that have met are drawn anew at the next stage, except for one. A last sweep goes
    back from the largest radius to the smallest: an optimum met late may be the better one
    before. And no radius is worse than a smaller one, whose ball it contains.
    """
    points = draw(starts)
    ends: list[tuple[Tensor, Tensor]] = []
    for radius, wanted in stages(radii, soft):
        points, values = search(points, radius, FINE if wanted else COARSE)
        if wanted:
            ends.append((points, values))
        met = torch.zeros_like(values, dtype=torch.bool)
        met[:, 1:] = values.diff(dim=-1) < SAME
        points = torch.where(met.unsqueeze(-1), draw(starts), points)
    best = [(points[:, :1], values[:, :1]) for points, values in ends]
    reach = list(radii)
    for k in reversed(range(len(ends) - 1)):
        again = search(best[k + 1][0], radii[k], FINE)
        better = again[1][:, :1] < best[k][1]
        best[k] = _choose(better, again, best[k])
    for k in range(1, len(ends)):
        better = best[k - 1][1] < best[k][1]
        best[k] = _choose(better, best[k - 1], best[k])
        reach[k] = torch.where(better, reach[k - 1], reach[k])
    values = torch.stack([value for _, value in best])  # (radii, trials, 1)
    others = torch.stack([value[:, 1:] for _, value in ends])
    return Ends(
        points=torch.stack([point[:, 0] for point, _ in best]),
        values=values.squeeze(-1),
        reach=torch.stack(reach),
        all_values=torch.cat([values, others], -1).sort(-1).values.movedim(-1, 1),
    )


def stages(radii: Tensor, soft: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """All radii to visit, (trials, spheres) each, and whether they were asked for."""
    start = torch.minimum(soft, radii[0])
    for j in range(WARM_UP):
        yield start * (radii[0] / start) ** (j / WARM_UP), False
    yield radii[0], True
    for low, high in pairwise(radii):
        steps = math.ceil(math.log(float((high / low).max())) / math.log(GROWTH) - 1e-6)
        for j in range(1, steps):
            yield low * (high / low) ** (j / steps), False
        yield high, True


class Directions:
    """Random directions, (trials, count, N); `first` (trials, N) is the first of all.

    They are the same for all trials, so that what is found for a trial does not depend on
    its company.
    """

    def __init__(self, size: int, first: Tensor, seed: int) -> None:
        if type(seed) is not int:
            raise TypeError(f"seed must be an integer, got {seed!r}")
        self.generator = torch.Generator().manual_seed(seed)
        self.size, self.first, self.fresh = size, first, True

    def __call__(self, count: int) -> Tensor:
        draws = torch.randn(count, self.size, dtype=torch.float64, generator=self.generator)
        draws = draws.to(self.first.device).repeat(len(self.first), 1, 1)
        if self.fresh:
            known = (self.first != 0).any(-1, keepdim=True)
            draws[:, 0] = torch.where(known, self.first, draws[:, 0])
            self.fresh = False
        return draws


def on_sphere(M: Tensor, p: float) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """M / ||M||_p, and the map from a gradient there to the gradient in M; (k, N) each."""
    norm = lp_norm(M, p, -1, keepdim=True)
    unit = M / norm

    def pull_back(gradient: Tensor) -> Tensor:
        radial = (gradient * unit).sum(-1, keepdim=True)
        return (gradient - radial * signed_power(unit, p - 1)) / norm

    return unit, pull_back


def lowest_first(points: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(trials, starts, N) and (trials, starts) in the order of the values."""
    values, order = values.sort(-1)
    return points.gather(1, order.unsqueeze(-1).expand_as(points)), values


def check_radii(name: str, radii: Sequence[float] | Tensor, trials: tuple[int, ...]) -> Tensor:
    """The radii as (radii, *trials), or an error that names them."""
    values = torch.as_tensor(radii, dtype=torch.float64)
    if values.dim() == 1:
        values = values.reshape(-1, *(1 for _ in trials)).expand(-1, *trials)
    if values.dim() == 0 or values.shape[1:] != trials or values.numel() == 0:
        given = tuple(torch.as_tensor(radii).shape)
        raise ValueError(f"{name} must be (radii,) or (radii, *{trials}), got shape {given}")
    if not bool(((values > 0) & values.isfinite()).all()) or bool((values.diff(dim=0) <= 0).any()):
        raise ValueError(f"{name} must be positive, finite and increasing, got {radii}")
    return values


def check_problem(problem: AttentionProblem, starts: int) -> AttentionProblem:
    """The problem with one dimension of trials."""
    if problem.heads is not None or problem.classes is not None:
        raise ValueError(f"problem must have one head and labels +1 and -1, got {problem}")
    if type(starts) is not int or starts < 1:
        raise ValueError(f"starts must be an integer >= 1, got {starts!r}")
    X, z, y, v, mask = problem.X, problem.z, problem.y, problem.v, problem.mask
    return AttentionProblem(
        X.reshape(-1, *X.shape[-3:]),
        z.reshape(-1, *z.shape[-2:]),
        y.reshape(-1, y.shape[-1]),
        v.reshape(-1, v.shape[-1]),
        problem.loss_name,
        None if mask is None else mask.reshape(-1, *mask.shape[-2:]),
    )


def _choose(
    first: Tensor, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Of two best (point, value) the first where `first`, (trials, 1)."""
    point = torch.where(first.unsqueeze(-1), one[0][:, :1], other[0])
    return point, torch.where(first, one[1][:, :1], other[1])
