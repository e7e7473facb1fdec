"""The mirror link w = sign(s)|s|^(q-1) between the weights and s = A' lambda, linearised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    the link gains. h, rho, f: (B, N).
    """

    h: Tensor
    rho: Tensor
    f: Tensor


def linearise(
    w: Tensor, s: Tensor, log_w: Tensor, log_s: Tensor, p: Tensor, floor: Tensor, goal: float
) -> Link:
    """The link at (w, s), given their logarithms, for exponents p (B, 1).

    floor (B, 1) keeps h bounded for p > 2, where it grows without bound at w = 0; it is
    relative to the largest |phi(w)|. All p lie between 2 and `goal`.
    """
    if goal == 2:
        return Link(torch.ones_like(s), s - w, s)
    r = 1 / (p - 1)  # q - 1
    if goal < 2:
        slope = torch.exp((r - 1) * log_s)
        f = slope * s
        return Link(r * slope, f - w, f)
    log_f = (p - 1) * log_w
    f = torch.exp(log_f).copysign(w)
    lowest = log_f.amax(-1, keepdim=True) + floor.log()
    h = r * torch.exp((r - 1) * torch.maximum(log_f, lowest))
    return Link(h, h * (s - f), f)


def log_abs(x: Tensor) -> Tensor:
    """log|x|, finite at zero."""
    return x.abs().clamp_min_(_TINY).log_()


def log_norm(log_x: Tensor, p: Tensor) -> Tensor:
    """log ||x||_p from log|x|: (B, N), (B, 1) -> (B, 1). Neither over- nor underflows."""
    top = log_x.amax(-1, keepdim=True)
    return torch.exp(p * (log_x - top)).sum(-1, keepdim=True).log() / p + top


def signed_power(x: Tensor, exponent: Tensor) -> Tensor:
    """sign(x)|x|^exponent; exp(e log x) is four times faster than pow and as good here."""
    return torch.exp(exponent * log_abs(x)).copysign(x)
