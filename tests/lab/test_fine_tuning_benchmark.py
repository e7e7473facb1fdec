"""benchmarks/fine_tuning.py on a tiny BERT: the plan, the choice of rates, what a run measures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mirrorhead.lab.datasets import LabelledTexts, Sentences
from mirrorhead.lab.models.pretrained import PretrainedClassifier
from tiny_bert import WORDS, tiny_bert

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fine_tuning.py"
METHODS = ("AdamW", "MirrorAdam p=1.5", "MirrorAdam p=1.1")


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_of_fine_tuning", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def toy() -> Sentences:
    rng = np.random.default_rng(0)

    def part(count: int) -> LabelledTexts:
        labels = rng.integers(2, size=count)
        texts = (
            " ".join([WORDS[3 * k + rng.integers(3)], *rng.choice(WORDS[6:], 3)]) for k in labels
        )
        return LabelledTexts(tuple(texts), labels)

    return Sentences("imdb", ("negative", "positive"), part(40), part(12), part(12))


def test_every_method_has_the_same_tuning_and_validation_chooses(bench: Any) -> None:
    done: list[dict[str, Any]] = []
    while True:
        known = {bench.Run(d["method"], d["lr"], d["seed"], d["final"]) for d in done}
        run = next((run for run in bench.planned(done) if run not in known), None)
        if run is None:
            break
        validation = 0.8 if run.lr == bench.RATES[-1] else 0.9
        done.append({**vars(run), "validation": validation})
    assert bench.METHODS == METHODS
    assert len(done) == len(METHODS) * (len(bench.RATES) + len(bench.SEEDS))
    assert [d["final"] for d in done] == sorted(d["final"] for d in done)  # tuning comes first
    smallest = bench.RATES[0]  # of equals
    assert all(bench.chosen(method, done) == smallest for method in METHODS)
    assert {d["lr"] for d in done if d["final"]} == {smallest}
    assert bench.chosen("AdamW", done[:2]) is None


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_measures_accuracy_pruning_and_attention(
    bench: Any, tmp_path: Path, method: str
) -> None:
    folder = tiny_bert(tmp_path / "bert")
    found = bench.perform(bench.Run(method, 1e-3, 0, True), folder, toy())
    assert found["method"] == method and 0 <= found["test"] <= 1
    assert list(found["pruned"]) == ["0.2", "0.4", "0.6", "0.8"]
    assert 0 < found["attention"]["entropy"] <= 1
    assert 0 < found["attention"]["one_hot"] <= 1
    tuning = bench.perform(bench.Run(method, 1e-3, 0, False), folder, toy())
    assert "test" not in tuning  # tuning never reads the test set
    assert tuning["validation"] == found["validation"]


def test_the_seed_draws_the_training_reviews(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head starts at 0 and there is no dropout: with the same reviews, seeds hardly differ."""
    seen: list[list[tuple[int, ...]]] = []
    tuned = bench.fine_tune

    def watch(model: Any, sets: Any, *rest: Any) -> Any:
        seen.append(sorted(tuple(row.tolist()) for row in sets.train.rows))
        return tuned(model, sets, *rest)

    monkeypatch.setattr(bench, "fine_tune", watch)
    folder, data = tiny_bert(tmp_path / "bert"), toy()
    for method, seed in (("AdamW", 0), ("AdamW", 1), ("MirrorAdam p=1.5", 1)):
        bench.perform(bench.Run(method, 1e-3, seed, False), folder, data, 16)
    assert [len(rows) for rows in seen] == [16] * 3
    assert seen[0] != seen[1] == seen[2]  # all methods see the same


def test_the_smallest_weights_are_pruned_in_a_copy(bench: Any, tmp_path: Path) -> None:
    model = PretrainedClassifier(tiny_bert(tmp_path), 2)
    before = {name: m.detach().clone() for name, m in model.train_matrices().items()}
    lighter = bench.pruned(model, 0.6).train_matrices()
    for name, matrix in before.items():
        kept = lighter[name] != 0
        assert int((~kept).sum()) == round(0.6 * matrix.numel())
        assert float(matrix[kept].abs().min()) >= float(matrix[~kept].abs().max())
        assert torch.equal(lighter[name][kept], matrix[kept])
        assert torch.equal(model.train_matrices()[name], matrix)


@pytest.mark.parametrize(
    ("gain", "word"), [(0.1, "holds"), (0.0, "does not hold"), (-0.1, "does not hold")]
)
def test_the_verdict_can_come_out_each_way(bench: Any, gain: float, word: str) -> None:
    done = []
    for method, more in zip(METHODS, (0.0, gain, gain), strict=True):
        for seed in range(3):
            kept = dict.fromkeys(("0.4", "0.6"), 0.7 + 1e-3 * seed + more)
            line = {"method": method, "final": True, "test": 0.85 + 1e-3 * seed, "pruned": kept}
            done.append({**line, "validation": 0.9})
    assert bench.verdict(done, METHODS[1]).endswith(f"Verdict: {word}.")
    assert ("do not refute" in bench.verdict(done, METHODS[1])) == (gain == 0)
    assert bench.verdict(done[:5], METHODS[1]) == f"{METHODS[1]}: not finished"
    done[4] = {"method": METHODS[1], "final": True, "validation": None}  # it diverged
    assert bench.verdict(done, METHODS[1]).endswith("Verdict: does not hold.")


def test_a_rate_that_diverges_is_recorded_and_not_chosen(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the same run would be tried, and would fail, at every start."""
    monkeypatch.setattr(bench, "RATES", (1e-3, 1e30))
    folder, data = tiny_bert(tmp_path / "bert"), toy()
    tried = [bench.perform(bench.Run("AdamW", lr, 0, False), folder, data) for lr in bench.RATES]
    assert tried[0]["validation"] is not None and tried[1]["validation"] is None
    assert bench.chosen("AdamW", tried) == 1e-3
    assert bench.chosen("AdamW", [tried[1], tried[1]]) is None
    assert (tried[0]["texts"], tried[0]["held_out"]) == (40, 12)
    bench.check_sizes(tried, 40, 12)
    with pytest.raises(SystemExit, match="other sizes"):
        bench.check_sizes(tried, 1500, 1000)


def test_a_line_that_was_cut_short_is_ignored(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"a": 1}\n{"a": ')
    assert bench.lines(tmp_path / "r.jsonl") == [{"a": 1}]
    assert bench.lines(tmp_path / "none.jsonl") == []
