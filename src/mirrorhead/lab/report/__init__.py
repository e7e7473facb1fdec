"""The report: one page that needs nothing else, with a verdict beside every claim."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from mirrorhead._files import write_atomically
from mirrorhead._version import __version__
from mirrorhead.lab.report.entry import WORDS
from mirrorhead.lab.report.entry import Entry as Entry
from mirrorhead.lab.report.entry import judged as judged
from mirrorhead.lab.report.entry import unfinished as unfinished
from mirrorhead.lab.report.real_data import Part
from mirrorhead.lab.report.real_data.claims import RULE
from mirrorhead.lab.report.templates import HERE, templates

GENERATOR = "mirrorhead"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class ReportError(ValueError):
    """The report cannot be written there."""


def check_free(path: Path) -> None:
    """A file of that name that is no report of ours is not overwritten."""
    if path.exists() and f'content="{GENERATOR} ' not in path.read_text("utf-8", "replace")[:2000]:
        raise ReportError(f"{path} is not a report of {GENERATOR}; choose another name, or move it")


def write_report(
    path: Path,
    entries: Sequence[Entry],
    parts: Sequence[Part] = (),
    missing: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the page, in place of an older one."""
    check_free(path)
    write_atomically(path, render(entries, parts, missing).encode())


def render(
    entries: Sequence[Entry],
    parts: Sequence[Part] = (),
    missing: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as HTML.

    Args:
        entries: the experiments.
        parts: studies on real data, with claims of their own.
        missing: what is not in the page, and the command that would make it.
    """
    environment = templates()
    environment.filters |= {"duration": duration, "powers": powers, "setting": setting}
    everything = [*entries, *(entry for part in parts for entry in part.entries)]
    counts = Counter(entry.word for entry in everything)
    return environment.get_template("report.html.j2").render(
        entries=entries,
        parts=parts,
        missing=missing,
        verdict_rule=RULE,
        everything=everything,
        number_of={entry.name: k for k, entry in enumerate(everything, start=1)},
        counts=[(word, counts[word]) for word in WORDS if counts[word]],
        seconds=sum(entry.seconds for entry in everything),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        generator=GENERATOR,
        version=__version__,
        css=Markup((HERE / "report.css").read_text("utf-8")),
        js=Markup((HERE / "report.js").read_text("utf-8")),
        css_class=lambda word: word.replace(" ", "-"),
        vars=vars,
    )


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(0.25), duration(61.2), duration(7260)
    ('0.2 s', '1 min 1 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def powers(text: str) -> str:
    """Powers of ten as one reads them.

    >>> powers("D = 3.0e-04 of 1e+12 at p = 1.5, not in hide-1")
    'D = 3.0·10⁻⁴ of 10¹² at p = 1.5, not in hide-1'
    """

    def written(match: re.Match[str]) -> str:
        mantissa, exponent = match[1], str(int(match[2]))
        power = "10" + exponent.translate(SUPERSCRIPTS)
        return power if mantissa == "1" else f"{mantissa}·{power}"

    return re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]?\d+)\b", written, text)


def setting(value: object) -> str:
    """A setting as one reads it.

    >>> setting((1.5, 2.0, "all")), setting(True), setting(20000), setting(1e-12)
    ('1.5, 2, all', 'yes', '20,000', '10⁻¹²')
    """
    if isinstance(value, tuple):
        return ", ".join(setting(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return powers(f"{value:g}") if isinstance(value, float) else str(value)
