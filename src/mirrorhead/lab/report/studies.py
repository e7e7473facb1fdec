"""All studies whose results are kept: each is a file in results/ and a part of the report."""

from __future__ import annotations

from pathlib import Path

from mirrorhead.lab.evaluation import language_results, patch_study
from mirrorhead.lab.evaluation.head_margins import load_margins
from mirrorhead.lab.evaluation.results import load_comparisons
from mirrorhead.lab.report import language, patches
from mirrorhead.lab.report.findings import Part
from mirrorhead.lab.report.real_data import part
from mirrorhead.lab.report.real_data.margins import margins_part

#: Marks in Markdown pages start with the name of a study.
NAMES = ("imdb", "cifar10", "margins", "patches", "language")


def study_parts(results: Path) -> list[Part]:
    """Return the parts of the studies whose files are in a folder; a damaged file is an error."""
    studies = load_comparisons(results)
    parts = [part(study, studies) for study in studies]
    heads = load_margins(results / "margins")
    parts += [margins_part(heads)] if heads else []
    runs = patch_study.read_patch_runs(results / patch_study.FILE)
    parts += [patches.part(runs)] if runs else []
    trained = language_results.load_runs(results / language_results.FILE)
    return parts + ([language.part(trained)] if trained else [])
