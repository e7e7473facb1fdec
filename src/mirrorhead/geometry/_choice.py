"""What an argument for a geometry may be: a number, which stands for `PNorm`, or an object."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mirrorhead._checks import is_number
from mirrorhead._files import sha256_of
from mirrorhead.geometry._base import Norm, Potential
from mirrorhead.geometry._powers import check_exponent, check_p
from mirrorhead.geometry.pnorm import PNorm


def as_norm(norm: object, name: str = "norm") -> Norm:
    """Return a norm: a number from 1 to inf stands for `PNorm`.

    >>> as_norm(1.5), as_norm(math.inf)
    (PNorm(1.5), PNorm(inf))
    """
    if isinstance(norm, Norm):
        return norm
    if isinstance(norm, Potential):
        raise TypeError(
            f"{name} must be a norm; the limit of {norm!r} is {norm.limit!r}: give that"
        )
    if not is_number(norm):
        raise TypeError(f"{name} must be a number from 1 to inf or a Norm, got {norm!r}")
    return PNorm(check_exponent(norm, name))  # pyright: ignore[reportArgumentType]


def as_potential(potential: object, name: str = "potential") -> Potential:
    """Return a potential: a number above 1 stands for `PNorm`.

    >>> as_potential(1.5)
    PNorm(1.5)
    """
    if isinstance(potential, Potential):
        if isinstance(potential, Norm) and getattr(potential, "p", None) in (1, math.inf):
            raise ValueError(
                f"{name} must be a potential, and {potential!r} is only a norm: give 1 < p < inf,"
                " or use steepest descent"
            )
        return potential
    if isinstance(potential, Norm):
        raise TypeError(
            f"{name} must be a potential, got the norm {potential!r}: use steepest descent"
        )
    if not is_number(potential):
        raise TypeError(f"{name} must be a number greater than 1 or a Potential, got {potential!r}")
    return PNorm(check_p(potential, name))  # pyright: ignore[reportArgumentType]


def norm_of(geometry: object, name: str = "geometry") -> Norm:
    """Return the norm that a geometry tends to: a norm itself, or the limit of a potential.

    >>> norm_of(math.inf), norm_of(PNorm(3))
    (PNorm(inf), PNorm(3))
    """
    if isinstance(geometry, Potential) and not isinstance(geometry, Norm):
        return geometry.limit
    return as_norm(geometry, name)


def divergence_of(geometry: object, name: str = "geometry") -> Potential:
    """Return the potential that measures directions: PNorm(2) for norms that are no potential.

    >>> divergence_of(1.5), divergence_of(math.inf)
    (PNorm(1.5), PNorm(2))
    """
    geometry = as_norm(geometry, name) if is_number(geometry) else geometry
    no_potential = not isinstance(geometry, Potential) or getattr(geometry, "p", 2) in (1, math.inf)
    if isinstance(geometry, Norm) and no_potential:
        return PNorm(2)
    return as_potential(geometry, name)


def as_smooth_pnorm(geometry: object, name: str = "geometry") -> PNorm:
    """Return a `PNorm` with 1 < p < inf, or refuse by name what has no such formulas.

    >>> as_smooth_pnorm(1.5)
    PNorm(1.5)
    """
    found = as_potential(geometry, name)
    if type(found) is not PNorm:
        raise ValueError(f"{name} must be a number p or PNorm(p), 1 < p < inf; got {geometry!r}")
    return found


def describe(geometry: object) -> str:
    """Return what identifies a geometry in files: its repr, or its class and attributes.

    Tensors are named by a hash of all their entries, which no repr shows.

    >>> describe(PNorm(1.5))
    'PNorm(1.5)'
    """
    if not hasattr(geometry, "__dict__"):
        return repr(geometry)
    kind, values = type(geometry), {k: _value(x) for k, x in sorted(vars(geometry).items())}
    if kind.__repr__ is object.__repr__:
        return f"{kind.__module__}.{kind.__qualname__} {values}"
    tensors = {k: x for k, x in values.items() if isinstance(vars(geometry)[k], Tensor)}
    return f"{geometry!r} {tensors}" if tensors else repr(geometry)


def _value(x: object) -> object:
    if isinstance(x, Tensor):
        entries = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return f"{x.dtype} {tuple(x.shape)} {sha256_of(entries.tobytes())[:16]}"
    return describe(x) if isinstance(x, Norm | Potential) else x
