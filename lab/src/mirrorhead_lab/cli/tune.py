"""`mirrorhead tune`: fine-tune a pretrained text classifier, and write the result as a patch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from mirrorhead._files import remove_folder, write_atomically, write_json
from mirrorhead_lab.cli import options
from mirrorhead_lab.cli.options import option
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.folders import check_folder, check_writable

if TYPE_CHECKING:
    from mirrorhead_lab.datasets import Sentences
    from mirrorhead_lab.models.pretrained import PretrainedClassifier
    from mirrorhead_lab.training.tuning import SizeRow, TuneSets, TuneSettings

SETTINGS, TABLE = "settings.json", "table.json"
PATCH, TUNED = "patch.safetensors", "tuned.safetensors"


@dataclass(frozen=True)
class Tune:
    """Fine-tune a text classifier so that few weights change, and write them as a patch.

    The encoder's matrices are trained by mirror descent centred at the base's weights; a new
    head is trained by AdamW. The table that is printed shows accuracy against the patch's size. The
    run keeps all tuned weights too, so that `mirrorhead patch make` can write patches of other
    sizes. A run that was interrupted resumes after its last epoch, by the same command.
    """

    task: Annotated[Positional[str], option("TASK")]
    """sst2, trec, subj, cr, or a file of one's own: .csv or .jsonl with "text" and "label"."""
    base: Annotated[Path | None, option("FOLDER")] = None
    """The pretrained encoder, a Hugging Face folder (default: all-MiniLM-L6-v2)."""
    p: float = 1.03
    """Exponent of the norm, above 1. The nearer to 1, the fewer weights matter."""
    reach: Annotated[float | None, option("R", "(default: 1.5 up to p = 1.18, then less)")] = None
    """How far a weight moves whose gradient never changes sign."""
    keep: float = 0.001
    """Share of the fine-tuned weights that the patch holds."""
    texts: int = 2000
    """Number of training texts; 0 for all."""
    epochs: int = 2
    batch_size: int = 32
    max_length: int = 32
    """Tokens of a text; the rest is cut off."""
    seed: int = 0
    """Of the draw and the order of the texts."""
    data: options.DataFolder = None
    download: options.Download = False
    partial: options.Partial = False
    out: options.RunFolder = None
    json: options.Json = False

    def run(self) -> int:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all that is read
        if not 0 < self.keep <= 1:
            raise UserError(f"--keep must be above 0 and at most 1, got {self.keep}")
        from mirrorhead_lab.models.pretrained import PretrainedError

        with options.user_errors(PretrainedError, ValueError, command=self):
            return self._tune()

    def _tune(self) -> int:
        from mirrorhead.patches.model_config import classifier_config
        from mirrorhead_lab.models.pretrained import PretrainedClassifier, default_encoder
        from mirrorhead_lab.training.run_folder import locked_folder
        from mirrorhead_lab.training.tuning import TuneSets, TuneSettings

        names = ("p", "reach", "epochs", "batch_size", "max_length", "seed")
        given: Any = {name: getattr(self, name) for name in names}
        settings = TuneSettings(texts=self.texts or None, **given)
        task = self._task()
        reach = "" if self.reach is None else f"-reach{self.reach:g}"
        name = f"tune-{task.name}-p{self.p:g}{reach}-seed{self.seed}"
        folder = self.out or Path("runs") / name
        base = self.base or default_encoder()
        about = {"task": task.name, "classes": list(task.classes), "base": str(base)}
        about |= {"keep": self.keep} | dataclasses.asdict(settings)
        # The same names can stand for other texts and weights, whose results are not these.
        about |= {"content of the data": task.fingerprint(), "content of the base": _sha256(base)}
        if _finished(folder, about):
            return self._show(folder, base)
        config = classifier_config(task.classes, settings.max_length)
        check_writable(folder)
        model = PretrainedClassifier(base, len(task.classes))
        model.config = config
        weights = sum(matrix.numel() for matrix in model.train_matrices().values())
        sets = TuneSets.of(task, base, settings)
        longest = max(part.longest() for part in (sets.train, sets.validation, sets.test))
        positions = getattr(model.encoder.config, "max_position_embeddings", None)
        if positions is not None and longest > positions:
            most = f"{positions}, the number of positions of {base}"
            raise UserError(f"--max-length must be at most {most}, got {self.max_length}")
        with locked_folder(folder):
            if not _finished(folder, about):  # another process may have been faster
                write_json(folder / SETTINGS, about)
                self._fine_tune(folder, model, sets, settings, weights)
        return self._show(folder, base)

    def _fine_tune(
        self,
        folder: Path,
        model: PretrainedClassifier,
        sets: TuneSets,
        settings: TuneSettings,
        weights: int,
    ) -> None:
        """Train, score patches of every size, and write all of it to the run's folder."""
        from safetensors.torch import save

        from mirrorhead.patches.model_config import KEY
        from mirrorhead_lab.runtime.progress import ProgressBars
        from mirrorhead_lab.training.checkpoints import checkpoints
        from mirrorhead_lab.training.tuning import SHARES, fine_tune, patch_of, size_table

        steps = self.epochs * max(1, len(sets.train) // self.batch_size)
        with ProgressBars({"tune": steps}, "steps") as bars:
            line = "epoch {}: loss {:.4f}, validation {:.1%}"
            result = fine_tune(
                model,
                sets,
                settings,
                after_step=lambda factor: bars.advance("tune"),
                on_epoch=lambda *epoch: bars.say(line.format(*epoch)),
                checkpoints=folder / "checkpoints",
            )
        write_json(folder / "metrics.json", dataclasses.asdict(result))
        tuned = model.tuned_state()
        rows = size_table(model, tuned, sets, weights, sorted({*SHARES, self.keep}, reverse=True))
        patch = patch_of(model, tuned, max(1, round(self.keep * weights)))
        chosen = next(row for row in rows if row.share == self.keep)
        patch.save(folder / PATCH)
        about = {KEY: json.dumps(model.config)}
        tensors = {name: tensor.contiguous() for name, tensor in tuned.items()}
        write_atomically(folder / TUNED, save(tensors, about))
        content = {
            "weights": weights,
            "table": [dataclasses.asdict(row) for row in rows],
            "patch": {"file": PATCH, **dataclasses.asdict(chosen)},
        }
        write_json(folder / TABLE, content)  # last: with it the run is finished
        for name in ("head", "encoder"):
            for checkpoint in checkpoints(folder / "checkpoints" / name):
                remove_folder(checkpoint)

    def _show(self, folder: Path, base: Path) -> int:
        """Print the table of a finished run."""
        from mirrorhead_lab.models.pretrained import HEAD
        from mirrorhead_lab.runtime.json_files import from_plain, read_json
        from mirrorhead_lab.training.tuning import SizeRow

        content = read_json(folder / TABLE, dict[str, Any])
        if self.json:
            print(json.dumps({"run": str(folder), **content}, indent=1))
            return 0
        _print_table(
            from_plain(content.get("table"), list[SizeRow], str(folder / TABLE)), self.keep
        )
        print(f"patch: {folder / PATCH}")
        print(f"apply: mirrorhead patch apply {base} {folder / PATCH} -o TUNED")
        print('classify: mirrorhead classify TUNED "a text" "another"')
        how = f"--count WEIGHTS --whole '{HEAD}' -o FILE"
        print(f"another size: mirrorhead patch make {base} {folder / TUNED} {how}")
        return 0

    def _task(self) -> Sentences:
        from mirrorhead_lab.datasets import load_own_sentences, load_sentences
        from mirrorhead_lab.datasets.sentences import TASKS

        path = Path(self.task)
        if path.suffix in (".csv", ".jsonl"):
            return load_own_sentences(path)
        if self.task not in TASKS:
            known = f"{', '.join(TASKS)}, or a .csv or .jsonl file"
            raise UserError(f"the task must be one of {known}, got {self.task!r}")
        return load_sentences(self.task, self.data, download=self.download, partial=self.partial)


def _sha256(base: Path) -> str:
    """A hash of the files with a base's weights."""
    from mirrorhead.patches.checkpoints import checkpoint_files

    digest = hashlib.sha256()
    for path in checkpoint_files(base):
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()[:16]


def _finished(folder: Path, about: dict[str, Any]) -> bool:
    """Whether the folder holds this run, finished; refuse one that holds anything else."""
    from mirrorhead_lab.runtime.json_files import read_json
    from mirrorhead_lab.training.run_folder import LOCK

    check_folder(folder, "run", (SETTINGS,), {LOCK})
    if not (folder / SETTINGS).exists():
        return False
    there = read_json(folder / SETTINGS, dict[str, Any])
    for key, value in about.items():
        if there.get(key) != value:
            other = f"another {key} ({there.get(key)!r}, not {value!r})"
            raise UserError(f"{folder} holds a run with {other}: give another --out")
    return all((folder / name).exists() for name in (TABLE, PATCH, TUNED))


def _print_table(rows: list[SizeRow], chosen: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kept", "weights", "bytes", "validation", "test", box=None)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        mark = " *" if row.share == chosen else ""
        test = "" if row.test is None else f"{row.test:.1%}"
        cells = (f"{row.share:.4g}{mark}", f"{row.changed:,}", f"{row.bytes:,}")
        table.add_row(*cells, f"{row.validation:.1%}", test)
    Console().print(table)
