"""Checkpoints for the tests of patches."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mirrorhead.patches.checkpoints import bits

State = dict[str, Tensor]


def small_state(dtype: torch.dtype = torch.float32, seed: int = 0) -> State:
    """Two layers, an integer buffer and a scalar."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "layer.0.weight": (6, 5),
        "layer.0.bias": (6,),
        "layer.1.weight": (4, 6),
        "scale": (),
    }
    state = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
    return state | {"ids": torch.arange(3)}


def copy_of(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def tuned_from(state: State, seed: int = 1) -> State:
    """The same with every floating-point weight moved a little."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (t.double() + 0.1 * torch.randn(t.shape, generator=generator).double()).to(t.dtype)
        if t.is_floating_point()
        else t.clone()
        for name, t in state.items()
    }


def same_bits(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype
        and one[n].shape == other[n].shape
        and torch.equal(bits(one[n]), bits(other[n]))
        for n in one
    )


def sharded_folder(folder: Path, state: State) -> Path:
    """A Hugging Face folder with two shards, an index, a configuration and stale other weights."""
    folder.mkdir(parents=True)
    names = sorted(state)
    files = {
        "model-00001-of-00002.safetensors": names[:2],
        "model-00002-of-00002.safetensors": names[2:],
    }
    for file, part in files.items():
        save_file({name: state[name] for name in part}, folder / file, {"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in state.values())},
        "weight_map": {name: file for file, part in files.items() for name in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"stale")
    return folder
