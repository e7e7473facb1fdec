"""`mirrorhead download`: fetch data sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from mirrorhead_lab.cli.options import DataFolder
from mirrorhead_lab.runtime.errors import UserError


@dataclass(frozen=True)
class Download:
    """Fetch data sets that are missing, from where their authors publish them.

    Sizes and checksums are verified. Run the same command again to resume a download.
    """

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="SET")] = ()
    """One or more: imdb (reviews), cad and eraser (annotations of them), cifar10, sentences (sst2,
    trec, subj and cr), bert (the vocabulary of runs on texts), or a module of one's own."""
    data: DataFolder = None

    def run(self) -> int:
        from mirrorhead_lab.datasets import SOURCES, download, find

        if not self.names:
            raise UserError(f"give at least one of {', '.join(sorted(SOURCES))}")
        wanted = [(name,) if name in SOURCES else find(name).sources for name in self.names]
        for name in dict.fromkeys(source for sources in wanted for source in sources):
            print(f"{name}: {download(name, self.data)}")
        return 0
