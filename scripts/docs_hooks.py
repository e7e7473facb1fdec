"""What the documentation needs beyond mkdocs: formulas as MathML, included files, our docstrings.

Formulas are written in LaTeX between dollar signs. They become MathML while the site is built, so
that pages show them without a script and without the network.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import re
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import griffe
from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([\[(])(.*?)\\[\])]</\1>', re.DOTALL)


def on_page_markdown(text: str, **_: Any) -> str:
    """Include files of the repository, and point links out of docs/ to pages (called by mkdocs)."""
    text = re.sub(r'^--8<-- "(.+)"$', _included, text, flags=re.M)
    text = text.replace("<!-- commands -->", commands())
    text = re.sub(r"\]\((?:\.\./)?examples/(\w+)\.py\)", r"](examples.md#\1)", text)
    return re.sub(r"\]\(docs/", "](", text)


def on_post_build(config: Any) -> None:
    """Put the playground beside the pages (called by mkdocs)."""
    from mirrorhead_lab.playground import playground_page

    page = Path(config["site_dir"]) / "playground-page.html"
    page.write_text(playground_page(), encoding="utf-8")


def _included(match: re.Match[str]) -> str:
    text = (ROOT / match[1]).read_text().strip()
    return f"```python\n{text}\n```" if match[1].endswith(".py") else text


def commands() -> str:
    """Return what `--help` prints, for every command."""
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    from mirrorhead_lab.cli.main import COMMANDS, main

    sections = []
    for name in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([name, "--help"])
        sections.append(f"## mirrorhead {name}\n\n```text\n{printed.getvalue().strip()}\n```")
    return "\n\n".join(sections)


def on_post_page(output: str, **_: Any) -> str:
    """Name the search for screen readers, which the theme leaves out (called by mkdocs)."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula that pymdownx.arithmatex has marked by MathML (called by mkdocs)."""
    return _FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    latex = html.unescape(match[3]).strip().replace("{aligned}", "{split}")  # all it knows
    formula = convert(latex, display=display)
    if "\\" in formula or "<mi>&<" in formula:
        raise ValueError(f"latex2mathml cannot translate {latex}")
    return f'<div class="formula" tabindex="0">{formula}</div>' if display == "block" else formula


class Docstrings(griffe.Extension):
    """Translate what our docstrings take from reStructuredText and doctest into Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """Return the docstring with formulas between dollar signs and examples in fences.

    >>> print(markdown(":math:`p > 1`\\n\\n>>> 1 + 1\\n2"))
    $p > 1$
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    text = re.sub(r":math:`([^`]+)`", r"$\1$", docstring)
    math = r"^( *)\.\. math::(.*)\n((?:(?:\1 +.*)?(?:\n|\Z))*)"
    text = re.sub(math, _display, text, flags=re.M)
    text = re.sub(
        r"^( +)(\w+(?:, \w+)+):((?: .*|\n\1 +.*)+)(?:\n|\Z)", _arguments, text, flags=re.M
    )
    return re.sub(r"^( *)>>> .*\n?(?:\1\S.*\n?| *\1 .*\n?)*", _example, text, flags=re.M)


def _arguments(match: re.Match[str]) -> str:
    """Give each of several arguments that are explained together an entry of its own."""
    return "".join(f"{match[1]}{name}:{match[3]}\n" for name in match[2].split(", "))


def _display(match: re.Match[str]) -> str:
    body = "\n".join((match[2].strip(), dedent(match[3]).strip())).strip()
    if "&" in body or r"\\" in body:
        body = rf"\begin{{aligned}}{body}\end{{aligned}}"
    return indent(f"$$\n{body}\n$$\n\n", match[1])


def _example(match: re.Match[str]) -> str:
    example = dedent(match[0]).strip("\n")
    return indent(f"```pycon\n{example}\n```\n", match[1])
