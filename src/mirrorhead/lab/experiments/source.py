"""Which code a result depends on: results are of that code, and of no other.

Editing how a result is drawn or judged must not throw away an hour of computing; editing how it
is computed must. That is a part of the experiment's own module, read from its text, and all of the
library below the experiments.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

import mirrorhead

# What experiments compute with, beside their own module.
BELOW = ("problem.py", "losses.py", "potentials.py", "tokens.py", "synthetic.py", "margin", "paths")


@cache
def library_hash() -> str:
    """A hash of the library's source that experiments compute with, the C kernel included."""
    home = Path(mirrorhead.__file__).parent
    files = [home / name for name in BELOW]
    files = [file for path in files for file in (path.rglob("*.*") if path.is_dir() else (path,))]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.suffix in (".py", ".c")):
        digest.update(file.relative_to(home).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def code_hash(text: str, function: str) -> str:
    """A hash of the module's statements that the function reaches by name, itself included.

    >>> text = "A = 1\\ndef run(): return A\\ndef draw(): return 2\\n"
    >>> code_hash(text, "run") == code_hash(text.replace("return 2", "return 3"), "run")
    True
    >>> code_hash(text, "run") == code_hash(text.replace("A = 1", "A = 2"), "run")
    False
    """
    tree = ast.parse(text)
    lines = text.splitlines()
    # A statement that binds nothing (other than a docstring) acts on import: all depend on it.
    reached = {k for k, node in enumerate(tree.body) if not _bound(node) and not _is_string(node)}
    names, todo = set[str](), [function, *(n for k in reached for n in _used(tree.body[k]))]
    while todo:
        name = todo.pop()
        if name in names:
            continue
        names.add(name)
        for k, node in enumerate(tree.body):
            if name in _bound(node) and k not in reached:
                reached.add(k)
                todo += _used(node)
    parts = ["\n".join(lines[_first(tree.body[k]) - 1 : tree.body[k].end_lineno]) for k in reached]
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:12]


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement of the module binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    names = set[str]()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
        elif isinstance(inner, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.split(".")[0] for alias in inner.names}
        elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            names.add(inner.name)
    return names


def _used(node: ast.stmt) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
