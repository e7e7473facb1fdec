"""Tables and figures of real data in a Markdown page, between marks, among hand-written text.

    <!-- begin imdb-accuracy -->
    what stands here is written by `mirrorhead report --markdown docs/evidence/imdb.md`
    <!-- end -->

Marks may have the name of a table or a figure of a study, or <study>-about, <study>-verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mirrorhead._files import write_atomically
from mirrorhead_lab import studies
from mirrorhead_lab.findings.finding import Finding, Part
from mirrorhead_lab.findings.formulas import plain_text
from mirrorhead_lab.findings.table import Table, markdown, word
from mirrorhead_lab.report import paper
from mirrorhead_lab.runtime.errors import UserError, reason

MARK = re.compile(r"^<!-- (begin ([\w-]+)|end) -->$", re.MULTILINE)


def write_markdown(path: Path, parts: Sequence[Part]) -> None:
    """Fill the marks of the page, and write its figures to images/ beside it."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error
    new = fill(text, blocks(parts), str(path))
    for figure in (figure for part in parts for figure in part.figures):
        if f"begin {figure.name} " in text:
            write_atomically(path.parent / "images" / f"{figure.name}.svg", figure.svg_file())
    write_atomically(path, new.encode())


def blocks(parts: Sequence[Part]) -> dict[str, str]:
    """What stands between the marks, by their names."""
    found = paper.blocks()
    for part in parts:
        found[f"{part.name}-about"] = f"    {part.command}\n\n{part.about} Tuning: {part.tuning}."
        pieces = [markdown(_verdicts(part)), part.verdict_rule, *map(_folded, part.findings)]
        found[f"{part.name}-verdicts"] = "\n\n".join(filter(None, pieces))
        for table in part.tables:
            found[table.name] = markdown(table) + (f"\n\n{table.note}" if table.note else "")
        for figure in part.figures:
            image = f"![{figure.caption}](images/{figure.name}.svg)"
            found[figure.name] = f"{image}\n\n{figure.caption}"
    return found


def fill(text: str, blocks: Mapping[str, str], name: str = "the page") -> str:
    """The text with the blocks between its marks; those of studies that are not given stay.

    >>> print(fill("A\\n<!-- begin x -->\\nold\\n<!-- end -->\\nB", {"x": "new"}))
    A
    <!-- begin x -->
    <BLANKLINE>
    new
    <BLANKLINE>
    <!-- end -->
    B
    """
    marks = list(MARK.finditer(text))
    begins, ends = marks[::2], marks[1::2]
    if len(marks) % 2 or [bool(mark[2]) for mark in marks] != [True, False] * len(ends):
        raise UserError(f"{name}: every <!-- begin NAME --> needs an <!-- end --> after it")
    pieces, last = [], 0
    for begin, end in zip(begins, ends, strict=True):
        block = blocks.get(begin[2])
        if block is None and not begin[2].startswith(_known()):
            known = ", ".join(blocks) or "none"
            raise UserError(f"{name}: there is nothing for {begin[2]}; there are {known}")
        if block is not None:
            pieces += [text[last : begin.end()], f"\n\n{block}\n\n"]
            last = end.start()
    return "".join([*pieces, text[last:]])


def _known() -> tuple[str, ...]:
    """Return what marks of studies start with."""
    return tuple(studies.load(name).id for name in studies.REPORTED)


def _verdicts(part: Part) -> Table:
    """Return a row of a few words for each claim; `_folded` has the numbers."""
    columns = {
        "claim": lambda finding: word(plain_text(finding.title)),
        "what we measured": lambda finding: word(finding.sentence),
        "verdict": lambda finding: word(finding.word),
    }
    return Table.of(f"{part.name}-verdicts", "Verdicts", columns, part.findings)


def _folded(finding: Finding) -> str:
    """Return a claim in full with its numbers and the remark, folded."""
    if finding.verdict is None:
        return ""
    shown = markdown(finding.comparisons) if finding.comparisons else finding.verdict.measured
    pieces = [f"<summary>{plain_text(finding.title)}</summary>", finding.claim, shown]
    pieces += [finding.comparisons.note] if finding.comparisons else []
    inside = "\n\n".join(filter(None, [*pieces, finding.verdict.remark]))
    return f'<details markdown="1">\n{inside}\n\n</details>'
