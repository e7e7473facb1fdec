"""Fingerprints of stored results: which code a result was computed from.

A stored result may be used again only while its code is the same: the file of the function that
computed it, and every file that this one imports, directly or through others, from the library and
from its own folder. Functions that only present a result do not count.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mirrorhead
from mirrorhead._files import sha256_of

LIBRARY = Path(mirrorhead.__file__).parent


def digest(content: Any) -> str:
    """Return a short hash of anything that JSON can hold, whatever the order of its keys.

    >>> digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    True
    """
    return sha256_of(json.dumps(content, sort_keys=True, allow_nan=False).encode())[:16]


def code_of(function: Callable[..., Any], without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return a hash of each file that a function depends on, {file: hash}.

    Args:
        function: a function of the module that computes the result.
        without: names of functions of the same module that do not count, for they present it.
    """
    own = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
    found: dict[Path, str] = {}
    todo = {own}
    while todo:
        path = todo.pop()
        found[path], imported = _read(path, own.parent, without if path == own else ())
        todo |= imported - found.keys()
    return {_label(path): found[path] for path in sorted(found)}


@cache
def _read(path: Path, beside: Path, without: tuple[str, ...]) -> tuple[str, frozenset[Path]]:
    """Return the hash of a file and the files that it imports, lazily and for type checkers too."""
    text = path.read_text("utf-8")
    lines, imported = text.splitlines(), []
    if path.suffix == ".py":
        tree = ast.parse(text)
        for node in reversed(tree.body):
            if isinstance(node, ast.FunctionDef) and node.name in without:
                del lines[node.lineno - 1 : node.end_lineno]
        imported = [file for name in _names(tree) for file in _files(name, beside)]
    if path == LIBRARY / "native" / "__init__.py":
        imported += [*path.parent.glob("*.c"), *path.parent.glob("*.h")]
    return sha256_of("\n".join(lines).encode())[:16], frozenset(imported)


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def _files(name: str, beside: Path) -> list[Path]:
    """Return the files behind a dotted name that are in the library, or in the folder `beside`."""
    first, *rest = name.split(".")
    if first != LIBRARY.name:
        return [file for part in (first, *rest) if (file := beside / f"{part}.py").is_file()]
    # A public name leads to its home; the package itself, to all of them.
    rest = [mirrorhead._HOME.get(rest[0], rest[0]), *rest[1:]] if rest else []
    places = [LIBRARY.joinpath(*rest[:k]) for k in range(1, len(rest) + 1)] or [LIBRARY]
    files = [file for place in places for file in (Path(f"{place}.py"), place / "__init__.py")]
    return [file for file in files if file.is_file()]


def _label(path: Path) -> str:
    inside = path.is_relative_to(LIBRARY)
    return path.relative_to(LIBRARY.parent).as_posix() if inside else path.name
