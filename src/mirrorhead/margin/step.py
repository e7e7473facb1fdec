"""One Newton step of the interior point method: the point it starts from, and where it leads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mirrorhead.margin.arithmetic import BATCH, Arithmetic, Scalar, Vector
from mirrorhead.margin.link import linearise, log_abs, log_norm, signed_power
from mirrorhead.margin.operator import Blocks


@dataclass(frozen=True)
class Pace:
    """How boldly the exponent moves while the barrier falls, and for how long."""

    factor: float  # p - 1 changes by at most this factor at a time,
    threshold: float  # only while the gap is below this,
    floor: float  # and the barrier falls by at most this factor meanwhile
    iterations: int
    dense: int  # up to this size the linear systems are factored
    brisk: bool = False  # with less precision and fewer rows where that seems to be enough


@dataclass(frozen=True, eq=False)
class Point:
    """An iterate, normalised to ||w||_p = 1 and <w, s> = 1, with s = A' lam and aw = A w."""

    w: Vector  # N
    aw: Vector  # m
    u: Vector  # m, slack: A w - u = beta b with a scale beta that is free
    s: Vector  # N
    lam: Vector  # m
    p: Scalar  # the exponent of the moment
    log_w: Vector  # N, log |w|
    log_s: Vector  # N, log |s|
    log_dual_norm: Scalar  # log ||s||_q, which is >= 0

    def map(self, vector: Callable[[Any], Any], scalar: Callable[[Any], Any]) -> Point:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, part in parts.items():
            parts[name] = (scalar if name in ("p", "log_dual_norm") else vector)(part)
        return Point(**parts)

    def take(self, keep: Tensor) -> Point:
        return self.map(lambda v: v[keep], lambda v: v[keep])


class Maps(Protocol):
    """A and its adjoint, on vectors of the kind in use."""

    def apply(self, w: Vector) -> Vector: ...

    def adjoint(self, lam: Vector) -> Vector: ...


class Factors(Protocol):
    """What factors K, on vectors of the kind in use."""

    def factor(self, h: Vector, e: Vector, tol: float) -> Callable[..., Vector]: ...


def begin(A: Blocks, b: Tensor, p: float, pace: Pace, start: tuple[Tensor, Tensor] | None) -> Point:
    """A centred point: from the data alone at an exponent near 2, or from a given solution."""
    share = b.clamp_min(0) / b.clamp_min(0).square().sum(-1, keepdim=True)
    share = share.where(b > 0, 0.01 / b.shape[-1])  # padding starts near its end, which is 0
    if start is None:
        slack, lam = 0.5, share
        exponent = _towards(BATCH, p, b.new_full((A.batch, 1), 2.0), pace)
        if p < 2:  # where a longer first move does no harm
            exponent = _towards(BATCH, p, exponent, pace)
    else:
        slack = 0.05
        lam = (1 - slack) * start[1] / BATCH.dot(b, start[1]) + slack * share
        exponent = b.new_full((A.batch, 1), p)
    s = A.adjoint(lam)
    w = _psi(BATCH, s, exponent) if start is None else start[0]
    aw = A.apply(w)
    x = normalised(BATCH, w, aw, aw, s, lam, exponent, p)
    beta = (1 - slack) / BATCH.dot(b, x.lam)
    least = 0.1 * slack / (b.shape[-1] * x.lam)
    return replace(x, u=torch.maximum(x.aw - beta * b, least))


def advance(
    ops: Arithmetic,
    x: Point,
    A: Maps,
    b: Vector,
    system: Factors,
    p: float,
    pace: Pace,
    gap: Scalar,
    smallest: float,
    largest: float,
) -> Point:
    """One predictor-corrector step, after moving the exponents that may move.

    gap belongs to the point x; smallest and largest are its extremes over the batch.
    """
    dot = ops.dot
    moving = x.p != p
    if any_moves := ops.any(moving):
        ready = moving & (gap < pace.threshold)
        x = _at_exponent(ops, x, ops.where(ready, _towards(ops, p, x.p, pace), x.p))
    q = x.p / (x.p - 1)
    product = x.lam * x.u
    complementarity = ops.total(product)
    # On the central path <lam, A w - u> = beta <lam, b>, and <lam, A w> = <s, w> = 1.
    target = ops.at_least(1 - complementarity, 0.1) / dot(b, x.lam) * b
    # sum |w|^p/p + |s|^q/q - w s, the Fenchel gap of the link, in the present normalisation.
    fenchel = ops.expm1(q * x.log_dual_norm) / q
    link = linearise(ops, x.w, x.s, x.log_w, x.log_s, x.p, gap, p)
    accuracy = min(max(0.1 * smallest, 1e-8), 1e-2)
    solve = system.factor(link.h, x.u / x.lam, accuracy)
    residual = target - x.aw - A.apply(link.rho)

    # Predictor: straight at the solution. With r = dlam/lam, complementarity asks for
    # du/u = -(1 + r). How far one gets says how much to centre.
    dlam = solve(residual, None, 1e-2)
    r = dlam / x.lam
    dual, primal = _reach(ops, ops.least(r)), _reach(ops, -1 - ops.most(r))
    after = ops.total(product * (1 + dual * r) * (1 - primal - primal * r))
    sigma = ops.at_most(after / complementarity, 1) ** 4
    if any_moves:
        sigma = ops.where(moving, ops.at_least(sigma, pace.floor), sigma)
    # Complementarity alone would fall ahead of the error of the link.
    mu = sigma * (complementarity + fenchel) / b.shape[-1]

    # Corrector. The second-order term counts as far as the predictor got: in full it can turn
    # the step uphill where the predictor got nowhere.
    push = ops.muladd(mu / x.lam, dual * x.u, r * (1 + r))
    dlam = solve(residual + push, dlam, accuracy)
    r = dlam / x.lam
    du = push - x.u * (1 + r)
    ds = A.adjoint(dlam)
    dw = ops.muladd(link.rho, link.h, ds)

    # Nearly to the boundary, primal and dual apart; ever nearer as the gap closes.
    fraction = ops.at_most(ops.at_least(1 - gap, 0.99), 1 - 1e-8)
    dual = fraction * _reach(ops, ops.least(r))
    primal = fraction * _reach(ops, ops.least(du / x.u))
    if p < 2 and largest > 1e-4:
        linear = dot(target, dlam)
        shrink = _backtrack(
            ops,
            lambda a: (
                dot(signed_power(ops, ops.muladd(x.s, a, ds), q - 1), ds)
                - linear
                - mu * ops.total(r / (1 + a * r))
            ),
            dot(link.f, ds) - linear - mu * ops.total(r),
            dual,
            gap > 1e-4,
        )
        primal, dual = primal * shrink, dual * shrink
    elif p > 2:
        # With the new multipliers, dw and du descend whether or not A w - u = target holds yet.
        new_s, new_lam = x.s + ds, x.lam + dlam
        primal = primal * _backtrack(
            ops,
            lambda a: (
                dot(signed_power(ops, ops.muladd(x.w, a, dw), x.p - 1) - new_s, dw)
                + dot(new_lam - mu / ops.muladd(x.u, a, du), du)
            ),
            dot(link.f - new_s, dw) + dot(new_lam - mu / x.u, du),
            primal,
            gap > 0,
        )
    w = ops.muladd(x.w, primal, dw)
    lam = ops.muladd(x.lam, dual, dlam)
    u = ops.muladd(x.u, primal, du)
    # Anew, not by adding ds: lam can swing by ten decades and would leave its rounding in s.
    s = A.adjoint(lam)
    astray = dot(w, s) <= 0
    if ops.any(astray):  # as happens when there is no solution; the link shows the way back
        w = ops.where(astray, _psi(ops, s, x.p), w)
    return normalised(ops, w, A.apply(w), u, s, lam, x.p, p)


