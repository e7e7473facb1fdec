"""Milliseconds and bytes a weight of one step of CenteredAdam, against AdamW.

python benchmarks/centred_step.py  # for a matrix of 10.6 million weights
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mirrorhead import CenteredAdam


def main() -> None:
    torch.set_num_threads(1)
    for name in ("AdamW, fused", "AdamW, foreach", "centred, p = 1.1"):
        weight = nn.Parameter(torch.randn(3072, 3456))
        weight.grad = torch.randn_like(weight)
        if name.startswith("AdamW"):
            optimizer: Optimizer = AdamW(
                [weight], 1e-4, fused="fused" in name, foreach="foreach" in name
            )
        else:
            optimizer = CenteredAdam([weight], 1.1, reach=0.5, total_steps=60)
        optimizer.step()
        times = []
        for _ in range(10):
            began = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - began)
        state = sum(t.nbytes for t in optimizer.state[weight].values() if isinstance(t, Tensor))
        print(f"{name:18}{1e3 * median(times):8.1f} ms {state / weight.numel():6.1f} bytes")


if __name__ == "__main__":
    main()
