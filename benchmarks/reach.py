"""Is centred mirror descent safe? Five reaches over two decades, three lengths, three p.

    python benchmarks/reach.py          # resumes where it stopped; about an hour of one core
    python benchmarks/reach.py --table  # what the results say so far

The last block of all-MiniLM-L6-v2 (1.8 million weights) learns TREC from what the first five give,
which is computed once. So a step takes milliseconds, and 10,000 steps are affordable. The reach is
the suggested one, `default_reach`, times 0.1 to 10; `steps` is `full_steps`. Each run appends a
line to the results.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from mirrorhead import MirrorAdam
from mirrorhead_lab.datasets import load_sentences
from mirrorhead_lab.models.pretrained import PretrainedClassifier, Tokens, default_encoder
from mirrorhead_lab.runtime.json_files import append_json_line, read_json_lines
from mirrorhead_lab.training.tuning import default_reach, full_steps, schedule

RESULTS = Path(__file__).parents[1] / "results" / "reach.jsonl"
EXPONENTS = (1.05, 1.2, 1.5)
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
LENGTHS = (100, 1000, 10_000)
KEPT = 0.001
TEXTS, BATCH, TOKENS = 2000, 8, 16


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


def load() -> tuple[PretrainedClassifier, Inputs, Inputs]:
    """A fresh model, training and validation inputs."""
    folder, task = default_encoder(), load_sentences("trec")
    torch.manual_seed(0)
    model = PretrainedClassifier(folder, len(task.classes))
    model.eval()
    parts = (task.train.sample(TEXTS, 0), task.validation)
    train, validation = (
        Inputs(model, Tokens(folder, part.texts, part.labels, TOKENS)) for part in parts
    )
    return model, train, validation


@torch.inference_mode()
def accuracy(model: LastBlock, inputs: Inputs) -> float:
    places = torch.arange(len(inputs.labels))
    right = [
        int((model(hidden, mask).argmax(1) == labels).sum())
        for hidden, mask, labels in map(inputs.batch, places.split(256))
    ]
    return sum(right) / len(places)


def perform(p: float, factor: float, length: int) -> dict[str, Any]:
    """Train, and describe the result as a line."""
    began = time.perf_counter()
    base, train, validation = load()
    model = LastBlock(base)
    weights = [w for w in model.block.parameters() if w.ndim == 2]
    for w in model.block.parameters():
        w.requires_grad_(w.ndim == 2)
    start = [w.detach().clone() for w in weights]
    factors = [schedule(step, length, 0.1) for step in range(length)]
    reach = factor * default_reach(p)
    ours = MirrorAdam(weights, reach, p, center="init", steps=full_steps(factors))
    head = AdamW(model.head.parameters(), 5e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    places = torch.empty(0, dtype=torch.long)
    for now in factors:
        if len(places) < BATCH:
            places = torch.cat([places, torch.randperm(TEXTS, generator=generator)])
        now_places, places = places[:BATCH], places[BATCH:]
        hidden, mask, labels = train.batch(now_places)
        for optimizer, rate in ((ours, reach), (head, 5e-3)):
            optimizer.param_groups[0]["lr"] = rate * now
        nn.functional.cross_entropy(model(hidden, mask), labels).backward()
        for optimizer in (ours, head):
            optimizer.step()
            optimizer.zero_grad()
    changes = [(w.detach() - w0).abs() for w, w0 in zip(weights, start, strict=True)]
    line = {
        "p": p, "factor": factor, "length": length, "reach": reach,
        "largest": max(float(c.max()) for c in changes),
        "density": sum(int((c > 0).sum()) for c in changes) / sum(c.numel() for c in changes),
        "accuracy": accuracy(model, validation),
    }  # fmt: skip
    flat = torch.cat([c.flatten() for c in changes])
    least = flat.topk(round(KEPT * len(flat))).values[-1]
    with torch.no_grad():
        for w, w0, c in zip(weights, start, changes, strict=True):
            w.copy_(torch.where(c >= least, w, w0))
    line["kept"] = accuracy(model, validation)
    line["seconds"] = round(time.perf_counter() - began, 1)
    return line


def print_table(lines: list[dict[str, Any]]) -> None:
    """A row for each p and reach; for each length: change, density, accuracy, that of 0.1 %."""
    titles = [f"{length:,} steps" for length in LENGTHS]
    print("| p | reach | " + " | ".join(titles) + " |")
    print("| --- " * (2 + len(titles)) + "|")
    found = {(one["p"], one["factor"], one["length"]): one for one in lines}
    for p, factor in product(EXPONENTS, FACTORS):
        cells = []
        for length in LENGTHS:
            one = found.get((p, factor, length))
            cells.append(
                f"{one['largest']:.2g}; {one['density']:.1%}; {one['accuracy']:.1%};"
                f" {one['kept']:.1%}"
                if one
                else "-"
            )
        print(f"| {p} | {factor * default_reach(p):.2g} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="compute nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    done = read_json_lines(options.results, dict[str, Any])
    keys = {(one["p"], one["factor"], one["length"]) for one in done}
    for length, p, factor in product(LENGTHS, EXPONENTS, FACTORS):
        if options.table or (p, factor, length) in keys:
            continue
        line = perform(p, factor, length)
        append_json_line(options.results, line)
        print(line, flush=True)
    print_table(read_json_lines(options.results, dict[str, Any]))


if __name__ == "__main__":
    main()
