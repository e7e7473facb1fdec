"""A progress line on a terminal, for work that takes more than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds before the line is shown
INTERVAL = 0.1  # seconds between two updates


@contextmanager
def progress_bar(title: str, total: int, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of steps done; it writes to a terminal only."""
    if not (show and sys.stderr.isatty()):
        yield lambda done: None
        return
    begin = time.monotonic()
    due, width = begin + PATIENCE, 0

    def tick(done: int) -> None:
        nonlocal due, width
        now = time.monotonic()
        if now < due:
            return
        left = (now - begin) * (total - done) / max(done, 1)
        line = f"{title}: {done}/{total}, {left:.0f} s left"
        sys.stderr.write("\r" + line.ljust(width))
        sys.stderr.flush()
        due, width = now + INTERVAL, len(line)

    try:
        yield tick
    finally:
        if width:
            sys.stderr.write("\r" + " " * width + "\r")
            sys.stderr.flush()
