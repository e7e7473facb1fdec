"""Tables and figures of real data in a Markdown page, between marks, among hand-written text.

    <!-- begin imdb-accuracy -->
    what stands here is written by `mirrorhead report --markdown docs/results.md`
    <!-- end -->

Marks may have the name of a table or a figure of a study, or <study>-about, <study>-verdicts.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mirrorhead._files import write_atomically
from mirrorhead.lab.evaluation.results import DATA_SETS, ComparisonResults
from mirrorhead.lab.plots import style
from mirrorhead.lab.report.findings import Finding
from mirrorhead.lab.report.real_data import about
from mirrorhead.lab.report.real_data.claims import RULE, claims_of, judge_claim
from mirrorhead.lab.report.real_data.figures import drawings
from mirrorhead.lab.report.real_data.tables import tables
from mirrorhead.lab.report.table import Table, markdown, word
from mirrorhead.lab.runtime.errors import UserError

MARK = re.compile(r"^<!-- (begin ([\w-]+)|end) -->$", re.MULTILINE)


def write_markdown(path: Path, studies: Sequence[ComparisonResults]) -> None:
    """Fill the marks of the page, and write its figures to images/ beside it."""
    import matplotlib

    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    new = fill(text, blocks(studies), str(path))
    for study in studies:
        for drawing in drawings(study):
            if f"begin {drawing.name} " in text:
                with matplotlib.rc_context({**style(), "svg.hashsalt": drawing.name}):
                    buffer = io.BytesIO()
                    drawing.draw(study).savefig(
                        buffer, format="svg", metadata={"Date": None}, facecolor="white"
                    )
                write_atomically(path.parent / "images" / f"{drawing.name}.svg", buffer.getvalue())
    write_atomically(path, new.encode())


def blocks(studies: Sequence[ComparisonResults]) -> dict[str, str]:
    """What stands between the marks, by their names."""
    found: dict[str, str] = {}
    for study in studies:
        findings = [judge_claim(study, claim) for claim in claims_of(study)]
        found[f"{study.name}-about"] = (
            f"    {study.command}\n\n{about(study)} Tuning: {study.rule}."
        )
        found[f"{study.name}-verdicts"] = f"{markdown(_verdicts(study.name, findings))}\n\n{RULE}"
        for table in tables(study):
            note = f"\n\n{table.note}" if table.note else ""
            found[table.name] = markdown(table) + note
        for drawing in drawings(study):
            found[drawing.name] = (
                f"![{drawing.caption}](images/{drawing.name}.svg)\n\n{drawing.caption}"
            )
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
    paired = len(begins) == len(ends) and not any(end[2] for end in ends)
    if not paired or not all(begin[2] for begin in begins):
        raise UserError(f"{name}: every <!-- begin NAME --> needs an <!-- end --> after it")
    pieces, last = [], 0
    for begin, end in zip(begins, ends, strict=True):
        block = blocks.get(begin[2])
        if block is None and begin[2].split("-")[0] not in DATA_SETS:
            known = ", ".join(blocks) or "none"
            raise UserError(f"{name}: there is nothing for {begin[2]}; there are {known}")
        if block is not None:
            pieces += [text[last : begin.end()], f"\n\n{block}\n\n"]
            last = end.start()
    return "".join([*pieces, text[last:]])


def _verdicts(study: str, findings: Sequence[Finding]) -> Table:
    rows = []
    for finding in findings:
        verdict = finding.verdict
        measured = f"{verdict.measured} {verdict.remark}".strip() if verdict else finding.failure
        rows.append((word(finding.claim), word(measured), word(finding.word)))
    columns = ("claim", "what we measured", "verdict")
    return Table(f"{study}-verdicts", "Verdicts", columns, tuple(rows))
