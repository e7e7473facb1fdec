"""A large model under FSDP2: does it train, how fast, with how much memory?

    torchrun --nproc-per-node 2 benchmarks/fsdp.py            # BERT-base: 12 layers, 12 heads, 768
    torchrun --nproc-per-node 2 benchmarks/fsdp.py --steps 50 --batch 4 --tokens 32

A BERT from scratch learns to fill in masked words of IMDb reviews, by MirrorAdam on sharded
parameters. Prints the loss along the steps, the median time of a step, the CPU time of the first
process per step, and the peak memory of each process. The loss at the start is about
log(vocabulary) = 10.3.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.distributed as dist
from torch import Tensor

from mirrorhead import MirrorAdam
from mirrorhead.optim._sharded import local
from mirrorhead_lab.datasets import load_imdb
from mirrorhead_lab.datasets.encoded import load_tokenizer
from mirrorhead_lab.training.process_group import process_group

MASK, MASKED = 103, 0.15  # [MASK], and the share of tokens that are predicted


def batches(steps: int, size: int, tokens: int, rank: int) -> list[Tensor]:
    """Token numbers of this process's reviews, (size, tokens) for each step."""
    tokenizer = load_tokenizer(max_length=tokens)
    texts = load_imdb("train").texts
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(rank)).tolist()
    long = (ids for i in order if len(ids := tokenizer.encode(texts[i]).ids) == tokens)
    return [torch.tensor([next(long) for _ in range(size)]) for _ in range(steps)]


def masked(ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs with some words replaced by [MASK], and labels that are -100 elsewhere."""
    hidden = torch.rand(ids.shape, generator=generator) < MASKED
    hidden[:, 1] = True  # at least one in each text
    return ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, -100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, value in (("layers", 12), ("heads", 12), ("width", 768), ("steps", 50)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=4, help="reviews per step, of all processes")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--p", type=float, default=1.5)
    options = parser.parse_args()
    from transformers import BertConfig, BertForMaskedLM

    with process_group() as group:
        if options.batch % group.size:
            parser.error(f"--batch must be a multiple of {group.size}, the number of processes")
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            intermediate_size=4 * options.width,
            max_position_embeddings=max(options.tokens, 16),
        )
        model = BertForMaskedLM(config)
        weights = sum(param.numel() for param in model.parameters())
        wrapped = group.wrap(model, "fsdp")
        optimizer = MirrorAdam(model.parameters(), options.lr, options.p)  # after the sharding
        own = sum(local(param).numel() for param in model.parameters())
        if group.is_first:
            print(
                f"{weights / 1e6:.1f} M weights, {own / 1e6:.1f} M of them in this process;"
                f" {group.size} processes, {options.batch} x {options.tokens} tokens per step"
            )
        generator = torch.Generator().manual_seed(group.rank)
        own_size = options.batch // group.size
        given = batches(options.steps, own_size, options.tokens, group.rank)
        losses, seconds, cpu = [], [], time.process_time()
        for step, ids in enumerate(given):
            began = time.perf_counter()
            inputs, labels = masked(ids, generator)
            loss = wrapped(input_ids=inputs, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = float(group.sum(loss.detach().double())) / group.size
            losses.append(mean)
            seconds.append(time.perf_counter() - began)
            if group.is_first and (step % 10 == 0 or step == options.steps - 1):
                print(f"step {step + 1:3}: loss {mean:.3f}, {seconds[-1]:.2f} s", flush=True)
        cpu = (time.process_time() - cpu) / options.steps
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        peaks = [torch.zeros(1, dtype=torch.float64) for _ in range(group.size)]
        if group.size > 1:
            dist.all_gather(peaks, torch.tensor([peak], dtype=torch.float64))
        else:
            peaks = [torch.tensor([peak])]
        if group.is_first:
            part = max(1, len(losses) // 5)
            first, last = statistics.fmean(losses[:part]), statistics.fmean(losses[-part:])
            print(
                f"loss {first:.3f} over the first fifth, {last:.3f} over the last (log"
                f" {config.vocab_size} = {math.log(config.vocab_size):.2f});"
                f" {statistics.median(seconds):.2f} s per step (median), {cpu:.2f} CPU s; peak"
                f" memory {', '.join(f'{float(one):.2f}' for one in peaks)} GB"
            )


if __name__ == "__main__":
    main()
