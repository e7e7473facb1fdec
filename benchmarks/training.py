"""Training at the paper's size against the plain way to write it, and at a laptop's size.

    python benchmarks/training.py [--only batch encoding laptop] [--size 3] [--batch 100]

One batch of the paper's text classifier. Plain, as published: padding to 512, an explicit
softmax, every row of every block, torch's dropout and the two-power optimizer step at p = 1.1.
Ours: batches of like length padded to their own longest and done in pieces of 8,192 tokens, as
the training loop does, attention text by text, the [CLS] row alone in the last block,
`MirrorDescent(fused=True)`. Same weights, same shares of dropout (.2, on
attention weights too), float32, one thread. Texts have lengths like IMDb's (mean 265 tokens).
Each runs in a process of its own. Seconds are of CPU, for ours the mean over evenly spaced
batches of a pool of 64; memory is the peak of the process, torch and the longest batch included.

Encoding: all 50,000 reviews, two threads, by the clock; needs $MIRRORHEAD_DATA.

Laptop: a step of the preset `laptop` by each optimizer of the IMDb study.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrorhead import MirrorDescent
from mirrorhead_lab.datasets import Texts, encode, load_imdb, load_tokenizer
from mirrorhead_lab.datasets.batches import POOL, even_batches, pieces
from mirrorhead_lab.models import TextClassifier, TextSettings
from mirrorhead_lab.studies.imdb import METHODS
from mirrorhead_lab.training import build_optimizer, preset
from mirrorhead_lab.training.classification import TOKENS_AT_ONCE

P, LR = 1.1, 1e-4
PARTS = ("batch", "encoding", "laptop")
REVIEWS = 20_184  # nine tenths of what `imdb_protocol` leaves of the training split


class TwoPowers(Optimizer):
    """The plain formula in eager torch: two powers of every weight, no state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for w in self.param_groups[0]["params"]:
            u = w.sign() * w.abs().pow(P - 1) - LR * w.grad
            w.copy_(u.sign() * u.abs().pow(1 / (P - 1)))


