"""`mirrorhead margins`: the heads of a trained model against the theory's max-margin solutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from mirrorhead_lab.cli.options import DataFolder, Flag, Json, Partial, option
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.progress import ProgressBars

if TYPE_CHECKING:
    from rich.table import Table

    from mirrorhead_lab.evaluation.head_margins import CheckpointMargins, ModelMargins
    from mirrorhead_lab.evaluation.model_margins import MarginSettings


@dataclass(frozen=True)
class Margins:
    """Compare every attention head of a trained text model with the max-margin solutions.

    For n texts, the tokens of a head are those it attends to most. The table shows how much of
    the largest possible margin W = W_K' W_Q has, and how far its direction is from the lp-AttSVM
    solution, for each p. If a run kept its weights at milestones, all of these are measured.
    """

    model: Annotated[Positional[Path], arg(metavar="RUN")]
    """The folder of a run on texts, or of a Hugging Face model."""
    p: Annotated[tuple[float, ...], arg(metavar="P ...")] = (1.1, 1.5, 2.0, 3.0)
    """Exponents of the solutions."""
    n: int = 32
    """Number of texts."""
    tokens: int = 64
    """Tokens of a text; the rest is cut off."""
    query: Annotated[
        Literal["first", "last"] | None,
        option("{first,last}", "(default: last if the model is causal)"),
    ] = None
    """Whose attention is read: the first token, [CLS], or the last one."""
    texts: Annotated[Path | None, option("FILE")] = None
    """A text per line (default: IMDb reviews that the run was trained on)."""
    seed: int = 0
    """Of the draw of the texts."""
    last: Flag = False
    """Measure the final weights alone, not those along the run."""
    json: Json = False
    data: DataFolder = None
    partial: Partial = False

    def run(self) -> int:
        settings = self._settings()
        from mirrorhead_lab.evaluation.model_margins import measure_model

        name = self.model.resolve().name
        with ProgressBars({name: None}, "solutions") as bars:
            found = measure_model(
                self.model, settings, lambda done, total: bars.update(name, done, total=total)
            )
        self._print(found)
        return 0

    def _settings(self) -> MarginSettings:
        for name, least in (("n", 1), ("tokens", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        if not self.p:
            raise UserError("--p needs at least one number")
        if not all(1.02 <= p <= 100 for p in self.p):
            raise UserError(f"--p must be from 1.02 to 100, got {' '.join(map(str, self.p))}")
        if not self.model.exists():
            raise UserError(f"{self.model} does not exist: give a run or a Hugging Face model")
        if not any((self.model / name).exists() for name in ("preset.json", "config.json")):
            raise UserError(
                f"{self.model} has neither preset.json, as a run has, nor config.json, as a Hugging"
                " Face model has"
            )
        from mirrorhead_lab.evaluation.model_margins import MarginSettings

        names = ("p", "n", "tokens", "query", "texts", "seed", "last", "data", "partial")
        return MarginSettings(**{name: getattr(self, name) for name in names})

    def _print(self, found: ModelMargins) -> None:
        if self.json:
            import json

            import msgspec

            print(json.dumps(msgspec.to_builtins(found), indent=1))
            return
        from rich.console import Console

        console = Console()
        for checkpoint in found.checkpoints:
            console.print(_table(checkpoint, self.p), "")


def _table(found: CheckpointMargins, ps: Sequence[float]) -> Table:
    from rich.table import Table

    title = found.name
    if found.epoch is not None:
        title += f", epoch {found.epoch}"
    if found.train_accuracy is not None:
        title += f", training accuracy {found.train_accuracy:.1%}"
    caption = "share: of the largest margin; D: divergence from its solution"
    table = Table(title=title, caption=caption, title_justify="left", box=None, pad_edge=False)
    table.add_column("layer, head")
    for name in ("one-hot", *(name for p in ps for name in (f"share\np={p:g}", "D"))):
        table.add_column(name, justify="right")
    for head in found.heads:
        cells = []
        for one in head.by_p:
            if one.share is None or one.divergence is None:
                cells += [one.status, "–"]
            else:
                cells += [f"{one.share:.3f}", f"{one.divergence:.3g}"]
        table.add_row(f"{head.layer}, {head.head}", f"{head.one_hot:.3f}", *cells)
    return table
