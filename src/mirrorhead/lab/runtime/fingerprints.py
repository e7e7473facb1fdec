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
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mirrorhead._files import sha256_of
from mirrorhead._version import __version__

Read = Callable[[Path], str]
PACKAGE = __name__.split(".")[0]


def digest(content: Any) -> str:
    """Return a short hash of anything that JSON can hold, whatever the order of its keys.

    >>> digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return sha256_of(text.encode())[:16]


def code_of(*parts: Callable[..., Any], read: Read | None = None) -> dict[str, str]:
    """Return a hash of the code that functions depend on, for each module or C file it is in.

    Args:
        parts: functions or classes of a module, as they are imported.
        read: how to read a source file, for tests.
    """
    roots = tuple((part.__module__, part.__qualname__) for part in map(inspect.unwrap, parts))
    return dict(_code_of(roots, read or _read))


@cache
def _code_of(roots: tuple[tuple[str, str], ...], read: Read) -> tuple[tuple[str, str], ...]:
    graph = _Graph({module.split(".")[0] for module, _ in roots}, read)
    for module, name in roots:
        graph.reach(module, name)
    found = {key: sorted(texts) for key, texts in graph.texts.items() if texts}
    return tuple((key, digest(found[key])) for key in sorted(found))


def _read(path: Path) -> str:
    return path.read_text("utf-8")


class _Graph:
    """The statements that a function reaches, module by module.

    Own code is this package, the packages of the functions, and modules that lie beside them.
    """

    def __init__(self, tops: set[str], read: Read) -> None:
        self.read = read
        self.texts: dict[str, set[str]] = {}  # module or file -> its reached statements
        self._sources: dict[str, _Source | None] = {}
        self._seen: set[tuple[str, str]] = set()
        self._homes = {name: _home(name) for name in (PACKAGE, *sorted(tops))}
        places = (self._homes[name] for name in sorted(tops - {PACKAGE}))
        self._beside = [place for place in places if place and "-packages" not in place.name]

    def reach(self, module: str, name: str) -> None:
        """Add what `name` of a module depends on; "*" is the whole module, "" only its import."""
        todo = [(module, name)]
        while todo:
            here = todo.pop()
            if here not in self._seen:
                self._seen.add(here)
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
            submodule = f"{module}.{name}"
            if self._source(submodule) is not None:
                yield submodule, "*"
            return
        texts = self.texts.setdefault(module, set())
        for statement in statements:
            if isinstance(statement.node, (ast.Import, ast.ImportFrom)):
                yield from self._follow(source, statement.node, name, texts)
                continue
            texts.add(statement.text)
            for used in statement.names_used & source.binders.keys():
                yield module, used
            for node in statement.imports:
                yield from self._follow(source, node, "*", texts)
            for kernel in statement.kernels:
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

    def _source(self, module: str) -> _Source | None:
        if module not in self._sources:
            path = self._path(module)
            self._sources[module] = None if path is None else _source(module, path, self.read(path))
        return self._sources[module]

    def _path(self, module: str) -> Path | None:
        top, *rest = module.split(".")
        home = self._homes.get(top)
        for place in [home] if home else self._beside:
            stem = place.joinpath(top, *rest)
            for path in (stem / "__init__.py", stem.parent / f"{stem.name}.py"):
                if path.is_file():
                    return path
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
            key = f"native/{path.name}"
            if key not in self.texts and f"EXPORT({name})" in (text := self.read(path)):
                self.texts[key] = {_without_comments(text)}
                for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE):
                    header = _without_comments(self.read(folder / included))
                    self.texts[f"native/{included}"] = {header}
                build = home.parent / "cmake" / "CMakeLists.txt"
                if build.is_file():
                    self.texts["cmake/CMakeLists.txt"] = {self.read(build)}


def _without_comments(c: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", c, flags=re.DOTALL)


class _Statement:
    """A statement of a module, without docstrings and annotations: its text and what it uses."""

    def __init__(self, node: ast.stmt) -> None:
        self.binds = _names(node)
        self.node: ast.stmt = _Plain().visit(node)

    @cached_property
    def text(self) -> str:
        return ast.unparse(self.node)

    @cached_property
    def names_used(self) -> set[str]:
        return {inner.id for inner in self._inner if isinstance(inner, ast.Name)}

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        return [inner for inner in self._inner if isinstance(inner, (ast.Import, ast.ImportFrom))]

    @cached_property
    def kernels(self) -> set[str]:
        """The C functions that it takes from the library: native.function("name", ...)."""
        calls = (inner for inner in self._inner if isinstance(inner, ast.Call) and inner.args)
        first = (c.args[0] for c in calls if ast.unparse(c.func) == "native.function")
        return {str(name.value) for name in first if isinstance(name, ast.Constant)}

    @cached_property
    def _inner(self) -> list[ast.AST]:
        return list(ast.walk(self.node))


class _Source:
    """A module's statements, and which names each of them binds."""

    def __init__(self, module: str, path: Path, text: str) -> None:
        self.module, self.path = module, path
        self.binders: dict[str, list[_Statement]] = {}
        self.lazy: dict[str, list[_Statement]] = {}  # names that only type checkers see bound
        self.effects: list[_Statement] = []  # statements that bind nothing act when imported
        self.body: list[_Statement] = []
        for node in ast.parse(text).body:
            if _is_docstring(node) or getattr(node, "module", "") == "__future__":
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                for statement in map(_Statement, node.body):
                    for name in statement.binds:
                        self.lazy.setdefault(name, []).append(statement)
                continue
            statement = _Statement(node)
            self.body.append(statement)
            for name in statement.binds:
                self.binders.setdefault(name, []).append(statement)
            if not statement.binds:
                self.effects.append(statement)

    def statements(self, name: str) -> list[_Statement]:
        """Return the statements behind a name; a package may import its public names lazily."""
        if name == "*":
            return self.body
        if not name:
            return self.effects
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


@cache
def _source(module: str, path: Path, text: str) -> _Source:
    return _Source(module, path, text)


class _Plain(ast.NodeTransformer):
    """Drop what does not change what code computes: docstrings and annotations of functions."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        node.body = _without_docstring(node.body)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body = _without_docstring(node.body)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return [node for node in body if not _is_docstring(node)] or [ast.Pass()]


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _names(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a module binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    names = set[str]()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
        elif isinstance(inner, (ast.Import, ast.ImportFrom)):
            names |= {_bound_by(alias) for alias in inner.names}
        elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            names.add(inner.name)
    return names


def _bound_by(alias: ast.alias) -> str:
    return alias.asname or alias.name.split(".")[0]


def _home(top: str) -> Path | None:
    """Return the folder in which a top-level module or package lies."""
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    return path.parent.parent if path.name == "__init__.py" else path.parent
