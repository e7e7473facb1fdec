"""Objects that are found by name: one module each, in the package or of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


def load_object(
    name: str, package: str, names: Sequence[str], attribute: str, kind: type[T]
) -> T | None:
    """Return an attribute of the module of that name; None if there is no such module.

    Args:
        name: one of `names`, whose modules are in `package`, or the name of a user's own module.
    """
    module = f"{package}.{name.replace('-', '_')}" if name in names else name
    if not module or module.startswith("."):
        return None
    try:
        found = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        return None
    if not isinstance(found, kind):
        what = f"{attribute} = {kind.__name__}(...)"
        raise TypeError(f"{module} has no {what}")
    return found
