"""`mirrorhead evaluate`, and its runs in the report, on slices that the tests make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mirrorhead_lab.cli.main import main
from mirrorhead_lab.report.single_runs import single_runs
from run_cases import make_slices, make_text_run, make_vit_run


@pytest.fixture
def slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MIRRORHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return make_slices(tmp_path / "data")


def test_everything_that_fits_is_measured_and_shown(slices: Path, capsys: Any) -> None:
    make_text_run(Path("run"))
    assert main(["evaluate", "run", "--partial"]) == 0
    told = capsys.readouterr().out
    found = json.loads(Path("run/measures.json").read_text())["measures"]
    assert {*found} == {"test", "weights", "pruned", "entropy", "eraser", "cad"}
    assert f"{found['test']['accuracy']:.2%}" in told
    assert f"{found['weights']['query']['gini']:.4f}" in told
    for part, splits in (("eraser", ("val", "test")), ("cad", ("dev", "test"))):
        for split in splits:
            for name in ("attention", "gradient", "random"):
                assert f"{found[part][split][name]['auprc']:.4f}" in told
    for words in ("gradient x input", "random", "token f1", "test, 2 pairs", "val, 1 documents"):
        assert words in told
    assert told.splitlines()[-1] == "measures: run/measures.json"
    # The same from what is kept, in the same order.
    assert main(["evaluate", "run", "--partial"]) == 0
    assert capsys.readouterr().out.split() == told.split()


def test_parts_are_chosen(slices: Path, capsys: Any) -> None:
    make_vit_run(Path("vit"))
    assert main(["evaluate", "vit", "--on", "weights", "--on", "test", "--partial"]) == 0
    told = capsys.readouterr().out
    assert "Gini" in told and "accuracy" in told and "Entropy" not in told
    assert {*json.loads(Path("vit/measures.json").read_text())["measures"]} == {"weights", "test"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("evaluate nothing", "nothing has no preset.json"),
        ("evaluate vit --on cad", "for a run on cifar10, got cad"),
        ("evaluate text --on cad --data nowhere", "cad, bert: there are no folders cad-imdb, "),
        ("evaluate text", "The folder is not complete"),
    ],
)
def test_wrong_use_is_told(slices: Path, capsys: Any, line: str, says: str) -> None:
    make_text_run(Path("text"))
    make_vit_run(Path("vit"))
    assert main(line.split()) == 2
    told = capsys.readouterr().err
    assert says in told and told.startswith("mirrorhead: ") and told.count("\n") == 1
    assert not list(Path().glob("*/measures.json"))


@pytest.mark.slow
@pytest.mark.parametrize("data", ["cifar10", "imdb"])
def test_a_single_run_is_trained_evaluated_and_in_the_report(slices: Path, data: str) -> None:
    line = f"train {data} --optimizer sgd --lr 0.01 --momentum 0.9 --epochs 1 --partial"
    assert main([*line.split(), "--out", "runs/one"]) == 0
    assert main(["evaluate", "runs/one", "--partial", "--on", "weights"]) == 0
    assert single_runs(Path("runs")) is None  # not all parts are measured yet
    assert main(["evaluate", "runs/one", "--partial"]) == 0
    part = single_runs(Path("runs"))
    assert part is not None
    cells = {k: c.text for k, c in zip(part.tables[0].columns, part.tables[0].rows[0], strict=True)}
    test = json.loads(Path("runs/one/test.json").read_text())
    assert (cells["Run"], cells["Data"]) == ("one", data)
    assert (cells["Optimizer"], cells["lr"]) == ("sgd momentum=0.9", "0.01")
    assert cells["Test %"] == f"{100 * test['accuracy']:.2f}" and cells["Epoch"] == "1"
    measures = json.loads(Path("runs/one/measures.json").read_text())["measures"]
    assert cells["Entropy"] == f"{measures['entropy']['mean']:.3f}"
    assert (cells["ERASER val AUPRC"] != "–") == (data == "imdb")
    assert main(["report", "--out", "out", "--results", "none"]) == 0
    page = Path("out/report.html").read_text("utf-8")
    assert "Single runs" in page and "sgd momentum=0.9" in page
