"""Run the two-process suites many times, to find what fails once in a hundred runs.

    python tests/library/repeat_distributed.py --runs 200

Pairs are forked from one process that has torch imported, and where a suite goes through all
options of the optimizers each run draws one of them, so that a run takes seconds. Start it beside
other work: what depends on timing shows when the cores are busy. With --fresh every process is a
new interpreter with its own order of sets, so that collectives whose order depends on it fail.
(TORCH_DISTRIBUTED_DEBUG=DETAIL would check the order, but DDP in torch 2.13 crashes under it with
gloo, in c10d::Logger::set_env_variables.) A failing run keeps its folder, with what its processes
printed, and core dumps if the system writes them there.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import distributed_worker
from distributed_worker import SUITES, WORLD, MirrorAdam, MirrorDescent, main

QUICK = tuple(suite for suite in SUITES if suite != "fused")  # that one compiles for a minute


def forked(suite: str, folder: Path) -> list[int]:
    """Run a suite in forked processes; return how each ended, as `waitpid` says it."""
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            try:
                main(rank, suite, str(folder))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(1)  # `main` leaves with 0 itself
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def fresh(suite: str, folder: Path) -> list[int]:
    """The same with an interpreter for each process."""
    code = f"from distributed_worker import main; main({{}}, {suite!r}, {str(folder)!r})"
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    processes = [
        subprocess.Popen([sys.executable, "-c", code.format(rank)], env=environment, cwd=folder)
        for rank in range(WORLD)
    ]
    return [process.wait() for process in processes]


def warm_up() -> None:
    """Import what torch imports at the first step of an optimizer, once for all pairs."""
    import torch
    import torch._dynamo

    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)  # by hand: after a backward pass, autograd refuses to be forked
    for optimizer in (MirrorDescent([weight], 0.1), MirrorAdam([weight])):
        optimizer.step()


def repeat(runs: range, suites: tuple[str, ...], start: bool) -> int:
    """Run the suites in turn; print and return the number of failures."""
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    failures, done = 0, Counter[str]()
    options = list(distributed_worker.every_option())
    warm_up()
    for number in runs:
        suite = suites[number % len(suites)]
        began = time.monotonic()
        drawn = random.Random(number).sample(options, 1)
        distributed_worker.every_option = lambda drawn=drawn: iter(drawn)
        folder = Path(tempfile.mkdtemp(prefix=f"pair-{suite}-"))
        codes = fresh(suite, folder) if start else forked(suite, folder)
        done[suite] += 1
        if any(codes):
            failures += 1
            print(f"{suite}: processes ended with {codes}; see {folder}", flush=True)
        else:
            shutil.rmtree(folder)
        passed = f"{sum(done.values())} runs, {failures} failures"
        print(f"{passed}; {suite} {time.monotonic() - began:.1f} s", flush=True)
    print(f"done: {dict(done)}, {failures} failures", flush=True)
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first run draws with this seed")
    parser.add_argument("--suites", nargs="+", choices=tuple(SUITES), default=QUICK)
    parser.add_argument("--fresh", action="store_true", help="new interpreters")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.runs)
    sys.exit(bool(repeat(numbers, tuple(options.suites), options.fresh)))
