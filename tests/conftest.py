"""Settings that hold for all tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]

FRAMEWORKS = ("test_integrations.py",)

# The same examples every time, and no time limit for one: compiling takes what it takes.
# `make quick` asks for the profile "quick".
hypothesis.settings.register_profile("mirrorhead", deadline=None, derandomize=True)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("mirrorhead"), max_examples=10
)
hypothesis.settings.load_profile("mirrorhead")
torch.set_num_threads(1)
torch.manual_seed(0)
IMPORTED = torch.get_rng_state()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of slow tests alone that import a framework, which takes seconds too."""
    quick = config.getoption("markexpr") == "not slow"
    return True if quick and collection_path.name in FRAMEWORKS else None


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse random numbers drawn at import: `_seed` comes too late for them."""
    if not torch.equal(torch.get_rng_state(), IMPORTED):
        raise pytest.UsageError("a test file draws from torch's generator while it is imported")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright  # not needed to test the library

    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail("these tests need chromium; scripts/setup installs it where it may")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that compile, which takes seconds for each p and dtype, and those in a browser."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
        params = getattr(item, "callspec", None)
        values = params.params.values() if params else ()
        if any(isinstance(value, dict) and value.get("fused") is True for value in values):
            item.add_marker(pytest.mark.slow)
