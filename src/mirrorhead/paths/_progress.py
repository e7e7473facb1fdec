"""A progress bar for people: on a terminal only, and only for what takes its time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds without a bar


@contextmanager
def progress_bar(title: str, total: int, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of steps done."""
    if not (show and sys.stderr.isatty()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        *Progress.get_default_columns()[:3],
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(title, total=total)
    begin, running = time.monotonic(), False

    def tick(done: int) -> None:
        nonlocal running
        if not running and time.monotonic() - begin > PATIENCE:
            running = True
            bar.start()
        if running:
            bar.update(task, completed=done)

    try:
        yield tick
    finally:
        if running:
            bar.stop()
