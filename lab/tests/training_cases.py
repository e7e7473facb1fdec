"""A small task for the training tests, and the script that is killed or run by two processes."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from mirrorhead_lab.models import TextClassifier, TextSettings
from mirrorhead_lab.training import OptimizerSettings, TrainSettings, train

OPTIMIZERS = {
    "mirror-descent": OptimizerSettings("mirror-descent", lr=0.05, p=1.5, momentum=0.5),
    "mirror-descent 1.1": OptimizerSettings(
        "mirror-descent", lr=0.02, p=1.1, normalize="global", weight_decay=0.01
    ),
    "mirror-adam": OptimizerSettings("mirror-adam", lr=5e-3, p=1.1, weight_decay=0.01),
    "adamw": OptimizerSettings("adamw", lr=5e-3, weight_decay=0.1),
    "sgd": OptimizerSettings("sgd", lr=0.05, momentum=0.9),
    "proximal-l1": OptimizerSettings("proximal-l1", lr=0.05, momentum=0.9, l1=1e-2),
}


class Task:
    """Sequences of different lengths; the label is whether token 5 is among them."""

    def __init__(self, n: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 2, n)
        self.rows = []
        for label in self.labels:
            row = rng.integers(6, 20, rng.integers(4, 12))
            row[0] = 2
            row[rng.integers(1, len(row))] = 5 if label else 4
            self.rows.append(row)
        self.lengths = np.array([len(row) for row in self.rows])

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(len(indices), int(self.lengths[indices].max()), dtype=torch.long)
        for i, index in enumerate(indices):
            ids[i, : self.lengths[index]] = torch.from_numpy(self.rows[index])
        return ids, torch.from_numpy(self.labels[indices])


def small_model(dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> TextClassifier:
    torch.manual_seed(0)
    settings = TextSettings(
        vocabulary=20,
        max_length=12,
        dim=16,
        hidden=24,
        layers=2,
        heads=2,
        dropout=dropout,
        attention_dropout=dropout,
        embedding_std=0.3,
    )
    return TextClassifier(settings).to(dtype)


def run(folder: Path, optimizer: str = "adamw", dropout: float = 0.1, **changes: Any) -> Any:
    settings = TrainSettings(
        **{
            "epochs": 2,
            "batch_size": 16,
            "optimizer": OPTIMIZERS[optimizer],
            "schedule": "cosine",
            "checkpoint_every": 3,
            **changes,
        }
    )
    dtype = torch.float64 if dropout == 0 else torch.float32
    model = small_model(dropout, dtype)
    outcome = train(model, Task(120), Task(60, seed=1), settings, folder)
    return model, outcome


def weights(folder: Path) -> dict[str, bytes]:
    """All that a finished run leaves, but the clock's part."""
    (last,) = sorted((folder / "checkpoints").glob("step-*"))[-1:]
    paths = [last / "model.safetensors", last / "optimizer.safetensors", last / "state.json"]
    paths += [folder / "best.safetensors", folder / "result.json", folder / "settings.json"]
    return {path.name: path.read_bytes() for path in paths}


# --- kills: a process that has imported everything forks runs, which are killed ----------------

FILE_EVENTS = (
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.chmod",
    "shutil.rmtree",
)


def start(
    folder: Path, optimizer: str, *, operation: int | None = None, seconds: float | None = None
) -> int:
    """Fork a run that is killed at a file operation, or after some CPU time, or not at all."""
    child = os.fork()
    if child:
        return child
    seen = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and str(folder) in str(args[0] if args else ""):
            seen += 1
            if operation is not None and seen > operation:
                os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        sys.addaudithook(watch)
        if seconds is not None:  # nothing handles SIGPROF: it ends the process where it stands
            signal.setitimer(signal.ITIMER_PROF, seconds)
        run(folder, optimizer)
        (folder.parent / f"{folder.name}.count").write_text(str(seen))
        code = 0
    finally:
        os._exit(code)


def finished(child: int) -> tuple[bool, float]:
    """Wait for a run: whether it came to its end (and was not killed), and its CPU time."""
    _, status, usage = os.wait4(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGPROF)
        return False, 0.0
    assert os.WEXITSTATUS(status) == 0, f"a run failed with {os.WEXITSTATUS(status)}"
    return True, usage.ru_utime + usage.ru_stime


def kill_and_resume(root: Path, optimizer: str, kills: int) -> None:
    """Half of the kills at a random time, half at a random file operation."""
    run(root / "warm", optimizer)  # what is imported on first use need not be by each child
    rng = random.Random(0)
    done, seconds = finished(start(root / "whole", optimizer))
    assert done
    expected = weights(root / "whole")
    lines = len((root / "whole" / "log.jsonl").read_text().splitlines())
    operations = int((root / "whole.count").read_text())
    killed = 0
    for i in range(kills):
        folder = root / f"killed-{i}"
        if i % 2:
            child = start(folder, optimizer, operation=rng.randrange(operations))
        else:
            child = start(folder, optimizer, seconds=rng.uniform(0.02, 0.9) * seconds)
        killed += not finished(child)[0]
        assert finished(start(folder, optimizer))[0]
        for name, content in weights(folder).items():
            assert content == expected[name], f"{name} differs after kill {i}"
        logged = len((folder / "log.jsonl").read_text().splitlines())
        assert logged == lines, f"the log has {logged} lines after kill {i}, not {lines}"
        left = {path.name for path in folder.rglob(".*")}
        assert not left, f"left behind after kill {i}: {left}"
    assert killed >= 0.8 * kills, f"only {killed} runs were killed before their end"
    print(f"{killed} of {kills} runs were killed, and all came to the same end")


def main() -> None:
    torch.set_num_threads(1)
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "kill":
        kill_and_resume(folder, sys.argv[3], kills=int(sys.argv[4]))
    elif what == "team":
        run(folder, sys.argv[3], dropout=0.0, parallel=sys.argv[4], clip=1.0)
        if os.environ.get("RANK", "0") == "0":
            assert load_file(folder / "best.safetensors")


if __name__ == "__main__":
    main()
