"""`mirrorhead classify`: the labels of texts, by a base with a patch of `tune` applied to it."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from mirrorhead_lab.cli import options
from mirrorhead_lab.cli.options import option
from mirrorhead_lab.runtime.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_LINES = 1024  # of the standard input that are read and classified at a time


@dataclass(frozen=True)
class Classify:
    """Print the label of each text and its probability, with a tab between them.

    The texts are arguments, or else the lines of the standard input. One line is printed for each.
    """

    folder: Annotated[Positional[Path], option("TUNED")]
    """A folder that `mirrorhead patch apply` wrote with a patch of `mirrorhead tune`."""
    texts: Annotated[Positional[tuple[str, ...]], option("TEXT ...")] = ()
    """Texts to classify; without any, the lines of the standard input."""
    json: Annotated[options.Flag, arg(help="Print a JSON object for each text.")] = False

    def run(self) -> int:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all that is read
        if not self.texts and sys.stdin.isatty():
            raise UserError("give one or more texts, or lines on the standard input")
        from mirrorhead.patches.model_config import HEAD
        from mirrorhead_lab.models.pretrained import (
            PretrainedError,
            Tokens,
            load_classifier,
            logits,
        )

        with options.user_errors(PretrainedError, ValueError, OSError):
            model = load_classifier(self.folder)
            labels = [model.config["id2label"][str(i)] for i in range(model.head.out_features)]
            length = model.config[HEAD]["max_length"]
            for texts in _batches(self.texts):
                tokens = Tokens(self.folder, texts, [0] * len(texts), length)
                for row in logits(model, tokens).double().softmax(1):
                    self._print(labels, row)
        return 0

    def _print(self, labels: list[str], probabilities: Tensor) -> None:
        import json

        best = int(probabilities.argmax())
        if self.json:
            by_label = dict(zip(labels, probabilities.tolist(), strict=True))
            found = {"label": labels[best], "probability": by_label[labels[best]]}
            print(json.dumps(found | {"probabilities": by_label}))
        else:
            print(f"{labels[best]}\t{float(probabilities[best]):.4f}")


def _batches(texts: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the texts, or the lines of the standard input, some at a time."""
    with suppress(AttributeError):  # a stream of another kind
        sys.stdin.reconfigure(errors="surrogateescape")  # pyright: ignore[reportAttributeAccessIssue]
    rest = iter(texts) if texts else (line.rstrip("\r\n") for line in sys.stdin)
    count = 0
    while batch := list(itertools.islice(rest, _LINES)):
        for text in batch:
            count += 1
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise UserError(f"text {count} is not valid UTF-8")
        yield batch
