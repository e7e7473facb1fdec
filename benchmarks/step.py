"""Time and memory of one optimizer step on a CPU, as ratios to torch's fused AdamW.

    python benchmarks/step.py [--rounds 15] [--quick] [--instructions avx512 | avx2 | baseline]

22.5 M float32 parameters, shaped like a text classifier of six blocks (width 384, vocabulary
30,522), on one thread. The optimizers take turns in several rounds, so that a slow spell of the
machine falls on all of them; a time is the median over rounds. Absolute times depend on the
machine: the ratios count. A floor is a C loop that only reads and writes as many streams of bytes
as the step does. --instructions forces an instruction set, for torch and for mirrorhead alike.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from mirrorhead import MirrorAdam, MirrorDescent, native

LARGE = [
    (30522, 384),
    (512, 384),
    *[s for _ in range(6) for s in [(384, 384)] * 4 + [(384, 1536), (1536, 384), (384,), (384,)]],
    (384, 2),
]
# 1.5 M weights in 103 tensors, most of them tiny: a transformer of twelve narrow blocks.
SMALL = [
    *[s for _ in range(12) for s in [(96, 96)] * 4 + [(96, 384), (384, 96), (96,), (96,)]],
    *[(256, 64)] * 5,
    *[(384,)] * 2,
]
TORCH_NAMES = {"avx512": "avx512", "avx2": "avx2", "baseline": "default"}
# name, streams read and written (the floor), bar
DESCENT = {1.1: (3, 2, 0.85), 1.5: (3, 2, 0.85), 2.0: (2, 1, 0.65), 3.0: (2, 1, 0.65)}
DESCENT |= {1.3: (3, 2, 1.3), 1.75: (3, 2, 1.3), 2.7: (2, 1, 1.3)}
ADAM = {1.1: (5, 4, 1.4), 1.5: (5, 4, 1.4), 1.3: (5, 4, 1.8)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="p = 1.1 only")
    parser.add_argument("--instructions", choices=list(TORCH_NAMES))
    args = parser.parse_args()
    if args.instructions and os.environ.get("MIRRORHEAD_NATIVE") != args.instructions:
        os.environ["MIRRORHEAD_NATIVE"] = args.instructions  # both are read when torch loads
        os.environ["ATEN_CPU_CAPABILITY"] = TORCH_NAMES[args.instructions]
        os.execv(sys.executable, [sys.executable, *sys.argv])
    print(
        f"{processor()}; torch {torch.__version__} uses {torch.backends.cpu.get_cpu_capability()}"
    )
    print(f"mirrorhead uses {native.instruction_set() or 'torch: its C library was not built'}")
    torch.set_num_threads(1)
    missed = large(args.rounds, args.quick)
    missed += small(args.rounds)
    if not args.quick:
        missed += two_threads(args.rounds)
    print("all bars met" if not missed else f"bars missed: {', '.join(missed)}")


def large(rounds: int, quick: bool) -> list[str]:
    params = make_parameters(LARGE)
    count = sum(p.numel() for p in params)
    print(f"\n{count / 1e6:.1f} M float32 parameters in {len(params)} tensors, one thread")
    rows: list[tuple[str, Any, tuple[int, int, float]]] = []
    for p, row in DESCENT.items():
        if p == 1.1 or not quick:
            rows.append((f"MirrorDescent p={p:g}", MirrorDescent(params, lr=1e-3, geometry=p), row))
    for p, row in ADAM.items():
        if p == 1.1 or not quick:
            rows.append((f"MirrorAdam p={p:g}", MirrorAdam(params, lr=1e-4, geometry=p), row))
    optimizers = {"AdamW fused": torch.optim.AdamW(params, lr=1e-4, fused=True)}
    optimizers |= {name: optimizer for name, optimizer, _ in rows}
    streams = {(4, 3), *[row[:2] for _, _, row in rows]}
    times, first = measure(params, optimizers, rounds, floors(count, streams))
    adamw = times["AdamW fused"]
    head = f"{'':22} {'ms':>7} {'x AdamW':>8} {'bar':>5} {'floor':>6} {'first':>6}"
    head += f" {'state':>6} {'extra':>6}"
    print(head + "\n" + "-" * len(head))
    missed = []
    for name, optimizer, (reads, writes, bar) in [
        ("AdamW fused", optimizers["AdamW fused"], (4, 3, 0.0)), *rows
    ]:  # fmt: skip
        ratio, begin = times[name] / adamw, first[name] / times[name]
        missed += [name] if bar and ratio > bar else []
        missed += [f"first step of {name}"] if bar and begin > 3 else []
        print(
            f"{name:22} {times[name]:7.1f} {ratio:8.2f} {bar or '':>5}"
            f" {times[reads, writes] / adamw:6.2f} {begin:6.1f}"
            f" {state_ratio(optimizer, count):6.2f} {peak_extra(optimizer, count):6.3f}"
        )
    print("floor: moving the bytes, x AdamW. first: the first step of all, x a later one; its bar")
    print("is 3. state: memory between steps. extra: peak scratch memory of a step, by torch's")
    print("allocator. Both in units of the parameters' memory.")
    return missed


def small(rounds: int) -> list[str]:
    params = make_parameters(SMALL)
    count = sum(p.numel() for p in params)
    print(f"\n{count / 1e6:.1f} M float32 parameters in {len(params)} tensors, one thread")
    optimizers: dict[str, Any] = {
        "AdamW fused": torch.optim.AdamW(params, lr=1e-4, fused=True),
        "MirrorDescent p=1.1": MirrorDescent(params, lr=1e-3, geometry=1.1),
        "MirrorAdam p=1.1": MirrorAdam(params, lr=1e-4, geometry=1.1),
    }
    times, _ = measure(params, optimizers, 5 * rounds, {})
    missed = []
    for name, bar in zip(optimizers, (0, 1.2, 1.6), strict=True):
        ratio = times[name] / times["AdamW fused"]
        missed += [f"{name}, small tensors"] if bar and ratio > bar else []
        print(f"{name:22} {times[name]:7.2f} {ratio:8.2f} {bar or '':>5}")
    return missed


def two_threads(rounds: int) -> list[str]:
    params = make_parameters(LARGE)
    optimizers: dict[str, Any] = {
        "AdamW fused": torch.optim.AdamW(params, lr=1e-4, fused=True),
        "MirrorDescent p=1.1": MirrorDescent(params, lr=1e-3, geometry=1.1),
        "MirrorAdam p=1.1": MirrorAdam(params, lr=1e-4, geometry=1.1),
    }
    one, _ = measure(params, optimizers, rounds, {})
    torch.set_num_threads(2)
    two, _ = measure(params, optimizers, rounds, {})
    torch.set_num_threads(1)
    gains = {name: one[name] / two[name] for name in optimizers}
    print("\ntwo threads, x one thread (bar: 1.6, where AdamW gains as much)")
    for name, gain in gains.items():
        print(f"{name:22} {gain:.2f}")
    least = min(1.6, gains["AdamW fused"])
    return [f"{name}, two threads" for name, gain in gains.items() if gain < 0.95 * least]


def make_parameters(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape) * 0.05) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 0.01
    return params


def floors(count: int, streams: set[tuple[int, int]]) -> dict[tuple[int, int], Callable[[], None]]:
    """Loops that read and write that many streams of `count` numbers."""
    size = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
    move = native.function("move_bytes", size)
    if move is None:
        raise SystemExit("the floor is measured by the C library, which was not built")
    memory = [torch.zeros(count) for _ in range(5)]
    pointers = (ctypes.c_void_p * 5)(*[x.data_ptr() for x in memory])

    def loop(reads: int, writes: int) -> Callable[[], None]:
        return lambda: move(pointers, reads, writes, memory[0].numel())

    return {key: loop(*key) for key in streams}


def measure(
    params: Sequence[nn.Parameter],
    optimizers: dict[str, Any],
    rounds: int,
    loops: dict[tuple[int, int], Callable[[], None]],
) -> tuple[dict[Any, float], dict[str, float]]:
    """Median milliseconds of a step, and of the first step of all.

    Each optimizer has its own copy of the weights; the gradients are shared.
    """
    weights, first = {}, {}
    for name, optimizer in optimizers.items():
        weights[name] = [p.detach().clone() for p in params]
        use(params, weights[name])
        first[name] = 1e3 * timed(optimizer.step)
        for _ in range(3):
            optimizer.step()
    times: dict[Any, list[float]] = {name: [] for name in (*optimizers, *loops)}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            use(params, weights[name])
            optimizer.step()  # brings its own state back to the cache
            times[name] += [timed(optimizer.step) for _ in range(2)]
        for name, loop in loops.items():
            loop()
            times[name] += [timed(loop) for _ in range(2)]
    return {name: 1e3 * median(values) for name, values in times.items()}, first


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


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


def processor() -> str:
    """The processor's name, as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
