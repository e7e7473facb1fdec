"""`mirrorhead classify`: a tuned model gives the predictions that `tune` scored, in any process."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mirrorhead.patches import Patch
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.datasets import find
from tiny_bert import tiny_bert, toy_texts

DOCS = Path(__file__).parents[2] / "docs" / "patches.md"
COMMAND = "import sys; from mirrorhead_lab.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BASE, own.csv, the folder of a run, and TUNED: the base with the run's patch."""
    root = tmp_path_factory.mktemp("classify")
    tiny_bert(root / "BASE")
    toy_texts(root / "own.csv")
    # With 10 epochs, the patch of 30 % of the weights is right about most texts, but not all.
    command = ["tune", str(root / "own.csv"), "--base", str(root / "BASE"), "--keep", "0.3"]
    options = ["--p", "1.3", "--reach", "1", "--epochs", "10", "--batch-size", "16"]
    assert main([*command, *options, "--out", str(root / "run")]) == 0
    command = ["patch", "apply", str(root / "BASE"), str(root / "run" / "patch.safetensors")]
    assert main([*command, "-o", str(root / "TUNED")]) == 0
    return root


def fresh(folder: Path, *arguments: str, given: str = "") -> str:
    """What a new process prints in a folder."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        input=given,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or arguments[1] != COMMAND
    return done.stdout


@pytest.mark.slow
def test_predictions_are_those_that_tune_scored(world: Path) -> None:
    table = json.loads((world / "run" / "table.json").read_text())
    test = find(str(world / "own.csv")).read().test
    lines = fresh(world, "-c", COMMAND, "classify", "TUNED", given="\n".join(test.texts))
    found = [line.split("\t") for line in lines.splitlines()]
    names = find(str(world / "own.csv")).read().classes
    right = [label == names[n] for (label, _), n in zip(found, test.labels, strict=True)]
    assert sum(right) / len(right) == table["patch"]["test"]
    assert table["patch"]["test"] > 0.6
    assert all(0.5 <= float(probability) <= 1 for _, probability in found)


@pytest.mark.slow
def test_the_code_in_the_docs_gives_the_same_without_mirrorhead(world: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    (code,) = (block for block in blocks if "AutoModel.from_pretrained" in block)
    assert "mirrorhead as" not in code and "import mirrorhead" not in code
    texts = re.findall(r"^texts = (.*)$", code, re.M)
    assert len(texts) == 1
    printed = fresh(world, "-W", "ignore", "-c", code).splitlines()
    ours = fresh(world, "-c", COMMAND, "classify", "TUNED", *eval(texts[0])).splitlines()
    assert len(printed) == len(ours) == len(eval(texts[0]))
    for line, own in zip(printed, ours, strict=True):
        label, probability = own.split("\t")
        assert line.split()[0] == label
        assert float(line.split()[1]) == pytest.approx(float(probability), abs=1e-4)


@pytest.mark.slow
def test_texts_lines_and_json(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["the film good", "", "a dull plot " * 30, "\u0445\u043e\u0440\u043e\u0448\u043e"]
    capsys.readouterr()
    assert main(["classify", str(world / "TUNED"), *texts]) == 0
    printed, errors = capsys.readouterr()
    assert len(printed.splitlines()) == 4 and errors == ""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    monkeypatch.setattr("mirrorhead_lab.cli.classify._LINES", 3)  # they come in two batches
    assert main(["classify", str(world / "TUNED"), "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    lines = [f"{one['label']}\t{one['probability']:.4f}" for one in objects]
    assert lines == printed.splitlines()
    for one in objects:
        assert sum(one["probabilities"].values()) == pytest.approx(1)
        assert max(one["probabilities"], key=one["probabilities"].get) == one["label"]


@pytest.mark.slow
def test_config_and_labels_travel_in_every_patch_and_revert_restores_the_base(
    world: Path, tmp_path: Path
) -> None:
    config = json.loads((world / "TUNED" / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}
    assert config["label2id"] == {"no": 0, "yes": 1}
    assert config["mirrorhead"] == {
        "pooling": "mean", "weight": "head.weight", "bias": "head.bias", "max_length": 32,
    }  # fmt: skip
    # Another size is made from the run's weights, whose file names the labels too.
    other = str(tmp_path / "other")
    make = ["patch", "make", str(world / "BASE"), str(world / "run" / "tuned.safetensors")]
    assert main([*make, "--count", "50", "--whole", "head.*", "-o", other]) == 0
    assert main(["patch", "apply", str(world / "BASE"), other, "-o", str(tmp_path / "T")]) == 0
    assert (tmp_path / "T" / "config.json").read_bytes() == (
        world / "TUNED" / "config.json"
    ).read_bytes()
    assert main(["classify", str(tmp_path / "T"), "good"]) == 0
    assert main(["patch", "revert", str(tmp_path / "T"), other, "-o", str(tmp_path / "B")]) == 0
    for folder in (world / "BASE", tmp_path / "B"):
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            path.name for path in (world / "BASE").iterdir()
        )
    for path in (world / "BASE").iterdir():
        assert (tmp_path / "B" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.parametrize("pooler", [True, False])
def test_a_base_that_was_tuned_before(
    pooler: bool, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tuned folder is a base like any other; its own head gives way to the new one."""
    base = shutil.copytree(world / "TUNED", tmp_path / "base")
    if not pooler:
        state = load_file(base / "model.safetensors")
        kept = {name: t for name, t in state.items() if "pooler" not in name}
        save_file(kept, base / "model.safetensors", {"format": "pt"})
    texts = tmp_path / "own.csv"
    texts.write_text((world / "own.csv").read_text().replace(",yes", ",fine"))
    command = ["tune", str(texts), "--base", str(base), "--out", str(tmp_path / "run")]
    assert main([*command, "--epochs", "1", "--texts", "64"]) == 0
    patch = str(tmp_path / "run" / "patch.safetensors")
    assert main(["patch", "apply", str(base), patch, "-o", str(tmp_path / "new")]) == 0
    capsys.readouterr()
    assert main(["classify", str(tmp_path / "new"), "good", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["probabilities"]) == {"no", "fine"}
    assert main(["patch", "revert", str(tmp_path / "new"), patch, "-o", str(tmp_path / "B")]) == 0
    for path in base.iterdir():
        assert (tmp_path / "B" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_what_cannot_be_classified_is_one_line(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    tuned = shutil.copytree(world / "TUNED", tmp_path / "tuned")
    config = json.loads((tuned / "config.json").read_text())
    weights = load_file(tuned / "model.safetensors")

    def told(folder: Path, *texts: str) -> str:
        capsys.readouterr()
        assert main(["classify", str(folder), *(texts or ("good",))]) == 2
        error = capsys.readouterr().err
        assert error.startswith("mirrorhead: ") and error.count("\n") == 1
        return error

    assert "is not a folder" in told(tmp_path / "nothing")
    assert "does not say which labels" in told(world / "BASE")
    assert "text 2 is not valid UTF-8" in told(tuned, "fine", "\udcff")
    for entry, value, words in (
        ("id2label", {"0": "no"}, "has no head for its 1 labels"),
        ("id2label", {"0": "no", "1": "\x1b[2J"}, "the entry 'id2label'"),
        ("mirrorhead", {"pooling": "max"}, "the entry 'mirrorhead'"),
    ):
        (tuned / "config.json").write_text(json.dumps(config | {entry: value}))
        assert words in told(tuned)
    (tuned / "config.json").write_text(json.dumps(config))
    del weights["head.bias"]
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    assert "tensor 'head.bias' is missing" in told(tuned)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    capsys.readouterr()
    assert main(["classify", str(tuned)]) == 2
    assert "give one or more texts" in capsys.readouterr().err


@pytest.mark.slow
def test_the_patch_file_of_a_run_names_labels_and_nothing_else(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = Patch.load(world / "run" / "patch.safetensors")
    capsys.readouterr()
    assert main(["patch", "info", str(world / "run" / "patch.safetensors")]) == 0
    assert "  labels: no, yes\n" in capsys.readouterr().out
    assert main(["patch", "info", str(world / "run" / "patch.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == patch.config
    assert sorted(patch.config) == ["id2label", "label2id", "mirrorhead"]
    with safe_open(world / "run" / "tuned.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["mirrorhead.config"]) == patch.config
    assert patch.without("head.*").config == {}
    assert Patch.merge([patch.without("head.*"), patch]).config == patch.config
    state = load_file(world / "BASE" / "model.safetensors")
    patch.apply(state)
    assert torch.equal(state["head.weight"], patch.tensors["head.weight"].values.view(2, 16))
