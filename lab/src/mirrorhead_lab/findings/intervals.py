"""The figure of a claim that consists of comparisons: each difference with its interval.

Every row has a scale of its own, symmetric about 0, and a tint on the side that is claimed. Colours
are those of verdicts, from the style sheet of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

#: Classes of the page's style sheet.
CLASSES = {
    "as claimed": "holds",
    "the other way": "does-not-hold",
    "not distinguishable": "not-decided",
    "worse, perhaps by less than allowed": "not-decided",
}
WIDTH, ROW, HALF, MIDDLE = 420, 38, 195, 210
SHOWN = 6


@dataclass(frozen=True)
class Interval:
    """A difference of two means: what it is of, its numbers, which side is claimed, the outcome."""

    label: str
    low: float
    value: float
    high: float
    higher: bool
    outcome: str


def intervals_figure(name: str, title: str, rows: Sequence[Interval]) -> Markup | None:
    """Return the figure as an <svg> element; None if there are no rows.

    >>> row = Interval("accuracy", -0.1, 0.2, 0.5, True, "not distinguishable")
    >>> "<svg" in (intervals_figure("a", "A", [row]) or "")
    True
    """
    if not rows:
        return None
    shown = rows[:SHOWN]
    left = len(rows) - len(shown)
    height = ROW * len(shown) + (20 if left else 4)
    parts = [row for k, one in enumerate(shown) for row in _row(one, k * ROW)]
    if left:
        text = f"and {left} more comparison{'s' * (left > 1)}"
        parts.append(f'<text x="4" y="{height - 6}" font-size="11">{text}</text>')
    label = f"{name}-intervals"
    return Markup(
        f'<svg id="figure-of-{name}" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' xmlns="http://www.w3.org/2000/svg" class="intervals" aria-labelledby="{label}"'
        f' style="max-width: {WIDTH}px">'
        f'<title id="{label}">{escape(title)}</title>{"".join(parts)}</svg>'
    )


def _row(one: Interval, top: float) -> list[str]:
    largest = max(abs(one.low), abs(one.high)) or 1.0
    low, value, high = (MIDDLE + HALF * x / largest for x in (one.low, one.value, one.high))
    line, start = top + 27, MIDDLE if one.higher else MIDDLE - HALF
    dot = f'<circle cx="{value:.1f}" cy="{line}" r="4.5" fill="currentColor"/>'
    bar = f'<path d="M{low:.1f} {line}H{high:.1f}" class="bar"/>'
    return [
        f'<text x="4" y="{top + 13}" font-size="12">{escape(one.label)}</text>',
        f'<rect x="{start}" y="{line - 8}" width="{HALF}" height="16" class="claimed"/>',
        f'<path d="M{MIDDLE} {line - 8}v16" class="zero"/>',
        f'<g class="{CLASSES[one.outcome]}">{bar}{dot}</g>',
    ]
