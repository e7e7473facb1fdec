"""A matplotlib figure as SVG that stands inside a page, beside others."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
