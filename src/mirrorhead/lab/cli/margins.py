"""`mirrorhead margins`: the heads of a trained model against the theory's max-margin solutions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from mirrorhead.lab.cli.options import DataFolder, Flag, Json, Partial, option, user_errors
from mirrorhead.lab.runtime.errors import UserError
from mirrorhead.lab.runtime.progress import ProgressBars

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from mirrorhead.lab.evaluation.head_margins import Batch, CheckpointMargins, ModelMargins


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
        arg(help_behavior_hint="(default: last if the model is causal)"),
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
        self._check()
        found = self._run_margins() if self._is_run() else self._pretrained_margins()
        if self.json:
            import json

            import msgspec

            print(json.dumps(msgspec.to_builtins(found), indent=1))
            return 0
        from rich.console import Console

        console = Console()
        for checkpoint in found.checkpoints:
            console.print(_table(checkpoint, self.p), "")
        return 0

    def _check(self) -> None:
        for name, least in (("n", 1), ("tokens", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        if not self.p or not all(1.02 <= p <= 100 for p in self.p):
            raise UserError(f"--p must be from 1.02 to 100, got {' '.join(map(str, self.p))}")
        if not self.model.is_dir():
            raise UserError(f"{self.model} is not a folder: give a run or a Hugging Face model")

    def _is_run(self) -> bool:
        from mirrorhead.lab.training.run_folder import PRESET

        if (self.model / PRESET).exists():
            return True
        if (self.model / "config.json").exists():
            return False
        raise UserError(
            f"{self.model} has neither preset.json, as a run has, nor config.json, as a Hugging"
            " Face model has"
        )

    def _run_margins(self) -> ModelMargins:
        from mirrorhead.lab.datasets.encoded import load_tokenizer
        from mirrorhead.lab.evaluation.head_margins import Batch, CheckpointMargins
        from mirrorhead.lab.models import TextSettings
        from mirrorhead.lab.training import load_run
        from mirrorhead.lab.training.presets import candidate_name
        from mirrorhead.lab.training.run_folder import weights_along

        run = load_run(self.model)
        settings = run.preset.model
        if not isinstance(settings, TextSettings):
            raise UserError(f"{self.model} is a run on {run.preset.data}, which has no texts")
        length = min(self.tokens, settings.max_length)
        tokenizer = load_tokenizer(self.data, max_length=length, partial=self.partial)
        batch = Batch(*_padded([tokenizer.encode(t).ids for t in self._texts(trained_on=True)], 0))
        states = weights_along(run)[-1:] if self.last else weights_along(run)
        checkpoints = []
        with self._bars(len(states) * settings.layers * settings.heads) as bars:
            for state in states:
                state.load_into(run.model)
                heads = self._measure(run.model, batch, bars)
                checkpoints.append(
                    CheckpointMargins(state.name, heads, state.epoch, state.train_accuracy)
                )
        rule, seed = run.preset.training.optimizer, run.preset.training.seed
        about = {"optimizer": candidate_name(rule), "lr": rule.lr, "p": rule.p, "seed": seed}
        return self._margins(batch, checkpoints, **about)

    def _pretrained_margins(self) -> ModelMargins:
        from mirrorhead.lab.evaluation.head_margins import Batch, CheckpointMargins
        from mirrorhead.lab.models.pretrained import PretrainedError, load_encoder, load_tokenizer

        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all that is read
        with user_errors(PretrainedError):
            # In half precision, attention is too coarse to be compared with the formula.
            model: Any = load_encoder(self.model).float().eval()
            tokenizer = load_tokenizer(self.model)
        texts = self._texts(trained_on=False)
        rows = tokenizer(texts, truncation=True, max_length=self.tokens)["input_ids"]
        ids, mask = _padded(rows, int(tokenizer.pad_token_id or 0))
        batch = Batch(ids, mask, {"input_ids": ids, "attention_mask": mask.long()})
        config = model.config
        total = getattr(config, "num_hidden_layers", 1) * getattr(config, "num_attention_heads", 1)
        with self._bars(total) as bars:
            checkpoint = CheckpointMargins("as it is", self._measure(model, batch, bars))
        return self._margins(batch, [checkpoint])

    def _bars(self, heads: int) -> ProgressBars:
        return ProgressBars({self.model.name: heads * len(self.p)}, "solutions")

    def _measure(self, model: nn.Module, batch: Batch, bars: ProgressBars) -> Any:
        from mirrorhead.lab.evaluation.head_margins import measure_heads

        try:
            return measure_heads(
                model, batch, self.p, self.query, lambda: bars.advance(self.model.name)
            )
        except UserError as error:
            raise UserError(f"{self.model}: {error}") from error

    def _margins(
        self, batch: Batch, checkpoints: list[CheckpointMargins], **about: Any
    ) -> ModelMargins:
        from mirrorhead.lab.evaluation.head_margins import ModelMargins

        name, (texts, tokens) = self.model.resolve().name, batch.ids.shape
        found = tuple(checkpoints)
        return ModelMargins(name, texts, tokens, self.query, found, text_seed=self.seed, **about)

    def _texts(self, *, trained_on: bool) -> list[str]:
        """Return n texts, drawn at random."""
        import numpy as np

        if self.texts is not None:
            from mirrorhead.lab.datasets.reviews import read_text

            texts: Sequence[str] = [t for t in read_text(self.texts).splitlines() if t.strip()]
        else:
            from mirrorhead.lab.datasets.reviews import imdb_protocol, load_imdb

            texts = (
                imdb_protocol(self.data, partial=self.partial).train.texts
                if trained_on
                else load_imdb("train", self.data, partial=self.partial).texts
            )
        if len(texts) < self.n:
            raise UserError(f"--n must be at most {len(texts)}, the number of texts, got {self.n}")
        order = np.random.default_rng(self.seed).permutation(len(texts))[: self.n]
        return [texts[i] for i in order]


def _padded(rows: Sequence[Sequence[int]], pad: int) -> Any:
    """Return ids and mask, (n, T), padded on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    lengths = torch.tensor([len(row) for row in rows])
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


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
