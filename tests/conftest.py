"""Settings of the library's tests, which run as if the lab were not installed."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

from rules_for_tests import _seed as _seed
from rules_for_tests import pytest_collection_finish as pytest_collection_finish
from rules_for_tests import pytest_collection_modifyitems as pytest_collection_modifyitems

FRAMEWORKS = ("test_integrations.py",)


class NoLab(MetaPathFinder):
    """Refuses to import the lab; the library and its tests do without."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] == "mirrorhead_lab":
            raise ModuleNotFoundError("the tests of the library do without the lab", name=fullname)


sys.meta_path.insert(0, NoLab())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of slow tests alone that import a framework, which takes seconds too."""
    quick = config.getoption("markexpr") == "not slow"
    return True if quick and collection_path.name in FRAMEWORKS else None
