"""Nothing that a user has is removed or changed; damage is noticed; errors are one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data_slices import make_cifar10
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.datasets import fingerprint
from mirrorhead_lab.training import RunError, TrainSettings, load_run, train
from mirrorhead_lab.training.checkpoints import checkpoints
from mirrorhead_lab.training.loggers import JsonLines
from run_cases import make_slices, make_text_run
from training_cases import Task, run, small_model


def content(folder: Path) -> dict[str, bytes | None]:
    """All files of a folder, byte for byte; None for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def small_train(folder: Path) -> None:
    train(small_model(), Task(20), Task(20), TrainSettings(epochs=1), folder)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder)
    return folder


@pytest.fixture
def trained(finished_run: Path, tmp_path: Path) -> Path:
    """A finished run of two epochs, to be damaged."""
    return shutil.copytree(finished_run, tmp_path / "finished" / "run")


# --- a user's files -----------------------------------------------------------------------------


def user_files(folder: Path) -> None:
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / ".env").write_text("SECRET=1\n")
    (folder / ".ssh").mkdir()
    (folder / "lock").write_text("mine")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-by-step.md").write_text("a text")
    (folder / "checkpoints" / ".hidden").write_text("a text")


def test_a_folder_that_is_not_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    user_files(tmp_path / "project")
    before = content(tmp_path)
    with pytest.raises(RunError, match="is not empty and holds no run"):
        small_train(tmp_path / "project")
    assert content(tmp_path) == before


@pytest.mark.parametrize("settings", ['{"editor.fontSize": 12}', "[]", "3", "", "{"])
def test_settings_of_another_program_are_not_a_run(tmp_path: Path, settings: str) -> None:
    (tmp_path / "settings.json").write_text(settings)
    (tmp_path / ".env").write_text("SECRET=1\n")
    before = content(tmp_path)
    with pytest.raises(RunError, match=r"settings\.json is"):
        small_train(tmp_path)
    assert content(tmp_path) == before


def test_files_of_a_user_in_the_folder_of_a_run_stay(trained: Path) -> None:
    ours = content(trained)
    shutil.move(trained / "checkpoints", trained / "kept")
    user_files(trained)
    for path in (trained / "kept").iterdir():
        shutil.move(path, trained / "checkpoints")
    (trained / "kept").rmdir()
    (trained / "result.json").unlink()  # so that it trains, and removes old checkpoints
    shutil.rmtree(checkpoints(trained / "checkpoints")[-1])
    theirs = set(content(trained)) - set(ours)
    before = content(trained)
    run(trained)
    after = content(trained)
    assert {name: after[name] for name in theirs} == {name: before[name] for name in theirs}
    assert "lock" in theirs and "checkpoints/step-by-step.md" in theirs


def test_a_refused_folder_of_another_run_is_left_alone(trained: Path) -> None:
    (trained / ".env").write_text("SECRET=1\n")
    (trained / ".mirrorhead-tmp-abcdefgh-result.json").write_text("{")
    before = content(trained)
    with pytest.raises(RunError, match="other settings: epochs"):
        run(trained, epochs=3)
    assert content(trained) == before


# --- finished runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["model.safetensors", "state.json", "last gone", "all gone"])
def test_the_result_of_a_finished_run_does_not_depend_on_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, damage: str
) -> None:
    make_cifar10(tmp_path, per_file=10)
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    arguments = "train cifar10 --optimizer sgd --lr 0.01 --epochs 2 --partial --out run"
    line = arguments.split()
    assert main(line) == 0
    told = capsys.readouterr().out
    saved = checkpoints(Path("run/checkpoints"))
    if damage == "all gone":
        shutil.rmtree("run/checkpoints")
    elif damage == "last gone":
        shutil.rmtree(saved[-1])
    else:
        (saved[-1] / damage).write_bytes(b"")
    result = Path("run/result.json").read_bytes()
    assert main(line) == 0
    assert capsys.readouterr().out == told
    assert Path("run/result.json").read_bytes() == result


def test_weights_after_the_last_epoch_are_not_made_up(trained: Path) -> None:
    shutil.rmtree(checkpoints(trained / "checkpoints")[-1])
    with pytest.raises(RunError, match="without its last checkpoint"):
        run(trained)


# --- damage -------------------------------------------------------------------------------------


