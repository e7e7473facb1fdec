"""What several experiments measure alike: how far paths have come, one array for all exponents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from mirrorhead.paths.descent import Path, descend, recorded_steps
from mirrorhead.problem import AttentionProblem
from mirrorhead.tokens import locally_optimal


def repeated(problem: AttentionProblem, times: int) -> AttentionProblem:
    """Repeat a problem along a new leading dimension, to descend from several starts at once.

    >>> from mirrorhead.synthetic import random_problem
    >>> repeated(random_problem(2), 3)
    AttentionProblem(trials=(3, 2), n=6, T=8, d=10, logistic)
    """
    parts = (problem.X, problem.z, problem.y, problem.v)
    X, z, y, v = (part.expand(times, *part.shape).contiguous() for part in parts)
    return AttentionProblem(X, z, y, v, problem.loss_name)


def lengths_needed(path: Path, patience: int) -> Tensor:
    """Return how many times its length a path needs for locally optimal tokens: 1, 2, 4, ...

    Where the tokens are not locally optimal, the path is continued by its own rule until they
    are, for at most `patience` times its length. 0 means that they are not even then.

    >>> from mirrorhead.synthetic import random_problem
    >>> lengths_needed(descend(random_problem(5), p=2, steps=100), patience=8)
    tensor([4, 4, 8, 4, 2])
    """
    problem, p, W = path.problem, path.p, path.W[-1].clone()
    steps = int(path.steps[-1])
    needed = locally_optimal(problem, path.tokens, p).optimal.long()
    length = 1
    while 2 * length <= patience and bool((left := needed == 0).any()):
        X, z, y, v = (part[left] for part in (problem.X, problem.z, problem.y, problem.v))
        rest = AttentionProblem(X, z, y, v, problem.loss_name)
        more = length * steps
        longer = descend(
            rest, p, more, path.lr, path.rule, init=W[left], record=[more], progress=False
        )
        length *= 2
        W[left] = longer.W[-1]
        needed[left] = length * locally_optimal(rest, longer.tokens, p).optimal.long()
    return needed


def stacked(rows: Iterable[Mapping[str, Tensor]], dim: int) -> dict[str, Tensor]:
    """Join what was measured for each exponent along a new dimension.

    >>> stacked([{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3, 4])}], 1)
    {'x': tensor([[1, 3],
            [2, 4]])}
    """
    first, *others = rows
    return {
        name: torch.stack([x, *(row[name] for row in others)], dim) for name, x in first.items()
    }


def at_a_tenth(steps: int) -> int:
    """Return the index of the record at a tenth of the steps, if `descend` chose the records."""
    return int(np.searchsorted(sorted(recorded_steps(steps)), steps / 10))
