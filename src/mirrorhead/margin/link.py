"""The mirror link w = sign(s)|s|^(q-1) between the weights and s = A' lambda, linearised."""

from __future__ import annotations

from dataclasses import dataclass

from mirrorhead.margin.arithmetic import Arithmetic, Scalar, Vector

# Entries below count as zero: the logarithm stays finite, and every power met here is 0.
_TINY = 1e-290


@dataclass(frozen=True, eq=False)
class Link:
    r"""First-order model dw = h ds + rho of the link between w and s at one point.

    The optimality condition s = phi(w), phi(w) = sign(w)|w|^(p-1), also reads w = psi(s),
    psi(s) = sign(s)|s|^(q-1). Only one of the two has a bounded slope at zero, and that is
    the one to linearise:

        p <= 2:  f = psi(s),  h = (q-1)|s|^(q-2),              rho = f - w
        p >  2:  f = phi(w),  h = (q-1) max(|f|, floor)^(q-2),  rho = h (s - f)

    w is an iterate of its own in both cases: resetting it to psi(s) loses for p > 2 what
    the link gains.
    """

    h: Vector
    rho: Vector
    f: Vector


def linearise(
    ops: Arithmetic,
    w: Vector,
    s: Vector,
    log_w: Vector,
    log_s: Vector,
    p: Scalar,
    gap: Scalar,
    goal: float,
) -> Link:
    """The link at (w, s), given their logarithms, for exponents p.

    For p > 2, h grows without bound at w = 0; what keeps it bounded is a floor of 1e-2 gap,
    relative to the largest |phi(w)|. All p lie between 2 and `goal`.
    """
    if goal == 2:
        return Link(ops.ones_like(s), s - w, s)
    r = 1 / (p - 1)  # q - 1
    if goal < 2:
        slope = ops.exp((r - 1) * log_s)
        f = slope * s
        return Link(r * slope, f - w, f)
    log_f = (p - 1) * log_w
    f = ops.copysign(ops.exp(log_f), w)
    lowest = ops.most(log_f) + ops.log(1e-2 * ops.at_least(ops.at_most(gap, 1), 1e-16))
    h = r * ops.exp((r - 1) * ops.maximum(log_f, lowest))
    return Link(h, h * (s - f), f)


def log_abs(ops: Arithmetic, x: Vector) -> Vector:
    """log|x|, finite at zero."""
    return ops.log(ops.at_least(ops.abs(x), _TINY))


def log_norm(ops: Arithmetic, log_x: Vector, p: Scalar) -> Scalar:
    """log ||x||_p from log|x|, which neither over- nor underflows."""
    top = ops.most(log_x)
    return ops.log(ops.total(ops.exp(p * (log_x - top)))) / p + top


def signed_power(ops: Arithmetic, x: Vector, exponent: Scalar) -> Vector:
    """sign(x)|x|^exponent; exp(e log x) is four times faster than pow and as good here."""
    return ops.copysign(ops.exp(exponent * log_abs(ops, x)), x)
