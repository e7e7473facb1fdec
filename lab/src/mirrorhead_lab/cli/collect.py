"""`mirrorhead collect`: the measures of a sweep's final runs in one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from mirrorhead_lab.cli.options import DataFolder, Partial
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.folders import check_new_file


@dataclass(frozen=True)
class Collect:
    """Measure the final runs of a sweep, and write one file with them and how they were tuned.

    Measures are kept in the folders of the runs, and not measured again.
    """

    sweep: Annotated[Positional[Path], arg(metavar="SWEEP")]
    """The folder of a sweep that has ended, or the record in it, sweep-....json."""
    out: Annotated[Path, arg(metavar="FILE")]
    """The file to write, such as results/imdb.json."""
    jobs: Annotated[int, arg(metavar="N")] = 1
    """Processes at once, of one thread each."""
    data: DataFolder = None
    partial: Partial = False

    def run(self) -> int:
        if self.jobs < 1:
            raise UserError(f"--jobs must be at least 1, got {self.jobs}")
        check_new_file(self.out, "--out")
        from mirrorhead_lab.evaluation.sweep_results import collect

        found = collect(self.sweep, self.out, jobs=self.jobs, data=self.data, partial=self.partial)
        runs = sum(len(one.runs) + len(one.diverged) for one in found.optimizers)
        print(f"results of {runs} runs: {self.out}")
        return 0
