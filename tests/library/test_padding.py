"""Padding changes nothing: one property, for every public function that takes a mask.

A ragged problem is posed twice, with as little padding as possible and with more of it, at other
positions and with other contents. Each public function must give the same answer, by the compiled
kernels and by torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import mirrorhead as mh
from margin_cases import generator
from mirrorhead.margin import _compiled
from mirrorhead.paths import descent

# Small samples seldom distinguish norms.
pytestmark = pytest.mark.filterwarnings("ignore:.*do not distinguish")

n, d = 3, 4


@dataclass
class Posed:
    """One way to write a problem down.

    place: (n, T), where each token of the shortest form lies in this one, any place where the
    shortest form has padding; real: (n, T), False there.
    """

    X: Tensor
    z: Tensor
    y: Tensor
    v: Tensor
    mask: Tensor | None
    place: Tensor
    real: Tensor

    def problem(self, **options: Any) -> mh.AttentionProblem:
        return mh.AttentionProblem(self.X, self.z, self.y, self.v, mask=self.mask, **options)

    def tokens(self, chosen: Tensor) -> Tensor:
        """Tokens of the shortest form, (..., n), as tokens of this one."""
        return self.place.expand(*chosen.shape, -1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)

    def named(self, tokens: Tensor) -> Tensor:
        """The inverse of `tokens`."""
        same = (self.place == tokens.unsqueeze(-1)) & self.real
        assert (same.sum(-1) == 1).all(), "padding was selected"
        return same.long().argmax(-1)

    def values(self, x: Tensor) -> Tensor:
        """Values of all tokens, (..., n, T), in the order of the shortest form; 0 on padding."""
        return x.gather(-1, self.place.expand(*x.shape[:-2], -1, -1)).where(self.real, 0)


def posed_twice(lengths: list[int], extra: int, junk: float, seed: int) -> tuple[Posed, Posed]:
    g = generator(seed)
    T = max(lengths)
    real = torch.arange(T) < torch.tensor(lengths).unsqueeze(-1)
    X = torch.randn(n, T, d, generator=g, dtype=torch.float64)
    z = torch.randn(n, d, generator=g, dtype=torch.float64)
    y = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    v = torch.randn(d, generator=g, dtype=torch.float64)
    place = torch.rand(n, T + extra, generator=g).topk(T).indices.sort().values
    longer = junk * torch.randn(n, T + extra, d, generator=g, dtype=torch.float64)
    mask = torch.zeros(n, T + extra, dtype=torch.bool)
    for i, length in enumerate(lengths):
        longer[i, place[i, :length]] = X[i, :length]
        mask[i, place[i, :length]] = True
    short = Posed(
        X, z, y, v, None if bool(real.all()) else real, torch.arange(T).expand(n, T), real
    )
    return short, Posed(longer, z, y, v, mask, place, real)


@contextmanager
def kernels(on: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not on:
            patch.setattr(_compiled, "can_solve", lambda A, schedule: False)
            patch.setattr(descent, "compiled_loop", lambda problem, rule: None)
        yield


def some_tokens(data: Posed, seed: int = 0) -> Tensor:
    """Tokens of the shortest form."""
    lengths = data.real.sum(-1)
    return (torch.rand(n, generator=generator(seed)) * lengths).long()


def solution_of(data: Posed, solution: mh.MarginSolution, tokens: Tensor) -> dict[str, Any]:
    assert solution.status == "optimal"
    assert solution.check(data.X, data.z, tokens, mask=data.mask)
    if data.mask is not None:
        assert not solution.support[~data.mask].any()
        assert (solution.dual[~data.mask] == 0).all()
    return {"norm": solution.norm}


def margins(p: float | mh.Norm) -> Callable[[Posed], dict[str, Any]]:
    def solve(data: Posed) -> dict[str, Any]:
        tokens = data.tokens(some_tokens(data))
        options: dict[str, Any] = {"mask": data.mask}
        tol = 1e-9 if isinstance(p, mh.Norm) else 1e-11
        solution = mh.attention_svm(data.X, data.z, tokens, p, tol, **options)
        found = solution_of(data, solution, tokens)
        if isinstance(p, int | float) and 1 < p < math.inf:
            near = mh.attention_svm(data.X, data.z, tokens, 1.2 * p, start=solution, **options)
            found["warm"] = solution_of(data, near, tokens)
        if isinstance(p, int | float) and 1 < p <= 2:  # elsewhere equal norms leave W some room
            found["W"] = solution.W
        return found

    return solve


def model(data: Posed) -> dict[str, Any]:
    W = torch.randn(d, d, generator=generator(1), dtype=torch.float64)
    problem = data.problem()
    weights, head = problem.gradients(30 * W)
    return {
        "logits": data.values(problem.logits(W)),
        "attention": data.values(problem.attention(W)),
        "scores": data.values(problem.scores()),
        "selected": data.named(problem.select(W)),
        "output": problem.output(W),
        "loss": problem.loss(W),
        "gradient": problem.gradient(W).value,
        "direction": weights.direction,
        "log norm": weights.log_norm,
        "head": head.value,
        "reach": problem.reach(mh.PNorm(3)),
    }


def heads_and_classes(data: Posed) -> dict[str, Any]:
    g = generator(2)
    W = torch.randn(2, d, d, generator=g, dtype=torch.float64)
    v = torch.randn(2, 3, d, generator=g, dtype=torch.float64)
    problem = mh.AttentionProblem(
        data.X, data.z, torch.tensor([0, 2, 1]), v, mask=data.mask, heads=2, classes=3
    )
    return {
        "attention": data.values(problem.attention(W)),
        "selected": data.named(problem.select(W)),
        "loss": problem.loss(W),
        "gradient": problem.gradient(W).value,
    }


def descents(data: Posed) -> dict[str, Any]:
    init = torch.randn(d, d, generator=generator(3), dtype=torch.float64)
    factors = tuple(torch.randn(d, 2, generator=generator(k), dtype=torch.float64) for k in (4, 5))
    problem = data.problem()
    options: dict[str, dict[str, Any]] = {
        "normalized": {"init": init},
        "constant": {"rule": "constant", "lr": 1e-2, "init": init},
        "accelerated": {"rule": "accelerated"},
        "joint": {"joint": True, "init": init},
        "factors": {"init": factors},
    }
    found = {}
    for name, each in options.items():
        path = mh.descend(problem, 1.7, 8, progress=False, **each)
        found[name] = path.W
        found[f"{name} tokens"] = data.named(path.tokens)
    return found


def diagnosis(data: Posed) -> dict[str, Any]:
    path = mh.descend(data.problem(), 2.0, 200, progress=False)
    found = mh.diagnose(path)
    # The rate is left out: it is a ratio of roundings once the divergence is.
    names = ("divergence", "norm", "mass", "growth", "in_cone")
    return {name: getattr(found, name) for name in names} | {"optimal": found.optimality.optimal}


def step_size(data: Posed) -> dict[str, Any]:
    W = torch.randn(d, d, generator=generator(6), dtype=torch.float64)
    # The curvature: its inverse is a rounding error where there is none.
    return {f"{p:g}": 1 / mh.largest_step(data.problem(), W, p) for p in (1.5, 2, 3)}


def paths(data: Posed) -> dict[str, Any]:
    path = mh.regularization_path(data.problem(), 2, [1.0, 5.0], starts=2)
    return {"W": path.W, "excess": path.log_excess, "tokens": data.named(path.tokens)}


def joint_paths(data: Posed) -> dict[str, Any]:
    path = mh.joint_regularization_path(data.problem(), 2, [1.0, 3.0], [1.0, 2.0], starts=2)
    return {"W": path.W, "v": path.v, "loss": path.log_excess, "tokens": data.named(path.tokens)}


def label_margins(data: Posed) -> dict[str, Any]:
    tokens = data.tokens(some_tokens(data))
    return {"nu": mh.assumption_b(data.problem(), tokens, 2, samples=300)}


def choices(data: Posed) -> dict[str, Any]:
    tokens = data.tokens(some_tokens(data))
    found = mh.choose_geometry(data.X, data.z, tokens, (1.5, 3.0), folds=n, mask=data.mask)
    return {"index": found.index, "correct": found.correct, "infeasible": found.infeasible}


def tokens_of(data: Posed) -> dict[str, Any]:
    problem, tokens = data.problem(), data.tokens(some_tokens(data))
    best = mh.globally_optimal_tokens(problem)
    local = mh.locally_optimal(problem, tokens, 1.5)
    cone = mh.cone_constants(problem, best, 2, tol=1e-12)
    names = ("delta", "A", "mu_0", "score_gap", "widest_score_gap", "score_range")
    return {
        "scores": data.values(mh.token_scores(problem)),
        "best": data.named(best),
        "support": data.values(mh.support_tokens(problem, tokens, 3).double()),
        "optimal": local.optimal,
        "sets": data.named(mh.locally_optimal_sets(problem, 2)).sort(0).values,
        "contains": cone.contains(cone.solution.W),
        **{name: getattr(cone, name) for name in names},
    }


def profiles(data: Posed) -> dict[str, Any]:
    W = torch.randn(d, d, generator=generator(7), dtype=torch.float64)
    tokens = data.tokens(some_tokens(data))
    given = mh.margin_profile(W, data.X, data.z, tokens, norms=(2, mh.Schatten(1)), mask=data.mask)
    own = mh.margin_profile(W, data.X, data.z, norms=(1.5,), mask=data.mask)
    return {"given": given.shares, "margins": given.margins, "selected": own.shares}


def trainings(data: Posed) -> dict[str, Any]:
    path = mh.follow(data.problem(), lambda params: torch.optim.Adam(params, 0.1), 20)
    return {"W": path.W, "tokens": data.named(path.tokens), "loss": path.log_loss}


# What each entry calls; together all public names that see tokens.
ENTRIES: dict[str, tuple[Callable[[Posed], dict[str, Any]], str]] = {
    "lp-AttSVM, p = 1": (margins(1), "attention_svm MarginSolution Check"),
    "lp-AttSVM, p = 1.3": (margins(1.3), "attention_svm MarginSolution Check"),
    "lp-AttSVM, p = 2": (margins(2), "attention_svm MarginSolution Check"),
    "lp-AttSVM, p = 4": (margins(4), "attention_svm MarginSolution Check"),
    "lp-AttSVM, p = inf": (margins(math.inf), "attention_svm MarginSolution Check"),
    "nuclear norm": (margins(mh.Schatten(1)), "attention_svm MarginSolution Check"),
    "Schatten norm": (margins(mh.Schatten(3)), "attention_svm MarginSolution Check"),
    "group norm": (margins(mh.Grouped(1.5, 1)), "attention_svm MarginSolution Check"),
    "model": (model, "AttentionProblem Gradient"),
    "model with heads and classes": (heads_and_classes, "AttentionProblem"),
    "descend": (descents, "descend Path"),
    "diagnose": (diagnosis, "diagnose Diagnostics"),
    "largest_step": (step_size, "largest_step"),
    "regularization_path": (paths, "regularization_path RegularizationPath"),
    "joint_regularization_path": (joint_paths, "joint_regularization_path"),
    "assumption_b": (label_margins, "assumption_b"),
    "choose_geometry": (choices, "choose_geometry GeometryChoice"),
    "margin_profile": (profiles, "margin_profile MarginProfile"),
    "follow": (trainings, "follow OptimizerPath"),
    "tokens": (tokens_of, " ".join(mh._HOMES["tokens"])),
}
# Public names that see no tokens.
NO_TOKENS = {
    *mh._HOMES["optim"],
    *mh._HOMES["patches"],
    *mh._HOMES["geometry"],
    *mh._HOMES["losses"],
    *mh._HOMES["sparsity"],
    "svm",
    "multiclass_svm",
    "LinearProblem",
}
# Where a search by L-BFGS ends depends on rounding to its tolerance.
SEARCHES = ("regularization_path", "joint_regularization_path")


def test_every_public_name_is_covered():
    covered = {name for _, names in ENTRIES.values() for name in names.split()}
    assert covered | NO_TOKENS == set(mh._HOME)


@pytest.mark.slow
@pytest.mark.parametrize("on", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("entry", ENTRIES)
@settings(max_examples=4)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=n, max_size=n).filter(lambda x: max(x) > 1),
    extra=st.integers(1, 4),
    junk=st.sampled_from([0.0, 1.0, 1e3, math.inf, math.nan]),
    seed=st.integers(0, 50),
)
def test_padding_changes_nothing(entry, on, lengths, extra, junk, seed):
    call, _ = ENTRIES[entry]
    with kernels(on):
        short, padded = (call(data) for data in posed_twice(lengths, extra, junk, seed))
    atol = 1e-4 if entry in SEARCHES else 1e-8
    torch.testing.assert_close(padded, short, rtol=1e-5, atol=atol, equal_nan=True)
