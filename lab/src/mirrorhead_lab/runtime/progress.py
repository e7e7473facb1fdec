"""Progress of long work: a bar for each job in a terminal, plain lines elsewhere.

The library has its own line (`paths.descent.progress_bar`): it does not need rich.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class ProgressBars:
    """A bar for each job, with what is done of its total and a note.

    Args:
        totals: the name of each job and how many units it has, None if that is not known yet.
        unit: what is counted, for example "trials"; "bytes" are shown as kB, MB and so on.
        console: where to draw; by default the standard error.

    Without a terminal no bar is drawn. Lines given to `say` are printed in both cases.

    >>> with ProgressBars({"figure-4": 40}, "trials") as bars:
    ...     bars.advance("figure-4", 40, "1.5 s")
    ...     bars.done["figure-4"]
    40
    """

    def __init__(
        self, totals: Mapping[str, int | None], unit: str, console: Console | None = None
    ) -> None:
        from rich import progress
        from rich.console import Console
        from rich.markup import escape

        self.console = console or Console(stderr=True)
        self.done = dict.fromkeys(totals, 0)
        in_bytes = unit == "bytes"
        self._progress = progress.Progress(
            progress.SpinnerColumn(finished_text="[green]✓"),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.DownloadColumn() if in_bytes else progress.MofNCompleteColumn(),
            progress.TextColumn(f"{'' if in_bytes else unit}[dim]{{task.fields[note]}}"),
            progress.TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.start, self.stop = self._progress.start, self._progress.stop
        self._bars = {
            name: self._progress.add_task(escape(name), total=total, note="")
            for name, total in totals.items()
        }

    def __enter__(self) -> ProgressBars:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def advance(self, name: str, units: int = 1, note: str = "") -> None:
        """Count units of a job as done; the note replaces the one before."""
        self.update(name, self.done[name] + units, note)

    def update(self, name: str, done: int, note: str = "", total: int | None = None) -> None:
        """Set how many units of a job are done, and its total if that was not known."""
        self.done[name] = done
        text = f", {note}" if note else ""
        self._progress.update(self._bars[name], completed=done, total=total, note=text)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