def flip(path: Path, place: int = -7) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_one_changed_bit_of_a_checkpoint_is_noticed(trained: Path, name: str) -> None:
    (trained / "result.json").unlink()
    path = checkpoints(trained / "checkpoints")[-1] / name
    if name == "state.json":
        path.write_text(path.read_text().replace('"batch": 0', '"batch": 1'))
    else:
        flip(path)
    with pytest.raises(RunError, match=rf"{name} is damaged.*Delete .*step-"):
        run(trained)
    path.unlink()
    with pytest.raises(RunError, match=rf"{name} cannot be read.*Delete .*step-"):
        run(trained)


def test_changed_best_weights_are_noticed(tmp_path: Path, trained: Path) -> None:
    flip(trained / "best.safetensors")
    (trained / "result.json").unlink()
    with pytest.raises(RunError, match=r"best\.safetensors has been damaged"):
        run(trained)
    folder = make_text_run(tmp_path / "run")
    sha256 = "0" * 64
    outcome = {"best_epoch": 1, "best_accuracy": 0.5, "stopped_early": False, "epochs": [{}]}
    (folder / "result.json").write_text(json.dumps({**outcome, "sha256": sha256}))
    with pytest.raises(RunError, match=r"best\.safetensors is damaged"):
        load_run(folder)


def test_a_log_that_was_cut_is_continued_and_a_strange_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    event = json.dumps({"kind": "step", "step": 1, "epoch": 0}) + "\n"
    for last in ("", "3", '{"kind": "st', "[]"):  # without a line break: cut by a kill
        path.write_text(event + last)
        JsonLines(path, 5)
        assert path.read_text() == event
    for line in ("3\n", "[]\n", "{}\n", '{"step": "x", "kind": "step"}\n', "x\n"):
        path.write_text(line + event)
        with pytest.raises(RunError, match=r"log\.jsonl, line 1 is not an event"):
            JsonLines(path, 5)
        assert path.read_text() == line + event


class Negated(Task):
    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        x, y = super().batch(indices)
        return -x, y


class Augmented(Task):
    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        x, y = super().batch(indices)
        return x + torch.randint(5, x.shape), y


def test_a_fingerprint_sees_the_inputs() -> None:
    assert fingerprint(Task(20)) == fingerprint(Task(20)) != fingerprint(Negated(20))
    random = fingerprint(Augmented(20))
    assert random == fingerprint(Augmented(20)) and "inputs" not in random
    state = torch.get_rng_state()
    fingerprint(Augmented(20))
    assert torch.equal(state, torch.get_rng_state())


def test_a_folder_belongs_to_its_inputs(tmp_path: Path) -> None:
    small_train(tmp_path)
    with pytest.raises(RunError, match="other settings: examples"):
        train(small_model(), Negated(20), Task(20), TrainSettings(epochs=1), tmp_path)


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_in_training_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    make_cifar10(tmp_path, per_file=10)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "mirrorhead_lab.training.loggers.JsonLines.__init__",
        lambda self, *_: setattr(self, "path", Path("/dev/full")),
    )
    line = "train cifar10 --optimizer sgd --lr 0.1 --epochs 1 --partial --data . --out run"
    assert main(line.split()) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "mirrorhead: /dev/full: No space left on device"


def command(*arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "mirrorhead_lab", *arguments], env=environment,
        capture_output=True, text=True, check=False, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_a_closed_pipe_is_silent() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    done = subprocess.run(
        [sys.executable, "-m", "mirrorhead_lab", "--help"], env=environment,
        stdout=reader.stdin, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    with suppress(BrokenPipeError):
        reader.communicate()


def test_an_interrupt_while_importing_is_one_line(tmp_path: Path) -> None:
    """Stands for a Ctrl-C at that moment: the module that is imported next raises it."""
    (tmp_path / "tyro").mkdir()
    (tmp_path / "tyro" / "__init__.py").write_text("raise KeyboardInterrupt\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = command("--help", env={"PYTHONPATH": path})
    assert done.returncode == 130
    assert done.stderr.startswith("mirrorhead: Interrupted") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_ascii_locale_is_enough(tmp_path: Path) -> None:
    make_slices(tmp_path / "data")
    folder = make_text_run(tmp_path / "run")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    page = tmp_path / "page.html"
    more = ["--data", str(tmp_path / "data"), "--partial"]
    for output in ([], ["--html", str(page)]):
        done = command(
            "attention", str(folder), "caf\u00e9 was dull".encode(), *output, *more, env=ascii_only
        )
        assert done.returncode == 0, done.stderr
    assert "\u2013" in page.read_text("utf-8") or page.stat().st_size > 1000
    done = command("evaluate", str(folder), "--on", "weights", *more, env=ascii_only)
    assert done.returncode == 0, done.stderr
