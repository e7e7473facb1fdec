"""The playground: one self-contained page on which to move tokens and see attention choose."""

from __future__ import annotations

from importlib.resources import files

PARTS = ("style.css", "mathematics.js", "presets.js", "application.js")


def playground_page() -> str:
    """Return the page as HTML, with its style and scripts inside: it needs no network.

    >>> page = playground_page()
    >>> "<script src" in page or "http://" in page.replace("http://www.w3.org", "")
    False
    """
    folder = files(__package__ or __name__)
    page = (folder / "page.html").read_text(encoding="utf-8")
    for file in PARTS:
        name = file.split(".")[0].upper()
        page = page.replace(f"/*{name}*/", (folder / file).read_text(encoding="utf-8"))
    return page
