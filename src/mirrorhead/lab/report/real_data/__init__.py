"""The real-data part of the report: for each study claims with verdicts, tables and figures."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from mirrorhead.lab.evaluation.results import ComparisonResults
from mirrorhead.lab.plots import style
from mirrorhead.lab.report.figures import inline_svg, plotted_values
from mirrorhead.lab.report.findings import Finding
from mirrorhead.lab.report.real_data.claims import claims_of, judge_claim
from mirrorhead.lab.report.real_data.figures import drawings
from mirrorhead.lab.report.real_data.tables import tables
from mirrorhead.lab.report.table import Table

TITLES = {
    "imdb": "IMDb: is a review positive?",
    "cifar10": "CIFAR-10: what does an image show?",
}


@dataclass(frozen=True)
class Part:
    """A study in the report."""

    name: str
    title: str
    about: str
    rule: str
    command: str
    findings: tuple[Finding, ...]
    figures: tuple[tuple[str, Markup, Table], ...]  # caption, SVG, values
    tables: tuple[Table, ...]


def part(study: ComparisonResults) -> Part:
    """Judge, draw and tabulate a study."""
    import matplotlib

    figures = []
    with matplotlib.rc_context(style()):
        for drawing in drawings(study):
            figure = drawing.draw(study)
            svg = inline_svg(figure, drawing.name, drawing.caption)
            figures.append((drawing.caption, svg, plotted_values(figure, drawing.name)))
    return Part(
        study.name,
        TITLES[study.name],
        about(study),
        study.rule,
        study.command,
        tuple(judge_claim(study, claim) for claim in claims_of(study)),
        tuple(figures),
        tuple(tables(study)),
    )


def about(study: ComparisonResults) -> str:
    """Say in a sentence what was trained on what."""
    sizes = study.sizes
    thing = "reviews" if study.name == "imdb" else "images"
    return (
        f"{len(study.optimizers)} optimizers train the same model (preset {study.preset}) for"
        f" {study.epochs} epochs with batches of {study.batch_size}, on {sizes['train']:,} {thing};"
        f" {sizes['validation']:,} are the validation set, which chooses the epoch and the learning"
        f" rate, and {sizes['test']:,} are the test set."
    )
