"""Random attention problems as in the paper's appendix H.2, and the paper's Examples 1 and 2.

| figure | problem | start |
| --- | --- | --- |
| 3 | `example_1()` | none: margins only |
| 4 | `authors_problem()`, seeds 1 to 100 | W(0) of standard deviation 1, drawn without a seed |
| 5 | `authors_problem(1)`, entries (1, 2) and (3, 4) of W | W(0) = 0 |
| 6, 7 | `example_2(halved=True)`, W and v trained | W(0) = 0, v(0) = 0 |

All use lr .1 and normalised steps: 1,500 for p = 1.75, 2,000 for p = 2 and 20,000 for p = 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mirrorhead._checks import check_integer, is_number
from mirrorhead.losses import Loss
from mirrorhead.problem import AttentionProblem


def random_problem(
    trials: int,
    n: int = 6,
    T: int = 8,
    d: int = 10,
    first: int = 0,
    loss: str | Loss = "logistic",
    heads: int | None = None,
    classes: int | None = None,
) -> AttentionProblem:
    """Return trials with x_it, z_i and v uniform on the unit sphere and y_i uniform.

    Trial k has its own generator with the seed first + k, so it does not depend on the number of
    trials.

    >>> random_problem(3)
    AttentionProblem(trials=(3,), n=6, T=8, d=10, logistic)
    >>> bool((random_problem(3).X[2] == random_problem(1, first=2).X[0]).all())
    True
    """
    for name, value in (("trials", trials), ("n", n), ("T", T), ("d", d)):
        check_integer(name, value, 1)
    check_integer("first", first, 0)
    head = tuple(size for size in (heads, classes) if size is not None)
    parts = []
    for seed in range(first, first + trials):
        generator = torch.Generator().manual_seed(seed)
        X = on_sphere((n, T, d), generator)
        z = on_sphere((n, d), generator)
        y = torch.randint(0, classes or 2, (n,), generator=generator)
        parts.append((X, z, y if classes else 2.0 * y - 1, on_sphere((*head, d), generator)))
    X, z, y, v = (torch.stack(part) for part in zip(*parts, strict=True))
    return AttentionProblem(X, z, y, v, loss, heads=heads, classes=classes)


def random_weights(
    problem: AttentionProblem, scale: float, first: int = 0, distribution: str = "normal"
) -> Tensor:
    """A start W(0) for each trial, of standard deviation `scale`, seeded like the trials.

    distribution: "normal", "uniform", "sparse" (one entry in ten, normal) or "rank-one".
    The seeds are apart from those of `random_problem`, so W(0) and X are independent: a
    generator looks at 32 bits of its seed, and the highest is set here.
    """
    shape, leading = problem.weight_shape, problem.trials
    if not (is_number(scale) and 0 <= scale < math.inf):
        raise ValueError(f"scale must be a finite number >= 0, got {scale!r}")
    if len(leading) != 1:
        raise ValueError(f"random_weights needs one leading dimension, got {leading}")
    generators = (torch.Generator().manual_seed(2**31 + first + k) for k in range(leading[0]))
    return scale * torch.stack([_draw(shape[1:], distribution, each) for each in generators])


def on_sphere(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Rows uniform on the unit sphere."""
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return x / x.norm(dim=-1, keepdim=True)


def _draw(shape: tuple[int, ...], distribution: str, generator: torch.Generator) -> Tensor:
    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float64, generator=generator)

    if distribution == "normal":
        return normal(*shape)
    if distribution == "uniform":
        return (torch.rand(shape, dtype=torch.float64, generator=generator) - 0.5) * 12**0.5
    if distribution == "sparse":
        keep = torch.rand(shape, dtype=torch.float64, generator=generator) < 0.1
        return normal(*shape) * keep * 10**0.5
    if distribution == "rank-one":
        return normal(*shape[:-1], 1) * normal(*shape[:-2], 1, shape[-1])
    raise ValueError(
        f"distribution must be normal, uniform, sparse or rank-one; got {distribution!r}"
    )


def authors_problem(
    trials: int = 100, n: int = 6, T: int = 8, d: int = 10, first: int = 1
) -> AttentionProblem:
    """The trials of Figure 4 as the authors' published code draws them; seed 1 is Figure 5's.

    One float32 generator a trial, of seed first + k, draws v, y, X and z in this order: normal
    numbers, of which y keeps the sign. The vectors are normalised in float32. Their W(0) has no
    seed, so nobody can draw it again: `random_weights(problem, 1.0)` has the same distribution.

    >>> authors_problem(2)
    AttentionProblem(trials=(2,), n=6, T=8, d=10, logistic)
    """
    for name, value in (("trials", trials), ("n", n), ("T", T), ("d", d)):
        check_integer(name, value, 1)
    check_integer("first", first, 0)
    drawn = []
    for seed in range(first, first + trials):
        generator = torch.Generator().manual_seed(seed)
        shapes = ((d,), (n,), (n, T, d), (n, d))
        drawn.append([torch.randn(shape, generator=generator) for shape in shapes])
    v, y, X, z = (torch.stack(part) for part in zip(*drawn, strict=True))
    X, z, v = (x / x.norm(dim=-1, keepdim=True) for x in (X, z, v))
    return AttentionProblem(X, z, (y > 0) * 2.0 - 1, v)


def example_1(origin: bool = True) -> AttentionProblem:
    """Example 1: X_1 = (5, 0), (0, 0), (0, 1), X_2 = -X_1, y = 1, -1, z_i the first token.

    Its matrices are not legible in every copy. `origin=False` is the other reading, without the
    token (0, 0), which is then padding. The example names no head. Here v is (1/5, 0), the lp-SVM
    solution of the first tokens, under which they have the highest scores.

    >>> example_1(origin=False)
    AttentionProblem(trials=(), n=2, T=3, d=2, logistic, masked)
    """
    first = torch.tensor([[5.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    X = torch.stack([first, -first])
    mask = None if origin else torch.tensor([[True, False, True]] * 2)
    return AttentionProblem(X, X[:, 0], [1.0, -1.0], [0.2, 0.0], mask=mask)


def example_2(halved: bool = False) -> AttentionProblem:
    """Example 2, (39): n = 2, T = 3, d = 2, z_i the first token; v starts at zero.

    The authors' code trains on half of the printed values: `halved` gives those.
    """
    X = torch.tensor(
        [[[-5.4, 2.4], [2.8, 4.2], [2.6, -0.2]], [[0.8, -4.4], [-2.2, -0.8], [1.8, 0.2]]],
        dtype=torch.float64,
    )
    X = X / 2 if halved else X
    return AttentionProblem(X, X[:, 0], [1.0, -1.0], [0.0, 0.0])
