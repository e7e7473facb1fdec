"""The study of patches: every method runs, and verdicts follow from the runs by the rule."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from mirrorhead_lab.datasets import Splits, Texts, find
from mirrorhead_lab.findings.finding import Part
from mirrorhead_lab.studies import patches_merged, reach
from mirrorhead_lab.studies.patches import (
    CONFIRMED,
    METHODS,
    OURS,
    SENTENCES,
    SIZES,
    SMALL,
    STUDY,
    Scores,
    best_setting,
    column,
    equals,
    run,
    scores_on_test,
    tuned_model,
)
from mirrorhead_lab.studies.study import Row, Rows, Trial
from mirrorhead_lab.training.sparse_tuning import Bench
from mirrorhead_lab.training.tuning import TuneSettings
from results_cases import filled
from tiny_bert import tiny_bert, toy_texts


def scores(trial: Trial, accuracy: float) -> Scores:
    """One accuracy at all sizes, a little higher for higher seeds."""
    how = METHODS[trial.method].how
    sizes = [None, *SIZES] if how.sized and not how.per_size else [None]
    sizes = [trial.setting["size"]] if how.per_size else sizes
    found = {column(size): accuracy + trial.seed / 1000 for size in sizes}
    part = "test" if trial.final else "validation"
    return Scores(
        {"F32": 0.9, "BF16": 0.95}, bytes=dict.fromkeys(found, 1000),
        compressed=dict.fromkeys(found, 500), **{part: found},
    )  # fmt: skip


def rows_of(trials: Iterable[Trial], **accuracy: float) -> Rows[Scores]:
    """Runs of methods; those that are not named have an accuracy of 0.5."""
    return Rows(STUDY, {t: Row(t, scores(t, accuracy.get(t.method, 0.5)), 90.0) for t in trials})


WHOLE = filled(STUDY, lambda trial: scores(trial, 0.5))


def study(**accuracy: float) -> Part:
    """The study on CR."""
    names = {name.replace("-", "_"): name for name in METHODS}
    levels = {names[name]: level for name, level in accuracy.items()}
    return STUDY.part(rows_of((t for t in WHOLE.by_trial if t.task == "cr"), **levels))


def test_the_best_by_far_holds() -> None:
    (finding,) = study(mirror=0.9, proximal=0.8).findings
    assert finding.word == "holds"
    assert (
        finding.verdict
        and "90.2%, the best other is AdamW, proximal l1" in finding.verdict.measured
    )
    assert finding.comparisons and len(finding.comparisons.rows) == len(SMALL) * len(equals("cr"))


def test_one_better_method_of_one_run_refutes_it() -> None:
    (finding,) = study(mirror=0.9, soft=0.95).findings
    assert finding.word == "does not hold"
    assert (
        finding.verdict
        and "soft threshold (AdaBreg) at 0.10% (the other way)" in finding.verdict.remark
    )
    assert "contain both answers" not in finding.verdict.remark


def test_methods_that_are_compared_have_one_training_run() -> None:
    assert equals("imdb") == ["proximal", "soft"]
    assert "sinh" in equals("trec") and "sinh" not in equals("cr")
    assert "mirror-first" not in equals("trec")


def test_methods_that_need_more_runs_do_not_count() -> None:
    (finding,) = study(mirror=0.9, gradient_mask=0.99, lora_16=0.99).findings
    assert finding.word == "holds"


def test_a_tie_is_not_refuted() -> None:
    (finding,) = study(mirror=0.9, adamw=0.8999).findings
    assert finding.word == "not decided"
    assert finding.verdict and "contain both answers" in finding.verdict.remark


def test_the_task_of_development_has_no_verdict() -> None:
    part = STUDY.part(rows_of(t for t in WHOLE.by_trial if t.task == "trec"))
    assert part.findings == () and part.tables


def test_missing_runs_leave_it_open() -> None:
    ours = (t for t in WHOLE.by_trial if t.task == "cr" and t.method == OURS)
    (finding,) = STUDY.part(rows_of(ours)).findings
    assert finding.word == "not finished"
    assert "AdamW, largest changes" in finding.failure


def test_masks_are_run_for_each_size_and_imdb_confirms_the_best_three() -> None:
    finals = [trial for trial in WHOLE.by_trial if trial.final]
    masks = {t.setting["size"] for t in finals if METHODS[t.method].how.per_size}
    assert masks == {*SMALL}
    confirmed = [trial for trial in finals if trial.task == "imdb"]
    assert {trial.method for trial in confirmed} == {*CONFIRMED} and len(confirmed) == 9
    assert len(WHOLE) == 477  # the file has 5 runs more, of a setting that lost later


def test_validation_at_the_small_sizes_chooses() -> None:
    first, second, third = (one["p"] for one in METHODS[OURS].settings)
    level = {first: 0.8, second: 0.9, third: 0.7}
    rows = filled(STUDY, lambda t: scores(t, level.get(t.setting.get("p", 0.0), 0.5)))
    assert rows.chosen(OURS, "cr") == {"p": second, "reach": 1.5} == best_setting(rows, OURS)
    lost = Trial(method=OURS, setting={"p": third, "reach": 1.5}, seed=0, final=True, task="cr")
    more = Rows(STUDY, {**rows.by_trial, lost: Row(lost, scores(lost, 0.99), 1.0)})
    tests = scores_on_test(more, "cr", OURS, SMALL[0])  # without the run of what lost
    assert tests == [0.9, 0.901, 0.902, 0.903, 0.904]
    begun = Rows(STUDY, {t: row for t, row in rows.by_trial.items() if t.task != "trec"})
    assert best_setting(begun, OURS) is None and begun.chosen(OURS, "trec") is None


def test_means_are_over_tasks_that_are_all_there() -> None:
    accuracies = {"trec": 0.9, "sst2": 0.8, "subj": 0.7, "cr": 0.6}
    found = {
        trial: Row(trial, scores(trial, accuracies[trial.task]), 1.0)
        for trial in WHOLE.by_trial
        if trial.task in (SENTENCES if trial.method == OURS else ("trec", "sst2"))
    }
    tables = {table.name: table for table in STUDY.part(Rows(STUDY, found)).tables}
    assert [row[0].text for row in tables["patches-mean"].rows] == [METHODS[OURS].title]
    assert tables["patches-mean"].rows[0][2].text == "75.2"
    untuned = [[cell.text for cell in row[1:]] for row in tables["patches-untuned"].rows]
    assert [row[1:] for row in untuned] == [["90.0", "80.0", "70.0", "60.0", "75.0"]] * 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Splits[Texts]]:
    """A tiny BERT and toy texts in the place of MiniLM and the four sets."""
    folder = tmp_path_factory.mktemp("data")
    return tiny_bert(folder / "bert"), find(str(toy_texts(folder / "own.csv"))).read()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_a_curve_and_a_kept_model_is_the_trained_one(
    data: tuple[Path, Splits[Texts]], tmp_path: Path, name: str
) -> None:
    """A final run takes tuning's model; DARE and LT-SFT rest on AdamW's."""
    how, setting = METHODS[name].how, {**METHODS[name].settings[0]}
    if how.per_size:
        setting["size"] = 0.1
    final = Trial(method=name, setting=setting, seed=0, final=True, task="trec")
    found = run(final, data, tmp_path / final.training, texts=64)
    columns = {"all"} if not how.sized else {"0.1"} if how.per_size else None
    assert set(found.test) == (columns or {"all", *(f"{size:g}" for size in SIZES)})
    assert not found.validation and all(0 <= value <= 1 for value in found.test.values())
    assert len(list(tmp_path.iterdir())) == (2 if name == "lt-sft" else 1)
    assert run(final, data, tmp_path / final.training, texts=64) == found
    assert run(final, data, tmp_path / "other" / final.training, texts=64) == found
    tuning = Trial(method=name, setting=setting, seed=0, task="trec")
    assert tuning.training == final.training
    assert not run(tuning, data, tmp_path / final.training, texts=64).test


def test_a_run_that_diverges_has_nothing_right(
    data: tuple[Path, Splits[Texts]], tmp_path: Path
) -> None:
    trial = Trial(method="adamw", setting={"lr": 1e30}, seed=0, task="trec")
    found = run(trial, data, tmp_path / "run", texts=64)
    assert found.validation == {"all": 0.0, "0.001": 0.0, "0.0003": 0.0}
    assert not found.test and STUDY.score(found) == 0


@pytest.mark.slow
def test_masks_and_low_rank_change_what_they_say(
    data: tuple[Path, Splits[Texts]], tmp_path: Path
) -> None:
    bench = Bench(*data, TuneSettings(texts=64))
    before = bench.model().train_matrices()
    total = sum(w.numel() for w in before.values())

    def changes(name: str, **setting: float) -> dict[str, torch.Tensor]:
        trial = Trial(method=name, setting=setting, seed=0, task="trec")
        after = dict(tuned_model(trial, bench, tmp_path).encoder.named_parameters())
        return {n: (after[n] - w).detach().double() for n, w in before.items()}

    for name in ("random-mask", "gradient-mask"):
        changed = sum(int((c != 0).sum()) for c in changes(name, lr=1e-2, size=0.05).values())
        assert 0.04 * total < changed <= round(0.05 * total)
    for change in changes("lora-1", lr=1e-2, rank=1).values():
        assert torch.linalg.matrix_rank(change, rtol=1e-3) <= 1


@pytest.mark.slow
def test_patches_of_three_tasks_are_merged(
    data: tuple[Path, Splits[Texts]], tmp_path: Path
) -> None:
    for method in patches_merged.STUDY.methods:
        trial = Trial(method=method, setting={"kept": 0.1}, seed=0, final=True)
        three: patches_merged.Data = dict.fromkeys(patches_merged.TASKS, data)
        found = patches_merged.run(trial, three, tmp_path, texts=64).test
        assert {*found} == {*patches_merged.HOW}
        assert all({*scores} == {*patches_merged.TASKS} for scores in found.values())


def test_a_larger_reach_moves_further(
    data: tuple[Path, Splits[Texts]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "TASKS", {"short": 20})
    inputs, found = reach.Data.of(*data), []
    for factor in (0.1, 1.0):
        trial = Trial(method="p=1.2", setting={"factor": factor}, seed=0, task="short")
        found.append(reach.run(trial, inputs, tmp_path))
    assert found[0].reach < found[1].reach and found[0].largest < found[1].largest
    assert all(0 < one.density <= 1 and 0 <= one.kept <= 1 for one in found)
    assert reach.run(trial, inputs, tmp_path) == found[1]  # the data are as they were
