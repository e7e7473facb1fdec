"""`mirrorhead tune` on a tiny random BERT: table, patch, and the scored model to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mirrorhead._files import write_json
from mirrorhead.patches import Patch
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.datasets import find
from mirrorhead_lab.models.pretrained import PretrainedClassifier, Tokens, accuracy
from mirrorhead_lab.training import checkpoints
from mirrorhead_lab.training.run_folder import locked_folder
from mirrorhead_lab.training.tuning import (
    SHARES,
    FineTuning,
    TuneSets,
    TuneSettings,
    fine_tune,
)
from tiny_bert import tiny_bert, toy_texts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return toy_texts(tmp_path / "own.csv")


def tune(texts: Path, base: Path, out: Path, *options: str) -> int:
    return main(["tune", str(texts), "--base", str(base), "--out", str(out), *options])


@pytest.mark.slow
def test_the_patch_gives_the_scored_model_and_the_base_back(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(texts, base, tmp_path / "run", "--keep", "0.1", "--epochs", "4", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    shares = [row["share"] for row in result["table"]]
    assert shares == sorted(shares, reverse=True) and 0.1 in shares
    patch = tmp_path / "run" / "patch.safetensors"
    assert result["patch"]["bytes"] == patch.stat().st_size
    command = ["patch", "apply", str(base), str(patch), "-o", str(tmp_path / "tuned"), "--verify"]
    assert main(command) == 0
    # Another size needs no more training: all tuned weights are kept.
    tuned, row = tmp_path / "run" / "tuned.safetensors", result["table"][1]
    command = ["patch", "make", str(base), str(tuned), "--count", str(row["changed"])]
    assert main([*command, "--whole", "head.*", "-o", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other").stat().st_size == row["bytes"]
    # The model in the written folder scores what the table says.
    state = load_file(tmp_path / "tuned" / "model.safetensors")
    model = PretrainedClassifier(base, 2)
    model.load_tuned(state)
    task = find(str(texts)).read()
    tokens = Tokens(base, task.test.texts, task.test.labels, 32)
    assert accuracy(model, tokens) == result["patch"]["test"]
    command = ["patch", "revert", str(tmp_path / "tuned"), str(patch)]
    assert main([*command, "-o", str(tmp_path / "again"), "--verify"]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        base / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_it_learns_and_prints_a_table(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--p", "1.3", "--reach", "1", "--epochs", "15", "--batch-size", "16"]
    assert tune(texts, base, tmp_path / "run", *options, "--keep", "0.05") == 0
    printed = capsys.readouterr().out
    assert "0.05 *" in printed and "patch:" in printed and "another size:" in printed
    table = json.loads((tmp_path / "run" / "table.json").read_text())["table"]
    assert table[0]["validation"] > 0.9


@pytest.mark.slow
def test_each_patch_is_computed_once_and_no_weights_are_saved_twice(
    texts: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, saved = [], []
    between, save = Patch.between, checkpoints.packed

    def counted(*args: Any, **options: Any) -> Patch:
        sizes.append(options["count"])
        return between(*args, **options)

    def packed(*args: Any) -> bytes:
        saved.append(args)
        return save(*args)

    monkeypatch.setattr(Patch, "between", counted)
    monkeypatch.setattr("mirrorhead_lab.training.loop.packed", packed)
    assert tune(texts, base, tmp_path / "run", "--epochs", "2", "--texts", "64") == 0
    assert len(sizes) == len(SHARES)
    assert len(saved) == 1 + 2  # before the first epoch, and after each


@pytest.mark.slow
def test_fine_tuning_is_the_plain_loop(texts: Path, base: Path) -> None:
    task, settings = find(str(texts)).read(), TuneSettings(epochs=2, texts=100, batch_size=16)
    sets = TuneSets.of(task, base, settings)
    model, plain = (PretrainedClassifier(base, 2) for _ in range(2))
    optimizer = torch.optim.AdamW(list(model.train_matrices().values()), 1e-3)
    fine_tune(model, sets, settings, optimizer)
    rules = (
        torch.optim.AdamW(list(plain.train_matrices().values()), 1e-3),
        torch.optim.AdamW(plain.head.parameters(), settings.head_lr, weight_decay=0.0),
    )
    rates, step, steps = (1e-3, settings.head_lr), 0, 2 * 6
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for places in sets.train.shuffled(16, generator):
            factor = (step + 1) / 2 if step < 2 else (steps - step) / (steps - 2)
            ids, mask, labels = sets.train.batch(places)
            torch.nn.functional.cross_entropy(plain(ids, mask), labels).backward()
            for rule, rate in zip(rules, rates, strict=True):
                rule.param_groups[0]["lr"] = rate * factor
                rule.step()
                rule.zero_grad()
            step += 1
    assert step == steps
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


class Stop(Exception):
    pass


def stop(*args: object, **kwargs: object) -> None:
    raise Stop


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the second epoch", "the patch", "the table"])
def test_an_interrupted_run_resumes_to_the_bit(
    where: str, texts: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    options = ["--epochs", "2", "--texts", "96"]
    assert tune(texts, base, tmp_path / "whole", *options) == 0
    steps: list[object] = []
    backward = FineTuning.backward

    def interrupted(task: FineTuning, batch: list[int]) -> torch.Tensor:
        steps.append(batch)
        if len(steps) > 96 // 32 + 1:
            raise Stop
        return backward(task, batch)

    def write_but_the_table(path: Path, content: object) -> None:
        if path.name == "table.json":
            raise Stop
        write_json(path, content)

    stops = {
        "the second epoch": ("mirrorhead_lab.training.tuning.FineTuning.backward", interrupted),
        "the patch": ("mirrorhead.patches.Patch.save", stop),
        "the table": ("mirrorhead_lab.training.tuning.write_json", write_but_the_table),
    }
    with monkeypatch.context() as patched:
        patched.setattr(*stops[where])
        with pytest.raises(Stop):
            tune(texts, base, tmp_path / "run", *options)
    assert not (tmp_path / "run" / "table.json").exists()
    capsys.readouterr()
    assert tune(texts, base, tmp_path / "run", *options) == 0
    first = capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names
    for name in ("patch.safetensors", "tuned.safetensors", "table.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # A finished run is shown again; nothing is computed.
    monkeypatch.setattr("mirrorhead_lab.training.tuning.FineTuning", stop)
    assert tune(texts, base, tmp_path / "run", *options) == 0
    shown = capsys.readouterr().out
    assert "patch:" in shown and first.endswith(shown)


@pytest.mark.slow
def test_a_folder_that_is_not_this_run_is_left_alone(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    assert tune(texts, base, own) == 2
    assert "is not empty and holds no run" in capsys.readouterr().err
    (own / "settings.json").write_text('{"p": 1.5}')
    assert tune(texts, base, own) == 2
    assert "is not of a run: choose a new or empty folder" in capsys.readouterr().err
    assert (own / "settings.json").read_text() == '{"p": 1.5}'
    assert sorted(path.name for path in own.iterdir()) == ["notes.txt", "settings.json"]


def test_a_folder_in_use_is_refused(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked_folder(tmp_path / "run"):
        assert tune(texts, base, tmp_path / "run") == 2
    assert "is in use by another process" in capsys.readouterr().err


@pytest.mark.slow
def test_other_texts_or_weights_under_the_same_names_are_another_run(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "base"
    shutil.copytree(base, own)
    options = ["--epochs", "1", "--texts", "64"]
    assert tune(texts, own, tmp_path / "run", *options) == 0
    table = (tmp_path / "run" / "table.json").read_bytes()
    weights = load_file(own / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, own / "model.safetensors")
    capsys.readouterr()
    assert tune(texts, own, tmp_path / "run", *options) == 2
    assert "other settings: content of the base is" in capsys.readouterr().err
    texts.write_text(texts.read_text().replace("good", "bad"))
    assert tune(texts, base, tmp_path / "run", *options) == 2
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    assert tune(texts, own, tmp_path / "run", *options) == 2
    assert "other settings: content of the data is" in capsys.readouterr().err
    assert (tmp_path / "run" / "table.json").read_bytes() == table


@pytest.mark.slow
def test_a_base_in_bf16(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModel

    half = tmp_path / "half"
    shutil.copytree(base, half)
    AutoModel.from_pretrained(half, dtype=torch.bfloat16).save_pretrained(half)
    assert tune(texts, half, tmp_path / "run", "--epochs", "1", "--texts", "64") == 0
    patch = str(tmp_path / "run" / "patch.safetensors")
    for action, source, out in (("apply", half, "tuned"), ("revert", tmp_path / "tuned", "again")):
        command = ["patch", action, str(source), patch, "-o", str(tmp_path / out), "--verify"]
        assert main(command) == 0
    files = [folder / "model.safetensors" for folder in (half, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    # Before it trains, the command refuses a folder whose two files contradict each other.
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    capsys.readouterr()
    assert tune(texts, half, tmp_path / "other") == 2
    assert "by the dtype in config.json" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--p", "1"], "p must be above 1"),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--max-length", "2"], "--max-length must be above 2"),
        (["--reach", "0"], "reach must be above 0"),
        (["--keep", "0"], "--keep must be above 0"),
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--base", "nothing"], "nothing does not exist"),
    ],
)
def test_wrong_use_is_one_line(
    options: list[str], message: str, texts: Path, base: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert tune(texts, base, tmp_path / "run", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("mirrorhead: ") and error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_texts_with_more_tokens_than_the_base_has_positions(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{'good ' * 40}{i},{i % 2}" for i in range(60)]
    (tmp_path / "own.csv").write_text("\n".join(["text,label", *lines]))
    assert tune(tmp_path / "own.csv", base, tmp_path / "run", "--max-length", "64") == 2
    assert "--max-length must be at most 32" in capsys.readouterr().err


def test_only_texts_can_be_tuned(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", "cifar10", "--base", str(base), "--out", str(tmp_path / "run")]
    assert main(command) == 2
    assert "tune is for texts, cifar10 has images" in capsys.readouterr().err
