"""The page of verdicts and the page of attention, as HTML that loads nothing from elsewhere.

The page of attention shows maps on sentences that one can point at: the paper's Figure 9.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from markupsafe import Markup

from mirrorhead._files import write_atomically
from mirrorhead._version import __version__
from mirrorhead_lab.experiments import storage
from mirrorhead_lab.findings.figures import share_letters
from mirrorhead_lab.findings.finding import GROUPS, WORDS, Finding, Part
from mirrorhead_lab.findings.formulas import equation, plain_text, powers, with_formulas
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.folders import check_folder, check_writable

if TYPE_CHECKING:
    from jinja2 import Environment
    from torch import Tensor

    from mirrorhead_lab.evaluation.attention_reading import AttentionReading

HERE = Path(__file__).parent
GENERATOR = "mirrorhead"
#: Weights are whole numbers of this size in the page of attention.
UNIT = 1e-4


def check_free(path: Path) -> None:
    """Refuse to overwrite a file of that name that is not one of our reports."""
    if path.exists() and f'content="{GENERATOR} ' not in path.read_text("utf-8", "replace")[:2000]:
        raise UserError(f"{path} is not a report of {GENERATOR}; choose another name, or move it")


def check_place(page: Path) -> None:
    """Refuse a folder in which experiments and their report cannot be written."""
    folder = page.parent
    check_writable(folder)
    check_free(page)
    # The documentation may have been built there before.
    check_folder(folder, "experiments", (page.name, f"*/{storage.RUN}"), {"docs"})


def write_report(
    path: Path,
    findings: Sequence[Finding],
    parts: Sequence[Part] = (),
    missing: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the page, in place of an older one."""
    check_free(path)
    text = render(findings, parts, missing, docs=find_docs(path.parent))
    write_atomically(path, text.encode())


def find_docs(folder: Path) -> str:
    """Return how a page in the folder links to a page of the docs, "" if it cannot.

    The pages that `make docs` has built beside it come first, then those of the checkout around it.
    """
    if (folder / "docs" / "evidence" / "paper.html").exists():
        return "docs/{}.html#{}"
    there = folder.resolve()
    for around in (there, *there.parents):
        page = around / "docs" / "evidence" / "paper.md"
        if page.exists() and (around / "mkdocs.yml").exists():
            return quote(os.path.relpath(around / "docs", there)) + "/{}.md#{}"
    return ""


def render(
    findings: Sequence[Finding],
    parts: Sequence[Part] = (),
    missing: Sequence[tuple[str, str]] = (),
    *,
    docs: str = "",
) -> str:
    """Return the page as HTML.

    Args:
        findings: the experiments, which were computed on this machine.
        parts: studies, read from stored results, with claims of their own.
        missing: what is not in the page, and the command that would make it.
        docs: how a section of the documentation is linked, such as "docs/{}.html#{}"; if it is
            empty, sections are named instead.
    """
    environment = templates()
    environment.filters |= {"equation": equation, "formulas": with_formulas, "plain": plain_text}
    environment.filters |= {"duration": duration, "setting": setting}
    stored = [replace(one, group=part.group) for part in parts for one in part.findings]
    everything = [*findings, *stored]
    text = environment.get_template("report.html.j2").render(
        origins=[
            ("computed", "Computed on this machine", grouped(findings)),
            ("stored", "Read from stored results", grouped(stored)),
        ],
        summary=summary(findings, stored),
        parts=parts,
        missing=missing,
        docs=docs,
        everything=everything,
        counts=verdict_counts(everything),
        seconds=sum(finding.seconds for finding in everything),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        generator=GENERATOR,
        version=__version__,
        css=Markup(read("report.css")),
        js=Markup(read("report.js")),
        css_class=lambda word: word.replace(" ", "-"),
        slug=lambda text: re.sub(r"[^a-z]+", "-", text.lower()),
        vars=vars,
    )
    return share_letters(text)


def grouped(findings: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
    """Return the findings of each group that has some, in the order of `GROUPS`."""
    found = [(group, [one for one in findings if one.group == group]) for group in GROUPS]
    return [(group, some) for group, some in found if some]


def verdict_counts(findings: Sequence[Finding]) -> list[tuple[str, int]]:
    """Return how many findings have which verdict, without zeros."""
    counts = Counter(finding.word for finding in findings)
    return [(word, counts[word]) for word in WORDS if counts[word]]


def summary(computed: Sequence[Finding], stored: Sequence[Finding]) -> list[str]:
    """Say in a sentence for each origin how many claims hold."""
    origins = (("computed on this machine", computed), ("read from stored results", stored))
    sentences = []
    for origin, findings in origins:
        if findings:
            held = sum(finding.word.startswith("holds") for finding in findings)
            failed = sum(finding.word == "does not hold" for finding in findings)
            sentences.append(
                f"Of {len(findings)} claims {origin}, {held} hold and {failed} do not; the rest are"
                " not decided, not seen at this scale, or not finished."
                if held + failed < len(findings)
                else f"Of {len(findings)} claims {origin}, {held} hold and {failed} do not."
            )
    return sentences


def render_attention(
    looks: Sequence[AttentionReading],
    title: str,
    *,
    layer: int | None = None,
    head: int | None = None,
    rolled: bool = False,
) -> str:
    """The page as HTML; it loads nothing from elsewhere.

    Args:
        looks: one for each sentence.
        title: what the model is.
        layer, head, rolled: what to show first: a layer (the last), a head (their mean), or
            attention rollout.
    """
    layers, heads = looks[0].maps.shape[:2]
    layer = layers - 1 if layer is None else layer
    shown = [look.rollout if rolled else look.weights(layer, head) for look in looks]
    return (
        templates()
        .get_template("attention.html.j2")
        .render(
            looks=looks,
            title=title,
            layers=layers,
            heads=heads,
            layer="rollout" if rolled else layer,
            head="mean" if head is None or rolled else head,
            shades=[(rows[0] / rows[0].max()).tolist() for rows in shown],
            weights=[rows[0].tolist() for rows in shown],
            content=[
                {
                    "tokens": look.tokens,
                    "maps": [[_whole(head) for head in layer] for layer in look.maps],
                    "rollout": _whole(look.rollout),
                }
                for look in looks
            ],
            unit=UNIT,
            version=__version__,
            css=Markup(read("report.css") + read("attention.css")),
            js=Markup(read("attention.js")),
        )
    )


def _whole(weights: Tensor) -> list[list[int]]:
    return (weights / UNIT).round().int().tolist()


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
