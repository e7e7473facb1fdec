"""A matplotlib figure in a page: as SVG beside others, and its numbers as a table."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from mirrorhead_lab.findings.formulas import plain_text, powers
from mirrorhead_lab.findings.table import Cell, Table, word
from mirrorhead_lab.plots import Figure, style

#: Points of a line in the table of values; a longer line is sampled.
POINTS = 9


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


def inline_svg(figure: Figure, name: str, alt: str) -> Markup:
    """Return the figure as an <svg> element whose ids start with `name`, described by `alt`.

    matplotlib gives parts of every figure the same ids, and a style sheet that would hold for
    the whole page. Here each reference finds its own part, and the page keeps its style.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    needless = r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|<defs>\s*</defs>"
    text = re.sub(needless, "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda i: f' id="{name}-{i[1]}"' if i[1] in used else "", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    # Hundredths of a point are enough, and no line needs an indent: half of a page would be those.
    text = re.sub(r"(scale\([^)]*\)|\.\d\d)\d*", r"\1", text)  # scales are of letters, and small
    text = re.sub(r"\s*\n\s*", "\n", text)
    view = re.search(r'viewBox="[^"]*"', text)
    if view is None:
        raise ValueError("the SVG has no viewBox")
    label = f"{name}-description"
    width = float(figure.get_figwidth()) * 96 * 1.15  # pixels; a small figure stays small
    opening = (
        f'<svg id="{name}" {view.group()} xmlns="http://www.w3.org/2000/svg" role="img"'
        f' aria-labelledby="{label}" stroke-linejoin="round" stroke-linecap="butt"'
        f' style="max-width: {width:.0f}px">'
        f'<title id="{label}">{escape(plain_text(alt))}</title>'
    )
    return Markup(opening + text[text.index(">") + 1 :])


def share_letters(page: str) -> str:
    """Return a page whose figures share one outline of each letter, instead of one per figure.

    >>> figures = '<body><path id="a-DejaVuSans-41" d="M"/><use href="#a-DejaVuSans-41"/></body>'
    >>> print(share_letters(figures))
    <body><svg width="0" height="0" aria-hidden="true"><defs>
    <path id="DejaVuSans-41" d="M"/>
    </defs></svg><use href="#DejaVuSans-41"/></body>
    """
    outline = re.compile(r'<path id="[\w-]*?(DejaVu[\w-]+)"([^>]*/>)')
    letters = dict(outline.findall(page))
    page = outline.sub("", page)
    page = re.sub(r'href="#[\w-]*?(DejaVu[\w-]+)"', r'href="#\1"', page)
    outlines = "\n".join(f'<path id="{name}"{rest}' for name, rest in letters.items())
    shared = f'<svg width="0" height="0" aria-hidden="true"><defs>\n{outlines}\n</defs></svg>'
    return re.sub(r"<body[^>]*>", lambda body: body[0] + shared, page, count=1)


def plotted_values(figure: Figure, name: str) -> Table:
    """Return the numbers behind the lines of a figure: panel, line, x and y.

    Of a long line `POINTS` points are shown, the first and the last among them.
    """
    from matplotlib.patches import StepPatch

    rows: list[tuple[Cell, ...]] = []
    named: dict[str, str] = {}  # a panel without a legend uses the colours of one that has it
    lines = [
        (axis, line, str(line.get_label()), str(line.get_color()))
        for axis in figure.axes
        for line in axis.lines
    ]
    for _, _, label, colour in lines:
        if not label.startswith("_"):
            named.setdefault(colour, label)
    for axis, line, label, colour in lines:
        shown = named.get(colour, "–") if label.startswith("_") else label
        rows += _rows(axis, shown, np.asarray(line.get_xydata(), float))
    for axis in figure.axes:
        for patch in axis.patches:
            if isinstance(patch, StepPatch):  # a histogram: its bins by their middle
                data: Any = patch.get_data()
                middle = (np.asarray(data.edges)[1:] + np.asarray(data.edges)[:-1]) / 2
                points = np.column_stack([middle, np.asarray(data.values, float)])
                rows += _rows(axis, str(patch.get_label()), points)
    columns = ("Panel", "Line", "Axis x", "x", "Axis y", "y")
    return Table(f"{name}-values", "Values of the figure", columns, tuple(rows))


def _rows(axis: Any, label: str, points: np.ndarray) -> list[tuple[Cell, ...]]:
    points = points[np.isfinite(points).all(1)]
    count = min(POINTS, len(points))
    chosen = np.unique(np.linspace(0, len(points) - 1, count).round().astype(int))
    title = axis.get_title(loc="left") or axis.get_title()
    texts = (title, label, axis.get_xlabel(), axis.get_ylabel())
    # Labels of matplotlib, without line breaks and formulas.
    panel, line, x, y = (
        word(plain_text(" ".join(text.split())).replace("||", "‖") or "–") for text in texts
    )
    # Ticks of the y axis that are words, such as the names of optimizers.
    ticks = {
        float(at): tick.get_text()
        for at, tick in zip(axis.get_yticks(), axis.get_yticklabels(), strict=False)
        if re.search(r"[A-Za-z]{2}", tick.get_text()) and "math" not in tick.get_text()
    }
    return [
        (panel, line, x, _number(a), y, Cell(ticks[b], b) if b in ticks else _number(b))
        for a, b in points[chosen].tolist()
    ]


def _number(value: float) -> Cell:
    return Cell(powers(f"{value:.4g}"), value)
