"""The recipe for the Hugging Face Trainer writes a patch that gives the trained weights."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

import mirrorhead as mh
from patch_cases import same_bits

EXAMPLE = Path(__file__).parents[2] / "examples" / "patch_trainer.py"


@pytest.mark.slow
def test_the_trainer_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "patch.safetensors"
    monkeypatch.setattr(sys, "argv", ["patch_trainer.py", "--out", str(file), "--steps", "20"])
    names = runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert f"patch: {file}" in capsys.readouterr().out
    patch = mh.Patch.load(file)
    assert patch.tensors["classifier.weight"].index is None
    assert 0 < patch.density() <= 0.0201

    # The same model from its seed: the patch applies to it, and reverts.
    torch.manual_seed(0)
    config = names["BertConfig"](
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    model = names["BertForSequenceClassification"](config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    patch.apply(model)
    patch.verify(model)
    assert not same_bits(dict(model.state_dict()), before)
    patch.revert(model)
    assert same_bits(dict(model.state_dict()), before)


@pytest.mark.slow
def test_the_callback_writes_on_the_first_process_alone(tmp_path: Path) -> None:
    names = runpy.run_path(str(EXAMPLE), run_name="example")
    base = {"w": torch.zeros(4)}
    callback = names["WritePatch"](base, tmp_path / "p", keep=0.5)
    for first in (False, True):
        state = type("State", (), {"is_world_process_zero": first})
        callback.on_train_end(None, state, None, model={"w": torch.arange(4.0)})
        assert (tmp_path / "p").exists() == first
    assert mh.Patch.load(tmp_path / "p").count == 2
