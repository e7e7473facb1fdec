"""Comparisons on real data: methods tuned alike on validation data, and judged on test data.

NAMES lists the studies. Each is the object STUDY of the module of its name. Their runs are lines of
results/<name>.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirrorhead_lab.runtime.extensions import load_object

if TYPE_CHECKING:
    from mirrorhead_lab.findings.finding import Part
    from mirrorhead_lab.studies.study import Study

#: Those that the report shows, in its order.
REPORTED = (
    *("imdb", "imdb-to-the-end", "cifar10", "heads"),
    *("patches", "optimizers", "language-model", "fine-tuning"),
)
#: With those that claim nothing.
NAMES = (
    *REPORTED,
    *("language-model-longer", "language-model-small", "language-model-moves"),
    *("patches-merged", "reach", "weight-sync"),
)


def load(name: str) -> Study[Any]:
    """Return the study of that name; or your own, by the name of its module.

    >>> load("fine-tuning").title
    'Fine-tuning a pretrained encoder'
    """
    from mirrorhead_lab.studies.study import Study

    found = load_object(name, __name__, NAMES, "STUDY", Study)
    if found is None:
        raise ValueError(f"there is no study {name!r}; there are {', '.join(NAMES)}")
    return found


def parts(results: Path, own: Sequence[str] = ()) -> list[Part]:
    """Return the parts of the studies whose files are in a folder; a damaged file is an error.

    own: the modules of studies beside those of `REPORTED`.
    """
    from mirrorhead_lab.studies.engine import read_rows

    studies = [load(name) for name in dict.fromkeys((*REPORTED, *own))]
    found = ((study, read_rows(study, results / study.file)) for study in studies)
    return [study.part(rows) for study, rows in found if len(rows)]
