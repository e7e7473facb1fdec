"""The entries of config.json that a patch carries: which, from where, and back to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mirrorhead as mh
from mirrorhead.patches.model_config import HISTORY, checked, classifier_config
from patch_cases import State

LABELS = classifier_config(("no", "yes"), 32)


def folder(path: Path, state: State, config: str) -> Path:
    path.mkdir()
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_bytes(config.encode())
    return path


def patch_with(base: State, config: dict[str, Any] = LABELS, step: float = 1) -> mh.Patch:
    patch = mh.Patch.between(base, {name: tensor + step for name, tensor in base.items()})
    return replace(patch, config=config)


@pytest.fixture
def state() -> State:
    return {"w": torch.zeros(4)}


@pytest.mark.parametrize("config", ['{"a": 1}', '{\r\n\t"a":1,"id2label": {"0": "\\u00e9"}}\r\n'])
def test_revert_restores_config_json_to_the_byte(config: str, state: State, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", state, config)
    first = patch_with(state)
    other = classifier_config(("red", "green", "blue"), 8)
    second = patch_with({"w": torch.ones(4)}, other)
    first.apply(base, tmp_path / "one")
    found = json.loads((tmp_path / "one" / "config.json").read_text())
    assert found == {**json.loads(config), **LABELS}
    second.apply(tmp_path / "one", tmp_path / "two")  # a second patch on top of the first
    assert json.loads((tmp_path / "two" / "config.json").read_text()) == {**found, **other}
    second.revert(tmp_path / "two", tmp_path / "one again")
    first.revert(tmp_path / "one again", tmp_path / "base again")
    for name, again in (("one", "one again"), ("base", "base again")):
        names = sorted(path.name for path in (tmp_path / name).iterdir())
        assert sorted(path.name for path in (tmp_path / again).iterdir()) == names
        for file in names:
            assert (tmp_path / again / file).read_bytes() == (tmp_path / name / file).read_bytes()


def test_a_patch_with_the_labels_that_are_there_already(state: State, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", state, json.dumps(LABELS))
    patch = patch_with(state)
    patch.apply(base, tmp_path / "one")
    patch.revert(tmp_path / "one", tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_other_entries_that_were_changed_since_stay(state: State, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", state, '{"a": 1, "id2label": {"0": "x"}}')
    patch = patch_with(state)
    patch.apply(base, tmp_path / "one")
    file = tmp_path / "one" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"a": 2, "b": 3}))
    patch.revert(tmp_path / "one", tmp_path / "again")
    found = json.loads((tmp_path / "again" / "config.json").read_text())
    assert found == {"a": 2, "b": 3, "id2label": {"0": "x"}}


def test_a_history_that_is_missing_or_damaged(state: State, tmp_path: Path) -> None:
    patch = patch_with(state)
    patch.apply(folder(tmp_path / "base", state, '{"a": 1}'), tmp_path / "one")
    history, config = tmp_path / "one" / HISTORY, tmp_path / "one" / "config.json"
    for damage in ("[]", "[3]", '["{"]', '["\\ud800"]', "{", '"x"'):
        history.write_text(damage)
        with pytest.raises(mh.PatchError, match=f"{HISTORY} is damaged"):
            patch.revert(tmp_path / "one", tmp_path / "out")
    history.unlink()
    with pytest.raises(mh.PatchError, match=f"{HISTORY} is missing"):
        patch.revert(tmp_path / "one", tmp_path / "out")
    patch.revert(tmp_path / "one" / "model.safetensors", tmp_path / "file")
    config.write_text('{"a": 1}')  # who removed the entries by hand
    patch.revert(tmp_path / "one", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == '{"a": 1}'


def test_a_config_json_that_cannot_take_the_labels_is_named_before_any_work(
    state: State, tmp_path: Path
) -> None:
    base = folder(tmp_path / "base", state, "{")
    for content in ("{", "[]", None):
        if content is None:
            (base / "config.json").unlink()
        else:
            (base / "config.json").write_text(content)
        with pytest.raises(mh.PatchError, match=f"{base}/config.json"):
            patch_with(state).apply(base, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["base"]
    # Without labels config.json does not matter, and a single file has none.
    patch_with(state, {}).apply(base, tmp_path / "out")
    patch_with(state).apply(base / "model.safetensors", tmp_path / "file")
    assert load_file(tmp_path / "file")["w"].tolist() == [1, 1, 1, 1]


def test_between_takes_what_a_folder_or_a_file_says_and_the_base_does_not(
    state: State, tmp_path: Path
) -> None:
    tuned = {"w": torch.ones(4)}
    base = folder(tmp_path / "base", state, '{"model_type": "bert", "problem_type": "regression"}')
    config = {**LABELS, "problem_type": "regression", "auto_map": {"AutoModel": "evil.Model"}}
    other = folder(tmp_path / "tuned", tuned, json.dumps(config))
    assert mh.Patch.between(base, other).config == LABELS
    assert mh.Patch.between(other, base).config == {}
    assert mh.Patch.between(state, tuned).config == {}
    file = tmp_path / "tuned.safetensors"
    for text, found in ((json.dumps(LABELS), LABELS), ("[1]", {}), ("{", {}), ('{"x": 1}', {})):
        save_file(tuned, file, {"mirrorhead.config": text})
        assert mh.Patch.between(base, file).config == found
    # Labels that no patch can hold do not keep the weights from being compared.
    (other / "config.json").write_text('{"id2label": {"0": "a", "1": "a"}}')
    assert mh.Patch.between(base, other).config == {}


def test_the_file_has_the_config_and_its_size_counts(state: State, tmp_path: Path) -> None:
    patch = patch_with(state)
    patch.save(tmp_path / "p")
    assert (tmp_path / "p").stat().st_size == patch.bytes > patch_with(state, {}).bytes
    read = mh.Patch.load(tmp_path / "p")
    assert read.config == LABELS
    read.save(tmp_path / "q")
    assert (tmp_path / "q").read_bytes() == (tmp_path / "p").read_bytes()


def test_merging_keeps_labels_on_which_all_agree(state: State) -> None:
    one, none = patch_with(state), patch_with(state, {})
    other = patch_with(state, classifier_config(("red", "green"), 32))
    assert mh.Patch.merge([one, none]).config == mh.Patch.merge([one, one]).config == LABELS
    assert mh.Patch.merge([one, other]).config == mh.Patch.merge([none, none]).config == {}


@pytest.mark.parametrize(
    "config",
    [
        [],
        {"auto_map": {"AutoModel": "evil.Model"}},
        {"architectures": ["Evil"]},
        {"id2label": {}},
        {"id2label": {"0": "a", "2": "b"}},
        {"id2label": {"0": "a", "1": "a"}},
        {"id2label": {"0": "\x1b[2J"}},
        {"id2label": {"0": 3}},
        {"id2label": ["a"]},
        {"label2id": {"a": 1}},
        {"label2id": {"a": "0"}},
        {"label2id": {"a": False}},
        {"problem_type": ["regression"]},
        {"mirrorhead": {**LABELS["mirrorhead"], "pooling": "max"}},
        {"mirrorhead": {**LABELS["mirrorhead"], "max_length": True}},
        {"mirrorhead": {**LABELS["mirrorhead"], "weight": None}},
        {"mirrorhead": {**LABELS["mirrorhead"], "code": "x"}},
        {"mirrorhead": None},
    ],
)
def test_a_file_with_any_other_config_is_refused(config: Any, state: State, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config"):
        checked(config)
    patch_with(state, {"x": config}).save(tmp_path / "p")
    data = (tmp_path / "p").read_bytes()
    text = json.dumps(json.dumps({"x": config}, separators=(",", ":"), ensure_ascii=False))[1:-1]
    wanted = json.dumps(json.dumps(config, separators=(",", ":"), ensure_ascii=False))[1:-1]
    assert data.count(text.encode()) == 1
    # The header keeps its length.
    changed = data.replace(text.encode(), wanted.encode().ljust(len(text.encode())))
    (tmp_path / "p").write_bytes(changed)
    with pytest.raises(mh.PatchError, match=r"p is damaged: .*config"):
        mh.Patch.load(tmp_path / "p")


def test_more_than_ten_labels_in_any_order(state: State, tmp_path: Path) -> None:
    config = classifier_config(tuple(f"label {i}" for i in range(12)), 32)
    base = folder(tmp_path / "base", state, "{}")
    patch_with(state, config).apply(base, tmp_path / "one")  # sorted as texts: 0, 1, 10, 11, 2
    assert mh.Patch.between(base, tmp_path / "one").config == config
