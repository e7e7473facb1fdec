"""The study of fine-tuning on a tiny BERT: the plan, the choice of rates, what a run measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mirrorhead_lab.datasets import LabelledTexts, Sentences
from mirrorhead_lab.evaluation import fine_tuning_results
from mirrorhead_lab.evaluation.fine_tuning_results import (
    METHODS,
    RATES,
    SEEDS,
    SHARES,
    TOTAL,
    FineTuningRun,
    Key,
    append_run,
    chosen_rate,
    compute,
    load_runs,
    missing,
    without_smallest,
)
from mirrorhead_lab.models.pretrained import PretrainedClassifier
from mirrorhead_lab.report.fine_tuning import part
from mirrorhead_lab.runtime.errors import RunError
from results_cases import fine_tuning_run
from tiny_bert import WORDS, tiny_bert

Runs = dict[Key, FineTuningRun]


def toy() -> Sentences:
    rng = np.random.default_rng(0)

    def part(count: int) -> LabelledTexts:
        labels = rng.integers(2, size=count)
        texts = (
            " ".join([WORDS[3 * k + rng.integers(3)], *rng.choice(WORDS[6:], 3)]) for k in labels
        )
        return LabelledTexts(tuple(texts), labels)

    return Sentences("imdb", ("negative", "positive"), part(40), part(12), part(12))


def study(score: Callable[[Key], Any]) -> Runs:
    """All runs of the study, in its order; score: validation, test and pruned accuracy."""
    runs: Runs = {}
    while (key := next(missing(runs), None)) is not None:
        runs[key] = fine_tuning_run(key, *score(key))
    return runs


def test_every_method_has_the_same_tuning_and_validation_chooses() -> None:
    runs = study(lambda key: (0.8 if key.lr == RATES[-1] else 0.9, 0.9, 0.9))
    assert len(runs) == TOTAL == len(METHODS) * (len(RATES) + len(SEEDS))
    assert [key.final for key in runs] == sorted(key.final for key in runs)  # tuning comes first
    smallest = RATES[0]  # of equals
    assert all(chosen_rate(runs, method) == smallest for method in METHODS)
    assert {key.lr for key in runs if key.final} == {smallest}
    assert chosen_rate(dict(list(runs.items())[:2]), "AdamW") is None


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_measures_accuracy_pruning_and_attention(tmp_path: Path, method: str) -> None:
    folder = tiny_bert(tmp_path / "bert")
    found = compute(Key(method, 1e-3, 0, True), toy(), folder)
    assert found.test is not None and 0 <= found.test <= 1
    assert tuple(found.pruned) == SHARES and found.attention is not None
    assert 0 < found.attention.entropy <= 1 and 0 < found.attention.one_hot <= 1
    tuning = compute(Key(method, 1e-3, 0, False), toy(), folder)
    assert tuning.test is None and not tuning.pruned  # tuning never reads the test set
    assert tuning.validation == found.validation


def test_the_seed_draws_the_training_reviews(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head starts at 0 and there is no dropout: with the same reviews, seeds hardly differ."""
    seen: list[list[tuple[int, ...]]] = []
    tuned = fine_tuning_results.fine_tune

    def watch(model: Any, sets: Any, *rest: Any) -> Any:
        seen.append(sorted(tuple(row.tolist()) for row in sets.train.rows))
        return tuned(model, sets, *rest)

    monkeypatch.setattr(fine_tuning_results, "fine_tune", watch)
    folder, data = tiny_bert(tmp_path / "bert"), toy()
    for method, seed in (("AdamW", 0), ("AdamW", 1), ("MirrorAdam p=1.5", 1)):
        compute(Key(method, 1e-3, seed, False), data, folder, texts=16)
    assert [len(rows) for rows in seen] == [16] * 3
    assert seen[0] != seen[1] == seen[2]  # all methods see the same


