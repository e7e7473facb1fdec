"""A run's folder can be read back, and says so when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mirrorhead_lab.training import RunError, describe_run, load_run, preset


@pytest.mark.parametrize("name", ["laptop", "laptop-vit"])
def test_a_run_is_what_was_described(tmp_path: Path, name: str) -> None:
    chosen = preset(name, p=1.1)
    model = chosen.build()
    describe_run(tmp_path, chosen)
    save_file(model.state_dict(), tmp_path / "best.safetensors")
    run = load_run(tmp_path)
    assert run.preset == chosen
    assert not run.model.training
    for key, value in model.state_dict().items():
        assert run.model.state_dict()[key].equal(value)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no preset\.json"):
        load_run(tmp_path)
    describe_run(tmp_path, preset("laptop"))
    with pytest.raises(RunError, match=r"has no best\.safetensors"):
        load_run(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "best.safetensors")
    with pytest.raises(RunError, match="cannot be read as the weights of this run"):
        load_run(tmp_path)
    (tmp_path / "best.safetensors").write_bytes(b"junk")
    with pytest.raises(RunError, match="cannot be read as the weights of this run"):
        load_run(tmp_path)
