"""What weight sync costs the trainer and a receiver, as shares of a fused AdamW step.

python benchmarks/weight_sync.py  # 22.7 million weights, of which about 1 % change in a step
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from mirrorhead import WeightReceiver, WeightSync
from mirrorhead.patches.fingerprint import Fingerprint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="each of 3.8 million weights")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1536, 2464) for _ in range(options.layers)))
    for param in model.parameters():
        param.grad = torch.randn_like(param)
        nn.init.normal_(param, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-7, fused=True, weight_decay=0)
    sync = WeightSync(model)
    served = sync.weights()
    receiver = WeightReceiver(served)
    flat = torch.cat([weight.flatten() for weight in served.values()])
    patch = sync.collect()

    def collect() -> None:
        nonlocal patch
        patch = sync.collect(commit=False)

    parts: dict[str, Callable[[], object]] = {
        "AdamW's step": optimizer.step,
        "collect": collect,
        "commit": sync.commit,
        "encode the patch": lambda: patch.bytes,
        "receive": lambda: receiver.receive([patch]),
        "full hash: ours": lambda: Fingerprint.of(flat),
        "full hash: SHA-256": lambda: hashlib.sha256(flat.view(torch.uint8).numpy().data).digest(),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    changed = []
    for _ in range(options.rounds):  # in turn: the machine may be slower at times
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            times[name].append(time.perf_counter() - began)
        changed.append(patch.count / patch.weights)
    weights = patch.weights
    print(f"{weights:,} weights, {median(changed):.2%} change in a step, {patch.bytes:,} bytes")
    print(f"{'':20}{'ns a weight':>12}{'of the step':>13}")
    step = times["AdamW's step"]
    for name, found in times.items():
        share = median(one / other for one, other in zip(found, step, strict=True))
        print(f"{name:20}{1e9 * median(found) / weights:12.2f}{share:12.0%}")
    print("memory of a sync: 2 bytes a weight, the snapshot in bfloat16")


if __name__ == "__main__":
    main()
