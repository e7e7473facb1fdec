"""A primal-dual interior point method for min ||w||_p subject to A w >= b, 1 < p < inf.

It knows operators and exponents, nothing of attention. The barrier and the exponent move
together: the method starts near p = 2, where the problem is a quadratic one, and takes the
exponent to p while the gap falls, so there is no separate solve on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mirrorhead.margin.link import linearise, log_abs, log_norm, signed_power
from mirrorhead.margin.operator import Blocks
from mirrorhead.margin.systems import DENSE_LIMIT, LAST_RESORT, System, make_system, part_size

# The hull of the unit rows comes this near to the origin: no direction separates.
INFEASIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class Outcome:
    """Where the method ended.

    w: (B, N) with ||w||_p = 1; lam: (B, m) > 0, of no particular scale; gap: (B,), the
    certified relative gap, inf where w has no positive margin; infeasible: (B,), lam is a
    Farkas certificate; iterations and inner: (B,), Newton and conjugate-gradient steps.
    """

    w: Tensor
    lam: Tensor
    gap: Tensor
    infeasible: Tensor
    iterations: Tensor
    inner: Tensor


@dataclass(frozen=True)
class _Pace:
    """How boldly the exponent moves while the barrier falls."""

    factor: float  # p - 1 changes by at most this factor at a time,
    threshold: float  # only while the gap is below this,
    floor: float  # and the barrier falls by at most this factor meanwhile
    iterations: int
    dense: int  # up to this size the linear systems are factored


# What does not finish at one pace starts again at the next.
_PACES = (
    _Pace(1.5, 0.5, 0.1, 40, DENSE_LIMIT),
    _Pace(1.25, 0.2, 0.1, 60, LAST_RESORT),
    _Pace(1.15, 0.1, 0.3, 100, LAST_RESORT),
)


def solve(
    A: Blocks, b: Tensor, p: float, tol: float, start: tuple[Tensor, Tensor] | None = None
) -> Outcome:
    r"""Minimise ||w||_p subject to A w >= b for a batch of problems.

    The rows of A should have norm 1 or 0. b is (B, m), at most 1; a row of zeros with b = -1
    is a constraint that always holds, which is how a batch is padded. `start` is a pair
    (w, lam) from a similar problem; where it leads nowhere, the cold start takes over.

    >>> A = Blocks(torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2), torch.ones(1, 1, 1).double())
    >>> b = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    >>> outcome = solve(A, b, p=3, tol=1e-12)
    >>> outcome.w / outcome.w[0, 0]  # both constraints hold with equality: w = b
    tensor([[1.0000, 0.5000]], dtype=torch.float64)
    """
    B = A.batch
    result = Outcome(
        w=b.new_zeros(B, A.columns),
        lam=torch.zeros_like(b),
        gap=b.new_full((B,), math.inf),
        infeasible=torch.zeros(B, dtype=torch.bool, device=b.device),
        iterations=torch.zeros(B, dtype=torch.long, device=b.device),
        inner=torch.zeros(B, dtype=torch.long, device=b.device),
    )
    left = torch.arange(B, device=b.device)
    if start is not None:
        left = _run_parts(A, b, p, tol, _PACES[0], start, result, left)
    for pace in _PACES:
        left = _run_parts(A, b, p, tol, pace, None, result, left)
    return result


@dataclass(frozen=True, eq=False)
class _Point:
    """An iterate, normalised to ||w||_p = 1 and <w, s> = 1, with s = A' lam and aw = A w."""

    w: Tensor  # (B, N)
    aw: Tensor  # (B, m)
    u: Tensor  # (B, m), slack: A w - u = beta b with a scale beta that is free
    s: Tensor  # (B, N)
    lam: Tensor  # (B, m)
    p: Tensor  # (B, 1), the exponent of the moment
    log_w: Tensor  # (B, N), log |w|
    log_s: Tensor  # (B, N), log |s|
    log_dual_norm: Tensor  # (B, 1), log ||s||_q, which is >= 0

    def take(self, keep: Tensor) -> _Point:
        return _Point(*(getattr(self, f.name)[keep] for f in fields(self)))


