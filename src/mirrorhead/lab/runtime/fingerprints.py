"""Fingerprints of kept results: which code and which inputs a result was computed from.

A kept result may be used again only while everything it depends on is the same. Code is found by
following imports from the function that computed it: the statements of its module that it reaches
by name, the statements of the modules that those import, and so on, with the C sources of the
kernels that they call and the flags that those are compiled with. Nothing else counts. An edit of
the figure, of the downloader or of the report keeps the result; so does an edit of a comment, a
docstring or a type annotation. Other people's packages are not followed.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path
from typing import Any

from mirrorhead._files import sha256_of
from mirrorhead._version import __version__

Read = Callable[[Path], str]
PACKAGE = __name__.split(".")[0]
_read: Read = methodcaller("read_text", "utf-8")


def digest(content: Any) -> str:
    """Return a short hash of anything that JSON can hold, whatever the order of its keys.

    >>> digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return sha256_of(text.encode())[:16]


def code_of(*parts: Callable[..., Any], read: Read = _read) -> dict[str, str]:
    """Return a hash of the code that functions depend on, for each module or C file it is in.

    Args:
        parts: functions or classes of a module, as they are imported.
        read: how to read a source file, for tests.
    """
    roots = tuple((part.__module__, part.__qualname__) for part in map(inspect.unwrap, parts))
    return dict(_code_of(roots, read))


@cache
def _code_of(roots: tuple[tuple[str, str], ...], read: Read) -> tuple[tuple[str, str], ...]:
    graph = _Graph({module.split(".")[0] for module, _ in roots}, read)
    graph.reach(roots)
    found = {key: sorted(texts) for key, texts in graph.texts.items() if texts}
    return tuple((key, digest(found[key])) for key in sorted(found))


class _Graph:
    """The statements that a function reaches, module by module.

    Own code is this package, the packages of the functions, and modules that lie beside them.
    """

    def __init__(self, tops: set[str], read: Read) -> None:
        self.read = read
        self.texts: dict[str, set[str]] = {}  # module or file -> its reached statements
        self._homes = {name: _home(name) for name in (PACKAGE, *sorted(tops))}
        places = (self._homes[name] for name in sorted(tops - {PACKAGE}))
        self._beside = [place for place in places if place and "-packages" not in place.name]
        self._source = cache(self._read_source)

    def reach(self, roots: Iterable[tuple[str, str]]) -> None:
        """Add what names of modules depend on; "*" is the whole module, "" only its import."""
        todo, seen = list(roots), set[tuple[str, str]]()
        while todo:
            here = todo.pop()
            if here not in seen:
                seen.add(here)
                todo += self._step(*here)

    def _step(self, module: str, name: str) -> Iterator[tuple[str, str]]:
        source = self._source(module)
        if source is None:
            return
        parent = module.rpartition(".")[0]
        if parent:
            yield parent, ""  # importing a module runs its package, too
        yield module, ""
        statements = source.statements(name)
        if not statements and name:
            yield f"{module}.{name}", "*"  # perhaps a submodule
            return
        texts = self.texts.setdefault(module, set())
        for statement in statements:
            if isinstance(statement, _IMPORTS):
                yield from self._follow(source, statement, name, texts)
                continue
            texts.add(_text(statement))
            names, imports, kernels = _uses(statement)
            for used in names & source.binders.keys():
                yield module, used
            for node in imports:
                yield from self._follow(source, node, "*", texts)
            for kernel in kernels:
                self._add_kernel(kernel)

    def _follow(
        self, source: _Source, node: ast.Import | ast.ImportFrom, name: str, texts: set[str]
    ) -> Iterator[tuple[str, str]]:
        """Go to what an import statement binds to `name`, or to all that it binds ("*")."""
        for alias in node.names:
            if name not in ("*", "", _bound_by(alias)):
                continue
            if isinstance(node, ast.Import):
                module, wanted = alias.name, "*"
            else:
                module, wanted = source.absolute(node), alias.name
            if self._source(module) is None:
                texts.add(f"{module} {wanted} as {_bound_by(alias)}")
            else:
                yield module, wanted

    def _read_source(self, module: str) -> _Source | None:
        top, *rest = module.split(".")
        home = self._homes.get(top)
        for place in [home] if home else self._beside:
            stem = place.joinpath(top, *rest)
            for path in (stem / "__init__.py", stem.parent / f"{stem.name}.py"):
                if path.is_file():
                    return _source(module, path, self.read(path))
        return None

    def _add_kernel(self, name: str) -> None:
        """Add the C file that exports a function of this name, its headers and its build flags.

        A wheel holds no C sources: the version of the package stands for them there.
        """
        home = self._homes[PACKAGE]
        assert home is not None, "this package is being imported"
        folder = home / PACKAGE / "native"
        sources = list(folder.glob("*.c"))
        if not sources:
            self.texts["native"] = {__version__}
        for path in sources:
            known = f"native/{path.name}" in self.texts
            if known or f"EXPORT({name})" not in (text := self.read(path)):
                continue
            headers = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)
            for file in (path.name, *headers):
                code = re.sub(r"/\*.*?\*/|//[^\n]*", "", self.read(folder / file), flags=re.DOTALL)
                self.texts[f"native/{file}"] = {code}  # without comments
            build = home.parent / "cmake" / "CMakeLists.txt"
            if build.is_file():
                self.texts["cmake/CMakeLists.txt"] = {self.read(build)}


