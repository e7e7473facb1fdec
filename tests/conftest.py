"""Settings that hold for all tests."""

from __future__ import annotations

import hypothesis
import pytest
import torch

# The same examples every time, and no time limit for one: compiling takes what it takes.
hypothesis.settings.register_profile("mirrorhead", deadline=None, derandomize=True)
hypothesis.settings.load_profile("mirrorhead")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
