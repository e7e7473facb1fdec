"""Folders of runs as training leaves them, with random weights, and slices to measure them on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from data_slices import VOCABULARY, make_bert, make_cad, make_cifar10, make_eraser, make_imdb
from mirrorhead_lab.models import TextSettings
from mirrorhead_lab.training import OptimizerSettings, describe_run, preset


def make_slices(root: Path) -> Path:
    make_imdb(root, per_folder=60)
    make_cad(
        root, [("a dull film was the plot", "a grand film was the plot"), ("a dull", "a very")]
    )
    make_eraser(root)
    make_bert(root)
    make_cifar10(root, per_file=10)
    return root


def make_text_run(folder: Path, *, seed: int = 0, layers: int = 1, max_length: int = 256) -> Path:
    model = TextSettings(
        vocabulary=len(VOCABULARY),
        max_length=max_length,
        dim=8,
        hidden=12,
        layers=layers,
        heads=2,
        embedding_norm=True,
    )
    return _make(folder, "laptop", seed, model=model)


def make_vit_run(folder: Path, *, seed: int = 0) -> Path:
    return _make(folder, "laptop-vit", seed)


def _make(folder: Path, name: str, seed: int, **changes: TextSettings) -> Path:
    base = preset(name, OptimizerSettings("sgd", lr=0.1))
    chosen = replace(base, training=replace(base.training, seed=seed), **changes)
    if chosen.kind == "text":
        chosen = chosen.for_classes(("negative", "positive"))
    torch.manual_seed(seed)
    model = chosen.build()
    describe_run(folder, chosen)
    save_file(model.state_dict(), folder / "best.safetensors")
    return folder
