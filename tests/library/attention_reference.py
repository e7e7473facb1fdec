"""The gradient of attention by its textbook formula, in as many digits as it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mpmath
import torch
from torch import Tensor

from mirrorhead import AttentionProblem


@dataclass
class Exact:
    """A gradient as a Frobenius-normalised direction and the logarithm of its norm."""

    direction: Tensor
    log_norm: float


def exact_gradients(problem: AttentionProblem, W: Tensor, digits: int) -> tuple[Exact, Exact]:
    """The gradients in W and v of a problem without trials."""
    assert problem.trials == ()
    with mpmath.workdps(digits):
        heads, classes = problem.heads or 1, problem.classes or 1
        n, T, d = problem.X.shape
        weights = W.reshape(heads, d, d).tolist()
        v = problem.v.reshape(heads, classes, d).tolist()
        to_W = [[[mpmath.mpf(0)] * d for _ in range(d)] for _ in range(heads)]
        to_v = [[[mpmath.mpf(0)] * d for _ in range(classes)] for _ in range(heads)]
        for i in range(n):
            kept = [t for t in range(T) if problem.mask is None or problem.mask[i, t]]
            X, z = problem.X[i, kept].tolist(), problem.z[i].tolist()
            y = int(problem.y[i])
            s = [_softmax([_dot(x, _times(A, z)) for x in X]) for A in weights]
            values = [[[_dot(c, x) for c in head] for x in X] for head in v]  # head, token, class
            f = [
                mpmath.fsum(s[h][t] * values[h][t][c] for h in range(heads) for t in range(len(X)))
                for c in range(classes)
            ]
            slopes = _slopes(problem, f, y)
            for h in range(heads):
                mean = [_dot(s[h], [value[c] for value in values[h]]) for c in range(classes)]
                for t, x in enumerate(X):
                    pull = s[h][t] * mpmath.fsum(
                        slopes[c] * (values[h][t][c] - mean[c]) for c in range(classes)
                    )
                    for a in range(d):
                        for b in range(d):
                            to_W[h][a][b] += pull * x[a] * z[b] / n
                        for c in range(classes):
                            to_v[h][c][a] += slopes[c] * s[h][t] * x[a] / n
        return (
            _exact([x for A in to_W for row in A for x in row], W.shape),
            _exact([x for head in to_v for row in head for x in row], problem.v.shape),
        )


def _slopes(problem: AttentionProblem, f: list[Any], y: int) -> list[Any]:
    """dl/df, one for each class."""
    if problem.classes is not None:
        shares = _softmax(f)
        return [share - (c == y) for c, share in enumerate(shares)]
    margin = y * f[0]
    slope = {
        "logistic": lambda: -1 / (1 + mpmath.exp(margin)),
        "exponential": lambda: -mpmath.exp(-margin),
        "linear": lambda: mpmath.mpf(-1),
    }[problem.loss_function.name]()
    return [y * slope]


def _softmax(h: list[Any]) -> list[Any]:
    top = max(h)
    e = [mpmath.exp(x - top) for x in h]
    total = mpmath.fsum(e)
    return [x / total for x in e]


def _dot(a: list[Any], b: list[Any]) -> Any:
    return mpmath.fsum(mpmath.mpf(x) * y for x, y in zip(a, b, strict=True))


def _times(A: list[list[Any]], z: list[Any]) -> list[Any]:
    return [_dot(row, z) for row in A]


def _exact(entries: list[Any], shape: torch.Size) -> Exact:
    norm = mpmath.sqrt(mpmath.fsum(x * x for x in entries))
    if norm == 0:
        return Exact(torch.zeros(shape, dtype=torch.float64), -float("inf"))
    unit = [float(x / norm) for x in entries]
    return Exact(torch.tensor(unit, dtype=torch.float64).reshape(shape), float(mpmath.log(norm)))
