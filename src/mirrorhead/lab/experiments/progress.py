"""A line for each experiment: how many trials are done, and the computing time they took."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn


class Lines:
    """Lines that move in a terminal; elsewhere one line for each experiment when it is done."""

    def __init__(self, trials: Iterable[tuple[str, int]], console: Console) -> None:
        self.console = console
        self.total = dict(trials)
        self.done = dict.fromkeys(self.total, 0)
        self.seconds = dict.fromkeys(self.total, 0.0)
        self.progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("trials[dim]{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.lines = {
            name: self.progress.add_task(escape(name), total=total, note="")
            for name, total in self.total.items()
        }

    def __enter__(self) -> Lines:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def advance(self, name: str, trials: int, seconds: float) -> None:
        self.done[name] += trials
        self.seconds[name] += seconds
        note = f", {self.seconds[name]:.1f} s"
        self.progress.update(self.lines[name], completed=self.done[name], note=note)
        if not self.console.is_terminal and self.done[name] == self.total[name]:
            plural = "" if self.total[name] == 1 else "s"
            self.say(f"{name}: {self.total[name]} trial{plural}{note}")

    def say(self, text: str) -> None:
        """A line of its own, above those that move."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
