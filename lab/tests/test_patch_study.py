"""The study of patches: verdicts follow from the lines by the rule, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mirrorhead_lab.cli.main import main
from mirrorhead_lab.evaluation.patch_study import (
    METHODS,
    OURS,
    SIZES,
    SMALL,
    PatchRun,
    best_setting,
    chosen,
    column,
    equals,
    final_runs,
    read_patch_runs,
    scores_on_test,
)
from mirrorhead_lab.findings.finding import Part
from mirrorhead_lab.report.patches import part
from mirrorhead_lab.runtime.errors import RunError


def line(
    method: str,
    seed: int,
    accuracy: float,
    *,
    final: bool = True,
    lr: float = 1e-4,
    task: str = "cr",
) -> Any:
    """A line with one accuracy at all sizes, a little higher for higher seeds."""
    kind = METHODS[method]
    sizes = [None, *SIZES] if kind.sized and not kind.per_size else [None]
    sizes = [*SMALL] if kind.per_size else sizes
    scores = {column(size): accuracy + seed / 1000 for size in sizes}
    return PatchRun(
        f"{task}|{method}|{lr}|{seed}|{final}", task, method, {"lr": lr}, seed,
        SMALL[0] if kind.per_size else None, final, kind.runs, scores, scores if final else {},
        dict.fromkeys(scores, 1000), dict.fromkeys(scores, 500),
        {"F32": 0.9, "BF16": 0.95}, 90.0,
    )  # fmt: skip


def study(**accuracy: float) -> Part:
    """Three seeds of each method; those that are not named have an accuracy of 0.5."""
    return part([line(m, s, accuracy.get(m, 0.5)) for m in METHODS for s in range(3)])


def test_the_best_by_far_holds() -> None:
    (finding,) = study(mirror=0.9, proximal=0.8).findings
    assert finding.word == "holds"
    assert (
        finding.verdict
        and "90.1%, the best other is AdamW, proximal l1" in finding.verdict.measured
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


def test_our_first_settings_do_not_count_as_another_method() -> None:
    (finding,) = study(mirror=0.9, **{"mirror-first": 0.95}).findings
    assert finding.word == "holds"
    assert equals("imdb") == ["proximal", "soft"]
    assert "sinh" in equals("trec") and "sinh" not in equals("cr")


def test_methods_that_need_more_runs_do_not_count() -> None:
    (finding,) = study(mirror=0.9, **{"gradient-mask": 0.99, "lora-16": 0.99}).findings
    assert finding.word == "holds"


def test_a_tie_is_not_refuted() -> None:
    (finding,) = study(mirror=0.9, adamw=0.8999).findings
    assert finding.word == "not decided"
    assert finding.verdict and "contain both answers" in finding.verdict.remark


def test_the_task_of_development_has_no_verdict() -> None:
    runs = [line(m, s, 0.5, task="trec") for m in METHODS for s in range(3)]
    assert part(runs).findings == () and part(runs).tables


def test_missing_runs_leave_it_open() -> None:
    runs = [line(OURS, seed, 0.9) for seed in range(3)]
    (finding,) = part(runs).findings
    assert finding.word == "not finished"
    assert "AdamW, largest changes" in finding.failure


def test_settings_are_chosen_by_validation_at_the_small_sizes() -> None:
    runs = [line(OURS, 0, a, final=False, lr=lr) for a, lr in ((0.8, 1e-3), (0.9, 1e-2), (0.7, 1))]
    assert chosen(runs[:2], "cr", OURS, 3) is None
    best = chosen(runs, "cr", OURS, 3)
    assert best is not None and best.setting == {"lr": 1e-2}


def test_final_runs_of_a_setting_that_lost_do_not_count() -> None:
    tuning = [line(OURS, 0, a, final=False, lr=lr) for a, lr in ((0.8, 1e-3), (0.9, 1e-2))]
    final = [line(OURS, seed, a, lr=lr) for a, lr in ((0.99, 1e-3), (0.7, 1e-2)) for seed in (0, 1)]
    assert scores_on_test(tuning + final, "cr", OURS, SMALL[0]) == [0.7, 0.701]
    assert len(final_runs(final, "cr", OURS)) == 4


def test_means_are_over_tasks_that_are_all_there() -> None:
    accuracies = {"trec": 0.9, "sst2": 0.8, "subj": 0.7, "cr": 0.6}
    runs = [line(OURS, 0, a, task=task, lr=1.0) for task, a in accuracies.items()]
    runs += [line("soft", 0, 0.9, task=task) for task in ("trec", "sst2")]
    for lr in (1.0, 2.0):
        runs += [
            line(OURS, 0, a - lr / 100, final=False, lr=lr, task=t) for t, a in accuracies.items()
        ]
    tables = {table.name: table for table in part(runs).tables}
    assert [row[0].text for row in tables["patches-mean"].rows] == [METHODS[OURS].title]
    assert tables["patches-mean"].rows[0][2].text == "75.0"
    untuned = [[cell.text for cell in row[1:]] for row in tables["patches-untuned"].rows]
    assert untuned[0] == ["lr 1", "89.0", "79.0", "69.0", "59.0", "74.0"]
    assert untuned[1][-1] == "73.0"
    assert best_setting(runs, OURS) == {"lr": 1.0} and best_setting(runs, "soft") is None


def write(file: Path, runs: list[PatchRun]) -> None:
    file.write_text("".join(json.dumps(msgspec.to_builtins(run)) + "\n" for run in runs))


def test_lines_are_read_as_written_and_a_cut_end_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "patches.jsonl"
    runs = [line(OURS, seed, 0.9) for seed in range(2)]
    write(file, runs)
    assert read_patch_runs(file) == runs
    file.write_bytes(file.read_bytes()[:-20])
    assert read_patch_runs(file) == runs[:1]


@pytest.mark.parametrize(("old", "new"), [('"seed": 0', '"seed": "0"'), ("{", ""), ("cr", "trek")])
def test_a_damaged_line_is_named(tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "patches.jsonl"
    write(file, [line(OURS, seed, 0.9) for seed in range(2)])
    file.write_text(file.read_text().replace(old, new, 2))
    with pytest.raises(RunError, match=r"patches\.jsonl.*line 1"):
        read_patch_runs(file)


def test_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "patches.jsonl"
    write(file, [line(OURS, 0, 0.9)])
    file.write_bytes(file.read_text().encode("utf-16"))
    with pytest.raises(RunError, match=r"patches\.jsonl is damaged in line 1"):
        read_patch_runs(file)


@pytest.mark.slow
def test_the_report_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    results.mkdir()
    write(
        results / "patches.jsonl",
        [line(m, s, 0.9 if m == OURS else 0.5) for m in METHODS for s in (0, 1)],
    )
    words = ["report", "--out", str(tmp_path / "out"), "--results", str(results)]
    assert main([*words, "--runs", str(tmp_path / "none")]) == 0
    assert "Patches on CR" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Patches: fine-tune and change few weights" in page
    assert 'id="patches-figure-' in page
