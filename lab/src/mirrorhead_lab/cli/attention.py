"""`mirrorhead attention`: what a run attends to in a sentence, in the terminal or as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from mirrorhead._files import write_atomically
from mirrorhead_lab.cli.options import Flag, option
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.folders import check_new_file

if TYPE_CHECKING:
    from rich.text import Text
    from torch import Tensor

    from mirrorhead_lab.evaluation.attention_reading import AttentionReading

#: Of a shade in the terminal, at no and at all attention.
PALE, DEEP = (255, 255, 255), (240, 180, 41)


@dataclass(frozen=True)
class Attention:
    """Show what a run on texts attends to, and what it predicts, for sentences of your own."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """The folder of a run."""
    sentences: Annotated[Positional[tuple[str, ...]], arg(metavar="SENTENCE")]
    """One or more, each in quotes."""
    layer: Annotated[int | None, option("N", "(default: the last)")] = None
    """From 0."""
    head: Annotated[int | None, option("N", "(default: all)")] = None
    """From 0."""
    rollout: Flag = False
    """All layers together, by attention rollout, instead of one."""
    html: Annotated[Path | None, option("FILE")] = None
    """Write a page instead, in which one can point at tokens."""
    data: Annotated[Path | None, option("FOLDER")] = None
    """The folder of all data sets, for the vocabulary (default: $MIRRORHEAD_DATA)."""
    partial: Flag = False
    """Accept another vocabulary than BERT's, as a run with --partial does."""

    def run(self) -> int:
        self._check_options()
        readings = self._readings([_decoded(sentence) for sentence in self.sentences])
        layers, heads = readings[0].maps.shape[:2]
        for name, value, count in (("layer", self.layer, layers), ("head", self.head, heads)):
            if value is not None and not 0 <= value < count:
                raise UserError(f"--{name} must be from 0 to {count - 1}, got {value}")
        if self.html is not None:
            from mirrorhead_lab.report.page import render_attention

            page = render_attention(
                readings, self.folder.name, layer=self.layer, head=self.head, rolled=self.rollout
            )
            write_atomically(self.html, page.encode())
            print(f"page: {self.html}")
            return 0
        from rich.console import Console

        console = Console(highlight=False)
        for reading in readings:
            console.print(f"[bold]{reading.predicted}[/bold] {reading.probability:.1%}")
            if reading.left_out:
                console.print(f"cut off: the model does not see the last {reading.left_out} tokens")
            for name, row in self._rows(reading):
                console.print(_line(name, reading.tokens, row), soft_wrap=False)
            console.print()
        return 0

    def _check_options(self) -> None:
        """Refuse what cannot work, before the model is loaded."""
        if not self.sentences:
            raise UserError("give at least one sentence, in quotes")
        if self.rollout and (self.layer is not None or self.head is not None):
            raise UserError("--rollout takes all layers and heads: leave out --layer and --head")
        if self.html is not None:
            from mirrorhead_lab.report.page import check_free

            check_new_file(self.html, "--html")
            try:
                check_free(self.html)
            except UserError as error:
                raise UserError(f"--html: {error}") from error

    def _readings(self, texts: list[str]) -> list[AttentionReading]:
        from mirrorhead_lab.datasets import load_tokenizer
        from mirrorhead_lab.evaluation.attention_reading import read_attention
        from mirrorhead_lab.models import TextSettings
        from mirrorhead_lab.training import load_run

        run = load_run(self.folder)
        settings = run.preset.model
        if not isinstance(settings, TextSettings):
            raise UserError(f"{self.folder} is a run on {run.preset.data}, which has no texts")
        tokenizer = load_tokenizer(self.data, max_length=settings.max_length, partial=self.partial)
        classes = run.preset.classes
        return [read_attention(run.model, tokenizer, text, classes) for text in texts]

    def _rows(self, reading: AttentionReading) -> list[tuple[str, Tensor]]:
        """Return the attention of [CLS], with a name for each line."""
        if self.rollout:
            return [("rollout", reading.rollout[0])]
        layer = -1 if self.layer is None else self.layer
        if self.head is not None:
            return [(f"head {self.head}", reading.weights(layer, self.head)[0])]
        heads = enumerate(reading.maps[layer])
        means = reading.weights(layer)[0]
        return [("mean", means), *((f"head {head}", rows[0]) for head, rows in heads)]


def _decoded(sentence: str) -> str:
    """Return an argument read as UTF-8, in every locale; other bytes came as surrogates."""
    try:
        return os.fsencode(sentence).decode("utf-8")
    except UnicodeError:
        raise UserError(f"SENTENCE is not valid UTF-8: {sentence!a}") from None


def _line(name: str, tokens: Sequence[str], weights: Tensor) -> Text:
    """Tokens shaded by their weights, and the largest in figures, for those without colours."""
    from rich.text import Text

    line = Text(f"{name:8}")
    most = float(weights.max()) or 1.0
    for token, weight in zip(tokens, weights.tolist(), strict=True):
        shade = (round(a + (b - a) * weight / most) for a, b in zip(PALE, DEEP, strict=True))
        line.append(f" {token} ", style=f"black on #{bytes(shade).hex()}")
    best = weights.topk(min(3, len(tokens)))
    figures = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    told = ", ".join(f"{tokens[i]} {weight:.3f}" for i, weight in figures)
    return line.append(f"\n{'':8} most: {told}")
