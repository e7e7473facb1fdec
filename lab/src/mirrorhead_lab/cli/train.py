"""`mirrorhead train`: one run by a preset's settings, scored on test once, at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from mirrorhead_lab.cli import options
from mirrorhead_lab.cli.options import option
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.folders import check_writable

if TYPE_CHECKING:
    from mirrorhead_lab.datasets import DataSet
    from mirrorhead_lab.training import Logger, OptimizerSettings, Preset
    from mirrorhead_lab.training.presets import Sets
    from mirrorhead_lab.training.process_group import ProcessGroup

USUAL_P = 1.1


@dataclass(frozen=True)
class Train:
    """Train a classifier of texts or images with mirror descent or another optimizer.

    Run the same command again to resume a run that was stopped. With several processes:
    torchrun --nproc-per-node 2 -m mirrorhead_lab train ...
    """

    task: Annotated[Positional[str], option("DATA")]
    """What to train on: imdb, imdb-published (as the paper has it), sst2, trec, subj, cr, cifar10;
    a file of one's own, .csv or .jsonl with "text" and "label"; or a module of one's own."""
    preset: Annotated[str, arg(help_behavior_hint="(default: laptop, or laptop-vit)")] = ""
    """laptop, laptop-to-the-end, paper-3, paper-4 or paper-6 for texts; laptop-vit or vit-paper for
    images."""
    optimizer: Annotated[
        Literal["mirror-descent", "mirror-adam", "adamw", "sgd", "proximal-l1"] | None,
        option(
            "{mirror-descent,mirror-adam,adamw,sgd,proximal-l1}",
            "(default: mirror-adam for laptop-vit, else mirror-descent)",
        ),
    ] = None
    p: Annotated[float | None, option("P", "(default: 1.1)")] = None
    """Exponent of the norm, for mirror-descent and mirror-adam; greater than 1."""
    lr: Annotated[float | None, option("LR", "(default: known for some p)")] = None
    """Learning rate. Needed by all but the default optimizer."""
    momentum: Annotated[float | None, option("SHARE", "(default: 0)")] = None
    """For mirror-descent, sgd and proximal-l1."""
    normalize: Annotated[Literal["tensor", "global"] | None, option("{tensor,global}")] = None
    """Divide gradients by their dual norm, that of each tensor or of all; for mirror-descent."""
    weight_decay: Annotated[float | None, option("RATE", "(default: 0)")] = None
    """For all but proximal-l1."""
    l1: Annotated[float | None, option("WEIGHT", "(default: 0)")] = None
    """Weight of the l1 norm, for proximal-l1."""
    knee: Annotated[float | None, option("K", "(default: 1)")] = None
    """Where the potential becomes quadratic, for mirror-adam; 0: nowhere."""
    schedule: Annotated[
        Literal["constant", "cosine"] | None, option("{constant,cosine}", "(default: preset's)")
    ] = None
    """Keep the learning rate, or lower it to 0 over all epochs along a cosine."""
    warmup: Annotated[float | None, option("SHARE", "(default: 0)")] = None
    """Share of all steps in which the learning rate grows from 0."""
    clip: Annotated[float | None, option("NORM", "(default: preset's)")] = None
    """Largest 2-norm of the gradient; 0 turns clipping off."""
    stop_at: Annotated[float | None, option("SHARE", "(default: preset's)")] = None
    """Stop after an epoch with this training accuracy, such as 0.995; 0 never stops early."""
    epochs: options.PresetInt = None
    batch_size: options.PresetInt = None
    """Examples per step, over all processes together."""
    seed: int = 0
    """Seed of the first weights, the order of examples, and dropout."""
    compile: options.Flag = False
    """Train through torch.compile."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With torchrun: replicate the model, or shard it."""
    data: options.DataFolder = None
    download: options.Download = False
    partial: options.Partial = False
    tensorboard: options.Flag = False
    """Also write the losses and accuracies for TensorBoard, to tensorboard/ in the run's folder."""
    out: options.RunFolder = None

    def run(self) -> int:
        from mirrorhead_lab.training.process_group import process_group

        chosen = self._chosen()
        with process_group() as group:
            try:
                self._train(chosen, group)
            except (UserError, OSError):
                if group.is_first:
                    raise
                return 2  # the first process says why
            return 0

    def _train(self, chosen: Preset, group: ProcessGroup) -> None:
        from mirrorhead_lab.training import Console, TensorBoard, complete_run
        from mirrorhead_lab.training.run_folder import check_run_folder

        folder = self.out or Path("runs") / self._name(chosen)
        check_writable(folder)
        check_run_folder(folder)  # before the data are read, which may take a minute
        sets = self._sets(chosen, group)
        loggers: list[Logger] = [Console()] if group.is_first else []
        if group.is_first and self.tensorboard:
            loggers.append(TensorBoard(folder / "tensorboard"))
        outcome, test = complete_run(chosen, sets, folder, group=group, loggers=loggers)
        if group.is_first and test is not None:
            scores = f"validation {outcome.best_accuracy:.2%}, test {test.accuracy:.2%}"
            print(f"best epoch {outcome.best_epoch}: {scores}\nrun: {folder}")

    def _sets(self, chosen: Preset, group: ProcessGroup) -> Sets:
        """Load the data, in the first process first: it may have to download and encode them."""
        import torch

        from mirrorhead_lab.training import load_sets
        from mirrorhead_lab.training.process_group import own_device

        sets, error = None, None
        if group.is_first:
            try:
                sets = load_sets(chosen, self.data, download=self.download, partial=self.partial)
            except (UserError, OSError) as caught:
                error = caught
        failed = group.sum(torch.tensor(float(error is not None), device=own_device()))
        if error is not None:
            raise error
        if failed:
            raise UserError("the first process has no data")
        return sets or load_sets(chosen, self.data, partial=self.partial)

    def _chosen(self) -> Preset:
        """Return the preset, with the changes that the options make."""
        from mirrorhead_lab.training import preset

        name = self._preset_name()
        with options.user_errors(ValueError, command=self):
            p = USUAL_P if self.p is None else self.p
            chosen = preset(name, self._rule(), p, self.task)
            if chosen.kind != self._data().kind:
                wrong = f"for {chosen.kind}, {self.task} has {self._data().kind}"
                raise UserError(f"--preset {name} is {wrong}")
            given = ("epochs", "batch_size", "schedule", "warmup", "clip", "stop_at")
            changes = {key: value for key in given if (value := getattr(self, key)) is not None}
            changes |= {key: None for key in ("clip", "stop_at") if changes.get(key) == 0}
            changes |= {"seed": self.seed, "compile": self.compile, "parallel": self.parallel}
            if self.parallel == "fsdp":  # torch's fused SGD knows no sharded tensors
                changes["fused"] = False
            return replace(chosen, training=replace(chosen.training, **changes))

    def _rule(self) -> OptimizerSettings | None:
        """Return the optimizer that the options name; None for the preset's at a known rate."""
        from mirrorhead.geometry._powers import check_p
        from mirrorhead_lab.training import OptimizerSettings
        from mirrorhead_lab.training.presets import usual_knee, usual_optimizer
        from mirrorhead_lab.training.settings import OPTIONS

        usual = usual_optimizer(self._preset_name())
        name = self.optimizer or usual
        known = ("p", "momentum", "normalize", "weight_decay", "l1", "knee")
        given: dict[str, Any] = {
            key: value for key in known if (value := getattr(self, key)) is not None
        }
        for key in given:
            if key not in OPTIONS[name]:
                own = ", ".join(map(options.spelled, ("lr", *OPTIONS[name])))
                raise UserError(f"{options.spelled(key)} is not an option of {name}; it has {own}")
        if "p" in OPTIONS[name]:
            given["p"] = check_p(given.get("p", USUAL_P))
        if given.get("knee") and given["p"] >= 2:
            raise UserError(f"--knee is for p below 2, got p = {given['p']:g}")
        if self.lr is None:
            others = [options.spelled(key) for key in given if key != "p"]
            if name == usual and not others:
                return None
            raise UserError(
                f"--lr is needed for {name}{' with ' * bool(others)}{', '.join(others)}"
            )
        given.setdefault("knee", usual_knee(name, given.get("p")))
        return OptimizerSettings(name, lr=self.lr, **given)

    def _data(self) -> DataSet:
        from mirrorhead_lab.datasets import find

        return find(self.task)

    def _preset_name(self) -> str:
        from mirrorhead_lab.training.presets import USUAL_PRESET

        return self.preset or USUAL_PRESET[self._data().kind]

    def _name(self, chosen: Preset) -> str:
        """Return a name for the folder that differs between runs with different settings."""
        rule = chosen.training.optimizer
        given = {
            "p": rule.p,
            "momentum": rule.momentum or None,
            "normalize-": rule.normalize,
            "decay": rule.weight_decay or None,
            "l1-": rule.l1 or None,
            "knee": rule.knee or None,
            "batch": self.batch_size,
            "": self.schedule,
            "warmup": self.warmup,
            "clip": self.clip,
            "stop-at": self.stop_at,
        }
        words = [self._preset_name(), self._data().name, rule.name, f"lr{rule.lr:g}"]
        words += [
            option + (value if isinstance(value, str) else f"{value:g}")
            for option, value in given.items()
            if value is not None
        ]
        words += ["fsdp"] if self.parallel == "fsdp" else []
        words += ["compiled"] if self.compile else []
        return "-".join([*words, f"seed{self.seed}"])
