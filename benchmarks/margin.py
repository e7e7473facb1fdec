"""Margin solvers against cvxpy + Clarabel, one thread: python benchmarks/margin.py [--large].

Every answer of ours is certified to a relative gap of 1e-9 and checked from the data; Clarabel
runs at its defaults (a gap of about 1e-8). cvxpy is given the problem in two ways: constraint
by constraint over a matrix variable, as the paper's authors write it, and as one matrix
inequality over a vector. Times are CPU time of one thread, data already in memory, first call
left out; ours is measured before and after the peer, so that a slow spell of the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from step import processor
from torch import Tensor

import mirrorhead as mh
from mirrorhead.margin._constraints import ConstraintMatrix
from mirrorhead.margin._linear_systems import IterativeSystem

# Where cvxpy is tried on large problems, and what it may use for each.
PEER_CASES = {
    (50, 30, 50): (1.1, 1.5, 2.0, 3.0, 5.0, 10.0),
    (100, 50, 100): (2.0,),
    (256, 64, 256): (2.0,),
}
PEER_SECONDS, PEER_GB = 300, 12
TEN_P = (1.05, 1.1, 1.25, 1.5, 1.75, 2.0, 3.0, 5.0, 10.0, 20.0)
# Norms and the least ratio to cvxpy; without one, the target is 5 times ten of PNorm(1.5).
OTHER_NORMS = (
    *((mh.Schatten(1), 50), (mh.Schatten(math.inf), 30)),
    *((norm, 0) for norm in (mh.Schatten(1.5), mh.Schatten(3))),
    *((mh.Grouped(p), 0) for p in (1, 2, math.inf)),
)
# The most CPU seconds of one problem with (n,T,d) = (100,16,128).
WIDE_NORMS = (
    ("Schatten(1)", 10),
    *((name, 60) for name in ("Schatten(inf)", "Grouped(1)", "Grouped(inf)")),
)
TARGETS: list[bool] = []  # whether each bar of the tables so far is met
Data = tuple[Tensor, Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--large", action="store_true", help="also (512,128,512) and (1000,128,768), minutes each"
    )
    parser.add_argument(
        "--peers", action="store_true", help="also cvxpy on large problems, 5 minutes each"
    )
    parser.add_argument("--threads", type=int, default=1, help="of ours, on large problems")
    parser.add_argument("--only", choices=["small", "norms", "middle", "wide", "large", "growth"])
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a single case, in its own process
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(one(**json.loads(options.one))))
        return
    tables = {
        "small": small, "norms": norms, "middle": middle, "wide": wide, "large": sizes,
        "growth": growth,
    }  # fmt: skip
    print(processor())
    for name, table in tables.items():
        if options.only in (None, name):
            table(options)
    if TARGETS:
        print(f"\ntargets met: {sum(TARGETS)}, targets missed: {len(TARGETS) - sum(TARGETS)}")


def small(_: argparse.Namespace) -> None:
    print("\n## (n,T,d) = (6,8,10), 100 problems in one call; ms a problem\n")
    header("p", "ours", "iterations", "cvxpy vector", "ratio", "cvxpy authors", "ratio", "targets")
    X, z, tokens = data(100, 6, 8, 10)
    for p in TEN_P:
        solution, before = timed(lambda p=p: mh.attention_svm(X, z, tokens, p), repeat=7)
        assert solution.check(X, z, tokens)
        assert solution.optimal.all()
        vector = 1e3 * per_problem(as_vector, X, z, tokens, p, solution.norm, 8)
        authors = 1e3 * per_problem(as_authors, X, z, tokens, p, solution.norm, 4)
        after = timed(lambda p=p: mh.attention_svm(X, z, tokens, p), repeat=7)[1]
        ours = 1e3 * (before + after) / 2 / 100
        met = targets((vector / ours, 30), (authors / ours, 100))
        row(
            f"{p:g}",
            f"{ours:.3f}",
            f"{float(solution.iterations.double().mean()):.1f}",
            f"{vector:.1f}",
            f"{vector / ours:.0f}x",
            f"{authors:.1f}",
            f"{authors / ours:.0f}x",
            met,
        )


def norms(_: argparse.Namespace) -> None:
    print("\n## Other norms, (n,T,d) = (6,8,10), 100 problems in one call; ms a problem\n")
    header("norm", "ours", "iterations", "cvxpy", "ratio", "over 10 of PNorm(1.5)", "target")
    X, z, tokens = data(100, 6, 8, 10)
    unit = 1e3 * timed(lambda: mh.attention_svm(X, z, tokens, 1.5), repeat=7)[1] / 10
    for norm, target in OTHER_NORMS:
        solution, before = timed(lambda norm=norm: mh.attention_svm(X, z, tokens, norm), repeat=5)
        assert solution.check(X, z, tokens)
        peer = 1e3 * per_problem(as_norm, X, z, tokens, norm, solution.norm, 4)
        after = timed(lambda norm=norm: mh.attention_svm(X, z, tokens, norm), repeat=5)[1]
        ours = 1e3 * (before + after) / 2 / 100
        # Either a ratio to the peer, or within 5 times ten problems in the p-norm.
        met = targets((peer / ours, target)) if target else targets((5 * unit / ours, 1))
        row(
            repr(norm),
            f"{ours:.2f}",
            f"{float(solution.iterations.double().mean()):.1f}",
            f"{peer:.1f}",
            f"{peer / ours:.0f}x",
            f"{ours / unit:.2f}",
            met,
        )


def middle(_: argparse.Namespace) -> None:
    print("\n## (n,T,d) = (20,20,30), one problem; seconds\n")
    header("p", "ours", "iterations", "cvxpy vector", "ratio", "target")
    X, z, tokens = data(1, 20, 20, 30)
    import cvxpy  # noqa: F401  the first import is not part of the first time

    for p in TEN_P:
        solution, before = timed(lambda p=p: mh.attention_svm(X, z, tokens, p), repeat=15)
        assert solution.check(X, z, tokens)
        assert solution.optimal.all()
        vector = per_problem(as_vector, X, z, tokens, p, solution.norm, 1, warm=False)
        after = timed(lambda p=p: mh.attention_svm(X, z, tokens, p), repeat=15)[1]
        ours = (before + after) / 2
        row(
            f"{p:g}",
            f"{ours:.4f}",
            f"{int(solution.iterations)}",
            f"{vector:.2f}",
            f"{vector / ours:.0f}x",
            targets((vector / ours, 200)),
        )


def wide(options: argparse.Namespace) -> None:
    print("\n## Other norms, (n,T,d) = (100,16,128), one problem, each in its own process")
    print(f"CPU s is CPU time; s is wall-clock time on {options.threads} thread(s)\n")
    header("norm", "status", "gap", "iterations", "CPU s", "s", "GB", "targets")
    for name, seconds in WIDE_NORMS:
        ours = apart(shape=(100, 16, 128), p=name, solver="ours", threads=options.threads)
        assert ours is not None
        row(
            name,
            ours["status"],
            f"{ours['gap']:.0e}",
            f"{ours['newton']}",
            f"{ours['seconds']:.1f}",
            f"{ours['wall']:.1f}",
            f"{ours['gb']:.2f}",
            f"{seconds} s {verdict(ours['seconds'] <= seconds)}, 2 GB {verdict(ours['gb'] <= 2)}",
        )


def sizes(options: argparse.Namespace) -> None:
    print("\n## Large problems, each in its own process, the peak memory of which is shown")
    print(f"CPU s is CPU time; s is wall-clock time on {options.threads} thread(s)\n")
    header(
        *("n,T,d", "constraints", "weights", "p", "status", "gap", "CPU s", "s"),
        *("Newton", "CG", "GB", "cvxpy"),
    )
    cases: list[tuple[tuple[int, int, int], tuple[float, ...]]] = [
        ((50, 30, 50), (1.1, 1.5, 2.0, 3.0, 5.0, 10.0)),
        ((100, 50, 100), (1.1, 1.5, 2.0, 3.0, 5.0, 10.0)),
        ((256, 64, 256), (1.1, 1.5, 2.0, 3.0, 5.0, 10.0)),
    ]
    if options.large:
        cases.append(((512, 128, 512), (1.1, 1.5, 2.0, 3.0, 5.0, 10.0)))
        cases.append(((1000, 128, 768), (2.0,)))
    for shape, exponents in cases:
        n, T, d = shape
        for p in exponents:
            ours = apart(shape=shape, p=p, solver="ours", threads=options.threads)
            assert ours is not None
            peer = "not run"
            if options.peers and p in PEER_CASES.get(shape, ()):
                peer = seconds_of(apart(shape=shape, p=p, solver="cvxpy"))
            row(
                f"{n},{T},{d}",
                f"{n * (T - 1)}",
                f"{d * d}",
                f"{p:g}",
                ours["status"],
                f"{ours['gap']:.0e}",
                f"{ours['seconds']:.2f}",
                f"{ours['wall']:.2f}",
                f"{ours['newton']}",
                f"{ours['cg']}",
                f"{ours['gb']:.2f}",
                peer,
            )


def growth(_: argparse.Namespace) -> None:
    print(
        "\n## Growth from (n,T,d) = (64,32,64), p = 1.5: what doubling costs, and where it goes\n"
    )
    header("n,T,d", "s", "Newton", "CG", "A and A'", "blocks and their solves", "rest")
    base = (64, 32, 64)
    shapes = [base]
    shapes += [
        tuple(k * b if i == axis else b for i, b in enumerate(base))
        for axis in range(3)
        for k in (2, 4)
    ]
    for n, T, d in shapes:
        X, z, tokens = (x[0] for x in data(1, n, T, d))
        mh.attention_svm(X, z, tokens, 1.5)
        spent = Stopwatch()
        with (
            spent.on(ConstraintMatrix, "apply", "map"),
            spent.on(ConstraintMatrix, "adjoint", "map"),
            spent.on_preconditioner(),
        ):
            start = time.perf_counter()
            solution = mh.attention_svm(X, z, tokens, 1.5)
            seconds = time.perf_counter() - start
        assert solution.optimal
        shares = spent.seconds["map"] / seconds, spent.seconds["blocks"] / seconds
        row(
            f"{n},{T},{d}",
            f"{seconds:.3f}",
            f"{int(solution.iterations)}",
            f"{int(solution.inner_iterations)}",
            *(f"{100 * share:.0f} %" for share in (*shares, 1 - sum(shares))),
        )


def data(count: int, n: int, T: int, d: int, seed: int = 0) -> Data:
    """Tokens and queries on the unit sphere, random tokens selected."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(count, n, T, d, generator=g, dtype=torch.float64)
    z = torch.randn(count, n, d, generator=g, dtype=torch.float64)
    tokens = torch.randint(0, T, (count, n), generator=g)
    return X / X.norm(dim=-1, keepdim=True), z / z.norm(dim=-1, keepdim=True), tokens


