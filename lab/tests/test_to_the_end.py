"""Training to the end, from the sweep to the page: sweep, collect, margins, evaluate, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mirrorhead_lab.cli.main import main
from mirrorhead_lab.evaluation.results import load_results
from run_cases import make_slices


@pytest.mark.slow
def test_runs_to_the_end_come_into_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    make_slices(tmp_path / "data")
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    candidates = ["mirror-descent p=2 lr=0.3", "mirror-descent p=3 lr=0.03"]
    words = [word for text in candidates for word in ("--candidate", text)]
    sweep = ["sweep", "imdb-to-the-end", *words, "--seeds", "0", "1", "--epochs", "2"]
    assert main([*sweep, "--partial", "--jobs", "1"]) == 0
    runs, file = Path("runs/imdb-to-the-end"), "results/imdb-to-the-end.json"
    Path("results").mkdir()
    assert main(["collect", str(runs), "--out", file, "--partial"]) == 0
    results = load_results(Path(file))
    assert results.name == results.preset.replace("laptop", "imdb") == "imdb-to-the-end"
    for one in results.optimizers:
        assert [run.best_epoch for run in one.runs] == [2, 2]  # the last, not the best
        assert all(0.0 in run.measures.milestones for run in one.runs)

    Path("results/margins").mkdir()
    (record,) = runs.glob("sweep-*.json")
    finals = [run["run"] for t in json.loads(record.read_text())["tuned"] for run in t["final"]]
    capsys.readouterr()
    for run in finals:
        small = ["--n", "4", "--tokens", "8", "--p", "2", "3", "--partial", "--json"]
        assert main(["margins", str(runs / run), *small]) == 0
        Path(f"results/margins/{run}.json").write_text(capsys.readouterr().out)

    assert main(["evaluate", str(runs / finals[0]), "--partial"]) == 0
    alone = load_results(runs / finals[0] / "results.json")
    assert (alone.name, alone.preset) == ("imdb-to-the-end", "laptop-to-the-end")

    assert main(["report"]) == 0
    page = Path("out/report.html").read_text()
    for name in ("table-1-to-the-end", "figure-8-to-the-end", "token-selection-to-the-end"):
        assert name in page
    for name in ("imdb-to-the-end-equal-training", "margins-nearest", "margins-figure"):
        assert name in page
    assert "Real heads: does the margin grow?" in page
