"""A trainer and two receivers in three processes; the weights that changed travel as files.

One receiver joins late, with a full copy; the other sleeps and misses patches. The folder keeps
the last patches only, so who sleeps too long needs a full copy too. At the end all three print a
version, a hash of all weights, and it must be the same:

    python examples/weight_sync.py --steps 200
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import mirrorhead as mh

KEPT = 30  # patches
COPY_EVERY = 50  # steps between full copies


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(64, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 64)]
    return nn.Sequential(*layers).to(dtype)


def train(folder: Path, steps: int) -> str:
    """Learn a permutation; publish a patch each step, and now and then a full copy."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    sync = mh.WeightSync(net, torch.bfloat16)
    target = torch.randperm(64)
    changed = sent = 0
    for step in range(steps + 1):
        if step % COPY_EVERY == 0 or step == steps:
            save_file(sync.weights(), folder / "copy.tmp")
            (folder / "copy.tmp").rename(folder / f"copy-{sync.number:06d}")
        if step == steps:
            break
        tokens = torch.randint(64, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens), target[tokens]).backward()
        optimizer.step()
        patch = sync.collect(commit=False)
        file = folder / f"{sync.number + 1:06d}.safetensors"
        patch.save(file, originals=False)
        sync.commit()  # the patch is there: it need not be in the next one
        changed, sent = changed + patch.count, sent + file.stat().st_size
        for old in sorted(folder.glob("*.safetensors"))[:-KEPT]:
            old.unlink()
    (folder / "end").write_text(sync.version)
    weights = sum(param.numel() for param in net.parameters())
    share, dense = changed / steps / weights, 2 * weights
    print(f"trainer: {share:.1%} of the weights change in a step; patches of {sent / steps:,.0f}")
    print(f"         bytes in place of {dense:,}")
    return sync.version


def receive(folder: Path, name: str, wait: int, nap: float) -> str:
    """Follow the trainer: start at patch `wait`, and sleep `nap` seconds between two looks."""
    while len(list(folder.glob("0*"))) < min(wait, KEPT) or not list(folder.glob("copy-*")):
        time.sleep(0.01)
    net = model(torch.bfloat16)
    copies = jumps = 0
    receiver = None
    while True:
        ended = (folder / "end").exists()  # before the look: nothing is published after it
        try:
            if receiver is None:
                net.load_state_dict(load_file(max(folder.glob("copy-*"))))
                receiver = mh.WeightReceiver(net)
                copies += 1
            receiver.receive(folder)
            jumps += 1
        except (mh.PatchError, FileNotFoundError) as error:
            if "full copy" in str(error):
                print(f"{name}: {error}")
                receiver = None  # the patches that it needs are gone
        if ended and receiver is not None and receiver.version == (folder / "end").read_text():
            break
        time.sleep(nap)
    receiver.verify()
    print(f"{name}: {copies} full copies, {jumps} jumps")
    return receiver.version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--role", choices=["all", "early", "late"], default="all")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    torch.set_num_threads(1)
    if options.role != "all":
        wait, nap = (0, 0.4) if options.role == "early" else (20, 0.02)
        print("version", receive(options.folder, options.role, wait, nap))
        return
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, "--folder", name, "--role"]
        others = [
            subprocess.Popen([*command, role], stdout=subprocess.PIPE, text=True)
            for role in ("early", "late")
        ]
        versions = [train(Path(name), options.steps)]
        for other in others:
            said, _ = other.communicate()
            *lines, last = said.splitlines()
            print("\n".join(lines))
            versions.append(last.removeprefix("version "))
            if other.returncode:
                sys.exit("a receiver failed")
    if len(set(versions)) > 1:
        sys.exit(f"the versions differ: {versions}")
    print(f"all three have version {versions[0]}")


if __name__ == "__main__":
    main()