def _run_parts(
    A: Blocks,
    b: Tensor,
    p: float,
    tol: float,
    pace: _Pace,
    start: tuple[Tensor, Tensor] | None,
    result: Outcome,
    left: Tensor,
) -> Tensor:
    """Run the problems named by `left`, as many at a time as memory allows; what is left."""
    still = []
    for index in left.split(part_size(A, pace.dense)) if len(left) else ():
        everything = len(index) == A.batch
        part, bound = (A, b) if everything else (A.take(index), b[index])
        begin = None if start is None else (start[0][index], start[1][index])
        still.append(index[_run(part, bound, p, tol, pace, begin, result, index)])
    return torch.cat(still) if still else left


def _run(
    A: Blocks,
    b: Tensor,
    p: float,
    tol: float,
    pace: _Pace,
    start: tuple[Tensor, Tensor] | None,
    result: Outcome,
    index: Tensor,
) -> Tensor:
    """Iterate until every problem has ended; True where one has not come to a conclusion.

    A problem is written to its place `index` in the result and leaves the batch when it ends.
    """
    system = make_system(A, pace.dense, p)
    live = b > 0
    live = None if bool(live.all()) else live
    x = _begin(A, b, p, pace, start)
    inconclusive = torch.ones(A.batch, dtype=torch.bool, device=b.device)
    here = torch.arange(A.batch, device=b.device)
    for iteration in range(pace.iterations + 1):
        verdict = _judge(x, b, live, p, tol)
        ended = verdict.ended if iteration < pace.iterations else torch.ones_like(verdict.ended)
        if bool(ended.any()):
            done = ended.nonzero().squeeze(-1)
            at = index[here[done]]
            result.iterations[at] += iteration
            result.inner[at] += system.steps
            done = done[~verdict.lost[done]]
            at = index[here[done]]
            result.w[at], result.lam[at] = x.w[done], x.lam[done]
            result.gap[at] = verdict.gap[done].squeeze(-1)
            result.infeasible[at] = verdict.infeasible[done]
            inconclusive[here[done]] = ~verdict.ended[done]
            keep = (~ended).nonzero().squeeze(-1)
            if len(keep) == 0:
                break
            x, A, b, system = x.take(keep), A.take(keep), b[keep], system.take(keep)
            live, here, verdict = (
                live if live is None else live[keep],
                here[keep],
                verdict.take(keep),
            )
        x = _advance(x, A, b, system, p, pace, verdict.gap)
    return inconclusive


@dataclass(frozen=True, eq=False)
class _Verdict:
    gap: Tensor  # (B, 1)
    infeasible: Tensor  # (B,)
    lost: Tensor  # (B,), overflow or worse: the point says nothing
    ended: Tensor  # (B,), optimal, infeasible or lost

    def take(self, keep: Tensor) -> _Verdict:
        return _Verdict(*(getattr(self, f.name)[keep] for f in fields(self)))


def _judge(x: _Point, b: Tensor, live: Tensor | None, p: float, tol: float) -> _Verdict:
    """The certificates of a point: its gap at the exponent of the moment, and Farkas' lemma."""
    ratio = x.aw / b
    margin = (ratio if live is None else ratio.where(live, math.inf)).amin(-1, keepdim=True)
    # ||s||_q / <b, lam> bounds the margin of every w of norm 1, and `margin` is that of this w.
    gap = torch.expm1(x.log_dual_norm - (_dot(b, x.lam) * margin.clamp_min(0)).log())
    lost = ~(gap > -1e-3).squeeze(-1)
    ended = lost | ((x.p == p) & (gap <= tol)).squeeze(-1)
    infeasible = torch.zeros_like(lost)
    if bool((gap == math.inf).any()):
        mass = (x.lam if live is None else x.lam * live).sum(-1)
        infeasible = (torch.linalg.vector_norm(x.s, dim=-1) < INFEASIBLE * mass) & ~ended
        ended = ended | infeasible
    return _Verdict(gap, infeasible, lost, ended)