def test_the_smallest_weights_are_pruned_in_a_copy(tmp_path: Path) -> None:
    model = PretrainedClassifier(tiny_bert(tmp_path), 2)
    before = {name: m.detach().clone() for name, m in model.train_matrices().items()}
    lighter = without_smallest(model, 0.6).train_matrices()
    for name, matrix in before.items():
        kept = lighter[name] != 0
        assert int((~kept).sum()) == round(0.6 * matrix.numel())
        assert float(matrix[kept].abs().min()) >= float(matrix[~kept].abs().max())
        assert torch.equal(lighter[name][kept], matrix[kept])
        assert torch.equal(model.train_matrices()[name], matrix)


@pytest.mark.parametrize(
    ("gain", "word"), [(0.1, "holds"), (0.0, "not decided"), (-0.1, "does not hold")]
)
def test_the_verdict_can_come_out_each_way(gain: float, word: str) -> None:
    def score(key: Key) -> tuple[float, float, float]:
        more = 0.0 if key.method == "AdamW" else gain
        return 0.9, 0.85 + 1e-3 * key.seed, 0.7 + 1e-3 * key.seed + more

    runs = study(score)
    for finding in part(runs).findings:
        assert finding.word == word and finding.verdict is not None
        assert ("contain both answers" in finding.verdict.remark) == (gain == 0)
    last = list(runs)[-1]
    lost = {**runs, last: fine_tuning_run(last, None)}
    for finding in part(lost).findings:  # p = 1.1 has a seed that diverged
        assert finding.verdict is not None
        # A guess among three seeds makes the intervals wide.
        assert finding.word == ("not decided" if finding.name.endswith("1-1") else word)
        assert f"counted as 50 %: {last}" in finding.verdict.measured
    some = part({key: run for key, run in runs.items() if key != last})
    assert [finding.word for finding in some.findings] == [word, "not finished"]
    for figure in some.figures:
        figure.svg_file()


def test_a_study_that_has_begun_is_shown() -> None:
    key = Key("AdamW", RATES[0], 0, False)
    found = part({key: fine_tuning_run(key, 0.9)})
    assert {finding.word for finding in found.findings} == {"not finished"}
    assert [cell.text for cell in found.tables[1].rows[0]] == ["AdamW", "90.0", "–", "–"]
    assert all(figure.svg_file() for figure in found.figures)


def test_a_rate_that_diverges_is_recorded_and_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the same run would be tried, and would fail, at every start."""
    rates = (1e-3, 1e30)
    monkeypatch.setattr(fine_tuning_results, "RATES", rates)
    folder, data = tiny_bert(tmp_path / "bert"), toy()
    tried = [compute(Key("AdamW", lr, 0, False), data, folder) for lr in rates]
    assert not tried[0].diverged and tried[1].diverged
    assert chosen_rate({run.key: run for run in tried}, "AdamW") == 1e-3
    both = {Key("AdamW", lr, 0, False): tried[1] for lr in rates}
    assert chosen_rate(both, "AdamW") is None
    assert (tried[0].texts, tried[0].held_out) == (40, 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0][:40]], "damaged in line 1"),
        (lambda lines: [lines[0], lines[0]], "twice, again in line 2"),
        (lambda lines: [lines[0].replace('"texts": 1500', '"texts": 9')], "other numbers"),
        (lambda lines: [lines[0].replace("AdamW", "Adam")], "method must be one of"),
        (lambda lines: [lines[1].replace('"test": 0.5', '"test": null')], "exactly if it is final"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, change: Callable[[list[str]], list[str]], message: str
) -> None:
    path = tmp_path / "runs.jsonl"
    for final in (False, True):
        append_run(path, fine_tuning_run(Key("AdamW", 1e-4, 0, final), 0.5, 0.5, 0.5))
    assert [run.final for run in load_runs(path).values()] == [False, True]
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(RunError, match=message) as error:
        load_runs(path)
    assert str(path) in str(error.value)


def test_kept_results_are_read() -> None:
    path = Path(__file__).parents[2] / "results" / fine_tuning_results.FILE
    found = load_runs(path)
    assert len(found) == len([json.loads(line) for line in path.read_text().splitlines()])