def normalised(
    ops: Arithmetic,
    w: Vector,
    aw: Vector,
    u: Vector,
    s: Vector,
    lam: Vector,
    exponent: Scalar,
    p: float,
) -> Point:
    """Scale w and lam, which changes neither's direction, and take the logarithms."""
    log_w, size = _sizes(ops, w, exponent, p)
    log_s, dual_size = _sizes(ops, s, exponent / (exponent - 1), p)
    shrink = ops.exp(-size)
    w = w * shrink
    pairing = ops.dot(w, s)
    pairing = ops.where(pairing > 0, pairing, 1.0)  # s = 0: lam is a certificate as it stands
    log_pairing = ops.log(pairing)
    return Point(
        w=w,
        aw=aw * shrink,
        u=u * shrink,
        s=s / pairing,
        lam=lam / pairing,
        p=exponent,
        log_w=log_w if p == 2 else log_w - size,
        log_s=log_s if p == 2 else log_s - log_pairing,
        log_dual_norm=dual_size - log_pairing,
    )


def _backtrack(
    ops: Arithmetic,
    slope: Callable[[Scalar], Scalar],
    slope_at_0: Scalar,
    step: Scalar,
    where: Scalar,
) -> Scalar:
    """Halve the step until the barrier function no longer rises steeply; by which factor."""
    shrink = 1.0
    limit = 0.9 * abs(slope_at_0)
    for _ in range(8):
        steep = where & (slope(step * shrink) > limit)
        if not ops.any(steep):
            break
        shrink = ops.where(steep, 0.5 * shrink, shrink)
    return shrink


def _sizes(ops: Arithmetic, x: Vector, exponent: Scalar, p: float) -> tuple[Vector, Scalar]:
    """log|x| and log ||x||; nobody asks for the former at p = 2, where x stands in for it."""
    if p == 2:
        return x, 0.5 * ops.log(ops.at_least(ops.dot(x, x), 1e-300))
    log_x = log_abs(ops, x)
    return log_x, log_norm(ops, log_x, exponent)


def _at_exponent(ops: Arithmetic, x: Point, p: Scalar) -> Point:
    """The same point normalised for another exponent, which needs no new logarithms."""
    size = log_norm(ops, x.log_w, p)
    grow = ops.exp(size)
    log_s = x.log_s + size
    return Point(
        w=x.w / grow,
        aw=x.aw / grow,
        u=x.u / grow,
        s=x.s * grow,
        lam=x.lam * grow,
        p=p,
        log_w=x.log_w - size,
        log_s=log_s,
        log_dual_norm=log_norm(ops, log_s, p / (p - 1)),
    )


def _psi(ops: Arithmetic, s: Vector, p: Scalar) -> Vector:
    """sign(s)|s|^(q-1), scaled to maximum 1."""
    log_s = log_abs(ops, s)
    return ops.exp((log_s - ops.most(log_s)) / (p - 1)) * ops.sign(s)


def _towards(ops: Arithmetic, p: float, current: Scalar, pace: Pace) -> Scalar:
    """The exponent one move nearer to p."""
    if p < 2:
        return ops.at_least((current - 1) / pace.factor + 1, p)
    return ops.at_most((current - 1) * pace.factor + 1, p)


def _reach(ops: Arithmetic, lowest: Scalar) -> Scalar:
    """The longest step up to 1 that keeps x + a dx >= 0, from the lowest dx/x."""
    return 1 / ops.at_least(-lowest, 1)
