"""Export to PEFT: a SHiRA adapter that PEFT itself loads and that gives the patched model."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import mirrorhead as mh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.second = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def changed(base: Net, count: int) -> tuple[mh.Patch, Net]:
    """A patch of `count` weights of the first layer and three of the second, and its model."""
    tuned = Net()
    tuned.load_state_dict(base.state_dict())
    with torch.no_grad():
        tuned.first.weight.view(-1)[torch.randperm(240)[:count]] += 1
        tuned.second.weight.view(-1)[:3] -= 1
    return mh.Patch.between(base, tuned), tuned


@pytest.mark.slow
def test_peft_loads_the_adapter(tmp_path: Path) -> None:
    from peft import PeftModel

    base = Net()
    patch, tuned = changed(base, 40)
    patch.to_peft(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")  # type: ignore[arg-type]
    x = torch.randn(5, 12)
    with torch.sparse.check_sparse_tensor_invariants(True):
        torch.testing.assert_close(model(x), tuned(x))
        merged = model.merge_and_unload()
    torch.testing.assert_close(merged.state_dict(), tuned.state_dict())


def test_what_shira_cannot_hold(tmp_path: Path) -> None:
    base = Net()
    patch, tuned = changed(base, 240)  # r (m + n) > m n
    with pytest.raises(mh.PatchError, match="too dense for SHiRA"):
        patch.to_peft(tmp_path / "adapter")
    with torch.no_grad():
        tuned.first.bias.add_(1)
    with pytest.raises(mh.PatchError, match=r"linear layers' weights only: 'first.bias'"):
        mh.Patch.between(base, tuned).to_peft(tmp_path / "adapter")
    with pytest.raises(mh.PatchError, match="the patch is empty"):
        mh.Patch.between(base, copy.deepcopy(base)).to_peft(tmp_path / "adapter")
    assert not list(tmp_path.iterdir())
