"""A matplotlib figure as SVG that stands inside a page, beside others."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Told apart by the colour-blind, and calm. Drawn on the page's own white, in its spirit.
COLOURS = ("#2f6690", "#c8553d", "#5a8f69", "#8e6c8a", "#b08900", "#3d405b", "#6c757d")


def style() -> dict[Any, Any]:
    """Settings of matplotlib with which experiments are drawn, for `matplotlib.rc_context`."""
    from cycler import cycler

    return {
        "svg.fonttype": "path",  # letters look, and take room, the same on every machine
        "font.size": 10.5,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#5c6370",
        "axes.labelcolor": "#2b303b",
        "axes.titlecolor": "#2b303b",
        "xtick.color": "#5c6370",
        "ytick.color": "#5c6370",
        "xtick.labelcolor": "#2b303b",
        "ytick.labelcolor": "#2b303b",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e4de",
        "grid.linewidth": 0.8,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
    }


def inline_svg(figure: Figure, name: str, alt: str) -> Markup:
    """The figure as an <svg> element whose ids start with `name`, described by `alt`.

    matplotlib gives parts of every figure the same ids, and a style sheet that would hold for
    the whole page; here each reference finds its own part, and the page keeps its style.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    needless = r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->"
    text = re.sub(needless, "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{name}-", text)
    view = re.search(r'viewBox="[^"]*"', text)
    if view is None:
        raise ValueError("the SVG has no viewBox")
    label = f"{name}-description"
    width = float(figure.get_figwidth()) * 96 * 1.15  # pixels; a small figure stays small
    opening = (
        f'<svg {view.group()} xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" role="img" aria-labelledby="{label}" '
        f'stroke-linejoin="round" stroke-linecap="butt" style="max-width: {width:.0f}px">'
        f'<title id="{label}">{escape(alt)}</title>'
    )
    return Markup(opening + text[text.index(">") + 1 :])
