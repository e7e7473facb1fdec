"""Settings that hold for the tests of both distributions; their conftest.py import these names."""

from __future__ import annotations

import hypothesis
import pytest
import torch

# The same examples every time, and no time limit for one: compiling takes what it takes.
# `make quick` asks for the profile "quick".
hypothesis.settings.register_profile("mirrorhead", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("mirrorhead"), max_examples=10
)
hypothesis.settings.load_profile("mirrorhead")
torch.set_num_threads(1)
torch.manual_seed(0)
IMPORTED = torch.get_rng_state()


def few(count: int) -> hypothesis.settings:
    """At most `count` examples; fewer where the profile says so."""
    default = hypothesis.settings.default
    return hypothesis.settings(max_examples=min(count, default.max_examples if default else count))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse random numbers drawn at import: `_seed` comes too late for them."""
    if not torch.equal(torch.get_rng_state(), IMPORTED):
        raise pytest.UsageError("a test file draws from torch's generator while it is imported")


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
