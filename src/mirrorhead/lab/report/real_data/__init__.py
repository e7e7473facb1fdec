"""The real-data part of the report: for each study claims with verdicts, tables and figures."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from mirrorhead.lab.plots import style
from mirrorhead.lab.report.entry import Entry
from mirrorhead.lab.report.figure import inline_svg
from mirrorhead.lab.report.real_data.claims import claims_of, judge_claim
from mirrorhead.lab.report.real_data.figures import drawings
from mirrorhead.lab.report.real_data.results import Study
from mirrorhead.lab.report.real_data.tables import tables
from mirrorhead.lab.report.tables import Table

TITLES = {
    "imdb": "IMDb: is a review positive?",
    "cifar10": "CIFAR-10: what is in a picture?",
}


@dataclass(frozen=True)
class Part:
    """A study in the report."""

    name: str
    title: str
    about: str
    rule: str
    command: str
    entries: tuple[Entry, ...]
    figures: tuple[tuple[str, Markup], ...]  # caption, SVG
    tables: tuple[Table, ...]


def part(study: Study) -> Part:
    """Judge, draw and tabulate a study."""
    import matplotlib

    figures = []
    with matplotlib.rc_context(style()):
        for drawing in drawings(study):
            svg = inline_svg(drawing.draw(study), drawing.name, drawing.caption)
            figures.append((drawing.caption, svg))
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


def about(study: Study) -> str:
    """What was trained on what, in a sentence."""
    sizes = study.sizes
    thing = "reviews" if study.name == "imdb" else "pictures"
    return (
        f"{len(study.rivals)} optimizers train the same model (preset {study.preset}) for"
        f" {study.epochs} epochs with batches of {study.batch_size}, on {sizes['train']:,} {thing};"
        f" {sizes['validation']:,} choose the epoch and the learning rate, and {sizes['test']:,}"
        " are scored at the end."
    )
