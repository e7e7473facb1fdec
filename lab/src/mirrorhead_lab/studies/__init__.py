"""Comparisons on real data: methods tuned alike on validation data, and judged on test data.

NAMES lists the studies. Each is the object STUDY of the module of its name. Their runs are lines of
results/<name>.jsonl.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mirrorhead_lab.findings.finding import Part
    from mirrorhead_lab.studies.study import Study

#: Those that the report shows, in its order.
REPORTED = ("patches", "language-model", "fine-tuning")
#: With those that claim nothing.
NAMES = (
    *REPORTED,
    *("language-model-longer", "language-model-small", "language-model-moves"),
    *("patches-merged", "reach"),
)


def load(name: str) -> Study[Any]:
    """Return the study of that name; or your own, by the name of its module.

    >>> load("fine-tuning").title
    'Fine-tuning a pretrained encoder'
    """
    from mirrorhead_lab.studies.study import Study

    module = f"{__name__}.{name.replace('-', '_')}" if name in NAMES else name
    unknown = ValueError(f"there is no study {name!r}; there are {', '.join(NAMES)}")
    if not module or module.startswith("."):
        raise unknown
    try:
        found = getattr(import_module(module), "STUDY", None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise unknown from None
    if not isinstance(found, Study):
        raise TypeError(f"{module} is not a study: it has no STUDY = Study(...)")
    return found


def parts(results: Path) -> list[Part]:
    """Return the parts of the studies whose files are in a folder; a damaged file is an error."""
    from mirrorhead_lab.studies.engine import read_rows

    found = ((study := load(name), read_rows(study, results / study.file)) for name in REPORTED)
    return [study.part(rows) for study, rows in found if len(rows)]
