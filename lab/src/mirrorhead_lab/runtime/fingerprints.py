"""Fingerprints of stored results: which code a result was computed from.

A stored result may be used again only while its code is the same. That is the module of the
function that computed it, and every file that the module imports, directly or through others, from
the library and from the folder in which it lies itself. The parts of the module that only present
a result can be left out, so that an edit of a figure keeps the result.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mirrorhead
from mirrorhead._files import sha256_of

LIBRARY = "mirrorhead"
KERNELS = "mirrorhead.native"  # whoever imports it depends on the C files beside it


def digest(content: Any) -> str:
    """Return a short hash of anything that JSON can hold, whatever the order of its keys.

    >>> digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return sha256_of(text.encode())[:16]


def code_of(function: Callable[..., Any], without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return a hash of each file that a function depends on, {module or C file: hash}.

    Args:
        function: a function of the module that computes the result.
        without: names of functions of the same module that do not count, for they present it.
    """
    module = inspect.unwrap(function).__module__
    path = _file(module)
    if path is None:
        raise ValueError(f"the source of {module} cannot be found")
    text = _without(path.read_text("utf-8"), without)
    found = {module: sha256_of(text.encode())[:16]}
    todo = [*_imports(module, path)]
    while todo:
        name = todo.pop()
        source = _file(name)
        own = source is not None and (name.split(".")[0] == LIBRARY or source.parent == path.parent)
        if source is None or not own or name in found:
            continue
        found[name] = _hash(source)
        todo += _imports(name, source)
        if name == KERNELS:
            files = [*source.parent.glob("*.c"), *source.parent.glob("*.h")]
            found |= {f"native/{file.name}": _hash(file) for file in files}
    return dict(sorted(found.items()))


def _without(text: str, names: tuple[str, ...]) -> str:
    """Return a module's source without its functions of these names."""
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)


@cache
def _hash(path: Path) -> str:
    return sha256_of(path.read_bytes())[:16]


@cache
def _imports(module: str, path: Path) -> tuple[str, ...]:
    """Return the modules that a file imports anywhere, lazily and for type checkers too."""
    return tuple(_named(ast.parse(path.read_text("utf-8")), module, path))


def _named(tree: ast.Module, module: str, path: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + (path.name == "__init__.py")]
            base = ".".join(
                [*(parts if node.level else ()), *([node.module] if node.module else ())]
            )
            submodules = [f"{base}.{_home(base, alias.name)}" for alias in node.names]
            found = [name for name in submodules if _file(name)]
            yield from found
            if len(found) < len(submodules):
                yield base


def _home(package: str, name: str) -> str:
    """Return the submodule behind a public name of the library, which imports them lazily."""
    return mirrorhead._HOME.get(name, name) if package == LIBRARY else name


@cache
def _file(module: str) -> Path | None:
    """Return the source file of a module; None if it has none or is not there."""
    try:
        spec = find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    path = Path(spec.origin) if spec and spec.origin else None
    return path if path and path.suffix == ".py" else None
