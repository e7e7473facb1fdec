"""`mirrorhead sweep`: optimizers tuned alike on one data set, then compared over seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction

from mirrorhead_lab.cli import options
from mirrorhead_lab.cli.options import option
from mirrorhead_lab.cli.study import Plan, made
from mirrorhead_lab.runtime.errors import UserError

CANDIDATE_HELP = (
    "An optimizer, its options and its learning rates, such as "
    "'mirror-descent p=1.1 lr=0.03,0.1,0.3,1'. Give the option once for each candidate, all with "
    "the same number of rates."
)


@dataclass(frozen=True)
class Sweep:
    """Tune optimizers alike on validation data, and compare them on test over several seeds.

    Run the same command again to resume a sweep that was stopped. Finished runs are not run again,
    even if another sweep made them in the same folder.
    """

    task: Annotated[Positional[str], option("DATA")]
    """What to train on, as in mirrorhead train: imdb, sst2, trec, subj, cr, cifar10; a file or a
    module of one's own."""
    candidate: Annotated[
        tuple[str, ...],
        UseAppendAction,
        option("CANDIDATE", "(default: three of the published comparisons)", CANDIDATE_HELP),
    ] = ()
    preset: Annotated[str, option("NAME", "(default: laptop, or laptop-vit)")] = ""
    """Everything but the optimizer, as in mirrorhead train."""
    seeds: Annotated[tuple[int, ...], option("N ...", "(default: 0 1 2)")] = (0, 1, 2)
    """Seeds of the runs that are compared. Tuning uses the first."""
    epochs: options.PresetInt = None
    plan: Plan = False
    backend: options.BackendName = "local"
    address: options.Address = ""
    jobs: options.Jobs = None
    data: options.DataFolder = None
    partial: options.Partial = False
    out: Annotated[Path | None, option("FOLDER", "(default: runs/DATA)")] = None
    """The folder of all runs and of their file; on a cluster, one that all machines share."""

    def run(self) -> int:
        from mirrorhead_lab.runtime.folders import check_folder
        from mirrorhead_lab.studies.sweep import sweep

        given: dict[str, Any] = {"preset": self.preset, "epochs": self.epochs}
        given |= {"seeds": self.seeds, "data": self.data, "partial": self.partial}
        with options.user_errors(ValueError, command=self):
            study = sweep(self.task, self._candidates(), **given)
        out = self.out or Path("runs") / study.title
        check_folder(out, "runs", ("*.jsonl", "*.jsonl.lock"))
        if made(self, study, out, out) is not None:
            print(f"runs: {out / study.file}")
        return 0

    def _candidates(self) -> dict[str, Any]:
        from mirrorhead_lab.training.candidates import parse_candidate

        found: dict[str, Any] = {}
        for text in self.candidate:
            try:
                name, rules = parse_candidate(text)
            except ValueError as error:
                raise UserError(f"--{error}") from error
            if name in found:
                raise UserError(f"--candidate {name!r} is given twice: put its rates into one")
            found[name] = rules
        return found
