"""What a run tells while it goes on: to a file always, to a terminal or TensorBoard if asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mirrorhead._files import write_atomically


@dataclass(frozen=True)
class Event:
    """Something that happened: after some steps, after an epoch, or at the start and the end."""

    kind: Literal["start", "step", "epoch", "end"]
    step: int
    steps: int  # of the whole run, if it is not stopped early
    epoch: int
    values: dict[str, float] = field(default_factory=dict)


#: Anything that takes an event. To send a run to a service, write a function of one.
Logger = Callable[[Event], None]


class JsonLines:
    """One line of JSON for every event but "start".

    Args:
        path: the file. What it says of steps beyond `step`, and a line that was cut by a kill,
            is dropped: it will happen again.
        step: where the run goes on.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    event = json.loads(line)
                except ValueError:
                    break
                if event["step"] <= step and event["kind"] != "end":
                    kept.append(line + "\n")
        write_atomically(path, "".join(kept).encode())
        self.path = path

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            return
        line = {"kind": event.kind, "step": event.step, "epoch": event.epoch, **event.values}
        with self.path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


class Console:
    """A progress bar, and a line for every epoch."""

    def __init__(self) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            Remaining(),
            TextColumn("{task.fields[note]}"),
            console=RichConsole(stderr=True),
        )
        self.task: Any = None

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            self.task = self.bar.add_task("training", total=event.steps, note="")
            self.bar.start()
        note = "  ".join(f"{name} {value:.4g}" for name, value in event.values.items())
        if event.kind == "epoch":
            self.bar.console.print(f"epoch {event.epoch}: {note}")
        self.bar.update(self.task, completed=event.step, note=note)
        if event.kind == "end":
            self.bar.stop()


class TensorBoard:
    """Scalars for TensorBoard; needs the package `tensorboard`."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard needs the package tensorboard: pip install tensorboard"
            ) from error
        self.writer = SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        for name, value in event.values.items():
            self.writer.add_scalar(f"{event.kind}/{name}", value, event.step)
        if event.kind in ("epoch", "end"):
            self.writer.flush()
        if event.kind == "end":
            self.writer.close()
