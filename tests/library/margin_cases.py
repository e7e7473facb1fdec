"""Problems the margin tests share, from the plain to the nasty."""

from __future__ import annotations

import torch
from torch import Tensor

Problem = tuple[Tensor, Tensor, Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_problem(*shape: int, seed: int = 0) -> Problem:
    """X (..., n, T, d) and z (..., n, d) on the unit sphere, and random tokens (..., n)."""
    *lead, n, T, d = shape
    g = generator(seed)
    X = torch.randn(*lead, n, T, d, generator=g, dtype=torch.float64)
    z = torch.randn(*lead, n, d, generator=g, dtype=torch.float64)
    tokens = torch.randint(0, T, (*lead, n), generator=g)
    return X / X.norm(dim=-1, keepdim=True), z / z.norm(dim=-1, keepdim=True), tokens


def dense_rows(X: Tensor, z: Tensor, tokens: Tensor) -> Tensor:
    """The constraint matrix of one problem as the formula has it, (n (T-1), d d)."""
    n, T, _ = X.shape
    return torch.stack(
        [
            torch.outer(X[i, tokens[i]] - X[i, t], z[i]).reshape(-1)
            for i in range(n)
            for t in range(T)
            if t != tokens[i]
        ]
    )


def nasty(name: str, count: int, seed: int = 0) -> Problem:
    """`count` problems of one of the kinds that break solvers."""
    X, z, tokens = random_problem(count, 6, 8, 10, seed=seed)
    g = generator(seed + 1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def decades(*shape: int, width: float) -> Tensor:
        return 10 ** (width * (torch.rand(*shape, generator=g, dtype=torch.float64) - 0.5))

    if name == "tiny scale":
        X = X * 1e-3
    elif name == "large scale":
        X = X * 1e3
    elif name == "six decades of row norms":
        X, z = X * decades(count, 6, 8, 1, width=3), z * decades(count, 6, 1, width=3)
    elif name == "near-duplicate of the selected token":
        selected = X.gather(2, tokens[..., None, None].expand(count, 6, 1, 10))
        twin = (tokens + 1) % 8
        X = X.scatter(
            2,
            twin[..., None, None].expand(count, 6, 1, 10),
            selected + 1e-6 * noise(count, 6, 1, 10),
        )
    elif name == "repeated unselected tokens":
        X[:, :, 5], tokens = X[:, :, 2], tokens % 2
    elif name == "near-infeasible":
        X[:, 1] = X[:, 0] + 1e-4 * noise(count, 8, 10)
        z[:, 1] = z[:, 0] + 1e-4 * noise(count, 10)
        tokens[:, 1] = (tokens[:, 0] + 1) % 8
    elif name == "integers":
        X, z = (3 * X).round(), (3 * z).round() + 0.5
        first = X.gather(2, tokens[..., None, None].expand(count, 6, 1, 10))
        same = (first == X).all(-1).scatter(2, tokens.unsqueeze(-1), False)
        X = X + same.unsqueeze(-1)
    elif name == "more constraints than weights":
        X, z, tokens = random_problem(count, 6, 13, 6, seed=seed)
    else:
        raise ValueError(name)
    return X, z, tokens


NASTY = (
    "tiny scale",
    "large scale",
    "six decades of row norms",
    "near-duplicate of the selected token",
    "repeated unselected tokens",
    "near-infeasible",
    "integers",
    "more constraints than weights",
)


def hopeless(name: str, count: int, seed: int = 0) -> Problem:
    """Problems without a solution."""
    X, z, tokens = random_problem(count, 6, 8, 10, seed=seed)
    if name == "selected token in the hull of the others":
        tokens[:, 0] = 0
        X[:, 0, 0] = X[:, 0, 1:].mean(1)
    elif name == "one input, two answers":
        X[:, 1], z[:, 1] = X[:, 0], z[:, 0]
        tokens[:, 1] = (tokens[:, 0] + 1) % 8
    elif name == "selected token equal to another":
        X.scatter_(
            2,
            ((tokens + 3) % 8)[..., None, None].expand(count, 6, 1, 10),
            X.gather(2, tokens[..., None, None].expand(count, 6, 1, 10)),
        )
    elif name == "zero query":
        z[:, 2] = 0
    else:
        raise ValueError(name)
    return X, z, tokens


HOPELESS = (
    "selected token in the hull of the others",
    "one input, two answers",
    "selected token equal to another",
    "zero query",
)
