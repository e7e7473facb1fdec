"""A run's folder, read back: what was trained, how, and the best weights."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from mirrorhead._files import write_json
from mirrorhead.lab.models import TextSettings, ViTSettings
from mirrorhead.lab.training.presets import Preset
from mirrorhead.lab.training.settings import OptimizerSettings, TrainSettings

_ABOUT, _WEIGHTS = "preset.json", "best.safetensors"


class RunError(ValueError):
    """The folder holds no run, or not one that can be read."""


@dataclass(frozen=True)
class Run:
    """A run: its folder, its settings, and the model with the weights of its best epoch."""

    folder: Path
    preset: Preset
    model: nn.Module


def describe_run(folder: str | Path, chosen: Preset) -> None:
    """Write beside a run what `load_run` needs to build its model again."""
    path = Path(folder) / _ABOUT
    if not path.exists():
        write_json(path, dataclasses.asdict(chosen))


def load_run(folder: str | Path) -> Run:
    """The run in a folder that `mirrorhead train` or a sweep has filled, in evaluation mode."""
    folder = Path(folder)
    for name in (_ABOUT, _WEIGHTS):
        if not (folder / name).is_file():
            raise RunError(
                f"{folder} has no {name}: give the folder of a run that `mirrorhead train` or"
                " `mirrorhead sweep` made, with at least one epoch done"
            )
    try:
        about = json.loads((folder / _ABOUT).read_text())
        rule = OptimizerSettings(**about["training"].pop("optimizer"))
        kind = {"imdb": TextSettings, "cifar10": ViTSettings}[about["data"]]
        chosen = Preset(
            about["data"],
            kind(**about["model"]),
            TrainSettings(**about["training"], optimizer=rule),
        )
        model = chosen.build()
        model.load_state_dict(load_file(folder / _WEIGHTS))
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise RunError(f"{folder} cannot be read as a run: {error}") from error
    return Run(folder, chosen, model.eval())