def as_authors(X: Tensor, z: Tensor, tokens: Tensor, p: float) -> float:
    """One scalar constraint for each token, over a matrix variable."""
    import cvxpy as cp

    n, T, d = X.shape
    W = cp.Variable((d, d))
    constraints = []
    for i in range(n):
        for t in range(T):
            if t != tokens[i]:
                difference = (X[i, tokens[i]] - X[i, t]).numpy()[None, :]
                constraints.append(difference @ W @ z[i].numpy()[:, None] >= 1)
    objective = cp.Minimize(cp.pnorm(W, p))  # pyright: ignore[reportArgumentType]
    return cp.Problem(objective, constraints).solve(solver=cp.CLARABEL)  # pyright: ignore[reportReturnType]


def as_norm(X: Tensor, z: Tensor, tokens: Tensor, norm: mh.Schatten | mh.Grouped) -> float:
    """All constraints as one matrix inequality, in a norm of a matrix variable."""
    import cvxpy as cp

    n, T, d = X.shape
    W, asked = cp.Variable((d, d)), []
    if isinstance(norm, mh.Grouped):
        size = cp.pnorm(cp.norm(W, 2, axis=1 - norm.dim), norm.p)  # pyright: ignore[reportArgumentType]
    elif norm.p in (1, math.inf):
        size = cp.normNuc(W) if norm.p == 1 else cp.sigma_max(W)
    else:  # decreasing t whose first k entries bound the k largest singular values together
        t = cp.Variable(d)
        both = cp.bmat([[np.zeros((d, d)), W], [W.T, np.zeros((d, d))]])
        asked = [cp.lambda_sum_largest(both, k) <= cp.sum(t[:k]) for k in range(1, d + 1)]
        asked.append(cp.diff(t) <= 0)
        size = cp.pnorm(t, norm.p)  # pyright: ignore[reportArgumentType]
    keep = torch.ones(n, T, dtype=torch.bool).scatter(1, tokens.unsqueeze(1), False)
    selected = X.gather(1, tokens.view(n, 1, 1).expand(n, 1, d))
    rows = torch.einsum("nta,nc->ntac", selected - X, z).reshape(n, T, d * d)[keep].numpy()
    constraints = [rows @ cp.vec(W, order="C") >= 1, *asked]
    return cp.Problem(cp.Minimize(size), constraints).solve(solver=cp.CLARABEL)  # pyright: ignore


