"""Measure the heads of a run or of a Hugging Face model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mirrorhead_lab.datasets import find, load_imdb
from mirrorhead_lab.datasets.encoded import load_tokenizer
from mirrorhead_lab.datasets.sources import require
from mirrorhead_lab.datasets.texts import read_text
from mirrorhead_lab.evaluation.head_margins import (
    PS,
    Batch,
    CheckpointMargins,
    ModelMargins,
    measure_heads,
)
from mirrorhead_lab.models import TextSettings
from mirrorhead_lab.models.attention_maps import Query
from mirrorhead_lab.models.pretrained import PretrainedError, load_encoder
from mirrorhead_lab.models.pretrained import load_tokenizer as load_encoders_tokenizer
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.training import load_run
from mirrorhead_lab.training.candidates import candidate_name
from mirrorhead_lab.training.run_folder import PRESET, weights_along


@dataclass(frozen=True)
class MarginSettings:
    """What is measured: exponents, numbers of texts and of their tokens, whose attention.

    Args:
        texts: a file with a text per line; without, IMDb reviews that the run was trained on.
        seed: of the draw of the texts.
        last: whether to measure the final weights alone, not those along the run.
        data, partial: as in `load_sets`.
    """

    p: tuple[float, ...] = PS
    n: int = 32
    tokens: int = 64
    query: Query | None = None
    texts: Path | None = None
    seed: int = 0
    last: bool = False
    data: Path | None = None
    partial: bool = False


#: Called after each solution with how many there are, and how many there will be.
Progress = Callable[[int, int], None]


def measure_model(
    folder: Path, settings: MarginSettings, progress: Progress = lambda done, total: None
) -> ModelMargins:
    """Measure every head of a run, along its kept weights, or of a Hugging Face model."""
    measure = _measure_run if (folder / PRESET).exists() else _measure_pretrained
    try:
        batch, checkpoints, about = measure(folder, settings, progress)
    except UserError as error:
        named = str(folder) in str(error)
        raise error if named else UserError(f"{folder}: {error}") from error
    texts, tokens = batch.ids.shape
    about |= {"query": settings.query, "text_seed": settings.seed}
    return ModelMargins(folder.resolve().name, texts, tokens, checkpoints=checkpoints, **about)


Measured = tuple[Batch, tuple[CheckpointMargins, ...], dict[str, Any]]


def _measure_run(folder: Path, settings: MarginSettings, progress: Progress) -> Measured:
    run = load_run(folder)
    model = run.preset.model
    if not isinstance(model, TextSettings):
        raise UserError(f"{folder} is a run on {run.preset.data}, which has no texts")
    sets = () if settings.texts is not None else find(run.preset.data).sources
    require(*sets, "bert", folder=settings.data)
    length = min(settings.tokens, model.max_length)
    tokenizer = load_tokenizer(settings.data, max_length=length, partial=settings.partial)
    texts = _texts(settings, trained_on=run.preset.data)
    batch = Batch(*_padded([tokenizer.encode(text).ids for text in texts], 0))
    states = weights_along(run)[-1:] if settings.last else weights_along(run)
    after = _counting(progress, len(states) * model.layers * model.heads * len(settings.p))
    checkpoints = []
    for state in states:
        state.load_into(run.model)
        heads = measure_heads(run.model, batch, settings.p, settings.query, after)
        checkpoints.append(CheckpointMargins(state.name, heads, state.epoch, state.train_accuracy))
    rule, seed = run.preset.training.optimizer, run.preset.training.seed
    about = {"optimizer": candidate_name(rule), "lr": rule.lr, "p": rule.p, "seed": seed}
    return batch, tuple(checkpoints), about


def _measure_pretrained(folder: Path, settings: MarginSettings, progress: Progress) -> Measured:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all that is read
    try:
        # In half precision, attention is too coarse to be compared with the formula.
        model: Any = load_encoder(folder).float().eval()
        tokenizer = load_encoders_tokenizer(folder)
    except PretrainedError as error:
        raise UserError(str(error)) from error
    texts = _texts(settings)
    rows = tokenizer(texts, truncation=True, max_length=settings.tokens)["input_ids"]
    ids, mask = _padded(rows, int(tokenizer.pad_token_id or 0))
    batch = Batch(ids, mask, {"input_ids": ids, "attention_mask": mask.long()})
    layers, heads = (
        getattr(model.config, f"num_{what}", 1) for what in ("hidden_layers", "attention_heads")
    )
    after = _counting(progress, layers * heads * len(settings.p))
    found = measure_heads(model, batch, settings.p, settings.query, after)
    return batch, (CheckpointMargins("as it is", found),), {}


def _counting(progress: Progress, total: int) -> Callable[[], None]:
    done = itertools.count(1)
    return lambda: progress(next(done), total)


def _texts(settings: MarginSettings, trained_on: str | None = None) -> list[str]:
    """Return n texts, drawn at random."""
    import numpy as np

    if settings.texts is not None:
        lines = read_text(settings.texts).splitlines()
        texts: Sequence[str] = [text for text in lines if text.strip()]
    elif trained_on is not None:
        found = find(trained_on).read(settings.data, partial=settings.partial)
        texts = tuple(found.train.texts)
    else:
        texts = load_imdb("train", settings.data, partial=settings.partial).texts
    if len(texts) < settings.n:
        raise UserError(f"--n must be at most {len(texts)}, the number of texts, got {settings.n}")
    order = np.random.default_rng(settings.seed).permutation(len(texts))[: settings.n]
    return [texts[i] for i in order]


def _padded(rows: Sequence[Sequence[int]], pad: int) -> Any:
    """Return ids and mask, (n, T), padded on the right."""
    from torch.nn.utils.rnn import pad_sequence

    lengths = torch.tensor([len(row) for row in rows])
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]
