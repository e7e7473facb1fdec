"""Is centred mirror descent safe? Five reaches over two decades, three lengths, three p.

The last block of all-MiniLM-L6-v2 (1.8 million weights) learns TREC from what the first five give,
which is computed once. So a step takes milliseconds, and 10,000 steps are affordable. The reach is
the suggested one, `default_reach`, times 0.1 to 10; `total_steps` is the sum of the
schedule. Only validation data are read, and nothing is claimed.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.optim import AdamW

from mirrorhead.optim import CenteredAdam
from mirrorhead_lab.datasets import Splits, Texts, find
from mirrorhead_lab.findings.table import NOTHING, Cell, Table, number
from mirrorhead_lab.models.pretrained import PretrainedClassifier, Tokens, default_encoder
from mirrorhead_lab.studies.study import Method, Rows, Study, Trial
from mirrorhead_lab.training.tuning import default_reach, schedule

EXPONENTS = (1.05, 1.2, 1.5)
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
LENGTHS = (100, 1000, 10_000)
KEPT = 0.001
TEXTS, BATCH, TOKENS = 2000, 8, 16
HEAD_RATE = 5e-3
#: The tasks are numbers of steps.
TASKS = {f"{length:,} steps": length for length in LENGTHS}


class Outcome(Struct, frozen=True):
    """The largest change, the share of weights changed, validation accuracy.

    kept: accuracy with the largest 0.1 % of the changes alone.
    """

    reach: float
    largest: float
    density: float
    accuracy: float
    kept: float


class LastBlock(nn.Module):
    """The last block and a head, for what the blocks before it give."""

    def __init__(self, model: PretrainedClassifier) -> None:
        super().__init__()
        self.block, self.head = model.encoder.encoder.layer[-1], model.head

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """hidden: (b, T, d), mask: (b, T) -> (b, classes)."""
        out = self.block(hidden, mask[:, None, None, :].bool())
        weights = mask[..., None].float()
        return self.head((out * weights).sum(1) / weights.sum(1))


class Inputs:
    """What the first blocks give for the texts of a set, all of one length."""

    @torch.inference_mode()
    def __init__(self, model: PretrainedClassifier, tokens: Tokens) -> None:
        ids, mask, labels = tokens.batch(range(len(tokens)))
        parts = [
            model.encoder(
                input_ids=ids[i : i + 128], attention_mask=mask[i : i + 128],
                output_hidden_states=True,
            ).hidden_states[-2]
            for i in range(0, len(ids), 128)
        ]  # fmt: skip
        self.hidden, self.mask, self.labels = torch.cat(parts).clone(), mask, labels

    def batch(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = self.mask[places]
        longest = int(mask.sum(1).max())
        return self.hidden[places, :longest].clone(), mask[:, :longest], self.labels[places]


@dataclass(frozen=True, eq=False)
class Data:
    """A fresh model, training and validation inputs."""

    model: PretrainedClassifier
    train: Inputs
    validation: Inputs

    @staticmethod
    def of(folder: Path, texts: Splits[Texts]) -> Data:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all that is read
        torch.manual_seed(0)
        model = PretrainedClassifier(folder, len(texts.classes))
        model.eval()
        parts = (texts.train.sample(TEXTS, 0), texts.validation)
        sets = (Inputs(model, Tokens(folder, part.texts, part.labels, TOKENS)) for part in parts)
        return Data(model, *sets)


def load(task: str, folder: Path | None) -> Data:
    return Data.of(default_encoder(), find("trec").read(folder))


@torch.inference_mode()
def accuracy(model: LastBlock, inputs: Inputs) -> float:
    places = torch.arange(len(inputs.labels))
    right = [
        int((model(hidden, mask).argmax(1) == labels).sum())
        for hidden, mask, labels in map(inputs.batch, places.split(256))
    ]
    return sum(right) / len(places)


def run(trial: Trial, data: Data, folder: Path) -> Outcome:
    """Train, and score with all changes and with the largest alone."""
    p, length = METHODS[trial.method].how, TASKS[trial.task]
    model = LastBlock(copy.deepcopy(data.model))
    weights = [w for w in model.block.parameters() if w.ndim == 2]
    for w in model.block.parameters():
        w.requires_grad_(w.ndim == 2)
    start = [w.detach().clone() for w in weights]
    factors = [schedule(step, length, 0.1) for step in range(length)]
    reach = trial.setting["factor"] * default_reach(p)
    ours = CenteredAdam(weights, p, reach=reach, total_steps=sum(factors))
    head = AdamW(model.head.parameters(), HEAD_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(trial.seed)
    count = len(data.train.labels)
    places = torch.empty(0, dtype=torch.long)
    for now in factors:
        if len(places) < BATCH:
            places = torch.cat([places, torch.randperm(count, generator=generator)])
        batch, places = places[:BATCH], places[BATCH:]
        hidden, mask, labels = data.train.batch(batch)
        for optimizer, rate in ((ours, reach), (head, HEAD_RATE)):
            optimizer.param_groups[0]["lr"] = rate * now
        nn.functional.cross_entropy(model(hidden, mask), labels).backward()
        for optimizer in (ours, head):
            optimizer.step()
            optimizer.zero_grad()
    changes = [(w.detach() - w0).abs() for w, w0 in zip(weights, start, strict=True)]
    whole = accuracy(model, data.validation)
    flat = torch.cat([c.flatten() for c in changes])
    least = flat.topk(round(KEPT * len(flat))).values[-1]
    with torch.no_grad():
        for w, w0, c in zip(weights, start, changes, strict=True):
            w.copy_(torch.where(c >= least, w, w0))
    return Outcome(
        reach,
        largest=float(flat.max()),
        density=int((flat > 0).sum()) / len(flat),
        accuracy=whole,
        kept=accuracy(model, data.validation),
    )


def table(rows: Rows[Outcome]) -> Table:
    """Return a row for each p and reach."""

    def at(task: str, one: tuple[str, int]) -> Cell:
        name, k = one
        row = rows.get(rows.study.tuning_trials(name, task)[k])
        if row is None:
            return NOTHING
        found = row.measured
        text = f"{found.largest:.2g}; {found.density:.1%}; {found.accuracy:.1%}; {found.kept:.1%}"
        return Cell(text, found.accuracy)

    def reach(one: tuple[str, int]) -> Cell:
        value = FACTORS[one[1]] * default_reach(METHODS[one[0]].how)
        return Cell(f"{value:.2g}", value)

    columns: Any = {"p": lambda one: number(METHODS[one[0]].how, 2), "Reach": reach}
    columns |= {task: partial(at, task) for task in TASKS}
    every = [(name, k) for name in METHODS for k in range(len(FACTORS))]
    note = (
        "Largest change; share of weights changed; validation accuracy with all changes; with the"
        " largest 0.1 %."
    )
    return Table.of("reach-table", "Reach", columns, every, note)


METHODS = {
    f"p={p:g}": Method(tuple({"factor": factor} for factor in FACTORS), p) for p in EXPONENTS
}
STUDY = Study(
    name="reach",
    title="Is centred mirror descent safe?",
    methods=METHODS,
    tasks=tuple(TASKS),
    seeds=(),
    tuning_seed=0,
    measured=Outcome,
    load=load,
    run=run,
    score=lambda measured: measured.accuracy,
    seconds=80,
    tuning="none",
    tables=lambda rows: (table(rows),),
)
