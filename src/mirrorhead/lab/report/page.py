"""The page of verdicts as HTML: one file that loads nothing from elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from mirrorhead._files import write_atomically
from mirrorhead._version import __version__
from mirrorhead.lab.report.figures import share_letters
from mirrorhead.lab.report.findings import WORDS, Finding, Part
from mirrorhead.lab.report.formulas import equation, plain_text, powers, with_formulas
from mirrorhead.lab.runtime.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
GENERATOR = "mirrorhead"


def check_free(path: Path) -> None:
    """Refuse to overwrite a file of that name that is not one of our reports."""
    if path.exists() and f'content="{GENERATOR} ' not in path.read_text("utf-8", "replace")[:2000]:
        raise UserError(f"{path} is not a report of {GENERATOR}; choose another name, or move it")


def write_report(
    path: Path,
    findings: Sequence[Finding],
    parts: Sequence[Part] = (),
    missing: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the page, in place of an older one."""
    check_free(path)
    docs = "docs" if (path.parent / "docs" / "paper.html").exists() else ""
    write_atomically(path, render(findings, parts, missing, docs=docs).encode())


def render(
    findings: Sequence[Finding],
    parts: Sequence[Part] = (),
    missing: Sequence[tuple[str, str]] = (),
    *,
    docs: str = "",
) -> str:
    """Return the page as HTML.

    Args:
        findings: the experiments.
        parts: studies on real data, with claims of their own.
        missing: what is not in the page, and the command that would make it.
        docs: where the built documentation is, seen from the page; if it is not known, sections
            are named instead of linked.
    """
    environment = templates()
    environment.filters |= {
        "duration": duration,
        "equation": equation,
        "formulas": with_formulas,
        "plain": plain_text,
        "setting": setting,
    }
    everything = [*findings, *(finding for part in parts for finding in part.findings)]
    counts = Counter(finding.word for finding in everything)
    text = environment.get_template("report.html.j2").render(
        findings=findings,
        parts=parts,
        missing=missing,
        docs=docs,
        everything=everything,
        number_of={finding.name: k for k, finding in enumerate(everything, start=1)},
        counts=[(word, counts[word]) for word in WORDS if counts[word]],
        seconds=sum(finding.seconds for finding in everything),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        generator=GENERATOR,
        version=__version__,
        css=Markup(read("report.css")),
        js=Markup(read("report.js")),
        css_class=lambda word: word.replace(" ", "-"),
        vars=vars,
    )
    return share_letters(text)


def templates() -> Environment:
    """Return the environment of the templates of this folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(HERE, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def read(name: str) -> str:
    """Return a style sheet or a script of this folder, whatever the locale."""
    return (HERE / name).read_text("utf-8")


def duration(seconds: float) -> str:
    """Write seconds in words.

    >>> duration(0.25), duration(61.2), duration(7260)
    ('0.2 s', '1 min 1 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def setting(value: object) -> str:
    """Write a setting as one reads it.

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
