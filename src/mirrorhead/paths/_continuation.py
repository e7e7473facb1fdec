"""Minima over balls of growing radius, from several starts that are carried along.

The minimum over a ball lies on the sphere whenever the best tokens can be selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from mirrorhead.paths._balls import Balls, Found
from mirrorhead.paths._lbfgs import Function

FINE, COARSE = 1e-7, 1e-3  # tolerance at the radii asked for, and at those in between
GROWTH = 1.9  # the most by which the radius grows from one stage to the next
WARM_UP = 2  # stages before the first radius, starting where attention is soft
SAME = 1e-3  # starts whose values differ by less have met
INSIDE = 1 - 1e-4  # a point of at most this share of the radius is inside
LOWER = 1e-9  # how much lower, relative to its size, a value inside must be to count

# From directions (trials, starts, N), radii (trials, spheres) and a tolerance to directions of
# norm 1, as many or more, and values.
Search = Callable[[Tensor, Tensor, float], Found]


def minima_in_balls(
    search: Search, function_of: Callable[[int], Function], balls: Balls, first: Tensor,
    starts: int, seed: int, radii: Tensor, soft: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The best points (radii, trials, N) of balls, and the values (radii, starts, trials).

    radii: (radii, trials, balls); soft: (trials, balls), where the function is nearly linear;
    first: (trials, N), a direction to start with. `function_of(count)` is the function for
    `count` instances of each trial.
    """
    units, reach, values = follow_spheres(search, directions(first, starts, seed), radii, soft)
    points, begin = balls.scale(units, reach), next(directions(first, starts, seed))
    search_inside(points, values, function_of, balls, begin, radii, soft)
    return points, values


def follow_spheres(
    search: Search, draws: Iterator[Tensor], radii: Tensor, soft: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The minima on the spheres of each radius, continued from the radii `soft` on.

    Starts that have met are replaced by random directions, but for one. A last sweep goes back,
    since an optimum found late may be better at smaller radii. Returns the best points (radii,
    trials, N), of norm 1 on each sphere, the radii (radii, trials, spheres) that they stand for,
    less than asked for where a smaller one was better, and the values of all starts (radii,
    starts, trials), lowest first.
    """
    points = next(draws)
    starts = points.shape[1]
    ends: list[Found] = []
    for radius, wanted in stages(radii, soft):
        points, values = _lowest(starts, *search(points, radius, FINE if wanted else COARSE))
        if wanted:
            ends.append((points, values))
        met = torch.zeros_like(values, dtype=torch.bool)
        met[:, 1:] = values.diff(dim=-1) < SAME
        points = torch.where(met.unsqueeze(-1), next(draws), points)
    best = [(points[:, :1], values[:, :1]) for points, values in ends]
    reach = list(radii)
    for k in reversed(range(len(ends) - 1)):
        again = _lowest(1, *search(best[k + 1][0], radii[k], FINE))
        best[k], _ = _lower(again, best[k])
    for k in range(1, len(ends)):
        best[k], better = _lower(best[k - 1], best[k])
        reach[k] = torch.where(better, reach[k - 1], reach[k])
    values = torch.stack([value for _, value in best])  # (radii, trials, 1)
    others = torch.stack([value[:, 1:] for _, value in ends])
    all_values = torch.cat([values, others], -1).sort(-1).values.movedim(-1, 1)
    points = torch.stack([point[:, 0] for point, _ in best])
    return points, torch.stack(reach), all_values


def search_inside(
    points: Tensor, values: Tensor, function_of: Callable[[int], Function], balls: Balls,
    directions: Tensor, radii: Tensor, soft: Tensor,
) -> None:  # fmt: skip
    """Replace points (radii, trials, N) and values (radii, starts, trials) by lower ones inside.

    The search starts along `directions` (trials, starts, N) at half the radius `soft`. The balls
    grow by at most GROWTH from stage to stage, so a minimum inside is met before attention
    saturates around it, while there is still a slope that leads to it.
    """
    function, trials = function_of(directions.shape[1]), torch.arange(len(directions))
    radius = torch.minimum(soft, radii[0])
    found = balls.scale(balls.units(directions), radius.unsqueeze(1) / 2)
    found, heights = balls.minima_inside(function, found, radius, COARSE)
    for k, wanted in enumerate(radii):
        for larger in (*_between(radius, wanted), wanted):
            found, heights = balls.minima_inside(function, found, larger, COARSE)
        radius = wanted
        inside = (balls.norms(found) < INSIDE * wanted.unsqueeze(1)).any(-1)
        if not bool(inside.any()):
            continue
        best = heights.where(inside, torch.inf).argmin(1)
        start = found[trials, best, None]
        point, value = balls.minima_inside(function_of(1), start, wanted, FINE)
        point, value, lowest = point[:, 0], value[:, 0], values[k, 0]
        inside = (balls.norms(point) < INSIDE * wanted).any(-1)
        lower = inside & (value < lowest - LOWER * (1 + lowest.abs()))
        points[k] = torch.where(lower.unsqueeze(-1), point, points[k])
        values[k, 0] = torch.where(lower, value, lowest)
    for k in range(1, len(radii)):  # no radius is worse than a smaller one
        lower = values[k - 1, 0] < values[k, 0]
        points[k] = torch.where(lower.unsqueeze(-1), points[k - 1], points[k])
        values[k, 0] = torch.where(lower, values[k - 1, 0], values[k, 0])


def stages(radii: Tensor, soft: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """All radii to visit, (trials, spheres) each, and whether they were asked for."""
    start = torch.minimum(soft, radii[0])
    for j in range(WARM_UP):
        yield start * (radii[0] / start) ** (j / WARM_UP), False
    yield radii[0], True
    for low, high in pairwise(radii):
        yield from ((radius, False) for radius in _between(low, high))
        yield high, True


def _between(low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Radii strictly between two, each at most GROWTH times the one before."""
    steps = math.ceil(math.log(float((high / low).max())) / math.log(GROWTH) - 1e-6)
    for j in range(1, steps):
        yield low * (high / low) ** (j / steps)


def directions(first: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    """Random directions (trials, count, N), the same for all trials, so that the result of one does
    not depend on the others. `first` (trials, N) is the first of all.
    """
    generator = torch.Generator().manual_seed(seed)
    given = (first != 0).any(-1, keepdim=True)
    while True:
        draws = torch.randn(count, first.shape[-1], dtype=torch.float64, generator=generator)
        draws = draws.to(first.device).repeat(len(first), 1, 1)
        draws[:, 0] = torch.where(given, first, draws[:, 0])
        yield draws
        given = torch.zeros_like(given)


def _lowest(count: int, points: Tensor, values: Tensor) -> Found:
    """The points of the lowest values, lowest first."""
    values, order = values.sort(-1)
    points = points.gather(1, order.unsqueeze(-1).expand_as(points))
    return points[:, :count], values[:, :count]


def _lower(new: Found, old: Found) -> tuple[Found, Tensor]:
    """The first point and value of `new` where they are lower than `old`, and where they are."""
    better = new[1][:, :1] < old[1]
    point = torch.where(better.unsqueeze(-1), new[0][:, :1], old[0])
    return (point, torch.where(better, new[1][:, :1], old[1])), better
