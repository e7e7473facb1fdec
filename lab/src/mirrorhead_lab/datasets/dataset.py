"""What a data set is: an object that reads three sets of labelled examples.

Its module says where the files come from (`publish`), and ends with `DATA_SET = DataSet(...)`. See
trec.py for a set of texts and cifar10.py for images. A set of your own is found by the name of its
module: `mirrorhead train my.module`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mirrorhead_lab.datasets.sources import Folder, data_root, require
from mirrorhead_lab.datasets.texts import Splits

Kind = Literal["text", "images"]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set that can be trained on.

    Args:
        name: by which `mirrorhead train NAME` finds it, if it is in this package.
        kind: "text" if its sets are `Texts`, which a preset encodes; "images" if they have batches
            of pixels (b, 3, height, width). Presets read one kind.
        load: reads the three sets from the folder of all data sets; with `partial`, also sets
            that are not complete.
        sources: names of what was published, which is downloaded if asked.
        load_test: reads the test set alone, if that takes less time.
        annotated: sets of texts of the same kind in which people marked what matters, "eraser" and
            "cad": attention of models that were trained on this set is compared with them.
    """

    name: str
    kind: Kind
    load: Callable[[Path, bool], Splits[Any]]
    sources: tuple[str, ...] = ()
    load_test: Callable[[Path, bool], Any] | None = None
    annotated: tuple[str, ...] = ()

    def read(
        self, folder: Folder = None, *, download: bool = False, partial: bool = False
    ) -> Splits[Any]:
        """Return the three sets; arguments as in `load_imdb`."""
        require(*self.sources, folder=folder, download=download)
        return self.load(data_root(folder), partial)

    def read_test(self, folder: Folder = None, *, partial: bool = False) -> Any:
        """Return the test set."""
        if self.load_test is None:
            return self.read(folder, partial=partial).test
        return self.load_test(data_root(folder), partial)