def as_vector(X: Tensor, z: Tensor, tokens: Tensor, p: float) -> float:
    """All constraints as one matrix inequality over a vector."""
    import cvxpy as cp

    n, T, d = X.shape
    keep = torch.ones(n, T, dtype=torch.bool).scatter(1, tokens.unsqueeze(1), False)
    selected = X.gather(1, tokens.view(n, 1, 1).expand(n, 1, d))
    rows = torch.einsum("nta,nc->ntac", selected - X, z).reshape(n, T, d * d)[keep].numpy()
    w = cp.Variable(d * d)
    objective = cp.Minimize(cp.pnorm(w, p))  # pyright: ignore[reportArgumentType]
    return cp.Problem(objective, [rows @ w >= 1]).solve(solver=cp.CLARABEL)  # pyright: ignore[reportReturnType]


def per_problem(
    solver: Callable[[Tensor, Tensor, Tensor, Any], float],
    X: Tensor,
    z: Tensor,
    tokens: Tensor,
    p: float | mh.Norm,
    norms: Tensor,
    count: int,
    warm: bool = True,
) -> float:
    """Mean seconds of a peer on the first problems; its values must agree with ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if warm:
            solver(X[0], z[0], tokens[0], p)
        start = time.process_time()
        values = [solver(X[k], z[k], tokens[k], p) for k in range(count)]
        seconds = (time.process_time() - start) / count
    for k, value in enumerate(values):
        assert math.isclose(value, float(norms[k]), rel_tol=1e-5), (p, value, norms[k])
    return seconds


def one(shape: tuple[int, int, int], p: Any, solver: str, threads: int = 1) -> dict[str, object]:
    torch.set_num_threads(threads)
    norm = p
    if isinstance(p, str):  # such as "Schatten(inf)"
        kind, exponent = p.rstrip(")").split("(")
        norm = getattr(mh, kind)(float(exponent))
    X, z, tokens = (x[0] for x in data(1, *shape))
    if solver == "cvxpy":
        resource.setrlimit(resource.RLIMIT_CPU, (PEER_SECONDS, PEER_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (PEER_GB << 30, PEER_GB << 30))
        start = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                as_vector(X, z, tokens, float(p))
        except (MemoryError, RuntimeError) as error:  # torch says RuntimeError
            return {"failed": str(error)}
        return {"seconds": time.process_time() - start}
    start = time.perf_counter()
    solution, seconds = timed(lambda: mh.attention_svm(X, z, tokens, norm), repeat=1)
    wall = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    assert solution.check(X, z, tokens)
    return {
        "status": solution.status,
        "gap": float(solution.gap),
        "seconds": seconds,
        "wall": wall,
        "newton": int(solution.iterations),
        "cg": int(solution.inner_iterations),
        "gb": peak,
    }


def apart(**case: object) -> dict | None:
    """`one` in a process of its own; None if it had to be ended for taking too long."""
    command = [sys.executable, __file__, "--one", json.dumps(case)]
    done = subprocess.run(command, capture_output=True)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return None
    done.check_returncode()
    return json.loads(done.stdout)


class Stopwatch:
    """Seconds spent in some methods, while they are being watched."""

    def __init__(self) -> None:
        self.seconds = {"map": 0.0, "blocks": 0.0}

    def wrap(self, f: Callable, key: str) -> Callable:
        def watched(*arguments: object, **keywords: object) -> object:
            start = time.perf_counter()
            result = f(*arguments, **keywords)
            self.seconds[key] += time.perf_counter() - start
            return result

        return watched

    def on(self, owner: type, name: str, key: str):
        from unittest.mock import patch

        return patch.object(owner, name, self.wrap(getattr(owner, name), key))

    def on_preconditioner(self):
        from unittest.mock import patch

        build = IterativeSystem._preconditioner

        def watched(system: IterativeSystem, h: Tensor, e: Tensor) -> Callable:
            start = time.perf_counter()
            apply = build(system, h, e)
            self.seconds["blocks"] += time.perf_counter() - start
            return self.wrap(apply, "blocks")

        return patch.object(IterativeSystem, "_preconditioner", watched)


def timed(f: Callable[[], mh.MarginSolution], repeat: int) -> tuple[mh.MarginSolution, float]:
    """The result and the median of `repeat` CPU times, after one that does not count."""
    result = f() if repeat > 1 else None
    times = []
    for _ in range(repeat):
        start = time.process_time()
        result = f()
        times.append(time.process_time() - start)
    assert result is not None
    return result, sorted(times)[len(times) // 2]


def targets(*ratios: tuple[float, int]) -> str:
    """Which of the (ratio, least that is asked) hold; `main` counts them."""
    words = []
    for ratio, least in ratios:
        words.append(f"{least}x {verdict(ratio >= least)}")
    return ", ".join(words)


def verdict(met: bool) -> str:
    TARGETS.append(met)
    return "met" if met else "MISSED"


def seconds_of(peer: dict | None) -> str:
    if peer is None:
        return f"> {PEER_SECONDS} s"
    return f"over {PEER_GB} GB" if "failed" in peer else f"{peer['seconds']:.1f} s"


def header(*names: str) -> None:
    row(*names)
    row(*("---" for _ in names))


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
