"""Margin problems, the paper's lp-AttSVM and lp-SVM among them, and their certified solutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrorhead._checks import as_floats, as_tensor, is_number
from mirrorhead.geometry import Norm, PNorm
from mirrorhead.margin._certificate import FARKAS, certify, support_excess
from mirrorhead.margin._constraints import Constraints, attention_constraints, svm_constraints
from mirrorhead.margin._interior_point import SolverResult
from mirrorhead.margin._rounding import round_together
from mirrorhead.margin._solvers import Choice, Task, choose

# Numbers recomputed from the same W, dual and data differ by less than this, relatively.
ROUNDED = 1e-11
# Gaps below this may be due to the rounding of the multipliers.
ROUNDING_GAP = 1e-6


class Status(IntEnum):
    """What is proved about a problem; the words of `MarginSolution.status` are these names."""

    OPTIMAL = 0
    INFEASIBLE = 1
    UNFINISHED = 2


WORDS = [status.name.lower() for status in Status]


@dataclass(frozen=True, eq=False)
class Check:
    """What `MarginSolution.check` found. The object is true if every problem is certified optimal.

    All fields have the shape of the batch.

    optimal: the status is "optimal", and W, dual and the data prove it.
    supported: W, dual and the data support all that the solution says. This includes proofs of
        infeasibility, and honest "unfinished" solutions, whose W may be NaN.
    margin: the smallest constraint value, at least 1 - tol where optimal.
    gap: ||W|| relative to the dual's lower bound, less 1, for W scaled to margin 1 if its margin
        is below 1. It includes bounds of all rounding errors.
    farkas: ||A' dual||_2 relative to the rows; 0 proves infeasibility.
    """

    optimal: Tensor
    supported: Tensor
    margin: Tensor
    gap: Tensor
    farkas: Tensor

    def __bool__(self) -> bool:
        return bool(self.optimal.all())

    def __repr__(self) -> str:
        count = f"{int(self.optimal.sum())} of {self.optimal.numel()} certified optimal"
        refuted = int((~self.supported).sum())
        more = f", {refuted} not supported by the data" if refuted else ""
        margin, gap = _finite(torch.min, self.margin, ".15g"), _finite(torch.max, self.gap, ".1e")
        return f"Check({count}{more}, smallest margin {margin}, gap up to {gap})"


@dataclass(frozen=True, eq=False, repr=False)
class MarginSolution:
    r"""Weights of smallest norm that satisfy all margin constraints, with a certificate.

    The certificate is about the tokens (or labels) that were given. It proves which weights
    separate them with the largest margin, not that training leads to these tokens.

    W: (..., d, d) for attention, (..., d) for `svm` (also called `v`). The smallest constraint
        value is 1 up to the rounding of W, and at least 1 - tol where the status is "optimal".
        NaN if no feasible W exists or was found.
    norm: (...), ||W||; inf where infeasible.
    dual: multipliers >= 0, (..., n, T) with 0 at the selected token, or (..., n) for `svm`.
        Where feasible, scaled to ||A' dual||_q = 1, so that dual.sum() is a lower bound of
        the norm and A' dual -> mirror(W) / ||W||^(p-1). Where infeasible, scaled to sum 1,
        with A' dual = 0: a Farkas certificate.
    gap: (...), ||W|| / dual.sum() - 1 and bounds of all rounding errors, recomputed from the
        data after the solve: in exact arithmetic the gap is at most this.
    status: "optimal" (gap <= tol), "infeasible" or "unfinished"; a list for a batch, nested
        like the leading dimensions.
    support: like dual, True on constraints that hold with equality: the share of the multiplier
        in the sum of dual exceeds the relative slack. At a degenerate vertex, where both are 0,
        this is decided by rounding; `locally_optimal` says "cannot tell" there.
    iterations, inner_iterations: (...), Newton steps and conjugate-gradient steps.
    geometry: the norm that is minimised; for a `PNorm`, `p` is its exponent.
    """

    W: Tensor
    norm: Tensor
    dual: Tensor
    gap: Tensor
    support: Tensor
    iterations: Tensor
    inner_iterations: Tensor
    geometry: Norm
    tol: float
    codes: Tensor  # (...), values of `Status`

    @property
    def p(self) -> float:
        """The exponent of a `PNorm`."""
        if not isinstance(self.geometry, PNorm):
            raise AttributeError(
                f"this solution is of {self.geometry!r} and has no p: use its geometry"
            )
        return self.geometry.p

    @property
    def v(self) -> Tensor:
        """The same as `W`, under the name that `svm` uses."""
        return self.W

    @property
    def status(self) -> Any:
        """The word, or (nested) lists of words for a batch."""
        return np.array(WORDS)[self.codes.cpu().numpy()].tolist()

    @property
    def optimal(self) -> Tensor:
        """(...) bool, True where the status is "optimal"."""
        return self.codes == Status.OPTIMAL

    def check(self, *data: Tensor, mask: Tensor | None = None) -> Check:
        """Decide from W, dual and the data alone whether the solution is certified optimal.

        The result is true if every problem is. Its field `supported` answers another question:
        do status, norm, gap and support agree with W, dual and the data? They also do where a
        problem is proved to be infeasible, or where the solution says that it is unfinished.

        data: the arguments of the solver, (X, z, tokens) or (features, labels).
        """
        if len(data) not in (2, 3):
            raise TypeError(f"check takes (X, z, tokens) or (features, labels), got {len(data)}")
        attention = len(data) == 3
        problem = attention_constraints(*data, mask=mask) if attention else svm_constraints(*data)
        for name, shape in (("W", problem.weights), ("dual", problem.shape)):
            fits, given = (*problem.lead, *shape), tuple(getattr(self, name).shape)
            if fits != given:
                raise ValueError(
                    f"the data fit a {name} of shape {fits}, this solution has {given}"
                )
        lam = problem.collect(self.dual)
        W = self.W.reshape(problem.A.batch, problem.A.columns)
        known = W.isfinite().all(-1)  # elsewhere no W was found
        proof = certify(problem, W.nan_to_num(), lam, self.geometry, self.tol)
        excess = support_excess(problem, lam, proof)
        claimed = problem.collect(self.support) > 0
        gap = proof.gap_as_is()
        codes, norm, stated_gap = (x.reshape(-1) for x in (self.codes, self.norm, self.gap))
        signs = (self.dual >= 0).flatten(len(self.norm.shape)).all(-1).reshape(-1)
        # What every solution states of its own W and dual, whatever the status.
        bound = lam.sum(-1)
        accuracy = proof.wobble.clamp_min(max(self.tol, ROUNDED))
        stated = torch.where(
            known,
            _near(norm, torch.where(proof.margin < math.inf, proof.upper, proof.size))
            & _near(1 + stated_gap, 1 + gap)
            & (_near(bound, proof.lower, accuracy) | (bound == 0))
            & torch.where(claimed, excess > -ROUNDED, excess < ROUNDED).all(-1),
            (norm == math.inf) & (stated_gap == math.inf) & ~claimed.any(-1),
        )
        optimal = known & signs & (proof.least >= 1 - self.tol) & (gap <= self.tol)
        infeasible = ~known & signs & (proof.farkas <= FARKAS)
        other = (codes == Status.UNFINISHED) | infeasible
        claims_optimum = codes == Status.OPTIMAL
        supported = stated & torch.where(claims_optimum, optimal, other)
        found = (supported & claims_optimum, supported, proof.margin, gap, proof.farkas)
        return Check(*(x.reshape(self.norm.shape) for x in found))

    def __repr__(self) -> str:
        norm = f"p={self.p:g}" if isinstance(self.geometry, PNorm) else repr(self.geometry)
        shape = "x".join(map(str, self.W.shape))
        if self.codes.dim() == 0:
            return (
                f"MarginSolution({norm}, W {shape}, {self.status}, norm {float(self.norm):.6g}, "
                f"gap {float(self.gap):.1e}, {int(self.iterations)} iterations)"
            )
        counts = [(int((self.codes == k).sum()), word) for k, word in enumerate(WORDS)]
        words = ", ".join(f"{count} {word}" for count, word in counts if count)
        gap = _finite(torch.max, self.gap, ".1e")
        return f"MarginSolution({norm}, W {shape}, {words or 'empty'}, gap up to {gap})"


def attention_svm(
    X: Tensor,
    z: Tensor,
    tokens: Tensor,
    geometry: float | Norm = 2,
    tol: float = 1e-9,
    *,
    mask: Tensor | None = None,
    start: MarginSolution | None = None,
) -> MarginSolution:
    r"""Compute the weights of smallest norm that prefer the given tokens with margin 1.

        min ||W||   subject to   (x_i,sel - x_it)' W z_i >= 1   for all t != sel = tokens_i

    Args:
        X: (..., n, T, d) tokens; leading dimensions are separate problems, solved together.
        z: (..., n, d) queries; or of another width c, and W is then (..., d, c).
        tokens: (..., n) integers, the selected token of each sample.
        geometry: a norm, `PNorm`, `Schatten` or `Grouped`; a number stands for `PNorm`. The
            interior point method is known to finish for exponents between 1.02 and 100. `PNorm(1)`
            and `PNorm(inf)` are linear programs, solved by HiGHS, and may have several solutions.
            `Schatten(1)`, the nuclear norm, is the limit of training W = K Q' with p = 2
            (examples/key_query.py).
        tol: the relative gap between ||W|| and a lower bound on it, within (0, 1). For p > 2
            W itself is less accurate: use 1e-12 if you need W.
        mask: (..., n, T) bool, False on padding, for sequences of different length. Padding may
            hold anything, even NaN.
        start: a solution of a similar problem of the same shape (another norm, a few other tokens).
            Only p-norms with 1 < p < inf use it.

    Returns a `MarginSolution`; look at its `status`. Data are promoted to float64. A sample
    with one token has no constraint; without any constraint W = 0 is optimal.

    >>> X = torch.tensor([[[1.0, 0.0], [-1.0, 1.0], [0.0, 0.0]]])
    >>> z = torch.tensor([[2.0, 0.0]])
    >>> solution = attention_svm(X, z, torch.tensor([0]), geometry=1.5)
    >>> solution.status, solution.W.round(decimals=6)  # only 2 W_11 >= 1 binds
    ('optimal', tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]], dtype=torch.float64))
    >>> solution.support
    tensor([[False, False,  True]])
    >>> bool(solution.check(X, z, torch.tensor([0])))
    True
    """
    choice = choose(geometry)
    return _solve(attention_constraints(X, z, tokens, mask), choice, tol, start)


def svm(
    features: Tensor,
    labels: Tensor,
    geometry: float | Norm = 2,
    tol: float = 1e-9,
    *,
    start: MarginSolution | None = None,
) -> MarginSolution:
    r"""Compute the lp max-margin separator through the origin: min ||v||_p, y_i v' x_i >= 1.

    features: (..., n, d); labels: (..., n) of +1 and -1. The other arguments are those of
    `attention_svm`. The weights are `solution.v`, (..., d).

    >>> solution = svm(torch.tensor([[2.0, 0.0], [0.0, -4.0]]), torch.tensor([1, -1]), geometry=3)
    >>> solution.status, solution.v.round(decimals=6)
    ('optimal', tensor([0.5000, 0.2500], dtype=torch.float64))
    """
    choice = choose(geometry)
    return _solve(svm_constraints(features, labels), choice, tol, start)


def multiclass_svm(
    features: Tensor, labels: Tensor, geometry: float | Norm = 2, tol: float = 1e-9
) -> MarginSolution:
    r"""Compute the matrix of smallest norm that gives each sample its class with margin 1.

        min ||W||   subject to   (W x_i)_label - (W x_i)_k >= 1   for all other classes k

    features: (..., n, d); labels: (..., n) integers, the classes 0, 1, ... This is `attention_svm`
    with the features as queries and the rows of the identity as tokens: `solution.W` is
    (..., classes, d), and `solution.check(tokens, features, labels)` takes
    `tokens = torch.eye(classes).expand(n, -1, -1)`.

    >>> features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    >>> multiclass_svm(features, torch.tensor([0, 1, 2])).status
    'optimal'
    """
    choice, features = choose(geometry), as_floats("features", features)
    labels = as_tensor("labels", labels, features)
    if features.dim() < 2 or labels.shape != features.shape[:-1] or not labels.numel():
        given = tuple(features.shape), tuple(labels.shape)
        raise ValueError(f"features must be (..., n, d) and labels (..., n), got {given}")
    if labels.is_floating_point() or labels.dtype == torch.bool or bool((labels < 0).any()):
        raise ValueError(f"labels must be integers from 0, got {labels.dtype}, {labels.min()}")
    tokens = torch.eye(int(labels.max()) + 1).to(features).expand(*features.shape[:-1], -1, -1)
    return _solve(attention_constraints(tokens, features, labels), choice, tol, None)


def _solve(
    problem: Constraints, choice: Choice, tol: float, start: MarginSolution | None
) -> MarginSolution:
    norm = choice.norm
    norm.check(problem.weights, "W")
    if not (is_number(tol) and 0 < tol < 1):
        raise ValueError(f"tol must be a number between 0 and 1, got {tol!r}")
    tol = float(tol)
    if start is not None and not isinstance(start, MarginSolution):
        raise TypeError(f"start must be a MarginSolution, got {type(start).__name__}")
    near = None if start is None else _start(problem, start)
    A, norms = problem.A, problem.A.row_norms.where(problem.live, math.inf)
    zero = norms == 0  # the constraint reads 0 >= 1: its unit vector is a certificate
    result = SolverResult.empty(A, norms)
    result.infeasible[:] = zero.any(-1)
    result.lam[:] = zero.double() / zero.sum(-1, keepdim=True).clamp_min(1)
    todo = (problem.live.any(-1) & ~result.infeasible).nonzero().squeeze(-1)
    if len(todo):
        if len(todo) < A.batch:
            A, norms = A.take(todo), norms[todo]
            near = None if near is None else (near[0][todo], near[1][todo])
        # Scale the rows to norm 1 and the right-hand side to maximum 1.
        padding = norms == math.inf
        A, b = A.unit_rows(), (norms.amin(-1, keepdim=True) / norms).where(~padding, -1.0)
        near = None if near is None else (near[0], near[1] * norms.where(~padding, 0.0))
        # Half of tol: rounding must not raise the gap recomputed from the data above tol.
        found = choice.solve(A, b, Task(norm, problem.weights, 0.5 * tol, near))
        for whole, part in zip(result, found._replace(lam=found.lam / norms), strict=True):
            whole[todo] = part
    return _conclude(problem, result, tol, norm)


def _conclude(problem: Constraints, result: SolverResult, tol: float, norm: Norm) -> MarginSolution:
    """Certify the result from the original data; the certificate decides the status."""
    lead, free = problem.lead, ~problem.live.any(-1)  # free of constraints
    W, dual = result.w, result.lam * problem.live
    margin = torch.where(problem.live, problem.A.apply(W), math.inf).amin(-1)
    found = (margin > 0) & ~free
    # Feasible: A' lam gets norm 1, that is, the sum is the lower bound. Infeasible: sum 1.
    pulled = problem.pull(dual)
    dual_norm = norm.dual_norm(pulled, tuple(range(1, pulled.dim())))
    total = torch.where(result.infeasible, dual.sum(-1), dual_norm)
    W, dual = _scaled(W, margin.where(found, math.inf)), _scaled(dual, total)
    proof = certify(problem, W, dual, norm, tol)  # of exactly what is returned
    if bool((found & ((proof.margin - 1).abs() > ROUNDED)).any()):  # float64 was not enough
        total = torch.where(result.infeasible, 1.0, proof.dual_norm)
        margin = proof.margin.where(found & (proof.margin > 0), 1.0)
        W, dual = _scaled(W, margin), _scaled(dual, total)
        proof = certify(problem, W, dual, norm, tol)
    rounded = (proof.gap > tol) & (proof.gap < ROUNDING_GAP) & (proof.wobble > 0.01 * proof.gap)
    if isinstance(norm, PNorm) and bool(rounded.any()):
        together = dual.clone()
        for k in rounded.nonzero().squeeze(-1).tolist():
            together[k] = round_together(problem, k, W[k], dual[k], norm)
        better = certify(problem, W, together, norm, tol).gap < proof.gap
        dual = together.where(better.unsqueeze(-1), dual)
        proof = certify(problem, W, dual, norm, tol)
    gap = proof.gap_as_is()
    infeasible = result.infeasible & (proof.farkas <= FARKAS)
    codes = torch.full_like(result.iterations, Status.UNFINISHED)
    codes[(gap <= tol) & (proof.least >= 1 - tol)] = Status.OPTIMAL
    codes[infeasible] = Status.INFEASIBLE
    found = (free | found) & ~infeasible
    support = (support_excess(problem, dual, proof) > 0) & found.unsqueeze(-1)
    size = torch.where(free, 0.0, proof.upper)
    return MarginSolution(
        W=W.where(found.unsqueeze(-1), math.nan).reshape(*lead, *problem.weights),
        norm=torch.where(infeasible, math.inf, size).reshape(lead),
        dual=problem.spread(dual),
        gap=gap.where(~infeasible, math.inf).reshape(lead),
        support=problem.spread(support.to(dual.dtype)).bool(),
        iterations=result.iterations.reshape(lead),
        inner_iterations=result.inner.reshape(lead),
        geometry=norm,
        tol=tol,
        codes=codes.reshape(lead),
    )


def _scaled(x: Tensor, divisor: Tensor) -> Tensor:
    """x (B, k) / divisor (B,), 0 where the divisor is 0 or infinite."""
    divisor = divisor.where(divisor > 0, math.inf).unsqueeze(-1)
    return torch.where(divisor < math.inf, x / divisor, 0.0)


def _start(problem: Constraints, start: MarginSolution) -> tuple[Tensor, Tensor]:
    for name, given, shape in (
        ("weights", start.W, problem.weights),
        ("dual", start.dual, problem.shape),
    ):
        if given.shape != (*problem.lead, *shape):
            raise ValueError(
                f"start must solve a problem of the same shape, with {name} "
                f"{(*problem.lead, *shape)}; got {tuple(given.shape)}"
            )
    W = start.W.reshape(problem.A.batch, problem.A.columns).to(problem.A.left)
    return W, problem.collect(start.dual.to(W.device))


def _near(x: Tensor, y: Tensor, tol: float | Tensor = ROUNDED) -> Tensor:
    """Whether x and y differ by at most tol, relatively; infinities are near to themselves."""
    return (x == y) | ((x - y).abs() <= tol * y.abs())


def _finite(extreme: Callable[[Tensor], Tensor], x: Tensor, style: str) -> str:
    x = x[x.isfinite()]
    return format(float(extreme(x)), style) if x.numel() else "none"