_IMPORTS = (ast.Import, ast.ImportFrom)


_text = cache(ast.unparse)


@cache
def _uses(node: ast.stmt) -> tuple[set[str], list[ast.Import | ast.ImportFrom], set[str]]:
    """The names, the import statements and the C functions in a statement."""
    inner = list(ast.walk(node))
    names = {node.id for node in inner if isinstance(node, ast.Name)}
    imports = [node for node in inner if isinstance(node, _IMPORTS)]
    return names, imports, {*map(_kernel, inner)} - {""}


class _Source:
    """A module's statements, without docstrings and annotations, and the names that they bind."""

    def __init__(self, module: str, path: Path, text: str) -> None:
        self.module, self.path = module, path
        self.binders: dict[str, list[ast.stmt]] = {}
        self.lazy: dict[str, list[ast.stmt]] = {}  # names that only type checkers see bound
        self.body: list[ast.stmt] = []
        for node in ast.parse(text).body:
            if _is_docstring(node) or getattr(node, "module", "") == "__future__":
                continue
            lazy: list[ast.stmt] = []
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                lazy = node.body
            statements = [_Plain().visit(inner) for inner in lazy or [node]]
            self.body += [] if lazy else statements
            binders = self.lazy if lazy else self.binders
            for statement in statements:
                for name in _names(statement):
                    binders.setdefault(name, []).append(statement)

    def statements(self, name: str) -> list[ast.stmt]:
        """Return the statements behind a name; a package may import its public names lazily."""
        if name == "*":
            lazy = self.lazy.values() if "__getattr__" in self.binders else ()
            return [*self.body, *(statement for some in lazy for statement in some)]
        if not name:  # statements that bind nothing act when imported
            return [statement for statement in self.body if not _names(statement)]
        name = name.split(".")[0]
        if name in self.binders:
            return self.binders[name]
        return self.lazy.get(name, []) if "__getattr__" in self.binders else []

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that is imported from."""
        if not node.level:
            return node.module or ""
        package = self.module.split(".")
        package = package[: len(package) - node.level + (self.path.name == "__init__.py")]
        return ".".join([*package, *([node.module] if node.module else [])])


_source = cache(_Source)


class _Plain(ast.NodeTransformer):
    """Drop what does not change what code computes: docstrings and annotations of functions."""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body = [inner for inner in node.body if not _is_docstring(inner)] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        return node

    visit_ClassDef = visit_FunctionDef

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


def _is_docstring(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


@cache
def _names(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a module binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    names = set[str]()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
        elif isinstance(inner, _IMPORTS):
            names |= {_bound_by(alias) for alias in inner.names}
        elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            names.add(inner.name)
    return names


def _bound_by(alias: ast.alias) -> str:
    return alias.asname or alias.name.split(".")[0]


def _kernel(node: ast.AST) -> str:
    """Return the C function that a call takes from the library, native.function("name", ...)."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return ""
    return str(node.args[0].value) if ast.unparse(node.func) == "native.function" else ""


def _home(top: str) -> Path | None:
    """Return the folder in which a top-level module or package lies."""
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    return path.parent.parent if path.name == "__init__.py" else path.parent
