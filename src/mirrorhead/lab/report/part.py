"""A study in the report: claims with verdicts, figures, tables; for the page and for Markdown."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from mirrorhead.lab.plots import Figure, style
from mirrorhead.lab.report.figures import inline_svg, plotted_values
from mirrorhead.lab.report.findings import Finding
from mirrorhead.lab.report.table import Table


@dataclass(frozen=True)
class PartFigure:
    """A figure, its name in files and ids, and what a reader sees in it."""

    name: str
    caption: str
    draw: Callable[[], Figure]

    def inline(self) -> tuple[str, Markup, Table]:
        """The caption, the figure for the page, and its values."""
        import matplotlib

        with matplotlib.rc_context(style()):
            figure = self.draw()
            svg = inline_svg(figure, self.name, self.caption)
            return self.caption, svg, plotted_values(figure, self.name)

    def svg_file(self) -> bytes:
        """The figure as a file; the same figure gives the same bytes."""
        import matplotlib

        buffer = io.BytesIO()
        with matplotlib.rc_context({**style(), "svg.hashsalt": self.name}):
            self.draw().savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
        return buffer.getvalue()


@dataclass(frozen=True)
class Part:
    """A study.

    Args:
        name, title: of its section.
        about: what was trained on what.
        tuning: how settings were chosen, without a full stop.
        verdict_rule: how its claims are judged.
        command: what makes the runs.
        findings, figures, tables: what the section shows.
    """

    name: str
    title: str
    about: str
    tuning: str
    verdict_rule: str
    command: str
    findings: tuple[Finding, ...] = ()
    figures: tuple[PartFigure, ...] = ()
    tables: tuple[Table, ...] = ()
