"""`mirrorhead bias`: which margin each optimizer maximises, yours among them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg

from mirrorhead_lab.cli import options
from mirrorhead_lab.cli.options import option
from mirrorhead_lab.runtime.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from mirrorhead_lab.experiments.experiment import Result

OWN_HELP = (
    "A function of your own, package.module:function, from parameters (and a learning rate, if it "
    "has a second argument) to a torch optimizer. Repeat the option for more."
)


@dataclass(frozen=True)
class Bias:
    """Measure which margin optimizers maximise: the share of the largest one in each norm.

    Every optimizer trains the same random problems. Those that take a learning rate get the one of
    a small grid with the smallest training loss. Run the same command again to resume.
    """

    problem: Annotated[
        Literal["attention", "factored", "linear", "network"],
        arg(help="One-layer attention, the same with W = K Q', linear data, or two layers."),
    ] = "attention"
    optimizer: Annotated[
        tuple[str, ...], UseAppendAction, option("MODULE:FUNCTION", "", OWN_HELP)
    ] = ()
    alone: options.Flag = False
    """Without the optimizers that are always compared."""
    trials: Annotated[int | None, option("N", "(default: 20, or 100)")] = None
    """Random problems."""
    steps: Annotated[int | None, option("N", "(default: 1000 or 2000, or 10000)")] = None
    """Steps of each optimizer."""
    full: options.Flag = False
    """More optimizers, 100 problems and 10,000 steps."""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("out-bias")
    """Where results, figure and report go; a folder for each problem."""
    backend: options.BackendName = "local"
    address: options.Address = ""
    jobs: options.Jobs = None

    def run(self) -> int:
        from rich.console import Console

        from mirrorhead._files import write_atomically
        from mirrorhead_lab.experiments import load
        from mirrorhead_lab.experiments.bias_runs import map_alone
        from mirrorhead_lab.experiments.runner import Run, execute
        from mirrorhead_lab.findings.figures import PartFigure
        from mirrorhead_lab.report.findings import finding_of
        from mirrorhead_lab.report.page import check_place, write_report
        from mirrorhead_lab.report.terminal import print_findings, print_place

        experiment = load(f"bias-{self.problem}")
        with options.user_errors(ValueError, TypeError, ImportError, command=self):
            settings = self._settings(experiment)
        console, page = Console(), self.out / "report.html"
        check_place(page)
        backend = options.chosen_backend(self.backend, self.address, self.jobs, self.out)
        run = Run(experiment, settings)
        execute([run], self.out, backend, console)
        finding = finding_of(run, self.out)
        write_report(page, [finding], [])
        if run.result is not None:
            console.print(_table(run.result))
            picture = self.out / f"{experiment.name}.svg"
            drawing = PartFigure(experiment.name, experiment.title, partial(map_alone, run.result))
            write_atomically(picture, drawing.svg_file())
            print(f"picture: {picture}")
        print_findings([finding], console)
        print_place(page)
        if finding.failure:
            print(f"mirrorhead: {finding.failure}", file=sys.stderr)
        return 1 if finding.failure else 0

    def _settings(self, experiment: Any) -> Any:
        from mirrorhead_lab.experiments.bias_optimizers import source_hash

        # Your module is in the folder where you are, here and in all worker processes.
        here = os.getcwd()
        sys.path.insert(0, here)
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        settings = experiment.full if self.full else experiment.quick
        code = tuple(source_hash(name) for name in self.optimizer)
        changes: dict[str, Any] = {"code": code}
        if self.alone and not self.optimizer:
            raise UserError("--alone needs --optimizer")
        others = () if self.alone else settings.optimizers
        changes["optimizers"] = tuple(dict.fromkeys((*self.optimizer, *others)))
        for name in ("trials", "steps"):
            if getattr(self, name) is not None:
                if getattr(self, name) < 1:
                    raise UserError(f"--{name} must be at least 1, got {getattr(self, name)}")
                changes[name] = getattr(self, name)
        return replace(settings, **changes)


def _table(result: Result[Any]) -> Table:
    """The shares at the end, with the best norm of each optimizer in bold."""
    import numpy as np
    from rich.table import Table

    from mirrorhead_lab.experiments.bias_runs import shares_of, short

    settings = result.settings
    certified = "shares" in result.arrays
    title = "share of the largest margin" + ("" if certified else " found (no certificate)")
    shares = shares_of(result)
    table = Table(title=f"{title}, median of the trials")
    table.add_column("optimizer")
    for norm in settings.norms:
        table.add_column(norm, justify="right")
    if "rates" in result.arrays:
        table.add_column("rate", justify="right")
    for k, name in enumerate(settings.optimizers):
        best = np.nan_to_num(shares[k], nan=-np.inf).argmax()
        cells = [f"[bold]{x:.3f}[/]" if j == best else f"{x:.3f}" for j, x in enumerate(shares[k])]
        if "rates" in result.arrays:
            rate = float(result["rates"][0, k])
            cells.append("own" if np.isnan(rate) else f"{rate:g}")
        table.add_row(short(name), *cells)
    return table
