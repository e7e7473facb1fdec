"""`mirrorhead sweep`, on slices that the tests make: the table, wrong use, clusters, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_slices import make_cifar10
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.runtime.jobs import dask, slurm
from mirrorhead_lab.training import SweepError, sweep
from mirrorhead_lab.training.presets import parse_candidate
from test_experiments_cluster import PATHS, cluster, wait_for

LINE = ["--candidate", "sgd lr=0.01,0.1", "--candidate", "adamw weight_decay=0.1 lr=1e-3,1e-4"]
CANDIDATES = dict(parse_candidate(text) for text in LINE[1::2])


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_cifar10(tmp_path / "data", per_file=12)
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MIRRORHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def command(*more: str, jobs: int | None = 1) -> list[str]:
    line = ["sweep", "cifar10", *LINE, "--seeds", "0", "1", "--epochs", "1", "--partial", *more]
    return [*line, "--jobs", str(jobs)] if jobs else line


def accuracies(record: Path) -> list[list[float]]:
    return [
        [r["test_accuracy"] for r in one["final"]]
        for one in json.loads(record.read_text())["tuned"]
    ]


def test_a_table_and_a_record(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command()) == 0
    told = capsys.readouterr().out
    (record,) = Path("runs/cifar10").glob("sweep-*.json")
    assert told.splitlines()[-1] == f"record: {record}"
    for one, found in zip(json.loads(record.read_text())["tuned"], accuracies(record), strict=True):
        (row,) = [line for line in told.splitlines() if one["name"] in line and "±" in line]
        assert f"{one['chosen']['lr']:g}" in row
        assert f"{50 * sum(found):.2f} ± " in row
    assert main(command()) == 0
    again = capsys.readouterr().out
    assert again.count("(done before)") == 8
    assert again.splitlines()[-6:] == told.splitlines()[-6:]


def test_several_presets(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["sweep", "cifar10", "--candidate", "sgd lr=0.1", "--seeds", "3", "--epochs", "1"]
    line += ["--partial", "--jobs", "1", "--out", "here"]
    assert main([*line, "--preset", "laptop-vit", "laptop-vit"]) == 0
    (record,) = Path("here").glob("sweep-*.json")
    asked = json.loads(record.read_text())["asked"]
    assert (asked["preset"], asked["seeds"], asked["epochs"]) == ("laptop-vit", [3], 1)
    assert "seed 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("imdb", "imdb, cad, bert: there are no folders"),
        ("cifar10", "not complete"),
        ("cifar10 --partial --data nowhere", "nowhere"),
        ("cifar10 --partial --preset large", "--preset must be one of laptop"),
        ("cifar10 --partial --preset laptop-vit paper-3", "paper-3 is for text, not for images"),
        ("cifar10 --partial --epochs 0", "epochs must be at least 1"),
        ("cifar10 --partial --seeds 1 1", "seeds must be different"),
        ("cifar10 --partial --jobs 0", "--jobs must be at least 1"),
        ("cifar10 --partial --backend dask", "--backend dask needs --address"),
        ("cifar10 --partial --address tcp://x", "--address goes with --backend dask"),
        ("cifar10 --partial --backend slurm", "--backend slurm needs sbatch"),
        ("cifar10 --partial --candidate sgd", "--candidate 'sgd': lr is missing"),
        ("cifar10 --partial --candidate sgd|lr=1 --candidate sgd|lr=2", "'sgd' is given twice"),
        (
            "cifar10 --partial --candidate sgd|lr=1 --candidate adamw|lr=1,2",
            "same number of learning",
        ),
    ],
)
def test_wrong_use_is_one_line(
    pictures: Path, line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *(word.replace("|", " ") for word in line.split())]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mirrorhead: ") and error.count("\n") == 1
    assert says in error
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must begin with one of mirror-descent"),
        ("adam lr=1", "must begin with one of mirror-descent"),
        ("sgd lr=1 p=2", "sgd takes lr=..., momentum=..., weight_decay=..., got 'p=2'"),
        ("sgd lr", "got 'lr'"),
        ("sgd lr=1 lr=2", "lr is given twice"),
        ("sgd lr=1,,2", "lr must be a number, got ''"),
        ("sgd lr=nan", "lr must be greater than 0"),
        ("sgd lr=inf", "lr must be greater than 0"),
        ("sgd lr=1 momentum=x", "momentum must be a number, got 'x'"),
        ("mirror-descent lr=1", "mirror-descent needs p"),
        ("mirror-descent p=2 normalize=2 lr=1", 'normalize must be "tensor" or "global"'),
    ],
)
def test_candidates_are_read_strictly(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="candidate") as caught:
        parse_candidate(text)
    assert says in str(caught.value) and repr(text) in str(caught.value)


def test_a_candidate_has_its_options() -> None:
    name, rules = parse_candidate(
        "  mirror-descent   normalize=global lr=1e-2,3 p=1.5 momentum=0.9"
    )
    assert name == "mirror-descent p=1.5 momentum=0.9 normalize=global"
    assert [rule.lr for rule in rules] == [0.01, 3.0]
    assert {(r.p, r.momentum, r.normalize) for r in rules} == {(1.5, 0.9, "global")}


@pytest.mark.slow
def test_dask_and_jobs_of_submitit_give_what_one_process_gives(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS)
    options: dict[str, Any] = {"seeds": (0,), "epochs": 1, "partial": True}
    here = sweep("laptop-vit", CANDIDATES, "here", **options)
    with cluster(tmp_path) as (address, _):
        assert sweep("laptop-vit", CANDIDATES, "dask", backend=dask(address), **options) == here
    # Each job starts two processes that import torch: one candidate is enough.
    jobs, one = slurm(Path("jobs"), "local"), {"sgd": CANDIDATES["sgd"]}
    assert sweep("laptop-vit", one, "jobs", backend=jobs, **options) == here[:1]
    submitted = len(list(Path("jobs/jobs").iterdir()))
    assert sweep("laptop-vit", one, "jobs", backend=jobs, **options) == here[:1]
    assert len(list(Path("jobs/jobs").iterdir())) == submitted  # all is done
    # A job that fails tells why; here the data is gone when it starts.
    pictures.rename(tmp_path / "gone")
    options["seeds"] = (5,)
    with pytest.raises(SweepError, match=r"sgd, lr 0.01, seed 5: job .* there is no folder"):
        sweep("laptop-vit", {"sgd": one["sgd"][:1]}, "jobs", backend=jobs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_goes_on(pictures: Path, tmp_path: Path, how: signal.Signals) -> None:
    line = command("--epochs", "8", "--out", "stopped", jobs=2)
    process = subprocess.Popen(
        [sys.executable, "-m", "mirrorhead_lab", *line], env={**os.environ, "PYTHONPATH": PATHS},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: len(list(Path("stopped").glob("*/checkpoints/step-*"))) > 3)
    os.killpg(process.pid, how)
    _, error = process.communicate(timeout=120)
    assert not list(Path("stopped").glob("sweep-*.json"))
    if how == signal.SIGINT:
        assert process.returncode == 130
        last = error.strip().splitlines()[-1]
        assert last == "mirrorhead: Interrupted. Run the same command again to resume."
        assert "Traceback" not in error
    for out in ("stopped", "whole"):
        assert main(command("--epochs", "8", "--out", out)) == 0
    (one,), (two,) = (list(Path(out).glob("sweep-*.json")) for out in ("stopped", "whole"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.slow
def test_two_sweeps_share_a_folder(pictures: Path) -> None:
    line = [sys.executable, "-m", "mirrorhead_lab", *command("--out", "shared")]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    pair = [subprocess.Popen(line, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    told = [process.communicate(timeout=240)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert told[0].splitlines()[-6:] == told[1].splitlines()[-6:]
    for log in Path("shared").glob("*/log.jsonl"):
        kinds = [json.loads(text)["kind"] for text in log.read_text().splitlines()]
        assert kinds.count("epoch") == kinds.count("end") == 1  # nothing was run twice
