"""C sources of this package, compiled on first use by the C compiler of the machine.

It takes about a second, and the library is kept in the user's cache. Where there is no compiler
the callers compute the same in torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp-simd", "-fPIC", "-shared")


def load(source: Path) -> ctypes.CDLL | None:
    """The library compiled from `source`; None where that cannot be done."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc"))), None)
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_build(compiler, source)))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None  # no home, no room, no headers, another kind of compiler: torch does it, too


def _build(compiler: str, source: Path) -> Path:
    """The shared library, compiled unless the cache has it for this source and processor."""
    key = hashlib.sha256(source.read_bytes() + " ".join((compiler, *FLAGS)).encode())
    key.update(platform.machine().encode() + _processor())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mirrorhead"
    target = home / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    home.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=home, suffix=".so")
    os.close(handle)
    try:
        command = [compiler, *FLAGS, str(source), "-o", temporary, "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _processor() -> bytes:
    """What -march=native depends on: a cache may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
