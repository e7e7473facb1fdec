"""Globally and locally optimal tokens, and the constants of the paper's cones around them.

A problem is any object with the attributes X (..., n, T, d), z (..., n, d), y (..., n) of +-1 and
v (..., d), and optionally a mask (..., n, T) that is False on padding, and `given_scores`
(..., n, T) that replace those of y and v. Leading dimensions are separate problems.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from itertools import islice, product
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from mirrorhead._checks import as_tensor, check_integer, check_mask, check_signs
from mirrorhead.geometry import Norm, PNorm
from mirrorhead.geometry._choice import as_smooth_pnorm
from mirrorhead.geometry._powers import dual_exponent, lp_norm
from mirrorhead.losses import LOSSES
from mirrorhead.margin import MarginSolution, attention_svm
from mirrorhead.margin._certificate import active_constraints
from mirrorhead.margin._constraints import attention_constraints
from mirrorhead.margin._problems import Status
from mirrorhead.margin._solvers import choose

FINEST = 1e-13  # the smallest gap that float64 certifies for most problems


class TokenProblem(Protocol):
    """Data of a one-layer attention classifier y = sign(v' X' softmax(X W z))."""

    @property
    def X(self) -> Tensor: ...
    @property
    def z(self) -> Tensor: ...
    @property
    def y(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...


def token_scores(problem: TokenProblem) -> Tensor:
    """Return the scores gamma_it = y_i v' x_it, (..., n, T) (Definition 2); 0 at padding.

    If the problem was given its scores, these are they.

    >>> from types import SimpleNamespace
    >>> X = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> data = SimpleNamespace(X=X, z=X[:, 0], y=torch.tensor([-1.0]), v=torch.tensor([2.0, 1.0]))
    >>> token_scores(data)
    tensor([[-2., -1.]])
    """
    given = getattr(problem, "given_scores", None)
    if given is not None:
        return given
    _check_has(problem, "X", "y", "v")
    y, v = problem.y, problem.v
    X = problem.X.where(_kept(problem).unsqueeze(-1), 0)
    if y.shape != X.shape[:-2]:
        raise ValueError(f"y must have shape {tuple(X.shape[:-2])}, got {tuple(y.shape)}")
    if v.shape != (*X.shape[:-3], X.shape[-1]):
        raise ValueError(f"v must have shape {(*X.shape[:-3], X.shape[-1])}, got {tuple(v.shape)}")
    check_signs("y", y)
    return y.unsqueeze(-1) * (X @ v[..., None, :, None]).squeeze(-1)


def globally_optimal_tokens(problem: TokenProblem) -> Tensor:
    """Return the token with the highest score in each sample, (..., n) (Definition 3.1)."""
    return token_scores(problem).where(_kept(problem), -math.inf).argmax(-1)


def support_tokens(problem: TokenProblem, tokens: Tensor, geometry: float | Norm) -> Tensor:
    """(..., n, T) bool: tokens whose constraint holds with equality at the margin solution."""
    return _solution(problem, tokens, geometry).support


@dataclass(frozen=True, eq=False)
class LocalOptimality:
    """Whether selected tokens are locally optimal: yes, no, or cannot tell.

    optimal: (...) bool, True where the tokens are proved to be locally optimal.
    undecided: (...) bool, True where neither this nor the contrary is proved. Either the margin
        problem is unfinished, or the certificate cannot tell whether a token that scores at
        least as high as the selected one is a support token.
    reasons: one for each problem in the order of the flattened leading dimensions, "" where
        optimal.
    rivals: (..., n, T) bool, support tokens that score at least as high as the selected one.
    solution: the lp-AttSVM solution.

    The object is true if all problems are proved to be optimal.
    """

    optimal: Tensor
    undecided: Tensor
    reasons: tuple[str, ...]
    rivals: Tensor
    solution: MarginSolution

    def __bool__(self) -> bool:
        return bool(self.optimal.all())

    def __repr__(self) -> str:
        if self.optimal.dim() == 0:
            answer = "cannot tell" if bool(self.undecided) else str(bool(self))
            why = f", {self.reasons[0]}" if self.reasons[0] else ""
            return f"LocalOptimality({answer}{why})"
        unknown = int(self.undecided.sum())
        more = f", {unknown} undecided" if unknown else ""
        return f"LocalOptimality({int(self.optimal.sum())} of {self.optimal.numel()}{more})"


def locally_optimal(
    problem: TokenProblem, tokens: Tensor, geometry: float | Norm, tol: float = 1e-9
) -> LocalOptimality:
    """Decide whether tokens are locally optimal (Definition 3.2).

    They are if they have an lp-AttSVM solution and score higher than its support, the tokens whose
    constraints hold with equality. The certificate decides this for each token that scores at
    least as high as the selected one. If it does not decide, the problem is solved again to a gap
    of 1e-13. If that does not decide either, the answer is "cannot tell".

    >>> from types import SimpleNamespace
    >>> X = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])
    >>> data = SimpleNamespace(X=X, z=X[:, 0], y=torch.tensor([1.0]), v=torch.tensor([1.0, 1.0]))
    >>> locally_optimal(data, torch.tensor([0]), geometry=2)
    LocalOptimality(True)
    >>> locally_optimal(data, torch.tensor([1]), geometry=2)
    LocalOptimality(False, sample 0: support token 0 scores 2, the selected token 1 scores 1)
    """
    norm = choose(geometry).norm
    scores = token_scores(problem)
    solution = _solution(problem, tokens, norm, tol)
    X, z, mask = problem.X, problem.z, _kept(problem)
    tokens = torch.as_tensor(tokens, device=X.device)
    at = tokens.unsqueeze(-1)
    no_less = ((scores >= scores.gather(-1, at)) & mask).scatter(-1, at, False)
    no_less &= solution.optimal[..., None, None]
    active, inactive = _active((X, z, tokens, mask), solution, no_less)
    # A problem with an active token is decided whatever its other tokens are.
    unclear = no_less & ~active & ~inactive & ~_any(active)[..., None, None]
    again = _any(unclear)
    if bool(again.any()) and tol > FINEST:
        part = X[again], z[again], tokens[again]
        finer = attention_svm(*part, solution.geometry, FINEST, mask=mask[again])
        newly_active, inactive = _active((*part, mask[again]), finer, unclear[again])
        active[again] |= newly_active
        unclear[again] &= ~(newly_active | inactive)
        unclear &= ~_any(active)[..., None, None]
    codes = solution.codes
    undecided = (codes == Status.UNFINISHED) | _any(unclear)
    optimal = (codes == Status.OPTIMAL) & ~undecided & ~_any(active)
    parts = (x.reshape(-1, *mask.shape[-2:]) for x in (scores, active, unclear))
    chosen = tokens.reshape(-1, tokens.shape[-1])
    reasons = tuple(map(_reason, codes.flatten().tolist(), chosen, *parts))
    return LocalOptimality(optimal, undecided, reasons, active, solution)


def locally_optimal_sets(
    problem: TokenProblem, geometry: float | Norm, limit: int = 100_000, tol: float = 1e-9
) -> Tensor:
    """Return all locally optimal token sets of one small problem, (found, n), in order.

    Every one of the T^n sets (fewer with padding) is solved, a thousand at a time; more than
    `limit` are refused. Sets for which `locally_optimal` cannot tell are left out with a warning.
    """
    _check_has(problem, "X", "z")
    geometry = choose(geometry).norm  # before the loop over sets
    if problem.X.dim() != 3:
        raise ValueError(f"X must be one problem, (n, T, d); got shape {tuple(problem.X.shape)}")
    check_integer("limit", limit, 1)
    kept, scores = _kept(problem), token_scores(problem)
    count = math.prod(kept.sum(-1).tolist())
    if count > limit:
        raise ValueError(f"{count} token sets are more than limit={limit}")
    sets = product(*(row.nonzero().squeeze(-1).tolist() for row in kept))
    found, undecided = [], 0
    while chosen := list(islice(sets, 1000)):
        tokens = torch.tensor(chosen, device=problem.X.device)
        parts = {"X": problem.X, "z": problem.z, "mask": kept, "given_scores": scores}
        # One problem, once for each token set.
        copies = {name: x.expand(len(chosen), *x.shape) for name, x in parts.items()}
        batch: Any = SimpleNamespace(**copies)
        decision = locally_optimal(batch, tokens, geometry, tol)
        undecided += int(decision.undecided.sum())
        found.append(tokens[decision.optimal])
    if undecided:
        warnings.warn(
            f"{undecided} of {count} token sets are left out: the certificate does not decide "
            f"whether they are locally optimal",
            stacklevel=2,
        )
    return torch.cat(found)


@dataclass(frozen=True, eq=False)
class ConeConstants:
    r"""The constants of the paper's appendix B.1 for one choice of tokens, each of shape (...).

    delta: min(1/4, 1/2 min of (margin - 1) over non-support tokens), (7);
    A: max(1, ||W|| max ||x_it z_i'||_q), (8), read with the dual exponent q = p/(p-1), as the
        proofs use it (the printed index is (p-1, p/(p-1)));
    mu_0: the radius of the cone, (9);
    score_gap, widest_score_gap: (..., n), the selected score minus the highest and the lowest
        of the support, (10), NaN for samples without support tokens;
    score_range: Gamma, the largest difference of two scores in a sample, (11);
    slope_ratio: an upper bound on the L of (19), sum_i l'_i / max_i l'_i, over all attention;
    loss_range: L_max - L_min of Lemma 6;
    R_delta: the norm of Lemma 10, from which on the gradient points inwards. Like the other radii
        it is NaN where a support token scores at least as high as the selected one.
    """

    delta: Tensor
    A: Tensor
    mu_0: Tensor
    score_gap: Tensor
    widest_score_gap: Tensor
    score_range: Tensor
    slope_ratio: Tensor
    loss_range: Tensor
    R_delta: Tensor
    solution: MarginSolution
    tokens_per_sample: int

    def R_pi(self, pi: float | Tensor) -> Tensor:
        r"""Return the norm of Lemma 11 for 0 < pi < 1, (...), with the constants of its proof:

        R_pi = max(R_delta, ||W_mm|| / min(pi, 3 delta/2) log(C L / (pi gap))),
        C = delta/2 max_i widest_score_gap_i T^2 + 6 Gamma A T^2 (T+1).
        """
        T, gap, widest = self.tokens_per_sample, *_over_samples(self)
        inner = self.delta / 2 * widest * T**2 + 6 * self.score_range * self.A * T**2 * (T + 1)
        pi = torch.as_tensor(pi, dtype=torch.float64, device=self.delta.device)
        log = (inner * self.slope_ratio / (pi * gap)).log()
        return self.R_delta.maximum(self.solution.norm * log / pi.minimum(1.5 * self.delta))

    def R_mu(self, mu: float | Tensor | None = None, lr: float = 0.0) -> Tensor:
        """Return the norm of Lemma 17, (...), for 0 < mu <= mu_0, by default mu_0, and a step lr.

        It is the largest of R_pi at pi = mu/3 and of (3 lr loss_range / mu)^(1/p). A path that
        starts in the cone of radius mu/3 with such a norm stays in the cone of radius mu.
        """
        wide = self.mu_0 if mu is None else torch.as_tensor(mu, dtype=torch.float64)
        reach = (3 * lr * self.loss_range / wide) ** (1 / self.solution.p)
        return self.R_pi(wide / 3).maximum(reach)

    def contains(
        self, W: Tensor, mu: float | Tensor | None = None, radius: float | Tensor | None = None
    ) -> Tensor:
        """Return whether W (..., d, d) lies in the cone C_mu,R of (5b).

        The conditions are D(W_mm/||W_mm||, W/||W||) <= mu and ||W|| >= radius. By default, mu is
        mu_0 and the radius is `R_mu`: the cone in which Lemma 17 keeps a path that starts in its
        inner third. That radius is about 1e9 times ||W_mm||. radius=0 tests the angle alone (5a).
        """
        psi, own = PNorm(self.solution.p), self.solution.W
        W = as_tensor("W", W, own).to(torch.float64)
        if W.dim() < 2 or W.shape[-2:] != own.shape[-2:]:
            raise ValueError(
                f"W must have shape (..., d, d) like {tuple(own.shape)}, got {tuple(W.shape)}"
            )
        divergence = psi.direction_divergence(own, W, (-2, -1))
        near = divergence <= (self.mu_0 if mu is None else mu)
        return near & (psi.norm(W, (-2, -1)) >= (self.R_mu(mu) if radius is None else radius))


def cone_constants(
    problem: TokenProblem, tokens: Tensor, geometry: float | PNorm, tol: float = 1e-9
) -> ConeConstants:
    """Return the constants (7)-(11) of the cones around the lp-AttSVM solution of the tokens.

    The paper defines them for p-norms with 1 < p < inf only, so other geometries are refused.
    Raises ValueError if the solution is not optimal, since the constants are then undefined.
    """
    solution = _solution(problem, tokens, as_smooth_pnorm(geometry), tol)
    if not bool(solution.optimal.all()):
        raise ValueError(f"tokens must have an lp-AttSVM solution, got {solution.status}")
    return constants_at(problem, tokens, solution)


def constants_at(problem: TokenProblem, tokens: Tensor, solution: MarginSolution) -> ConeConstants:
    """`cone_constants` of a known solution; NaN or meaningless where there is no solution."""
    p, kept = solution.p, _kept(problem)
    scores = token_scores(problem).to(torch.float64)
    X, z = problem.X.to(torch.float64), problem.z.to(torch.float64)
    at = torch.as_tensor(tokens, device=X.device).unsqueeze(-1)
    logits = (X @ solution.W.unsqueeze(-3) @ z.unsqueeze(-1)).squeeze(-1)  # (..., n, T)
    excess = logits.gather(-1, at) - logits - 1
    support = solution.support
    other = (kept & ~support).scatter(-1, at, False)
    delta = (0.5 * excess.where(other, math.inf).amin((-2, -1))).clamp_max(0.25)
    q = dual_exponent(p)
    # ||x z'||_q = ||x||_q ||z||_q
    outer = lp_norm(X, q, -1).where(kept, 0).amax(-1) * lp_norm(z, q, -1)
    A = (solution.norm * outer.amax(-1)).clamp_min(1)
    if p >= 2:
        mu_0 = (delta / (8 * A)) ** p / p
    else:
        # d^(2/p - 1) of square weights: (entries)^(1/p - 1/2), which compares p-norm and 2-norm.
        entries = X.shape[-1] * z.shape[-1]
        mu_0 = (delta * (p - 1) / (4 * A * entries ** (1 / p - 1 / 2))) ** 2 / p
    chosen, some = scores.gather(-1, at).squeeze(-1), support.any(-1)
    highest, lowest = _extremes(scores, support)
    gap, widest_gap = ((chosen - x).where(some, math.nan) for x in (highest, lowest))
    highest, lowest = _extremes(scores, kept)
    loss = getattr(problem, "loss_function", LOSSES["logistic"])
    # -l' and l are largest at the lowest score, for they decrease; (trials, n)
    steepest, flattest = (loss.log_slope(x).exp() for x in (lowest, highest))
    constants = ConeConstants(
        delta=delta,
        A=A,
        mu_0=mu_0,
        score_gap=gap,
        widest_score_gap=widest_gap,
        score_range=(highest - lowest).amax(-1),
        slope_ratio=steepest.sum(-1) / flattest.amin(-1),
        loss_range=(loss.value(lowest) - loss.value(highest)).mean(-1),
        R_delta=torch.full_like(delta, math.nan),
        solution=solution,
        tokens_per_sample=int(kept.sum(-1).max()),
    )
    return replace(constants, R_delta=_correlation_radius(constants))


def _correlation_radius(cone: ConeConstants) -> Tensor:
    """R_delta = ||W_mm|| / delta log(2 Gamma L A T^2 (T+1) / (gap (1 - delta/2))), Lemma 10.

    The proof prints it once with a factor n inside the logarithm and once without; the sums over
    samples are divided by n on both sides, so it cancels.
    """
    T, delta, (gap, _) = cone.tokens_per_sample, cone.delta, _over_samples(cone)
    inner = 2 * cone.score_range * cone.slope_ratio * cone.A * T**2 * (T + 1)
    log = (inner / (gap * (1 - delta / 2))).log()
    return cone.solution.norm / delta * log.clamp_min(0)


def _over_samples(cone: ConeConstants) -> tuple[Tensor, Tensor]:
    """The least score gap and the widest one, of the samples with support tokens: (...) each.

    The least is NaN where it is not positive: the tokens are not locally optimal then.
    """
    none = cone.score_gap.isnan()
    least = cone.score_gap.where(~none, math.inf).amin(-1)
    return least.where(least > 0, math.nan), cone.widest_score_gap.where(~none, 0).amax(-1)


def _check_has(problem: TokenProblem, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(problem, name, None), Tensor):
            given = type(problem).__name__
            raise TypeError(
                f"problem must have the tensors {', '.join(names)}, as an AttentionProblem; got a"
                f" {given} without {name}"
            )


def _extremes(scores: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """The highest and the lowest score among some tokens of each sample, (..., n)."""
    return scores.where(among, -math.inf).amax(-1), scores.where(among, math.inf).amin(-1)


def _kept(problem: TokenProblem) -> Tensor:
    """(..., n, T) bool, False on padding."""
    X, mask = problem.X, getattr(problem, "mask", None)
    return torch.ones_like(X[..., 0], dtype=torch.bool) if mask is None else check_mask(mask, X)


def _solution(
    problem: TokenProblem, tokens: Tensor, geometry: float | Norm, tol: float = 1e-9
) -> MarginSolution:
    _check_has(problem, "X", "z")
    mask = getattr(problem, "mask", None)
    return attention_svm(problem.X, problem.z, tokens, geometry, tol, mask=mask)


def _any(x: Tensor) -> Tensor:
    """Whether any token of any sample is True: (..., n, T) -> (...)."""
    return x.flatten(-2).any(-1)


def _active(
    data: tuple[Tensor, Tensor, Tensor, Tensor], solution: MarginSolution, asked: Tensor
) -> tuple[Tensor, Tensor]:
    """`active_constraints` of the data (X, z, tokens, mask) for the tokens asked for."""
    constraints = attention_constraints(*data)
    W = solution.W.nan_to_num().reshape(constraints.A.batch, -1)
    dual, asked = constraints.collect(solution.dual), constraints.collect(asked) > 0
    active, inactive = active_constraints(constraints, W, dual, solution.geometry, asked)
    return constraints.spread(active.double()) > 0, constraints.spread(inactive.double()) > 0


def _reason(code: int, tokens: Tensor, scores: Tensor, rivals: Tensor, unclear: Tensor) -> str:
    if code == Status.INFEASIBLE:
        return "infeasible: no W makes attention prefer these tokens"
    if code == Status.UNFINISHED:
        return "undecided: the margin problem is unfinished"
    if bool(rivals.any()):
        found, what = rivals, "support token"
    elif bool(unclear.any()):
        found, what = unclear, "perhaps on the margin: token"
    else:
        return ""
    i, t = found.nonzero()[0].tolist()
    chosen = int(tokens[i])
    rival, own = float(scores[i, t]), float(scores[i, chosen])
    return (
        f"sample {i}: {what} {t} scores {rival:.4g}, the selected token {chosen} scores {own:.4g}"
    )
