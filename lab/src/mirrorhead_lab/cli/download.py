"""`mirrorhead download`: fetch data sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from mirrorhead_lab.cli.options import DataFolder
from mirrorhead_lab.runtime.errors import UserError

Name = Literal["imdb", "cad", "eraser", "cifar10", "sentences", "bert"]


@dataclass(frozen=True)
class Download:
    """Fetch data sets that are missing, from where their authors publish them.

    Sizes and checksums are verified. Run the same command again to resume a download.
    """

    names: Annotated[Positional[tuple[Name, ...]], arg(metavar="SET")] = ()
    """One or more: imdb (reviews), cad and eraser (annotations of them), cifar10, sentences (the
    tasks of tune), bert (the vocabulary of runs on texts)."""
    data: DataFolder = None

    def run(self) -> int:
        from mirrorhead_lab.datasets import download
        from mirrorhead_lab.datasets.sources import SOURCES

        if not self.names:
            raise UserError(f"give at least one of {', '.join(SOURCES)}")
        for name in dict.fromkeys(self.names):
            print(f"{name}: {download(name, self.data)}")
        return 0
