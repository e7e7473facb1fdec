"""Time and memory of one optimizer step, as ratios to torch's own optimizers.

    python benchmarks/step.py [--steps 15] [--quick]

22.5 M float32 parameters, shaped like a text classifier of six blocks (width 384,
vocabulary 30,522), on one thread. The optimizers take turns, a few steps each, in several
rounds, so that a slow spell of the machine falls on all of them; a time is the median over
rounds. Absolute times depend on the machine: the ratios are what counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from mirrorhead import MirrorAdam, MirrorDescent

SHAPES = [
    (30522, 384),
    (512, 384),
    *[s for _ in range(6) for s in [(384, 384)] * 4 + [(384, 1536), (1536, 384), (384,), (384,)]],
    (384, 2),
]


PEERS = (
    "AdamW fused",
    "AdamW foreach",
    "two powers, eager, p=1.1",
    "memory floor of a dual state",
)


class TwoPowers(torch.optim.Optimizer):
    """The plain formula in eager torch: two powers of every weight, no state."""

    def __init__(self, params: Sequence[Tensor], lr: float, p: float) -> None:
        super().__init__(params, {"lr": lr, "p": p})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            p, lr = group["p"], group["lr"]
            for w in group["params"]:
                u = w.sign() * w.abs().pow(p - 1) - lr * w.grad
                w.copy_(u.sign() * u.abs().pow(1 / (p - 1)))


class MemoryFloor(torch.optim.Optimizer):
    """What no step with a dual state can beat: read w, u and the gradient, write w and u."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__(params, {})
        for w in params:
            self.state[w]["u"] = torch.zeros_like(w)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for w in self.param_groups[0]["params"]:
            _touch(w.data.flatten(), self.state[w]["u"].flatten(), w.grad.flatten())


@torch.compile(dynamic=True)
def _touch(w: Tensor, u: Tensor, g: Tensor) -> None:
    u.add_(g, alpha=1e-3)
    w.mul_(0.5).add_(u)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=15, help="rounds (default 15)")
    parser.add_argument("--quick", action="store_true", help="p = 1.1 only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    params = make_parameters()
    count = sum(p.numel() for p in params)
    print(
        f"{count / 1e6:.1f} M float32 parameters in {len(params)} tensors,"
        f" torch {torch.__version__}"
    )

    adamw_fused = torch.optim.AdamW(params, lr=1e-4, fused=True)
    adamw_foreach = torch.optim.AdamW(params, lr=1e-4, foreach=True)
    rows: list[tuple[str, Any, str, float]] = []  # name, optimizer, peer, bar
    fused_bars = {1.1: 1.0} if args.quick else {
        1.1: 1.0, 1.5: 1.0, 2.0: 1.0, 3.0: 1.0, 1.3: 2.5, 1.75: 2.5, 2.7: 2.5
    }  # fmt: skip
    for p, bar in fused_bars.items():
        rows.append((f"MirrorDescent fused p={p:g}", descent(params, p, fused=True), "fused", bar))
    for p in (1.1,) if args.quick else (1.1, 1.5):
        rows.append((f"MirrorAdam fused p={p:g}", adam(params, p), "fused", 1.6))
    rows.append(("MirrorDescent foreach p=1.1", descent(params, 1.1, foreach=True), "foreach", 1.0))
    if not args.quick:
        stateless = descent(params, 1.1, foreach=True, keep_dual=False)
        rows.append(("MirrorDescent foreach p=1.1, no state", stateless, "foreach", 0))
        rows.append(("MirrorDescent foreach p=3", descent(params, 3.0, foreach=True), "foreach", 0))
    two_powers = TwoPowers(params, lr=1e-3, p=1.1)
    floor = MemoryFloor(params)

    everything: dict[str, Any] = {"AdamW fused": adamw_fused, "AdamW foreach": adamw_foreach}
    everything |= {name: optimizer for name, optimizer, *_ in rows}
    everything["two powers, eager, p=1.1"] = two_powers
    everything["memory floor of a dual state"] = floor
    times = measure(params, everything, args.steps)
    memory = {name: state_ratio(optimizer, count) for name, optimizer in everything.items()}
    extra = {name: peak_extra(optimizer, count) for name, optimizer in everything.items()}

    head = f"{'optimizer':40} {'ms':>7} {'ratio to':>17} {'bar':>6} {'state':>6} {'extra':>6}"
    print(head + "\n" + "-" * len(head))
    for name in PEERS:
        print(f"{name:40} {times[name]:7.1f} {'':17} {'':6} {memory[name]:6.2f} {extra[name]:6.2f}")
    missed = []
    for name, _, peer, bar in rows:
        ratio = times[name] / times[f"AdamW {peer}"]
        if bar and ratio > bar:
            missed.append(name)
        print(
            f"{name:40} {times[name]:7.1f} {ratio:7.2f} {peer:>9} {bar or '':>6}"
            f" {memory[name]:6.2f} {extra[name]:6.2f}"
        )
    speedup = times["two powers, eager, p=1.1"] / times["MirrorDescent fused p=1.1"]
    print(f"fused p=1.1 is {speedup:.1f} x faster than two powers in eager torch (bar: 20)")
    best = times["two powers, eager, p=1.1"] / times["memory floor of a dual state"]
    print(f"the memory floor itself is {best:.1f} x faster than two powers in eager torch")
    print("state: memory kept between steps, extra: peak scratch memory of a step, both in")
    print("units of the parameters' memory.")
    if speedup < 20:
        missed.append("two powers")
    print("all bars met" if not missed else f"bars missed: {', '.join(missed)}")


def make_parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape) * 0.05) for shape in SHAPES]


def descent(params: Sequence[nn.Parameter], p: float, **options: Any) -> MirrorDescent:
    return MirrorDescent(params, lr=1e-3, p=p, **options)


def adam(params: Sequence[nn.Parameter], p: float) -> MirrorAdam:
    return MirrorAdam(params, lr=1e-4, p=p, fused=True)


def measure(
    params: Sequence[nn.Parameter], optimizers: dict[str, Any], rounds: int
) -> dict[str, float]:
    """Median milliseconds of a step, each optimizer on its own copy of the weights."""
    weights = {}
    for name, optimizer in optimizers.items():
        weights[name] = [p.detach().clone() for p in params]
        use(params, weights[name])
        for _ in range(4):  # warm-up: compiles, makes state, moves every weight
            for param in params:
                param.grad = torch.randn_like(param) * 0.01
            optimizer.step()
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            use(params, weights[name])
            optimizer.step()  # brings its own state back to the cache
            for _ in range(2):
                start = time.perf_counter()
                optimizer.step()
                times[name].append(time.perf_counter() - start)
    return {name: 1e3 * median(values) for name, values in times.items()}


def use(params: Sequence[nn.Parameter], weights: Sequence[Tensor]) -> None:
    for param, weight in zip(params, weights, strict=True):
        param.data = weight


def state_ratio(optimizer: torch.optim.Optimizer, count: int) -> float:
    tensors = [x for state in optimizer.state.values() for x in state.values()]
    return sum(x.numel() * x.element_size() for x in tensors if x.dim()) / (4 * count)


def peak_extra(optimizer: torch.optim.Optimizer, count: int) -> float:
    """Peak of memory allocated by torch during a step, over what was there before."""
    optimizer.step()  # takes in the weights that another one left
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        optimizer.step()
    total = peak = 0
    for event in profile.profiler.kineto_results.events():  # pyright: ignore
        if event.name() == "[memory]":
            total += event.nbytes()  # pyright: ignore
            peak = max(peak, total)
    return peak / (4 * count)


if __name__ == "__main__":
    main()
