"""The one schema of results: what is written is read back, and what does not fit is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mirrorhead_lab.cli.main import main
from mirrorhead_lab.evaluation import load_comparisons, load_results, load_single_runs
from mirrorhead_lab.evaluation.results import (
    ComparisonResults,
    write_results,
)
from mirrorhead_lab.runtime.errors import RunError
from results_cases import made_up, write
from run_cases import make_slices

IMDB = made_up("imdb")
STORED = Path(__file__).parents[2] / "results"


def loaded(tmp_path: Path, content: dict[str, Any]) -> ComparisonResults:
    return load_results(write(tmp_path, content))


@pytest.mark.parametrize("name", ["imdb", "cifar10"])
def test_stored_results_are_read_and_written_without_a_change(tmp_path: Path, name: str) -> None:
    results = load_results(STORED / f"{name}.json")
    assert results.name == name
    write_results(tmp_path / "again.json", results)
    assert (tmp_path / "again.json").read_bytes() == (STORED / f"{name}.json").read_bytes()


def test_seeds_that_diverged_are_written_and_read_back(tmp_path: Path) -> None:
    content = copy.deepcopy(IMDB)
    content["rivals"][1]["runs"][0] = {"seed": 0, "diverged": True}
    results = loaded(tmp_path, content)
    assert results.optimizers[1].diverged == (0,) and len(results.optimizers[1].runs) == 4
    write_results(tmp_path / "again.json", results)
    assert load_results(tmp_path / "again.json") == results


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    results = loaded(tmp_path, IMDB)
    for text in ('{"mine": 1}', "a text", ""):
        (tmp_path / "notes").write_text(text)
        with pytest.raises(RunError, match="notes"):
            write_results(tmp_path / "notes", results)
        assert (tmp_path / "notes").read_text() == text


def test_a_file_must_be_of_the_data_set_that_its_name_says(tmp_path: Path) -> None:
    write(tmp_path, made_up("cifar10")).rename(tmp_path / "imdb.json")
    with pytest.raises(RunError, match=r"imdb\.json has results on cifar10"):
        load_comparisons(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["cifar10", "imdb"])
def test_a_single_run_is_trained_evaluated_and_read_by_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, data: str
) -> None:
    make_slices(tmp_path / "data")
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MIRRORHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    line = f"train {data} --optimizer sgd --lr 0.01 --momentum 0.9 --epochs 1 --partial"
    assert main([*line.split(), "--out", "runs/one"]) == 0
    assert main(["evaluate", "runs/one", "--partial", "--on", "weights"]) == 0
    assert load_single_runs(Path("runs")) == {}  # not all parts are measured yet
    assert main(["evaluate", "runs/one", "--partial"]) == 0
    assert "results: runs/one/results.json" in capsys.readouterr().out
    ((name, results),) = load_single_runs(Path("runs")).items()
    assert name == "one" and results.name == data
    (optimizer,) = results.optimizers
    assert optimizer.name == "sgd momentum=0.9" and optimizer.tried == ()
    (run,) = optimizer.runs
    test = json.loads(Path("runs/one/test.json").read_text())
    assert run.test_accuracy == test["accuracy"] and run.best_epoch == 1
    measures = json.loads(Path("runs/one/measures.json").read_text())["measures"]
    assert run.measures.entropy.mean == measures["entropy"]["mean"]
    assert bool(run.measures.eraser) == (data == "imdb") == bool(results.random_cad)
    assert results.preset == ("laptop" if data == "imdb" else "laptop-vit")
    assert main(["report", "--out", "out", "--results", "none"]) == 0
    page = Path("out/report.html").read_text("utf-8")
    assert "Single runs" in page and "sgd momentum=0.9" in page
    assert f"{100 * run.test_accuracy:.2f}" in page and ">one<" in page.replace("\n", "")


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    found = loaded(tmp_path, IMDB)
    assert [one.name for one in found.optimizers] == [r["name"] for r in IMDB["rivals"]]
    raw, run = IMDB["rivals"][3]["runs"][2], found.optimizers[3].runs[2]
    assert (run.seed, run.test_accuracy) == (raw["seed"], raw["test_accuracy"])
    assert run.measures.pruned == {float(k): v for k, v in raw["measures"]["pruned"].items()}
    attention = raw["measures"]["eraser"]["val"]["attention"]
    assert vars(run.measures.eraser["val"]["attention"]) == attention
    assert run.measures.weights["key"].large == raw["measures"]["weights"]["key"]["large"]
    assert found.optimizers[0].chosen and found.optimizers[0].chosen.p == 1.1
    assert found.optimizers[0].tried[-1].validation_accuracy is None
    assert load_comparisons(tmp_path / "none") == []
    write(tmp_path, made_up("cifar10"))
    assert [one.name for one in load_comparisons(tmp_path)] == ["imdb", "cifar10"]


RUN = ["rivals", 1, "runs", 0]


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (["study"], "mnist", "Invalid enum value 'mnist' - at `$.study`"),
        (["preset"], "", "`$.preset`"),
        (["epochs"], 0, "Expected `int` >= 1 - at `$.epochs`"),
        (["epochs"], True, "Expected `int`, got `bool` - at `$.epochs`"),
        (["sizes", "test"], None, "Expected `int`, got `null` - at `$.sizes.test`"),
        (["sizes"], [], "Expected `object`, got `array` - at `$.sizes`"),
        (["rivals"], [], "length >= 1 - at `$.rivals`"),
        (["rivals"], 3, "got `int` - at `$.rivals`"),
        (["rivals", 1], [], "got `array` - at `$.rivals[1]`"),
        (["rivals", 1, "name"], "MD p=1.1", "must be distinct, got MD p=1.1 more than once"),
        (["rivals", 1, "chosen"], None, "exactly if a learning rate was chosen - at `$.rivals[1]`"),
        (["rivals", 1, "runs"], [], "exactly if a learning rate was chosen - at `$.rivals[1]`"),
        (["rivals", 1, "chosen", "lr"], 0, "lr must be greater than 0 and finite, got 0"),
        (["rivals", 1, "tried", 0, "diverged"], 0, "at `$.rivals[1].tried[0].diverged`"),
        ([*RUN, "seed"], 1, "seeds must be distinct, got 1 more than once - at `$.rivals[1]`"),
        ([*RUN, "test_accuracy"], 85.1, "at `$.rivals[1].runs[0].test_accuracy`"),
        ([*RUN, "test_accuracy"], "x", "got `str` - at `$.rivals[1].runs[0].test_accuracy`"),
        ([*RUN, "measures", "pruned"], {"0.5": 0.8}, "pruned must have 0.8 - at `$.rivals[1]"),
        ([*RUN, "measures", "cad"], {}, "measures of MD p=1.5 must have 'cad'"),
        ([*RUN, "measures", "weights", "key", "histogram", "counts"], [1], "1 counts do not fit"),
        ([*RUN, "measures", "weights", "key", "histogram"], {"edges": [0, 1, 1], "counts": [1, 1]},
         "edges must grow - at `$.rivals[1].runs[0].measures.weights"),
        ([*RUN, "measures", "weights", "key", "histogram"], {"edges": [0, 1, 2], "counts": [1, 1]},
         "edges must be symmetric about 0"),
        (["baselines", "random", "cad", "test", "auprc"], None, "got `null` - at `$.baselines"),
        (["baselines"], {}, "baselines must have 'random'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    tmp_path: Path, way: list[Any], value: Any, message: str
) -> None:
    content = copy.deepcopy(IMDB)
    place: Any = content
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = value
    path = tmp_path / "imdb.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RunError) as error:
        load_results(path)
    assert message in str(error.value) and str(path) in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("text", ["", "{", '{"study": NaN}', "[]", "\xff"])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "imdb.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RunError, match=r"imdb\.json"):
        load_results(path)


def test_a_study_in_which_everything_diverged_is_refused(tmp_path: Path) -> None:
    content = copy.deepcopy(IMDB)
    for rival in content["rivals"]:
        rival |= {"chosen": None, "runs": []}
    with pytest.raises(RunError, match="rivals must have one with runs"):
        loaded(tmp_path, content)
