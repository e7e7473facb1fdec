"""All studies whose results are kept: each is a file in results/ and a part of the report."""

from __future__ import annotations

from pathlib import Path

from mirrorhead_lab import studies
from mirrorhead_lab.evaluation.head_margins import load_margins
from mirrorhead_lab.evaluation.results import load_comparisons
from mirrorhead_lab.findings.finding import Part
from mirrorhead_lab.report.real_data import part
from mirrorhead_lab.report.real_data.margins import margins_part

#: Marks in Markdown pages start with the name of a study.
NAMES = ("imdb", "cifar10", "margins", "patches", "language", "fine")


def study_parts(results: Path) -> list[Part]:
    """Return the parts of the studies whose files are in a folder; a damaged file is an error."""
    compared = load_comparisons(results)
    parts = [part(study, compared) for study in compared]
    heads = load_margins(results / "margins")
    parts += [margins_part(heads)] if heads else []
    return parts + studies.parts(results)
