"""Weight sync when things fail: hostile files, killed processes, a thousand random runs."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mirrorhead as mh
from mirrorhead.patches import in_place
from mirrorhead.patches.checkpoints import raw
from patch_cases import State, copy_of, same_bits
from sync_worker import net

WORKER = Path(__file__).parent / "sync_worker.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def follow(folder: Path) -> tuple[mh.WeightReceiver, State]:
    state = load_file(folder / "copy")
    return mh.WeightReceiver(state), state


# --- Killed processes -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("point", ["collected", "published", "half-saved"])
def test_a_killed_trainer_resumes_and_receivers_need_no_full_copy(
    point: str, tmp_path: Path
) -> None:
    step = 9 if "saved" in point else 7
    done = run("train", tmp_path, 12, f"{step} {point}", "originals", 1)
    assert done.returncode == -9, done.stderr
    receiver, state = follow(tmp_path)
    receiver.receive(tmp_path)  # up to the last patch that was published
    done = run("train", tmp_path, 12, "never", "originals", 2)
    assert done.returncode == 0, done.stderr
    receiver.receive(tmp_path)
    assert receiver.version == done.stdout.strip()
    late, other = follow(tmp_path)
    late.receive(tmp_path)
    assert same_bits(state, other)


@pytest.mark.slow
def test_without_originals_a_receiver_that_is_ahead_is_told_to_take_a_full_copy(
    tmp_path: Path,
) -> None:
    assert run("train", tmp_path, 12, "7 committed", "no", 1).returncode == -9
    receiver, state = follow(tmp_path)
    receiver.receive(tmp_path)
    before = copy_of(state)
    done = run("train", tmp_path, 12, "never", "no", 2)
    with pytest.raises(mh.PatchError, match=r"continued from another version.*full copy"):
        receiver.receive(tmp_path)
    assert same_bits(state, before)
    late, _ = follow(tmp_path)  # whoever is behind the checkpoint follows
    late.receive(tmp_path)
    assert late.version == done.stdout.strip()


@pytest.mark.slow
def test_a_killed_receiver_catches_up_from_its_copy(tmp_path: Path) -> None:
    trained = run("train", tmp_path, 6, "never", "no", 1)
    assert run("receive", tmp_path, "kill").returncode == -9
    done = run("receive", tmp_path, "live")
    assert done.stdout == trained.stdout, done.stderr


def test_a_write_that_fails_leaves_the_model_and_the_receiver_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, served = net(), net(torch.bfloat16)
    sync = mh.WeightSync(model)
    receiver = mh.WeightReceiver(served)
    with torch.no_grad():
        for param in model.parameters():
            param += 1
    patch = sync.collect()
    before, version = copy_of(served.state_dict()), receiver.version
    put, calls = in_place._Write.put, []

    def fail_once(self: in_place._Write, values: Tensor) -> None:
        put(self, values)
        calls.append(self.name)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(in_place._Write, "put", fail_once)
        with pytest.raises(KeyboardInterrupt):
            receiver.receive([patch])
    assert same_bits(dict(served.state_dict()), before)
    assert receiver.version == version
    receiver.receive([patch])
    assert receiver.version == sync.version
    receiver.verify()


# --- Hostile files --------------------------------------------------------------------------


def three_patches(folder: Path) -> list[State]:
    """Files 0, 1 and 2 in a folder, and the states before each and at the end."""
    model = net()
    sync = mh.WeightSync(model)
    states = [sync.weights()]
    for k in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.view(-1)[k::5] *= 1.1
        sync.collect().save(folder / f"{k}.safetensors")
        states.append(sync.weights())
    return states


def alter(file: Path, change: Any) -> None:
    with safe_open(file, framework="pt") as opened:
        content = json.loads(opened.metadata()["mirrorhead.patch"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(content, tensors)
    save_file(tensors, file, {"mirrorhead.patch": json.dumps(content)})


CHANGES: dict[str, Any] = {
    "values": lambda c, t: t["values.BF16"].mul_(2),
    "result": lambda c, t: c["tensors"][0].update(result="0" * 32),
    "base": lambda c, t: c["tensors"][0].update(base="0" * 32),
    "two kinds of hash": lambda c, t: c["tensors"][0].update(base="0" * 64),
    "short hash": lambda c, t: c["tensors"][0].update(base="0" * 31),
    "unknown result": lambda c, t: c["tensors"][0].update(result=None),
    "new tensor": lambda c, t: c["tensors"][0].update(base=None),
    "renamed": lambda c, t: c["tensors"][0].update(name="other"),
    "tied to the next": lambda c, t: c["tensors"][0].update(tied=[c["tensors"][1]["name"]]),
    "tied to a number": lambda c, t: c["tensors"][0].update(tied=3),
    "twice": lambda c, t: c["tensors"].append(c["tensors"][0]),
    "shape": lambda c, t: c["tensors"][1].update(shape=[6, 16]),
    "dtype": lambda c, t: c["tensors"][0].update(dtype="F16"),
    "weights": lambda c, t: c.update(weights=3),
    "records of another kind": lambda c, t: c.update(tensors=[3]),
    "records that are text": lambda c, t: c.update(tensors="abc"),
    "version": lambda c, t: c.update(version=2),
    "no records": lambda c, t: c.pop("tensors"),
    "count": lambda c, t: c["tensors"][0].update(count=1),
    "index": lambda c, t: t["index"].add_(1),
    "NaN": lambda c, t: t["values.BF16"].fill_(float("nan")),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_altered_file_in_a_chain_is_refused_before_a_bit_is_written(
    name: str, which: int, tmp_path: Path
) -> None:
    start = three_patches(tmp_path)[0]
    alter(tmp_path / f"{which}.safetensors", CHANGES[name])
    state = copy_of(start)
    receiver = mh.WeightReceiver(state)
    version = receiver.version
    with pytest.raises(mh.PatchError):
        receiver.receive(tmp_path)
    assert same_bits(state, start)
    assert receiver.version == version
    receiver.verify()


def test_originals_that_are_not_the_bases_are_not_walked_back(tmp_path: Path) -> None:
    states = three_patches(tmp_path)
    alter(tmp_path / "1.safetensors", lambda c, t: t["originals.BF16"].mul_(2))
    state = copy_of(states[0])
    receiver = mh.WeightReceiver(state)
    receiver.receive(tmp_path)  # forward they are not needed
    assert same_bits(state, states[3])
    files = [tmp_path / f"{k}.safetensors" for k in (2, 1, 0)]
    with pytest.raises(mh.PatchError, match="does not apply"):
        receiver.receive(files)  # to the result of the first
    assert same_bits(state, states[3])
    receiver.receive(files[:2])
    assert same_bits(state, states[2])


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_that_is_cut_or_damaged_anywhere(seed: int, tmp_path: Path) -> None:
    states = three_patches(tmp_path)
    draw = random.Random(seed)
    receiver = mh.WeightReceiver(state := copy_of(states[0]))
    for _ in range(60):
        file = tmp_path / f"{draw.randrange(3)}.safetensors"
        whole = bytearray(file.read_bytes())
        cut = draw.randrange(len(whole))
        damaged = whole[:cut]
        if draw.random() < 0.5:
            damaged = bytearray(whole)
            damaged[cut] ^= draw.randrange(1, 256)
        file.write_bytes(damaged)
        try:
            receiver.receive(sorted(tmp_path.glob("*.safetensors")))
        except mh.PatchError:
            assert same_bits(state, states[0])
        else:  # the damage is where nothing depends on it, such as in a blank
            assert same_bits(state, states[3])
            receiver = mh.WeightReceiver(state := copy_of(states[0]))
        receiver.verify()
        file.write_bytes(whole)


def test_versions_that_run_in_circles_end(tmp_path: Path) -> None:
    model = net()
    sync = mh.WeightSync(model)
    start = sync.weights()
    patches = []
    for change in (1.0, -1.0, 1.0, -1.0, 2.0):
        with torch.no_grad():
            model[0].bias.fill_(change)  # pyright: ignore
        patches.append(sync.collect())
    state = copy_of(start)
    receiver = mh.WeightReceiver(state)
    assert receiver.receive(patches).count == 16
    assert receiver.version == sync.version
    receiver.receive([patches[4], *patches[:4]])  # back by the patch that led here
    assert receiver.version == patches[1].version == patches[3].version


# --- A thousand random runs -----------------------------------------------------------------


def random_model(draw: random.Random) -> nn.Module:
    width = draw.randrange(1, 9)
    layers: list[nn.Module] = [nn.Linear(4, width, bias=draw.random() < 0.5)]
    if draw.random() < 0.5:
        layers.append(nn.LayerNorm(width))
    if draw.random() < 0.3:
        layers.append(nn.BatchNorm1d(width))
    tied = nn.Linear(width, width)
    layers += [tied, nn.Tanh(), tied] if draw.random() < 0.3 else [nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, draw.randrange(1, 5)))
    return model.to(draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16]))


def random_optimizer(draw: random.Random, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    lr = 10 ** draw.uniform(-5, -1)
    return draw.choice([
        lambda: torch.optim.SGD(params, lr=lr, momentum=draw.choice([0.0, 0.9])),
        lambda: torch.optim.AdamW(params, lr=lr),
        lambda: torch.optim.RMSprop(params, lr=lr),
        lambda: torch.optim.Adagrad(params, lr=lr),
        lambda: mh.MirrorAdam(params, lr=lr, geometry=1.5),
        lambda: mh.MirrorDescent(params, lr=lr, geometry=2.0),
    ])()  # fmt: skip


def edit(draw: random.Random, model: nn.Module) -> None:
    """Edits that no optimizer makes."""
    param = draw.choice(list(model.parameters()))
    with torch.no_grad():
        draw.choice([
            lambda: param.mul_(1 + 2 ** -draw.randrange(4, 12)),
            lambda: param.neg_(),
            lambda: param.zero_(),
            lambda: param.view(-1)[:1].fill_(-0.0),
            lambda: param.copy_(param.flip(0)),
            lambda: setattr(param, "data", param.detach().clone() * 0.5),
        ])()  # fmt: skip


def sha(state: State) -> str:
    """The content, by a hash that shares no code with the fingerprints."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + bytes(raw(state[name].detach().reshape(-1))))
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_random_runs_are_exact(part: int, tmp_path: Path) -> None:
    """Random models, optimizers, edits, dtypes, lost commits, resumed trainers, late receivers."""
    for seed in range(250 * part, 250 * (part + 1)):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        model = random_model(draw)
        optimizer = random_optimizer(draw, model)
        dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, None])
        sync = mh.WeightSync(model, dtype)
        served, late = sync.weights(), sync.weights()
        receiver = mh.WeightReceiver(served)
        patches: list[mh.Patch] = []
        for _ in range(draw.randrange(1, 7)):
            for _ in range(draw.randrange(4)):
                x = torch.randn(5, 4, dtype=next(model.parameters()).dtype)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            if draw.random() < 0.4:
                edit(draw, model)
            if draw.random() < 0.2:
                sync.collect(commit=False)  # lost
            if draw.random() < 0.2:
                state = sync.state_dict()
                sync = mh.WeightSync(model, dtype)
                sync.load_state_dict(state)
            patch = sync.collect()
            if draw.random() < 0.3:
                patch.save(tmp_path / "p", originals=draw.random() < 0.5)
                patch = mh.Patch.load(tmp_path / "p")
            patches.append(patch)
            if draw.random() < 0.6:
                receiver.receive(patches)
        receiver.receive(patches)
        expected = {
            name: t.to(dtype) if dtype and t.is_floating_point() else t
            for name, t in model.state_dict().items()
        }
        assert sha(served) == sha(expected), seed
        assert receiver.version == sync.version == patches[-1].version, seed
        jump = mh.Patch.chain(patches)
        jump.apply(late)
        jump.verify(late)
        assert sha(late) == sha(expected), seed
