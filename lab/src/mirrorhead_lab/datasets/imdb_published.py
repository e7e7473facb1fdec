"""IMDb as the paper has it: all 25,000 published training reviews, and test scores by epoch.

Nothing is held out: the validation set *is* the published test set. So the log of a run has the
test accuracy after every epoch, of which the paper's Table 1 prints the best. Choose nothing by it:
`imdb` is the data set for that.
"""

from __future__ import annotations

from mirrorhead_lab.datasets.dataset import DataSet
from mirrorhead_lab.datasets.imdb import CLASSES, load_imdb
from mirrorhead_lab.datasets.texts import Splits, Texts


def _published(train: Texts, test: Texts) -> Splits[Texts]:
    return Splits("imdb-published", CLASSES, train, test, test)


DATA_SET = DataSet(
    name="imdb-published",
    kind="text",
    sources=("imdb",),
    load=lambda root, partial: _published(
        *(load_imdb(split, root, partial=partial) for split in ("train", "test"))
    ),
    load_test=lambda root, partial: load_imdb("test", root, partial=partial),
)
