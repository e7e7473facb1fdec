"""A trainer and a receiver for the kill tests of weight sync: each dies where it is told to."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import mirrorhead as mh
from mirrorhead.patches import in_place

CHECKPOINT_EVERY = 5


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def die_at(here: str, wanted: str) -> None:
    if here == wanted:
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, steps: int, kill: str, originals: bool, seed: int) -> None:
    """Train and publish; resume from the checkpoint if there is one. Prints the last version."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint, start = folder / "checkpoint.pt", 0
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    sync = mh.WeightSync(model)
    if saved:
        sync.load_state_dict(saved["sync"])
    else:
        save_file(sync.weights(), folder / "copy")
    for step in range(start, steps):
        torch.manual_seed(1000 * seed + step)  # a resumed run sees other data
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        patch = sync.collect(commit=False)
        die_at(f"{step} collected", kill)
        patch.save(folder / f"{seed}-{step:03d}.safetensors", originals=originals)
        die_at(f"{step} published", kill)
        sync.commit()
        die_at(f"{step} committed", kill)
        if step % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
            parts = {"model": model, "optimizer": optimizer, "sync": sync}
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**saved, "step": step + 1}, folder / "checkpoint.tmp")
            die_at(f"{step} half-saved", kill)
            (folder / "checkpoint.tmp").rename(checkpoint)
            die_at(f"{step} saved", kill)
    print(sync.version)


def receive(folder: Path, kill: bool) -> None:
    """Catch up from the full copy; die after the first tensor is written. Prints the version."""
    model = net(torch.bfloat16)
    model.load_state_dict(load_file(folder / "copy"))
    receiver = mh.WeightReceiver(model)
    put = in_place._Write.put

    def put_and_die(self: in_place._Write, values: torch.Tensor) -> None:
        put(self, values)
        die_at("kill", "kill" if kill else "")

    in_place._Write.put = put_and_die
    receiver.receive(folder)
    receiver.verify()
    print(receiver.version)


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "train":
        train(place, int(sys.argv[3]), sys.argv[4], sys.argv[5] == "originals", int(sys.argv[6]))
    else:
        receive(place, sys.argv[3] == "kill")
