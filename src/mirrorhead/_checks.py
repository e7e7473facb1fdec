"""Checks of arguments: a clear error before any work, naming the argument and what is allowed."""

from __future__ import annotations

import math
import reprlib
from numbers import Real
from operator import index

import torch
from torch import Tensor


def is_number(x: object) -> bool:
    """Whether x is a real number of Python or numpy; True and False are not numbers here."""
    return isinstance(x, Real) and not isinstance(x, bool)


def check_positive(name: str, value: float) -> float:
    """A finite number above 0, as a float."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number > 0, got {value!r}")
    return float(value)


def check_integer(name: str, value: int, least: int) -> int:
    """An integer of at least `least`; 2.0 and True are refused."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return number


def check_seed(seed: int) -> int:
    """A seed that torch's generators take."""
    try:
        number = index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer, got {seed!r}") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2^63 - 1, got {seed!r}")
    return number


def as_tensor(name: str, value: object, like: Tensor | None = None) -> Tensor:
    """A real tensor on the device of `like`."""
    try:
        x = torch.as_tensor(value, device=None if like is None else like.device)
        if x.is_floating_point() and not hasattr(value, "dtype"):
            x = x.new_tensor(value, dtype=torch.float64)  # lists of numbers lose no digits
    except (TypeError, ValueError, RuntimeError) as error:
        given = reprlib.repr(value)
        raise TypeError(
            f"{name} must be a tensor or an array of numbers, got {given}: {error}"
        ) from None
    if x.is_complex():
        raise TypeError(f"{name} must be real, got {x.dtype}")
    return x


def check_mask(mask: object, X: Tensor) -> Tensor:
    """A mask of the tokens X (..., n, T, d): bool, (..., n, T)."""
    found = as_tensor("mask", mask, X)
    if found.dtype != torch.bool or found.shape != X.shape[:-1]:
        given = f"{found.dtype} {tuple(found.shape)}"
        error = TypeError if found.dtype != torch.bool else ValueError
        raise error(f"mask must be bool of shape {tuple(X.shape[:-1])}, got {given}")
    return found


def check_data(X: object, z: object, mask: object = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens (..., n, T, d), queries (..., n, c) and a mask (..., n, T) in float64, checked.

    Padding may hold anything: it is replaced by 0 here, so that no NaN of it goes further.
    """
    X = as_tensor("X", X).to(torch.float64)
    if X.dim() < 3 or 0 in X.shape[-3:]:
        raise ValueError(f"X must be (..., n, T, d) and not empty, got {tuple(X.shape)}")
    if mask is not None:
        mask = check_mask(mask, X)
        X = X.masked_fill(~mask.unsqueeze(-1), 0.0)
    X, z = as_floats("X", X), as_floats("z", z, X)
    if z.shape[:-1] != X.shape[:-2] or z.dim() == 0 or z.shape[-1] == 0:
        fits = (*X.shape[:-2], X.shape[-1])
        raise ValueError(
            f"z must have shape {fits}, got {tuple(z.shape)}; only its last size may differ, from 1"
        )
    return X, z, mask


def check_tokens(tokens: object, kept: Tensor) -> Tensor:
    """A token of each sample, (..., n), that is not padding; `kept` is (..., n, T)."""
    found = as_tensor("tokens", tokens, kept)
    shape, T = tuple(kept.shape[:-1]), kept.shape[-1]
    if found.shape != shape or found.is_floating_point() or found.dtype == torch.bool:
        given = f"{found.dtype} {tuple(found.shape)}"
        raise ValueError(f"tokens must be integers of shape {shape}, got {given}")
    found = found.long()
    outside = (found < 0) | (found >= T)
    if bool(outside.any()):
        raise ValueError(f"tokens must be from 0 to {T - 1}, got {int(found[outside][0])}")
    if not bool((chosen := kept.gather(-1, found.unsqueeze(-1)).squeeze(-1)).all()):
        where = (~chosen).nonzero()[0].tolist()
        raise ValueError(f"tokens must not be padding, got padding at sample {where}")
    return found


def check_signs(name: str, labels: Tensor, more: str = "") -> None:
    """Refuse labels other than +1 and -1; `more` says what else is allowed."""
    wrong = labels.abs() != 1 if labels.dtype != torch.bool else ~labels
    if bool(wrong.any()):
        given = labels[wrong][0].item()
        hint = f"; for labels 0 and 1 give 2 * {name} - 1" if given == 0 else ""
        raise ValueError(f"{name} must be +1 or -1 everywhere, got {given!r}{hint}{more}")


def as_floats(
    name: str, value: object, like: Tensor | None = None, shape: tuple[int, ...] | None = None
) -> Tensor:
    """A finite float64 tensor on the device of `like`, of the given shape."""
    x = as_tensor(name, value, like).to(torch.float64)
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {int((~x.isfinite()).sum())} bad entries")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    return x
