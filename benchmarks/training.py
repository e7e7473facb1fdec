"""A training step of the paper's text classifier, against the plain way to write it.

    python benchmarks/training.py [--size 3] [--batch 16] [--batches 6]

The plain way, as published: padding to 512, an explicit softmax, every row of every block,
and the two-power optimizer step at p = 1.1. Ours: batches of like length padded to their own
longest, fused attention, the [CLS] row alone in the last block, `MirrorDescent`. Same
weights, same dropout (.2, on attention weights too), float32, one thread. Texts have lengths
like IMDb's (mean 265 tokens). Each variant runs in a process of its own: CPU seconds for one
batch, mean over the batches of a pool, and peak memory. Ratios are what counts.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrorhead import MirrorDescent
from mirrorhead.data.batches import POOL, even_batches
from mirrorhead.models import TextClassifier, TextSettings

P, LR = 1.1, 1e-4
VARIANTS = {
    "plain": "plain",
    "ours": "ours",
    "plain, no dropout on attention": "plain-quiet",
    "ours, no dropout on attention": "ours-quiet",
}


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
    ids = F.pad(ids, (0, settings.max_length - ids.shape[1]))
    hidden = (ids == 0)[:, None, None, :]
    x = model.drop(model.tokens(ids) + model.positions.weight)
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
        x = block.norm1(x + block.drop(out))
        x = block.norm2(x + block.drop(block.down(block.up(x).relu())))
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
    """Seconds of CPU for one step and for its optimizer, peak memory, and predictions."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = TextSettings.paper(size)
    if variant.endswith("quiet"):
        settings = replace(settings, attention_dropout=0.0)
    model = TextClassifier(settings)
    plain = variant.startswith("plain")
    forward: Callable[[Tensor], Tensor] = (
        (lambda ids: plain_forward(model, ids)) if plain else model
    )
    batches = some_batches(batch, count, settings.max_length)
    model.eval()
    with torch.no_grad():
        predictions = float(forward(batches[0]).double().square().sum())
    model.train()
    optimizer = TwoPowers(model.parameters()) if plain else MirrorDescent(
        model.parameters(), LR, P
    )  # fmt: skip
    # All batches cost the plain way the same: one is enough to know it, after one to warm up.
    warm, timed = batches[:1], batches[:1] if plain else batches
    spent = {"step": 0.0, "optimizer": 0.0}
    for i, ids in enumerate([*warm, *timed]):
        began = time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(forward(ids), torch.arange(batch) % 2).backward()
        middle = time.process_time()
        optimizer.step()
        ended = time.process_time()
        if i >= len(warm):
            spent["step"] += (ended - began) / len(timed)
            spent["optimizer"] += (ended - middle) / len(timed)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {**spent, "memory": memory, "predictions": predictions}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=int, default=3, help="3, 4 or 6 (default 3)")
    parser.add_argument("--batch", type=int, default=16, help="texts in a batch (default 16)")
    parser.add_argument("--batches", type=int, default=6, help="batches of ours (default 6)")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.size, options.batch, options.batches)))
        return
    shared = ["--size", options.size, "--batch", options.batch, "--batches", options.batches]
    found = {}
    for name, variant in VARIANTS.items():
        command = [sys.executable, __file__, *map(str, shared), "--variant", variant]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout)
    print(f"paper's size {options.size}, batch of {options.batch}, p = {P}\n")
    print("| variant | CPU s a batch | faster | memory, GB | of plain | optimizer's share |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, one in found.items():
        base = found[name.replace("ours", "plain")]
        print(
            f"| {name} | {one['step']:.2f} | {base['step'] / one['step']:.1f} x"
            f" | {one['memory']:.2f} | {one['memory'] / base['memory']:.2f}"
            f" | {one['optimizer'] / one['step']:.1%} |"
        )
    sums = [one["predictions"] for one in found.values()]
    print(f"\npredictions agree to {max(sums) / min(sums) - 1:.0e} (sum of squared logits)")


if __name__ == "__main__":
    main()
