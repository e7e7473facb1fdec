"""The training loop against a loop as plain as can be; kills, resumption, teams."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import mirrorhead as mh
from mirrorhead_lab.datasets import epoch_batches
from mirrorhead_lab.models import HuggingFaceClassifier
from mirrorhead_lab.training import (
    Console,
    Diverged,
    Event,
    OptimizerSettings,
    ProximalSGD,
    RunError,
    TensorBoard,
    TrainSettings,
    build_optimizer,
    evaluate,
    train,
)
from mirrorhead_lab.training.checkpoints import (
    checkpoints,
    load_checkpoint,
    packed,
    save_checkpoint,
)
from mirrorhead_lab.training.loop import mix
from mirrorhead_lab.training.settings import Schedule
from training_cases import OPTIMIZERS, Task, run, small_model, weights

SCRIPT = Path(__file__).parent / "training_cases.py"


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# --- the loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_loop_is_the_plain_loop(tmp_path: Path, name: str) -> None:
    model, outcome = run(tmp_path, name)
    plain, task = small_model(), Task(120)
    optimizer = build_optimizer(plain, OPTIMIZERS[name])
    step, correct = 0, []
    for epoch in range(2):
        right = 0
        for batch in epoch_batches(np.arange(120), 16, seed=0, epoch=epoch, lengths=task.lengths):
            torch.manual_seed(mix(0, step, 0))
            x, y = task.batch(batch)
            for group in optimizer.param_groups:
                group["lr"] = OPTIMIZERS[name].lr * (1 + math.cos(math.pi * step / 16)) / 2
            optimizer.zero_grad()
            logits = plain(x)
            F.cross_entropy(logits, y).backward()
            optimizer.step()
            right += int((logits.argmax(1) == y).sum())
            step += 1
        correct.append(right / 120)
    assert step == 16
    assert same(model, plain)
    assert [epoch["train_accuracy"] for epoch in outcome.epochs] == correct
    assert not same(model, small_model())


@pytest.mark.slow
def test_a_batch_in_pieces_is_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"dropout": 0.0, "clip": 0.5}
    whole, outcome = run(tmp_path / "whole", "sgd", **options)
    for tokens in (40, 1):  # some texts at once, and one
        monkeypatch.setattr("mirrorhead_lab.training.classification.TOKENS_AT_ONCE", tokens)
        model, found = run(tmp_path / str(tokens), "sgd", **options)
        assert not same(model, whole)  # sums in another order
        for a, b in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        for one, two in zip(found.epochs, outcome.epochs, strict=True):
            assert one == pytest.approx(two, rel=1e-9)


@pytest.mark.slow
def test_seeds_decide(tmp_path: Path) -> None:
    one, _ = run(tmp_path / "a")
    two, _ = run(tmp_path / "b")
    other, _ = run(tmp_path / "c", seed=1)
    assert same(one, two) and not same(one, other)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


@pytest.mark.slow
def test_training_stops_at_an_accuracy(tmp_path: Path) -> None:
    _, outcome = run(tmp_path, epochs=60, schedule="constant", stop_at=0.9)
    accuracies = [epoch["train_accuracy"] for epoch in outcome.epochs]
    assert outcome.stopped_early and len(accuracies) < 60
    assert accuracies[-1] >= 0.9 and all(a < 0.9 for a in accuracies[:-1])


@pytest.mark.slow
def test_the_best_weights_are_those_of_the_best_epoch(tmp_path: Path) -> None:
    _, outcome = run(tmp_path, epochs=6)
    best = small_model()
    best.load_state_dict(load_file(tmp_path / "best.safetensors"))
    assert evaluate(best, Task(60, seed=1))["accuracy"] == outcome.best_accuracy
    assert outcome.best_accuracy == max(e["validation_accuracy"] for e in outcome.epochs)
    with safe_open(tmp_path / "best.safetensors", "pt") as file:
        assert file.metadata()["epoch"] == str(outcome.best_epoch)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["best_accuracy"] == outcome.best_accuracy


@pytest.mark.slow
def test_the_last_epoch_may_be_chosen_instead(tmp_path: Path) -> None:
    model, outcome = run(tmp_path, epochs=6, choose="last")
    last = small_model()
    last.load_state_dict(load_file(tmp_path / "best.safetensors"))
    assert same(last, model)
    assert outcome.best_epoch == 6
    assert outcome.best_accuracy == outcome.epochs[-1]["validation_accuracy"]
    _, other = run(tmp_path / "other", epochs=6)
    assert other.epochs == outcome.epochs  # what is kept does not change the training
    assert other.best_epoch < 6


@pytest.mark.slow
def test_weights_are_kept_at_milestones(tmp_path: Path) -> None:
    _, outcome = run(tmp_path, epochs=8, milestones=(0.0, 0.7, 0.8, 1.0))
    reached = [epoch["train_accuracy"] for epoch in outcome.epochs]
    kept = {path.name for path in (tmp_path / "milestones").iterdir()}
    assert kept == {f"{m:g}.safetensors" for m in (0.0, 0.7, 0.8, 1.0) if m <= max(reached)}
    for name in kept:
        first = next(i for i, share in enumerate(reached) if share >= float(name[:-12]))
        with safe_open(tmp_path / "milestones" / name, "pt") as file:
            assert file.metadata()["epoch"] == str(first + 1)
        then = small_model()
        then.load_state_dict(load_file(tmp_path / "milestones" / name))
        validation = evaluate(then, Task(60, seed=1))["accuracy"]
        assert validation == outcome.epochs[first]["validation_accuracy"]


def test_evaluation_is_one_by_one(tmp_path: Path) -> None:
    model, task = small_model().train(), Task(60, seed=1)
    found = evaluate(model, task, batch_size=7)
    assert model.training
    model.eval()
    losses, right = [], 0
    for i in range(60):
        x, y = task.batch(np.array([i]))
        logits = model(x).detach()
        losses.append(float(F.cross_entropy(logits.double(), y)))
        right += int(logits.argmax() == y)
    assert found["accuracy"] == right / 60
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_gradients_are_clipped(tmp_path: Path) -> None:
    small = OptimizerSettings("sgd", lr=1.0)
    model = small_model()
    start = [p.detach().clone() for p in model.parameters()]
    settings = TrainSettings(epochs=1, batch_size=60, optimizer=small, clip=1e-3)
    train(model, Task(60), Task(20), settings, tmp_path)
    moved = sum(
        float((p.detach() - s).square().sum())
        for p, s in zip(model.parameters(), start, strict=True)
    )
    assert math.sqrt(moved) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.slow
def test_a_bert_is_trained_by_the_same_loop(tmp_path: Path) -> None:
    import transformers  # takes seconds

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
    )
    model = HuggingFaceClassifier(transformers.BertForSequenceClassification(config))
    settings = TrainSettings(epochs=8, optimizer=OptimizerSettings("mirror-adam", lr=1e-2, p=1.5))
    outcome = train(model, Task(120), Task(60, seed=1), settings, tmp_path)
    assert outcome.epochs[-1]["train_loss"] < 0.9 * outcome.epochs[0]["train_loss"]


@pytest.mark.slow
def test_compiled_training_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tracing alone, as generating code takes long; tests/test_models.py does that.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled, _ = run(tmp_path / "a", "sgd", dropout=0.0, epochs=1, compile=True)
    plain, _ = run(tmp_path / "b", "sgd", dropout=0.0, epochs=1)
    assert same(compiled, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirror-descent", "mirror-adam", "adamw", "proximal-l1"])
def test_fused_steps_lead_to_the_same_weights(tmp_path: Path, name: str) -> None:
    fused, _ = run(tmp_path / "a", name, fused=True)
    again, _ = run(tmp_path / "b", name, fused=True)
    plain, _ = run(tmp_path / "c", name)
    assert same(fused, again)
    for one, two in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_the_knee_of_mirror_adam() -> None:
    """Without one, settings are those of runs that were made before there was one."""
    model = torch.nn.Linear(2, 1)
    usual = mh.MirrorAdam([model.weight]).defaults["rms_floor"]
    for knee, expected in ((0.0, (None, 1e-2)), (2.0, (2.0, usual))):
        settings = OptimizerSettings("mirror-adam", p=1.5, knee=knee)
        group = build_optimizer(model, settings).param_groups[0]
        assert (group["knee"], group["rms_floor"]) == expected


# --- folders ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, outcome = run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr("mirrorhead_lab.training.classification.epoch_batches", None)
    again, told = run(tmp_path)
    assert told == outcome and same(model, again)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_a_folder_belongs_to_its_settings(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    with pytest.raises(ValueError, match="holds a run with other settings: epochs is 1 there, 2"):
        run(tmp_path, epochs=2)
    with pytest.raises(ValueError, match="other settings: optimizer is"):
        run(tmp_path, "sgd", epochs=1)
    with pytest.raises(ValueError, match="other settings: model is"):
        run(tmp_path, epochs=1, dropout=0.0)
    run(tmp_path, epochs=1, keep=5)  # decides nothing
    usual = TrainSettings(1, 16, OPTIMIZERS["adamw"], "cosine", checkpoint_every=3)
    for name, seeds in {"examples": (1, 1), "validation": (0, 2)}.items():
        one, two = Task(120, seed=seeds[0]), Task(60, seed=seeds[1])
        with pytest.raises(ValueError, match=f"other settings: {name} is"):
            train(small_model(), one, two, usual, tmp_path)


def test_empty_sets_are_refused(tmp_path: Path) -> None:
    for sets, says in [((Task(0), Task(9)), "examples must"), ((Task(9), Task(0)), "validation")]:
        with pytest.raises(ValueError, match=f"{says}.* not be empty"):
            train(small_model(), *sets, TrainSettings(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_two_runs_can_not_share_a_folder(tmp_path: Path) -> None:
    def meddle(event: Event) -> None:
        if event.kind == "start":
            with pytest.raises(BlockingIOError, match="in use by another process"):
                run(tmp_path)

    settings = TrainSettings(epochs=1)
    train(small_model(), Task(60), Task(20), settings, tmp_path, loggers=[meddle])
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("rule", "batch", "says"),
    [
        (OptimizerSettings("sgd", lr=1e30), 16, "not finite, found at step"),
        # One step: only validation sees its weights.
        (OptimizerSettings("sgd", lr=1e38), 120, "validation loss is not finite after epoch 1"),
        (
            OptimizerSettings("mirror-descent", lr=1e30, p=1.5),
            16,
            r"step \d+: the gradient of .* not finite",
        ),
    ],
)
def test_divergence_is_told(tmp_path: Path, rule: OptimizerSettings, batch: int, says: str) -> None:
    settings = TrainSettings(epochs=3, batch_size=batch, optimizer=rule, checkpoint_every=2)
    with pytest.raises(Diverged, match=says):
        train(small_model(), Task(120), Task(60), settings, tmp_path)
    assert not (tmp_path / "result.json").exists()
    assert not (tmp_path / "best.safetensors").exists()


@pytest.mark.slow
def test_the_log_has_every_event_once(tmp_path: Path) -> None:
    events: list[Event] = []
    settings = TrainSettings(epochs=3, batch_size=16, checkpoint_every=5)
    train(small_model(), Task(120), Task(60), settings, tmp_path, loggers=[events.append])
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(e.kind, e.step) for e in events[1:]] == [(x["kind"], x["step"]) for x in lines]
    assert [x["epoch"] for x in lines if x["kind"] == "epoch"] == [1, 2, 3]
    assert events[0].kind == "start" and events[-1].kind == "end"
    assert {e.steps for e in events} == {24}


def test_consoles_and_boards_take_events(tmp_path: Path, capsys: Any) -> None:
    settings = TrainSettings(epochs=1)
    train(small_model(), Task(60), Task(20), settings, tmp_path, loggers=[Console()])
    assert "epoch 1: train_loss" in capsys.readouterr().err
    board = TensorBoard(tmp_path / "board")
    board(Event("epoch", 3, 10, 1, {"train_loss": 0.5}))
    board(Event("end", 3, 10, 1))
    assert list((tmp_path / "board").iterdir())


# --- checkpoints ------------------------------------------------------------------------------


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    task = Task(120)
    for step in steps:
        x, y = task.batch(np.arange(8 * step, 8 * step + 8))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_holds_everything(tmp_path: Path, name: str) -> None:
    model = small_model(0.0)
    optimizer = build_optimizer(model, OPTIMIZERS[name])
    steps_of(model, optimizer, range(4))
    state = {"a": [0.1, 1 / 3]}
    save_checkpoint(tmp_path, 4, model, [optimizer], state, packed(model, {}), keep=2)
    steps_of(model, optimizer, range(4, 8))

    again = small_model(0.0)
    with torch.no_grad():
        for param in again.parameters():
            param.add_(1)
    fresh = build_optimizer(again, OPTIMIZERS[name])
    (path,) = checkpoints(tmp_path)
    assert load_checkpoint(path, again, [fresh]) == state
    steps_of(again, fresh, range(4, 8))
    assert same(model, again)
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    run(tmp_path, epochs=2, keep=3, checkpoint_every=5)
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000008", "step-00000010", "step-00000015", "step-00000016"][1:]


def test_the_best_weights_are_not_written_twice(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    last = checkpoints(tmp_path / "checkpoints")[-1] / "model.safetensors"
    assert last.samefile(tmp_path / "best.safetensors")


def test_a_file_system_without_links_has_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError("not supported")

    run(tmp_path / "linked", epochs=1)
    monkeypatch.setattr("os.link", link)
    run(tmp_path / "copied", epochs=1)
    assert weights(tmp_path / "linked") == weights(tmp_path / "copied")


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OPTIMIZERS["sgd"])
    save_checkpoint(tmp_path, 1, model, [optimizer], {}, packed(model, {}), keep=1)
    (path,) = checkpoints(tmp_path)
    for other, says in [
        (nn.Linear(4, 2), r"weight is \(2, 3\)"),
        (nn.Linear(3, 2).double(), "torch.float32 there"),
        (nn.Linear(3, 2, bias=False), "differ in bias"),
    ]:
        before = [p.detach().clone() for p in other.parameters()]
        with pytest.raises(RunError, match=says):
            load_checkpoint(path, other, [build_optimizer(other, OPTIMIZERS["sgd"])])
        assert all(map(torch.equal, other.parameters(), before))


def shell(*command: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_killed_runs_go_on_to_the_bit() -> None:
    memory = Path("/dev/shm")  # where there is one, as a thousand checkpoints wait for the disk
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        shell(SCRIPT, "kill", folder, "mirror-adam", "20")


# --- several processes ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel"), [("mirror-descent 1.1", "ddp"), ("mirror-adam", "fsdp")]
)
def test_a_team_trains_the_same_model(tmp_path: Path, name: str, parallel: str) -> None:
    options: dict[str, Any] = {"parallel": parallel, "clip": 1.0, "keep": 99}
    run(tmp_path / "one", name, dropout=0.0, **options)
    if parallel == "fsdp":  # go on from the middle of what one process did
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        for path in checkpoints(tmp_path / "two" / "checkpoints")[3:]:
            shutil.rmtree(path)
        (tmp_path / "two" / "result.json").unlink()
        (tmp_path / "two" / "best.safetensors").unlink()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shell(*launch, SCRIPT, "team", tmp_path / "two", name, parallel)
    one, two = (load_file(tmp_path / x / "best.safetensors") for x in ("one", "two"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=1e-9 * float(value.abs().max()))
    logs = [
        [json.loads(line) for line in (tmp_path / x / "log.jsonl").read_text().splitlines()]
        for x in ("one", "two")
    ]
    for a, b in zip(*logs, strict=True):
        assert (a["kind"], a["step"], a.get("train_accuracy")) == (
            b["kind"], b["step"], b.get("train_accuracy"),
        )  # fmt: skip


# --- settings and optimizers ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OptimizerSettings("adam"), "name must be one of mirror-descent"),  # pyright: ignore[reportArgumentType]
        (lambda: OptimizerSettings("mirror-descent"), "mirror-descent needs p"),
        (lambda: OptimizerSettings("mirror-adam", p=1.0), "p must be finite and greater than 1"),
        (lambda: OptimizerSettings("sgd", p=1.5), "sgd has no p; it has: momentum"),
        (lambda: OptimizerSettings("adamw", momentum=0.9), "adamw has no momentum"),
        (lambda: OptimizerSettings("adamw", l1=0.9), "adamw has no l1"),
        (lambda: OptimizerSettings("adamw", knee=1.0), "adamw has no knee"),
        (lambda: OptimizerSettings("mirror-adam", p=1.5, knee=-1.0), "knee must be at least 0"),
        (lambda: OptimizerSettings("sgd", lr=0), "lr must be greater than 0"),
        (lambda: OptimizerSettings("sgd", lr=math.nan), "lr must be greater than 0"),
        (lambda: OptimizerSettings("sgd", momentum=1), "momentum must be at least 0 and less"),
        (lambda: TrainSettings(epochs=0), "epochs must be at least 1"),
        (lambda: TrainSettings(warmup=1.0), "warmup must be at least 0 and less than 1"),
        (lambda: TrainSettings(clip=0.0), "clip must be greater than 0"),
        (lambda: TrainSettings(stop_at=99.5), "stop_at must be above 0 and at most 1"),
        (lambda: TrainSettings(choose="first"), "choose must be"),  # pyright: ignore[reportArgumentType]
        (lambda: TrainSettings(milestones=(99.5,)), "milestones must be from 0 to 1"),
        (lambda: TrainSettings(schedule="linear"), "schedule must be"),  # pyright: ignore[reportArgumentType]
        (lambda: TrainSettings(parallel="none"), "parallel must be"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_settings_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_an_optimizer_of_ones_own_is_given_as_a_function() -> None:
    with pytest.raises(ValueError, match="given to complete_run"):
        build_optimizer(nn.Linear(2, 1), OptimizerSettings("own"))


@pytest.mark.parametrize("end", [0.0, 0.1])
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_rates_rise_and_fall(shape: Any, end: float) -> None:
    schedule = Schedule(shape, warmup=0.1, end=end)
    rates = [schedule(step, 200) for step in range(200)]
    assert rates[:20] == pytest.approx([(i + 1) / 20 for i in range(20)])
    assert all(a > b > 0 for a, b in pairwise(rates[20:]))
    assert rates[19] == 1 and rates[20] == pytest.approx(1, abs=1e-2)
    # The last step has the rate `end`, or the smallest before 0.
    assert rates[-1] == pytest.approx(end, abs=1e-9 if end else 1e-2)
    assert {Schedule()(step, 10) for step in range(10)} == {1.0}


def test_proximal_steps_are_soft_thresholds() -> None:
    model = nn.Linear(40, 3)
    optimizer = ProximalSGD(model.parameters(), lr=0.1, momentum=0.5, l1=0.4)
    reference = torch.nn.Linear(40, 3)
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)
    x = torch.randn(20, 40)
    for _ in range(5):
        for one, opt in ((model, optimizer), (reference, plain)):
            opt.zero_grad()
            one(x).square().mean().backward()
            opt.step()
        w = reference.weight.data
        w.copy_(w.sign() * (w.abs() - 0.1 * 0.4).clamp(min=0))
        torch.testing.assert_close(model.weight, reference.weight, rtol=0, atol=1e-7)
        torch.testing.assert_close(model.bias, reference.bias, rtol=0, atol=1e-7)
    assert int((model.weight == 0).sum()) > 60
    assert not (model.bias == 0).any()