def _advance(
    x: _Point,
    A: Blocks,
    b: Tensor,
    system: System,
    p: float,
    pace: _Pace,
    gap: Tensor,
) -> _Point:
    """One predictor-corrector step, after moving the exponents that may move."""
    moving = x.p != p
    if bool(moving.any()):
        ready = moving & (gap < pace.threshold)
        x = _at_exponent(x, torch.where(ready, _towards(p, x.p, pace), x.p))
    q = x.p / (x.p - 1)
    complementarity = _dot(x.lam, x.u)
    # On the central path <lam, A w - u> = beta <lam, b>, and <lam, A w> = <s, w> = 1.
    target = (1 - complementarity).clamp_min(0.1) / _dot(b, x.lam) * b
    # sum |w|^p/p + |s|^q/q - w s, the Fenchel gap of the link, in the present normalisation.
    fenchel = torch.expm1(q * x.log_dual_norm) / q
    floor = 1e-2 * gap.clamp(1e-16, 1)
    link = linearise(x.w, x.s, x.log_w, x.log_s, x.p, floor, p)
    solve = system.factor(link.h, x.u / x.lam)
    residual = target - x.aw - A.apply(link.rho)

    # Predictor: straight at the solution. With r = dlam/lam, complementarity asks for
    # du/u = -(1 + r). How far one gets says how much to centre.
    dlam = solve(residual, None, 1e-2)
    r = dlam / x.lam
    lowest, highest = torch.aminmax(r, dim=-1, keepdim=True)
    dual, primal = _reach(lowest), _reach(-1 - highest)
    product = x.lam * x.u
    after = (product * (1 + dual * r) * (1 - primal * (1 + r))).sum(-1, keepdim=True)
    sigma = (after / complementarity).clamp_max(1) ** 4
    sigma = torch.where(moving, sigma.clamp_min(pace.floor), sigma)
    # Complementarity alone would fall ahead of the error of the link.
    mu = sigma * (complementarity + fenchel) / b.shape[-1]

    # Corrector. The second-order term counts as far as the predictor got: in full it can turn
    # the step uphill where the predictor got nowhere.
    push = mu / x.lam + dual * x.u * r * (1 + r)
    accuracy = min(max(0.1 * float(gap.max()), 1e-8), 1e-2)
    dlam = solve(residual + push, dlam, accuracy)
    r = dlam / x.lam
    du = push - x.u * (1 + r)
    ds = A.adjoint(dlam)
    dw = torch.addcmul(link.rho, link.h, ds)

    # Nearly to the boundary, primal and dual apart; ever nearer as the gap closes.
    fraction = (1 - gap).clamp(0.99, 1 - 1e-8)
    dual = fraction * _reach(r.amin(-1, keepdim=True))
    primal = fraction * _reach((du / x.u).amin(-1, keepdim=True))
    if p < 2:
        linear = _dot(target, dlam)
        slope = _dot(link.f, ds) - linear - mu * r.sum(-1, keepdim=True)
        shrink = _backtrack(
            lambda a: (
                _dot(signed_power(torch.addcmul(x.s, a, ds), q - 1), ds)
                - linear
                - mu * (r / (1 + a * r)).sum(-1, keepdim=True)
            ),
            slope,
            dual,
            gap > 1e-4,
        )
        primal, dual = primal * shrink, dual * shrink
    elif p > 2:
        # With the new multipliers, dw and du descend whether or not A w - u = target holds yet.
        new_s, new_lam = x.s + ds, x.lam + dlam
        slope = _dot(link.f - new_s, dw) + _dot(new_lam - mu / x.u, du)
        primal = primal * _backtrack(
            lambda a: (
                _dot(signed_power(torch.addcmul(x.w, a, dw), x.p - 1) - new_s, dw)
                + _dot(new_lam - mu / torch.addcmul(x.u, a, du), du)
            ),
            slope,
            primal,
            gap > 0,
        )
    w = torch.addcmul(x.w, primal, dw)
    lam = torch.addcmul(x.lam, dual, dlam)
    u = torch.addcmul(x.u, primal, du)
    # Anew, not by adding ds: lam can swing by ten decades and would leave its rounding in s.
    s = A.adjoint(lam)
    astray = _dot(w, s) <= 0
    if bool(astray.any()):  # as happens when there is no solution; the link shows the way back
        w = torch.where(astray, _psi(s, x.p), w)
    return _normalised(replace(x, w=w, aw=A.apply(w), u=u, s=s, lam=lam), p)