def plain_forward(model: TextClassifier, ids: Tensor) -> Tensor:
    """The model's weights, without any of its savings."""
    settings = model.settings

    def drop(x: Tensor) -> Tensor:
        return F.dropout(x, settings.dropout, training=model.training)

    ids = F.pad(ids, (0, settings.max_length - ids.shape[1]))
    hidden = (ids == 0)[:, None, None, :]
    x = drop(model.tokens(ids) + model.positions.weight)
    block: Any
    for block in model.blocks:
        layer = block.attention
        q, k, v = (
            m(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
            for m in (layer.query, layer.key, layer.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        weights = F.dropout(weights, layer.dropout, training=model.training)
        out = layer.out((weights @ v).transpose(1, 2).flatten(2))
        x = block.norm1(x + drop(out))
        x = block.norm2(x + drop(block.down(block.up(x).relu())))
    return model.head(x[:, 0])


def some_batches(size: int, count: int, longest: int) -> list[Tensor]:
    """Every so-manieth bucket of a pool of 64 batches, with lengths like IMDb's."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(5.43, 0.62, size * POOL)).astype(int).clip(12, longest)
    buckets = even_batches(np.arange(len(lengths)), size, lengths)
    batches = []
    for i in range(count):
        places = buckets[int((i + 0.5) * POOL / count)]
        ids = np.zeros((size, lengths[places].max()), dtype=np.int64)
        for row, length in zip(ids, lengths[places], strict=True):
            row[:length] = rng.integers(5, 30_522, length)
        batches.append(torch.from_numpy(ids))
    return batches


def measure(variant: str, size: int, batch: int, count: int) -> dict[str, float]:
    """CPU seconds of one step and of its optimizer, and the peak of memory in GB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TextClassifier(TextSettings.paper(size)).train()
    batches = some_batches(batch, count, model.settings.max_length)
    # All batches cost the plain way the same: one is enough to know it.
    timed = batches[:1] if variant == "plain" else batches
    forward: Callable[[Tensor], Tensor] = model
    optimizer: Optimizer = MirrorDescent(model.parameters(), LR, P, fused=True)
    if variant == "plain":
        forward, optimizer = lambda ids: plain_forward(model, ids), TwoPowers(model.parameters())
    imported = peak()
    spent = {"step": 0.0, "optimizer": 0.0}
    for i, ids in enumerate([batches[0][:2], *timed]):  # two texts to warm up, kernels too
        began = time.process_time()
        optimizer.zero_grad()
        for rows in [np.arange(len(ids))] if variant == "plain" else in_pieces(ids):
            part = forward(ids[torch.from_numpy(rows)])
            loss = F.cross_entropy(part, torch.from_numpy(rows) % 2, reduction="sum") / len(ids)
            loss.backward()
        middle = time.process_time()
        optimizer.step()
        ended = time.process_time()
        if i > 0:
            spent["step"] += (ended - began) / len(timed)
            spent["optimizer"] += (ended - middle) / len(timed)
    return {**spent, "memory": peak(), "imported": imported}


def in_pieces(ids: Tensor) -> list[np.ndarray]:
    """Rows of a batch that the training loop takes at once."""
    return pieces(np.arange(len(ids)), (ids != 0).sum(dim=1).numpy(), TOKENS_AT_ONCE)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


@torch.no_grad()
def difference(size: int) -> float:
    """The largest difference of logits, relative to the largest logit, for texts of all lengths."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TextClassifier(TextSettings.paper(size)).eval()
    worst = 0.0
    for ids in some_batches(2, 6, model.settings.max_length):
        plain = plain_forward(model, ids)
        worst = max(worst, float((model(ids) - plain).abs().max() / plain.abs().max()))
    return worst


def batch_rows(size: int, batch: int, count: int) -> list[tuple[str, str, str, bool]]:
    found = {}
    for variant in ("plain", "ours"):
        numbers = ["--size", size, "--batch", batch, "--batches", count, "--variant", variant]
        command = [sys.executable, __file__, *map(str, numbers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[variant] = json.loads(done.stdout)
    plain, ours = found["plain"], found["ours"]
    faster, less = plain["step"] / ours["step"], ours["memory"] / plain["memory"]
    over = (ours["memory"] - ours["imported"]) / (plain["memory"] - plain["imported"])
    share, differ = ours["optimizer"] / ours["step"], difference(size)
    both = "{:.2f} s against {:.2f} s, {:.2f} x faster"
    memory = "{:.2f} GB against {:.2f} GB, {:.2f} of it ({:.2f} without model and imports)"
    return [
        (
            f"a batch of {batch}, CPU time",
            both.format(ours["step"], plain["step"], faster),
            "at least 3.5 x",
            faster >= 3.5,
        ),
        ("its predictions", f"differ by {differ:.0e} of the largest", "below 1e-5", differ < 1e-5),
        (
            "its peak of memory",
            memory.format(ours["memory"], plain["memory"], less, over),
            "at most .5",
            less <= 0.5,
        ),
        ("the optimizer's share", f"{share:.1%}", "under 3 %", share < 0.03),
    ]


def encoding_row() -> tuple[str, str, str, bool]:
    """All reviews into an empty cache, and again out of it."""
    os.environ["RAYON_NUM_THREADS"] = "2"
    parts = [load_imdb(split) for split in ("train", "test")]
    reviews = Texts(
        parts[0].texts + parts[1].texts,
        np.concatenate([part.labels for part in parts]),
        parts[0].names + parts[1].names,
    )
    tokenizer = load_tokenizer()
    with tempfile.TemporaryDirectory() as cache:
        moments = [time.perf_counter()]
        for _ in range(2):
            encode(reviews, tokenizer, cache)
            moments.append(time.perf_counter())
    first, again = np.diff(moments)
    found = f"{first:.0f} s, and {again:.1f} s the next time"
    return f"encoding {len(reviews):,} reviews", found, "under 60 s", bool(first < 60)


def laptop_table(count: int = POOL) -> None:
    torch.set_num_threads(1)
    batches = some_batches(32, count, TextSettings.laptop().max_length)
    labels = torch.arange(32) % 2
    print("\n| preset `laptop` | CPU ms a step | of it the optimizer | CPU s an epoch |")
    print("| --- | --- | --- | --- |")
    for name, method in METHODS.items():
        rule = dataclasses.replace(method.how, **method.settings[1])
        chosen = preset("laptop", rule)
        torch.manual_seed(0)
        model = chosen.build().train()
        optimizer = build_optimizer(model, rule, chosen.training.fused)
        step = mirror = 0.0
        for i, ids in enumerate([*batches[:2], *batches]):  # the first two to warm up
            began = time.process_time()
            F.cross_entropy(model(ids), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            middle = time.process_time()
            optimizer.step()
            optimizer.zero_grad()
            ended = time.process_time()
            if i >= 2:
                step += (ended - began) / len(batches)
                mirror += (ended - middle) / len(batches)
        epoch = step * REVIEWS / 32
        print(f"| {name} | {1e3 * step:.1f} | {mirror / step:.0%} | {epoch:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="(default all)")
    parser.add_argument("--size", type=int, default=3, help="3, 4 or 6 (default 3)")
    parser.add_argument("--batch", type=int, default=100, help="texts in a batch (default 100)")
    parser.add_argument("--batches", type=int, default=6, help="batches of ours (default 6)")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.size, options.batch, options.batches)))
        return
    rows = []
    if "batch" in options.only:
        print(f"paper's size {options.size}, p = {P}, torch {torch.__version__}\n")
        rows += batch_rows(options.size, options.batch, options.batches)
    if "encoding" in options.only and os.environ.get("MIRRORHEAD_DATA"):
        rows.append(encoding_row())
    elif "encoding" in options.only:
        print("encoding is not measured: set MIRRORHEAD_DATA to the folder with aclImdb/\n")
    if rows:
        print("| what | measured | bar | met |\n| --- | --- | --- | --- |")
    for what, found, bar, met in rows:
        print(f"| {what} | {found} | {bar} | {'yes' if met else 'no'} |", flush=True)
    if "laptop" in options.only:
        laptop_table()


if __name__ == "__main__":
    main()
