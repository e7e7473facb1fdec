"""`mirrorhead patch`: the commands end to end on small files, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mirrorhead_lab.cli.main import main
from patch_cases import same_bits, sharded_folder, small_state, tuned_from


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """base.safetensors, tuned.safetensors, and base/ and tuned/ in two shards."""
    monkeypatch.chdir(tmp_path)
    base = small_state()
    tuned = tuned_from(base) | {"head.weight": torch.randn(2, 4)}
    for name, state in (("base", base), ("tuned", tuned)):
        save_file(state, f"{name}.safetensors")
        sharded_folder(tmp_path / name, state)
    return tmp_path


def run(command: str) -> int:
    return main(["patch", *command.split()])


def test_make_apply_revert_info(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("make base tuned --keep 0.1 --whole head.* -o p.safetensors") == 0
    printed = capsys.readouterr().out
    assert "layer.0" in printed and "patch: p.safetensors" in printed
    assert run("apply base p.safetensors -o patched --verify") == 0
    assert "verified to the bit" in capsys.readouterr().out
    assert run("apply patched p.safetensors -o twice") == 2
    assert "already patched with this patch" in capsys.readouterr().err
    assert run("revert patched p.safetensors -o again --verify") == 0
    for part in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        assert same_bits(load_file(files / "again" / part), load_file(files / "base" / part))
    assert run("info p.safetensors --largest 2") == 0
    assert capsys.readouterr().out.count("->") == 2


def test_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "make base.safetensors tuned.safetensors --count 5 --whole head.* -o p --json"
    assert run(command) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["changed"] == 5 + 8 and made["bytes"] == (files / "p").stat().st_size
    assert made["tensors"]["head.weight"]["new"]
    assert run("info p --json") == 0
    assert json.loads(capsys.readouterr().out) == made
    assert run("apply base.safetensors p -o out --verify --json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "out": "out", "what": "patched", "verified": True,
    }  # fmt: skip


def test_merge(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for count in (3, 9):
        assert run(f"make base tuned --count {count} --whole head.* -o {count}") == 0
    assert run("merge 3 9 --method ties --without head.* --base base -o both") == 0
    assert "head" not in capsys.readouterr().out.rpartition("Patch(")[2]
    assert run("apply base both -o patched --verify") == 0
    # Without the base there are no hashes to verify with, and nothing is written.
    assert run("merge 3 9 --without head.* -o unhashed") == 0
    assert run("apply base unhashed -o other --verify") == 2
    assert "it was merged without a base" in capsys.readouterr().err
    assert not (files / "other").exists()


def test_chain(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import mirrorhead as mh

    state = load_file("base.safetensors")
    sync = mh.WeightSync(state)
    versions = [sync.version]
    Path("patches").mkdir()
    for k in range(3):
        state["layer.0.weight"][k] *= 2
        sync.collect().save(f"patches/{k}.safetensors")
        versions.append(sync.version)
        save_file(sync.weights(), f"at-{k + 1}")
    assert run("chain patches -o jump") == 0
    assert "Patch(15 of" in capsys.readouterr().out
    assert run("info jump") == 0
    printed = capsys.readouterr().out
    assert f"base_version: {versions[0]}" in printed and f"version: {versions[3]}" in printed
    first, last = "patches/0.safetensors", "patches/2.safetensors"
    middle = "patches/1.safetensors"
    assert run(f"chain {first} {middle} {last} --start {versions[1]} -o two --json") == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["base_version"], about["version"]) == (versions[1], versions[3])
    assert run("apply at-1 two -o out --verify") == 0
    assert same_bits(load_file("out"), load_file("at-3"))
    assert run(f"chain {first} {last} -o gap --no-originals") == 2
    assert "a patch is missing" in capsys.readouterr().err
    assert not Path("gap").exists()
