"""Loggers: the events of a run go to a file always, to a terminal or TensorBoard if asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mirrorhead._files import write_atomically
from mirrorhead_lab.runtime.errors import RunError, UserError, reason
from mirrorhead_lab.runtime.progress import ProgressBars

Kind = Literal["start", "step", "epoch", "end"]


@dataclass(frozen=True)
class Event:
    """Something that happened: after some steps, after an epoch, or at the start and the end."""

    kind: Kind
    step: int
    steps: int  # of the whole run, if it is not stopped early
    epoch: int
    values: dict[str, float] = field(default_factory=dict)


#: Any function of an event. To send a run to a service, write one.
Logger = Callable[[Event], None]


class JsonLines:
    """One line of JSON for every event but "start".

    Events that the file has after `step`, where the run resumes, are dropped, as they will happen
    again; so is a last line that was cut by a kill. Any other line that is no event is an error.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        log = read_log(path)
        kept = [line for line, event in log if event["step"] <= step and event["kind"] != "end"]
        write_atomically(path, "".join(kept).encode())
        self.path = path

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            return
        line = {"kind": event.kind, "step": event.step, "epoch": event.epoch, **event.values}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:  # a full disk has no name
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def read_log(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the lines of a log, each with its event; none if there is no file."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from error
    found = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            event = json.loads(line)
            if not isinstance(event["step"], int) or not isinstance(event["kind"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            if not line.endswith("\n"):
                break  # cut by a kill
            raise RunError(
                f"{path}, line {number} is not an event of a run. Delete {path} to resume"
                " without the log so far"
            ) from None
        found.append((line, event))
    return found


class Console:
    """A progress bar and a line for every epoch, on the standard error stream."""

    def __init__(self) -> None:
        self.bars = ProgressBars({"training": None}, "steps")

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            self.bars.start()
        note = "  ".join(f"{name} {value:.4g}" for name, value in event.values.items())
        if event.kind == "epoch":
            self.bars.say(f"epoch {event.epoch}: {note}")
        self.bars.update("training", event.step, note, total=event.steps)
        if event.kind == "end":
            self.bars.stop()


class TensorBoard:
    """Scalars for TensorBoard; needs the package `tensorboard`. The folder is made at the start."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "TensorBoard needs: pip install 'mirrorhead-lab[tensorboard]'"
            ) from error
        self.folder = folder
        self.open = SummaryWriter
        self.writer: Any = None

    def __call__(self, event: Event) -> None:
        if self.writer is None:
            self.writer = self.open(str(self.folder), purge_step=event.step + 1)
        for name, value in event.values.items():
            self.writer.add_scalar(f"{event.kind}/{name}", value, event.step)
        if event.kind in ("epoch", "end"):
            self.writer.flush()
        if event.kind == "end":
            self.writer.close()
