"""`mirrorhead train`: one run by a preset's settings, scored on test once, at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from mirrorhead.commands.errors import UserError
from mirrorhead.files import write_json

if TYPE_CHECKING:
    from mirrorhead.training import Preset


@dataclass(frozen=True)
class Train:
    """Train a classifier on IMDb or CIFAR-10 with mirror descent or a rival.

    A run that was stopped goes on where it was when the same command is given again.
    """

    task: Positional[Literal["imdb", "cifar10"]]
    """What to train on."""
    preset: Annotated[str, arg(help_behavior_hint="(default: laptop, or laptop-vit)")] = ""
    """laptop, paper-3, paper-4 or paper-6 for imdb; laptop-vit or vit-paper for cifar10."""
    optimizer: Literal["mirror-descent", "mirror-adam", "adamw", "sgd", "proximal-l1"] = (
        "mirror-descent"
    )
    p: float = 1.1
    """Exponent of the norm, for mirror-descent and mirror-adam."""
    lr: Annotated[float | None, arg(metavar="LR", help_behavior_hint="(default: known for p)")] = (
        None
    )
    """Learning rate. Needed by all but mirror-descent."""
    momentum: float = 0.0
    weight_decay: float = 0.0
    l1: float = 0.0
    """Weight of the l1 norm, for proximal-l1."""
    epochs: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: preset's)")] = None
    seed: int = 0
    """Of the first weights, the order of examples, and dropout."""
    data: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """The folder of all data sets (default: $MIRRORHEAD_DATA)."""
    download: Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")] = False
    """Fetch what is missing from its home."""
    partial: Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")] = False
    """Accept a slice of the data sets."""
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: runs/...)")] = (
        None
    )
    """The folder of this run."""

    def run(self) -> int:
        """Train, score the best epoch on test, print and write what came out."""
        import torch
        from rich.console import Console as Terminal
        from safetensors.torch import load_file

        from mirrorhead.data import DataError
        from mirrorhead.training import (
            CheckpointError,
            Console,
            Diverged,
            describe_run,
            evaluate,
            load_sets,
            train,
        )

        terminal = Terminal()
        try:
            chosen = self._chosen()
            sets = load_sets(chosen, self.data, download=self.download, partial=self.partial)
            folder = self.out or Path("runs") / self._name()
            torch.manual_seed(self.seed)
            model = chosen.build()
            describe_run(folder, chosen)
            outcome = train(
                model, sets.train, sets.validation, chosen.training, folder, loggers=[Console()]
            )
        except (DataError, CheckpointError, Diverged, ValueError, BlockingIOError) as error:
            raise UserError(str(error)) from error
        model.load_state_dict(load_file(folder / "best.safetensors"))
        test = evaluate(model, sets.test)
        write_json(folder / "test.json", test)
        terminal.print(
            f"best epoch {outcome.best_epoch}: validation {outcome.best_accuracy:.2%},"
            f" test {test['accuracy']:.2%}"
        )
        print(f"run: {folder}")
        return 0

    def _chosen(self) -> Preset:
        """The preset, with what the options change."""
        from mirrorhead.training import OptimizerSettings, preset

        name = self.preset or ("laptop" if self.task == "imdb" else "laptop-vit")
        rule = None
        mirrored = self.optimizer in ("mirror-descent", "mirror-adam")
        if self.lr is not None:
            rule = OptimizerSettings(
                self.optimizer,
                lr=self.lr,
                p=self.p if mirrored else None,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                l1=self.l1,
            )
        elif self.optimizer != "mirror-descent" or self.momentum or self.weight_decay:
            raise UserError(f"--lr is needed for {self.optimizer} with these options")
        chosen = preset(name, rule, self.p)
        if chosen.data != self.task:
            raise UserError(f"--preset {name} is for {chosen.data}, not for {self.task}")
        changes = {"seed": self.seed, "epochs": self.epochs or chosen.training.epochs}
        return replace(chosen, training=replace(chosen.training, **changes))

    def _name(self) -> str:
        """A folder's name that tells runs apart by their settings."""
        rule = self._chosen().training.optimizer
        words = [self.preset or "laptop", self.task, rule.name, f"lr{rule.lr:g}"]
        words += [f"p{rule.p:g}"] if rule.p is not None else []
        return "-".join([*words, f"seed{self.seed}"])
