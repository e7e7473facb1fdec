"""Two processes against one: DDP, FSDP2, other layouts, distributed checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.multiprocessing.spawn import spawn

from distributed_worker import SUITES, WORLD, main

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("suite", SUITES)
def test_two_processes_are_as_one(suite: str, tmp_path: Path) -> None:
    try:
        spawn(main, args=(suite, str(tmp_path)), nprocs=WORLD)
    except Exception as error:
        said = [path.read_text(errors="replace")[-4000:] for path in tmp_path.glob("stderr-*")]
        raise AssertionError("\n".join([str(error), *said])) from error