def _backtrack(
    slope: Callable[[Tensor], Tensor], slope_at_0: Tensor, step: Tensor, where: Tensor
) -> Tensor:
    """Halve the step until the barrier function no longer rises steeply: (B, 1) factors."""
    shrink = torch.ones_like(step)
    limit = 0.9 * slope_at_0.abs()
    for _ in range(8):
        steep = where & (slope(step * shrink) > limit)
        if not bool(steep.any()):
            break
        shrink = torch.where(steep, 0.5 * shrink, shrink)
    return shrink


def _begin(
    A: Blocks, b: Tensor, p: float, pace: _Pace, start: tuple[Tensor, Tensor] | None
) -> _Point:
    """A centred point: from the data alone at an exponent near 2, or from a given solution."""
    share = b.clamp_min(0) / b.clamp_min(0).square().sum(-1, keepdim=True)
    share = share.where(b > 0, 0.01 / b.shape[-1])  # padding starts near its end, which is 0
    if start is None:
        slack, lam = 0.5, share
        exponent = _towards(p, b.new_full((A.batch, 1), 2.0), pace)
        if p < 2:  # where a longer first move does no harm
            exponent = _towards(p, exponent, pace)
    else:
        slack = 0.05
        lam = (1 - slack) * start[1] / _dot(b, start[1]) + slack * share
        exponent = b.new_full((A.batch, 1), p)
    s = A.adjoint(lam)
    if start is None:
        w = _psi(s, exponent)
    else:
        w = start[0]
    aw = A.apply(w)
    unset = torch.empty_like(w)
    x = _normalised(_Point(w, aw, aw, s, lam, exponent, unset, unset, unset), p)
    beta = (1 - slack) / _dot(b, x.lam)
    least = 0.1 * slack / (b.shape[-1] * x.lam)
    return replace(x, u=torch.maximum(x.aw - beta * b, least))


def _normalised(x: _Point, p: float) -> _Point:
    """Scale w and lam, which changes neither's direction, and take the logarithms anew."""
    log_w, size = _sizes(x.w, x.p, p)
    log_s, dual_size = _sizes(x.s, x.p / (x.p - 1), p)
    shrink = torch.exp(-size)
    w = x.w * shrink
    pairing = _dot(w, x.s)
    pairing = pairing.where(pairing > 0, 1.0)  # s = 0: lam is a Farkas certificate as it stands
    log_pairing = pairing.log()
    return _Point(
        w=w,
        aw=x.aw * shrink,
        u=x.u * shrink,
        s=x.s / pairing,
        lam=x.lam / pairing,
        p=x.p,
        log_w=log_w - size,
        log_s=log_s - log_pairing,
        log_dual_norm=dual_size - log_pairing,
    )


def _sizes(x: Tensor, exponent: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """log|x| and log ||x||; nobody asks for the former at p = 2, where x stands in for it."""
    if p == 2:
        return x, torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-290).log()
    log_x = log_abs(x)
    return log_x, log_norm(log_x, exponent)


def _at_exponent(x: _Point, p: Tensor) -> _Point:
    """The same point normalised for another exponent, which needs no new logarithms."""
    size = log_norm(x.log_w, p)
    grow = torch.exp(size)
    log_s = x.log_s + size
    return _Point(
        w=x.w / grow,
        aw=x.aw / grow,
        u=x.u / grow,
        s=x.s * grow,
        lam=x.lam * grow,
        p=p,
        log_w=x.log_w - size,
        log_s=log_s,
        log_dual_norm=log_norm(log_s, p / (p - 1)),
    )


def _psi(s: Tensor, p: Tensor) -> Tensor:
    """sign(s)|s|^(q-1), scaled to maximum 1."""
    log_s = log_abs(s)
    return torch.exp((log_s - log_s.amax(-1, keepdim=True)) / (p - 1)) * s.sign()


def _towards(p: float, current: Tensor, pace: _Pace) -> Tensor:
    """The exponent one move nearer to p."""
    if p < 2:
        return ((current - 1) / pace.factor + 1).clamp_min(p)
    return ((current - 1) * pace.factor + 1).clamp_max(p)


def _reach(lowest: Tensor) -> Tensor:
    """The longest step up to 1 that keeps x + a dx >= 0, from the lowest dx/x: (B, 1)."""
    return lowest.neg().clamp_min_(1).reciprocal_()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)
