"""The C library of this package: loaded once, for the best instruction set of the processor.

The library is built when the package is installed (cmake/CMakeLists.txt). Nothing is compiled at
run time and no shared object is kept in a cache folder. Where the library could not be built,
everything is computed in torch: one warning says so, and `available()` is False.

>>> available() == (instruction_set() is not None)
True
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_LIBRARY = _FOLDER / "kernels.so"
_VARIABLE = "MIRRORHEAD_NATIVE"


def available() -> bool:
    """Whether the C library was built and is in use."""
    return instruction_set() is not None


def instruction_set() -> str | None:
    """The instruction set in use: "avx512", "avx2" or "baseline"; None without the library.

    The environment variable MIRRORHEAD_NATIVE, read once, asks for a lower one, or for "off".
    """
    library, _ = _load()
    if library is None:
        return None
    usable = library.usable_sets().decode().split()
    wanted = os.environ.get(_VARIABLE) or usable[0]
    if wanted not in usable:
        raise ValueError(
            f"{_VARIABLE} must be one of {', '.join(usable)} on this processor, or off;"
            f" got {wanted!r}"
        )
    return wanted


def function(name: str, argtypes: list[Any]) -> Any | None:
    """The C function `name` for the instruction set in use; None, with a warning, if it is missing.

    ctypes releases the GIL during a call.
    """
    library, problem = _load()
    if library is None:
        if problem:
            _warn(problem)
        return None
    found = getattr(library, f"{name}_{instruction_set()}")
    found.argtypes = argtypes
    return found


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None and the reason to tell; no reason where it was turned off."""
    if os.environ.get(_VARIABLE) == "off":
        return None, None
    if not _LIBRARY.exists():
        return None, "was not built"
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        for question in (library.usable_sets, library.source_digest):
            question.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        return None, f"could not be loaded ({error})"
    if (digest := _source_digest()) and library.source_digest().decode() != digest:
        return None, "is older than its C sources"
    return library, None


@functools.cache
def _warn(problem: str) -> None:
    warnings.warn(
        f"the C library of mirrorhead {problem}: torch computes instead, more slowly. Reinstall"
        " mirrorhead where there is a C compiler; in a clone, run `make native`",
        stacklevel=4,
    )


def _source_digest() -> str | None:
    """What CMakeLists.txt computes from the C sources; None in a wheel, which has none."""
    sources = sorted([*_FOLDER.glob("*.c"), *_FOLDER.glob("*.h")])
    digests = "".join(hashlib.sha256(source.read_bytes()).hexdigest() for source in sources)
    return hashlib.sha256(digests.encode()).hexdigest() if sources else None
