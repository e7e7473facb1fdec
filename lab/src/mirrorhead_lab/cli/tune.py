"""`mirrorhead tune`: fine-tune a pretrained text classifier, and write the result as a patch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from mirrorhead_lab.cli import options
from mirrorhead_lab.cli.options import option
from mirrorhead_lab.runtime.errors import UserError

if TYPE_CHECKING:
    from mirrorhead_lab.datasets import Splits, Texts
    from mirrorhead_lab.training.tuning import SizeRow


@dataclass(frozen=True)
class Tune:
    """Fine-tune a text classifier so that few weights change, and write them as a patch.

    The encoder's matrices are trained by mirror descent centred at the base's weights; a new
    head is trained by AdamW. The table that is printed shows accuracy against the patch's size. The
    run keeps all tuned weights too, so that `mirrorhead patch make` can write patches of other
    sizes. A run that was interrupted resumes after its last epoch, by the same command.
    """

    task: Annotated[Positional[str], option("TASK")]
    """imdb, sst2, trec, subj or cr; a file of one's own, .csv or .jsonl with "text" and "label"; or
    a module of one's own."""
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
        from mirrorhead_lab.models.pretrained import default_encoder
        from mirrorhead_lab.training import Console
        from mirrorhead_lab.training.tuning import TuneSettings, tune

        names = ("p", "reach", "epochs", "batch_size", "max_length", "seed")
        given: Any = {name: getattr(self, name) for name in names}
        settings = TuneSettings(texts=self.texts or None, **given)
        task, base = self._task(), self.base or default_encoder()
        reach = "" if self.reach is None else f"-reach{self.reach:g}"
        name = f"tune-{task.name}-p{self.p:g}{reach}-seed{self.seed}"
        folder = self.out or Path("runs") / name
        tune(task, base, settings, self.keep, folder, loggers=[Console()])
        return self._show(folder, base)

    def _show(self, folder: Path, base: Path) -> int:
        """Print the table of a finished run."""
        from mirrorhead_lab.models.pretrained import HEAD
        from mirrorhead_lab.runtime.json_files import from_plain, read_json
        from mirrorhead_lab.training.tuning import PATCH, TABLE, TUNED, SizeRow

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

    def _task(self) -> Splits[Texts]:
        from mirrorhead_lab.datasets import find

        data = find(self.task)
        if data.kind != "text":
            raise UserError(f"tune is for texts, {self.task} has {data.kind}")
        return data.read(self.data, download=self.download, partial=self.partial)


def _print_table(rows: list[SizeRow], chosen: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kept", "weights", "bytes", "validation", "test", box=None)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        mark = " *" if row.share == chosen else ""
        cells = (f"{row.share:.4g}{mark}", f"{row.changed:,}", f"{row.bytes:,}")
        table.add_row(*cells, f"{row.validation:.1%}", f"{row.test:.1%}")
    Console().print(table)
