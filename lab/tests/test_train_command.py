"""`mirrorhead train` and the presets, on slices that the tests make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

from data_slices import make_bert, make_cad, make_cifar10, make_imdb
from mirrorhead_lab.cli.train import Train
from mirrorhead_lab.models import TextSettings, ViTSettings
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.training import OptimizerSettings, evaluate, load_run, load_sets, preset
from mirrorhead_lab.training.candidates import parse_candidate
from mirrorhead_lab.training.presets import PRESETS, RATES


@pytest.fixture
def slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "data"
    make_imdb(root, per_folder=60)
    make_cad(root, [("altogether dull", "altogether grand")])
    make_bert(root)
    make_cifar10(root, per_file=10)
    monkeypatch.setenv("MIRRORHEAD_DATA", str(root))
    monkeypatch.setenv("MIRRORHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return root


def parse(line: str) -> Train:
    return tyro.cli(Train, args=line.split())


@pytest.mark.slow
def test_a_run_is_trained_scored_and_not_run_again(slices: Path, capsys: Any) -> None:
    command = parse("imdb --epochs 2 --partial --seed 3")
    assert command.run() == 0
    told = capsys.readouterr().out
    folder = Path("runs/laptop-imdb-mirror-descent-lr0.3-p1.1-seed3")
    assert told.splitlines()[-1] == f"run: {folder}"
    test = json.loads((folder / "test.json").read_text())
    assert 0 <= test["accuracy"] <= 1
    assert f"test {test['accuracy']:.2%}" in told
    before = (folder / "best.safetensors").stat().st_mtime_ns
    assert command.run() == 0
    assert (folder / "best.safetensors").stat().st_mtime_ns == before
    assert json.loads((folder / "test.json").read_text()) == test


def test_pictures_and_other_optimizers(slices: Path) -> None:
    command = parse("cifar10 --optimizer adamw --lr 1e-3 --epochs 1 --partial --out here")
    assert command.run() == 0
    settings = json.loads(Path("here/settings.json").read_text())
    assert settings["optimizer"]["name"] == "adamw"
    assert settings["optimizer"]["lr"] == 1e-3
    assert settings["epochs"] == 1
    with pytest.raises(UserError, match="other settings: epochs is 1 there, 2 here"):
        replace(command, epochs=2).run()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("imdb", "not the published data"),
        ("cifar10", "not complete"),
        ("imdb --partial --data nowhere", "imdb, cad, bert: there are no folders aclImdb, "),
        ("imdb --partial --preset large", "preset must be one of laptop"),
        ("imdb --partial --preset vit-paper", "--preset vit-paper is for images, imdb has text"),
        ("imdb --partial --p 1.2", "no learning rate is known for p = 1.2 in laptop"),
        ("imdb --partial --optimizer adamw", "--lr is needed for adamw"),
        ("imdb --partial --momentum 0.9", "--lr is needed for mirror-descent"),
        ("imdb --partial --normalize global", "--lr is needed for mirror-descent"),
        ("imdb --partial --l1 0.1", "--l1 is not an option of mirror-descent; it has --lr, --p, "),
        ("cifar10 --partial --knee 0", "--lr is needed for mirror-adam with --knee"),
        ("cifar10 --partial --optimizer mirror-descent", "--lr is needed for mirror-descent$"),
        ("imdb --partial --knee 2", "--knee is not an option of mirror-descent"),
        ("imdb --partial --optimizer adamw --p 3", "--p is not an option of adamw; it has --lr, "),
        ("imdb --partial --optimizer sgd --lr 1 --p 3", "--p is not an option of sgd"),
        ("imdb --partial --optimizer sgd --lr 1 --normalize tensor", "--normalize is not an"),
        ("imdb --partial --warmup 1", "warmup must be at least 0 and less than 1"),
        ("imdb --partial --clip -1", "clip must be greater than 0"),
        ("imdb --partial --stop-at 99.5", "--stop-at must be above 0 and at most 1"),
        ("imdb --partial --epochs 0", "epochs must be at least 1, got 0"),
        ("imdb --partial --batch-size 0", "--batch-size must be at least 1, got 0"),
        ("imdb --partial --optimizer sgd --lr -1", "--lr must be greater than 0 and finite, got"),
        ("imdb --partial --optimizer sgd --lr inf", "--lr must be greater than 0 and finite, got"),
        ("imdb --partial --optimizer adamw --lr 1 --l1 0.1", "--l1 is not an option of adamw"),
    ],
)
def test_wrong_use_is_told(slices: Path, line: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(line).run()
    assert not Path("runs").exists()


@pytest.mark.parametrize("p", [0.0, 1.0, -1.0, float("nan"), float("inf")])
def test_p_is_checked_first_and_alike(slices: Path, p: float) -> None:
    says = f"p must be finite and greater than 1, got {p}"
    for line in ("imdb", "cifar10", "imdb --lr 0.1", "imdb --optimizer mirror-adam"):
        with pytest.raises(UserError) as told:
            parse(f"{line} --partial --p {p}").run()
        assert str(told.value) == f"--{says}"
    for name in PRESETS:
        with pytest.raises(ValueError, match=says):
            preset(name, p=p)
    with pytest.raises(ValueError, match=f"mirror-descent lr=1 p={p}': {says}"):
        parse_candidate(f"mirror-descent lr=1 p={p}")


def test_options_reach_the_settings() -> None:
    line = "imdb --lr 0.1 --p 1.5 --normalize global --batch-size 7 --compile --parallel fsdp"
    command = parse(line)
    chosen = command._chosen()
    training = chosen.training
    assert (training.batch_size, training.compile, training.parallel) == (7, True, "fsdp")
    assert training.optimizer == OptimizerSettings("mirror-descent", 0.1, 1.5, normalize="global")
    name = "laptop-imdb-mirror-descent-lr0.1-p1.5-normalize-global-batch7-fsdp-compiled-seed0"
    assert command._name(chosen) == name
    assert parse("imdb")._chosen() == preset("laptop")


@pytest.mark.parametrize(("option", "knee"), [("", 1.0), ("--knee 2.5", 2.5), ("--knee 0", 0.0)])
def test_mirror_adam_has_the_usual_knee(option: str, knee: float) -> None:
    command = parse(f"imdb --optimizer mirror-adam --lr 1e-3 {option}")
    chosen = command._chosen()
    assert chosen.training.optimizer == OptimizerSettings("mirror-adam", 1e-3, 1.1, knee=knee)
    assert (f"-knee{knee:g}-" in command._name(chosen)) == bool(knee)
    _, (rule,) = parse_candidate(f"mirror-adam p=1.1 lr=1e-3 {option[2:].replace(' ', '=')}")
    assert rule == chosen.training.optimizer


def test_the_schedule_and_limits_are_options() -> None:
    usual = preset("laptop").training
    assert (usual.schedule, usual.clip, usual.stop_at) == ("cosine", 1.0, None)
    line = "imdb --schedule constant --warmup 0.1 --clip 0.5 --stop-at 0.995"
    command = parse(line)
    chosen = command._chosen()
    training = chosen.training
    assert (training.schedule, training.warmup) == ("constant", 0.1)
    assert (training.clip, training.stop_at) == (0.5, 0.995)
    name = command._name(chosen)
    assert name.endswith("-constant-warmup0.1-clip0.5-stop-at0.995-seed0")
    off = parse("imdb --preset paper-3 --clip 0 --stop-at 0")._chosen().training
    assert off.clip is None and off.stop_at is None
    assert preset("paper-3").training.stop_at == 0.995


def test_scalars_for_tensorboard(slices: Path) -> None:
    command = parse("cifar10 --optimizer sgd --lr 0.01 --epochs 1 --partial --tensorboard --out a")
    assert command.run() == 0
    assert list(Path("a/tensorboard").glob("events*"))


@pytest.mark.slow
def test_torchrun_trains_as_one_process_and_prints_once(slices: Path) -> None:
    line = ["imdb", "--optimizer", "sgd", "--lr", "0.1", "--epochs", "1", "--partial"]
    line += ["--batch-size", "30"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "-m", "mirrorhead_lab", "train", *line]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*launch, *more], env=environment, capture_output=True, text=True, check=False
        )

    done = run("--out", "two", "--parallel", "fsdp")
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    accuracy = json.loads(Path("two/test.json").read_text())["accuracy"]
    assert first.startswith("best epoch 1") and f"test {accuracy:.2%}" in first
    assert last == "run: two"
    assert done.stderr.count("epoch 1:") == 1
    best = load_run("two")
    assert evaluate(best.model, load_sets(best.preset, partial=True).test)["accuracy"] == accuracy
    wrong = run("--data", "nowhere")
    assert wrong.returncode != 0 and not wrong.stdout
    assert wrong.stderr.count("mirrorhead: ") == 1
    assert "bert-uncased in nowhere" in wrong.stderr


def test_seeds_decide_the_first_weights(slices: Path) -> None:
    for seed in (0, 1):
        parse(f"imdb --epochs 1 --partial --seed {seed} --out s{seed}").run()
    one, two = (Path(f"s{seed}/best.safetensors").read_bytes() for seed in (0, 1))
    assert one != two


def test_presets_are_the_papers() -> None:
    for size in (3, 4, 6):
        for p in (1.1, 2.0, 3.0):
            found = preset(f"paper-{size}", p=p)
            assert found.model == TextSettings.paper(size)
            assert found.training.optimizer.lr == RATES[f"paper-{size}"][p]
            assert found.training.batch_size == 100
            assert found.training.stop_at == 0.995
    assert preset("vit-paper").model == ViTSettings()
    rule = OptimizerSettings("adamw", lr=1e-4)
    for name in PRESETS:
        assert preset(name, rule).training.optimizer == rule
    for p, lr in RATES["laptop"].items():
        assert preset("laptop", p=p).training.optimizer.lr == lr
    with torch.device("meta"):
        shapes = [p.shape for p in preset("vit-paper").build().parameters()]
    assert torch.Size([145, 512]) in shapes


def test_validation_is_not_trained_on(slices: Path) -> None:
    pictures = load_sets(preset("laptop-vit"), partial=True)
    assert len(pictures.train) + len(pictures.validation) == 50
    assert len(pictures.test) == 10
    one, two = (
        {row.numpy().tobytes() for row in part.batch(range(len(part)))[0]}
        for part in (pictures.train, pictures.validation)
    )
    assert not one & two
    texts = load_sets(preset("laptop"), partial=True)
    assert len(texts.train) > 4 * len(texts.validation) > 0
