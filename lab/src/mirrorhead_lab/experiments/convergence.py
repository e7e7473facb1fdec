"""What several experiments share: settings, and how far paths have come for each exponent."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrorhead import AttentionProblem, Path, descend, locally_optimal
from mirrorhead.paths.descent import recorded_steps
from mirrorhead_lab.experiments.experiment import TrialSettings


@dataclass(frozen=True, kw_only=True)
class PathSettings(TrialSettings):
    """p: exponents of paths; steps: of each path, by default as in the paper."""

    p: tuple[float, ...] = (1.75, 2.0, 3.0)
    steps: tuple[int, ...] = (1500, 2000, 20_000)

    @property
    def records(self) -> list[list[int]]:
        """The steps of each path that `descend` records unless it is told which."""
        return [sorted(recorded_steps(steps)) for steps in self.steps]

    @property
    def tenths(self) -> list[int]:
        """The index of the first of these records of each path at a tenth of its steps or later."""
        return [at_a_tenth(steps) for steps in self.steps]


@dataclass(frozen=True, kw_only=True)
class OpenQuestionSettings(PathSettings):
    """steps and lr of each path; tol: the certified gap of the solutions."""

    steps: tuple[int, ...] = (3000, 6000, 6000)
    lr: tuple[float, ...] = (0.1, 0.1, 10.0)
    tol: float = 1e-12


def descend_anyway(*arguments: Any, **options: Any) -> Path:
    """`descend`, without a warning where lr exceeds what Remark 1 allows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lr = .* exceeds the largest step")
        return descend(*arguments, **options, progress=False)


def repeated(problem: AttentionProblem, times: int) -> AttentionProblem:
    """Repeat a problem along a new leading dimension, to descend from several starts at once.

    >>> from mirrorhead.synthetic import random_problem
    >>> repeated(random_problem(2), 3)
    AttentionProblem(trials=(3, 2), n=6, T=8, d=10, logistic)
    """
    return problem.mapped(lambda part: part.expand(times, *part.shape).contiguous())


def lengths_needed(path: Path, patience: int) -> Tensor:
    """Return how many times its length a path needs for locally optimal tokens: 1, 2, 4, ...

    Where the tokens are not locally optimal, the path is continued by its own rule until they
    are, for at most `patience` times its length. 0 means that they are not even then.

    >>> from mirrorhead.synthetic import random_problem
    >>> lengths_needed(descend(random_problem(5), geometry=2, steps=100), patience=8)
    tensor([4, 4, 8, 4, 2])
    """
    p, W, length = path.p, path.W[-1].clone(), 1
    needed = locally_optimal(path.problem, path.tokens, p).optimal.long()
    while 2 * length <= patience and bool((left := needed == 0).any()):
        rest = path.problem.mapped(lambda part, left=left: part[left])
        more = length * int(path.steps[-1])
        longer = descend(
            rest, p, more, path.lr, path.rule, init=W[left], record=[more], progress=False
        )
        length *= 2
        W[left] = longer.W[-1]
        needed[left] = length * locally_optimal(rest, longer.tokens, p).optimal.long()
    return needed


def joined(
    exponents: Iterable[float], rows: Iterable[Mapping[str, Tensor]], *apart: str, dim: int = 1
) -> dict[str, Tensor]:
    """Join what was measured for each exponent along a new dimension; some arrays stay "name p".

    >>> rows = [{"x": torch.tensor([1, 2]), "y": 5}, {"x": torch.tensor([3, 4]), "y": 6}]
    >>> joined([1.5, 2], rows, "y")
    {'y 1.5': 5, 'y 2': 6, 'x': tensor([[1, 3],
            [2, 4]])}
    """
    pairs = list(zip(exponents, rows, strict=True))
    arrays = {f"{name} {p:g}": row[name] for p, row in pairs for name in apart}
    together = [name for name in pairs[0][1] if name not in apart]
    return arrays | {name: torch.stack([row[name] for _, row in pairs], dim) for name in together}


def at_a_tenth(steps: int) -> int:
    """Return the index of the record at a tenth of the steps, if `descend` chose the records."""
    return int(np.searchsorted(sorted(recorded_steps(steps)), steps / 10))
