"""Studies of classifiers: how their claims are judged, what their tables say, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy import stats

from mirrorhead_lab import studies
from mirrorhead_lab.evaluation.results import (
    KINDS,
    Classified,
    Histogram,
    Milestone,
    WeightStatistics,
)
from mirrorhead_lab.evaluation.sparsity import large_from
from mirrorhead_lab.findings.finding import Finding
from mirrorhead_lab.findings.statistics import Difference, outcome, welch
from mirrorhead_lab.findings.table import Table
from mirrorhead_lab.runtime.errors import RunError
from mirrorhead_lab.studies.classifier_results import sizes
from mirrorhead_lab.studies.engine import read_rows
from mirrorhead_lab.studies.study import Rows
from results_cases import Level, edited, made_up, write_rows

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
LOW, MIDDLE, HIGH = Level(accuracy=0.83), Level(accuracy=0.84), Level(accuracy=0.86)
SPARSE, DENSE = Level(large=800, sparsity=0.6), Level(large=1200, sparsity=0.4)
FIRM = Level(falls=0.01)
P11, P15, P2, P3 = "MD p=1.1", "MD p=1.5", "MD p=2", "MD p=3"
SGD, ADAM11, ADAM15, ADAMW = "SGD, momentum", "MirrorAdam p=1.1", "MirrorAdam p=1.5", "AdamW"


def found(rows: Rows[Any]) -> dict[str, Finding]:
    return {finding.name: finding for finding in rows.study.part(rows).findings}


def tables(rows: Rows[Any]) -> dict[str, Table]:
    return {table.name: table for table in rows.study.part(rows).tables}


def measures(run: Classified, **changes: Any) -> Classified:
    return replace(run, measures=replace(run.scores, **changes))


# --- statistics -----------------------------------------------------------------------------

samples = st.lists(st.floats(-1, 1), min_size=2, max_size=6)


@given(samples, samples)
def test_welch_is_the_formula(one: list[float], two: list[float]) -> None:
    """d +- t(df) s, s^2 = a + b, a = var(one)/n, b = var(two)/m, df by Welch-Satterthwaite."""
    ours = welch(one, two)
    assert ours.low <= ours.value <= ours.high
    if min(np.std(one), np.std(two)) > 1e-6:
        n, m = len(one), len(two)
        a, b = np.var(one, ddof=1) / n, np.var(two, ddof=1) / m
        freedom = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1))
        half = stats.t.ppf(0.975, freedom) * np.sqrt(a + b)
        expected = (np.mean(one) - np.mean(two) - half, np.mean(one) - np.mean(two) + half)
        np.testing.assert_allclose((ours.low, ours.high), expected, atol=1e-9)
    swapped = welch(two, one)
    np.testing.assert_allclose((-ours.high, -ours.low), (swapped.low, swapped.high), atol=1e-12)


def test_outcomes_at_the_edges() -> None:
    assert welch([0.5, 0.5], [0.25, 0.25]) == Difference(0.25, 0.25, 0.25)
    assert outcome(Difference(0, 0, 0)) == "not distinguishable"
    assert outcome(Difference(-0.005, -0.009, 0), margin=0.01) == "as claimed"
    assert outcome(Difference(-0.02, -0.03, -0.011), margin=0.01) == "the other way"
    assert outcome(Difference(-0.02, -0.03, 0.01), margin=0.01) == "not distinguishable"
    worse = outcome(Difference(-0.01, -0.011, -0.009), margin=0.01)
    assert worse == "worse, perhaps by less than allowed"
    with pytest.raises(ValueError, match="at least 2 seeds each, got 1 and 2"):
        welch([1.0], [1.0, 2.0])


# --- claims ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "levels", "holds"),
    [
        ("table-1", {P11: HIGH, P3: MIDDLE, P2: LOW}, "holds"),
        ("table-1", {P11: HIGH, P3: HIGH, P2: LOW}, "not seen at this scale"),
        ("table-1", {P11: HIGH, P3: LOW, P2: LOW}, "holds with a remark"),
        ("table-1", {}, "not seen at this scale"),  # nothing is distinguishable
        ("table-1", {P11: HIGH, P3: LOW, P2: MIDDLE}, "holds with a remark"),  # 2 before 3
        ("table-1-momentum", {P11: HIGH, P3: MIDDLE, SGD: LOW}, "holds"),
        ("table-1-momentum", {P11: HIGH, P3: MIDDLE, P2: LOW, SGD: HIGH}, "not seen at this scale"),
        ("figure-8", {P11: SPARSE, P2: DENSE}, "holds"),
        ("figure-8", {P11: Level(large=1200, sparsity=0.6)}, "not seen at this scale"),
        ("figure-8", {P11: Level(large=800, sparsity=0.4)}, "holds with a remark"),
        ("token-selection", {P11: Level(selection=0.35)}, "holds"),
        ("token-selection", {P2: Level(selection=0.35)}, "not seen at this scale"),
        ("token-selection-others", {P11: Level(selection=0.35)}, "holds"),
        ("token-selection-others", {P11: Level(selection=0.35), ADAMW: Level(selection=0.4)},
         "does not hold"),
        ("token-selection-others", {}, "not decided"),
        ("imdb-pruning", {ADAM11: FIRM, ADAM15: FIRM}, "holds"),
        ("imdb-pruning", {ADAM11: FIRM}, "holds with a remark"),
        ("imdb-pruning", {ADAM11: Level(accuracy=0.83, falls=0), ADAM15: FIRM}, "does not hold"),
        ("figure-11", {P11: SPARSE}, "holds"),
        ("figure-11", {P11: DENSE}, "not seen at this scale"),
        ("figure-11", {P11: Level(accuracy=0.8, sparsity=0.6)}, "not seen at this scale"),
        ("figure-11", {P11: Level(accuracy=0.9, sparsity=0.6)}, "holds"),  # better is no flaw
        ("cifar10-pruning", {ADAM11: FIRM}, "holds"),
        ("cifar10-pruning", {ADAMW: FIRM}, "does not hold"),
    ],
)  # fmt: skip
def test_each_claim_can_come_out_each_way(claim: str, levels: dict[str, Level], holds: str) -> None:
    images = claim in ("figure-11", "cifar10-pruning")
    entry = found(made_up("cifar10" if images else "imdb", levels))[claim]
    assert entry.word == holds and entry.comparisons is not None
    if holds == "not seen at this scale":  # the paper's claims are about its models
        assert entry.verdict and "dimensions" in entry.verdict.remark


@pytest.mark.parametrize(
    ("early", "end", "holds", "says"),
    [
        (HIGH, HIGH, "holds", "Stopped early: "),
        (LOW, HIGH, "holds with a remark", "As claimed at the end of training only."),
        (HIGH, LOW, "not seen at this scale", "Like the paper's, it was trained at a constant"),
        (LOW, LOW, "not seen at this scale", "at most 60 epochs"),
    ],
)
def test_the_verdict_rests_on_both_regimes(
    tmp_path: Path, early: Level, end: Level, holds: str, says: str
) -> None:
    others = {P3: Level(accuracy=0.845), P2: Level(accuracy=0.84)}
    path = write_rows(tmp_path, made_up("imdb-to-the-end", {**others, P11: end}))
    study = studies.load("imdb-to-the-end")
    alone = found(read_rows(study, path))["table-1-to-the-end"].verdict
    assert alone and "rests on the end of training alone" in alone.remark
    assert alone.word == ("holds with a remark" if end is HIGH else "not seen at this scale")
    write_rows(tmp_path, made_up("imdb", {**others, P11: early}))
    both = found(read_rows(study, path))
    assert set(both) == {f"{n}-to-the-end" for n in ("table-1", "figure-8", "token-selection")}
    verdict = both["table-1-to-the-end"].verdict
    assert verdict and verdict.word == holds
    assert says in f"{verdict.measured} {verdict.remark}"


def test_two_regimes_need_both_to_be_judged(tmp_path: Path) -> None:
    path = write_rows(tmp_path, made_up("imdb-to-the-end"))
    early = made_up("imdb").by_trial
    without = {trial: row for trial, row in early.items() if trial.method != P11}
    write_rows(tmp_path, Rows(studies.load("imdb"), without))
    finding = found(read_rows(studies.load("imdb-to-the-end"), path))["table-1-to-the-end"]
    assert finding.verdict is None and "stopped early, it cannot be judged" in finding.failure


def test_a_level_that_was_not_reached_is_left_out_and_named() -> None:
    def short(seed: int, run: Classified) -> Classified:
        kept = {m: one for m, one in run.scores.milestones.items() if m < 0.995}
        return measures(run, milestones=kept)

    rows = edited(made_up("imdb-to-the-end", {P11: HIGH}), P11, short, only=2)
    entry = found(rows)["table-1-to-the-end"]
    assert entry.verdict and entry.comparisons
    assert "at 99.5 % training accuracy: a run of MD p=1.1 has none." in (
        entry.verdict.measured.replace("Test", "test")
    )
    compared = [row[0].text for row in entry.comparisons.rows]
    assert compared.count("test accuracy at 97.5 % training accuracy") == 3
    assert compared.count("test accuracy at 99.5 % training accuracy") == 1
    table = tables(rows)["imdb-to-the-end-equal-training"]
    assert table.columns[-1] == "Train 99.5 %" and table.rows[0][-1].text.endswith("(4 of 5)")


def test_runs_that_end_before_the_end_are_a_remark() -> None:
    """They are favoured: test accuracy falls on the way to 99.5 %."""
    others = {P3: Level(accuracy=0.845), P2: Level(accuracy=0.84)}
    rows = made_up("imdb-to-the-end", {**others, P11: HIGH})
    rows = edited(rows, P11, lambda seed, run: replace(run, train=0.981), only=2)
    verdict = found(rows)["table-1-to-the-end"].verdict
    assert verdict and verdict.word == "holds with a remark"
    assert "1 of 5 of MD p=1.1, the lowest at 98.1 %" in verdict.remark


def test_equal_training_accuracy_is_interpolated() -> None:
    """An epoch that jumps from 93 to 97 % is not compared as if it were at 95 %."""
    kept = {
        0.0: Milestone(1, 0.8, 0.86), 0.8: Milestone(1, 0.8, 0.86),
        0.925: Milestone(2, 0.93, 0.85), 0.95: Milestone(3, 0.97, 0.83),
        0.975: Milestone(5, 0.975, 0.82),
    }  # fmt: skip
    rows = made_up("imdb-to-the-end")
    rows = edited(rows, P11, lambda seed, run: measures(run, milestones=kept))
    run = rows.final(P11)[0]
    at = run.scores.test_accuracy_at
    assert at(0.95) == pytest.approx(0.84)  # halfway from 93 to 97 %
    assert at(0.975) == pytest.approx(0.82)
    assert at(0.8) == pytest.approx(0.86)  # the first epoch
    assert at(0.995) is None
    assert run.best_kept == max(run.test or 0, 0.86)
    table = tables(rows)["imdb-to-the-end-equal-training"]
    assert table.rows[0][table.columns.index("Train 95 %")].text.startswith("84.00")


def test_the_words_of_a_verdict_have_the_numbers() -> None:
    wanted = {P11: 0.86, P3: 0.85, P2: 0.84}
    rows = made_up("imdb")
    for name, level in wanted.items():
        rows = edited(rows, name, lambda seed, run, at=level: replace(run, test=at + seed / 1e3))
    entry = found(rows)["table-1"]
    one, two = ([wanted[name] + seed / 1e3 for seed in range(5)] for name in (P11, P2))
    theirs = stats.ttest_ind(one, two, equal_var=False).confidence_interval(0.95)
    assert entry.verdict
    said = f"test accuracy +2.00 points (+{100 * theirs.low:.2f} to +{100 * theirs.high:.2f})"
    assert f"MD p=1.1 minus MD p=2: {said}, as claimed" in entry.verdict.measured


def test_a_claim_without_its_runs_is_not_finished() -> None:
    rows = made_up("imdb")
    lost = {trial: row for trial, row in rows.by_trial.items() if trial.method != P11}
    entries = found(Rows(rows.study, lost))
    assert "the tuning of MD p=1.1 is not finished" in entries["table-1"].failure
    assert entries["imdb-pruning"].word != "not finished"
    some = {trial: row for trial, row in rows.by_trial.items() if not trial.final or trial.seed < 3}
    part = rows.study.part(Rows(rows.study, some))
    assert all("no final run of seeds 3, 4" in one.failure for one in part.findings)
    assert len(part.tables) == 9 and all(figure.inline() for figure in part.figures[:1])


def test_seeds_that_diverged_are_left_out_and_named() -> None:
    rows = made_up("imdb", {P11: HIGH, P3: MIDDLE, P2: LOW})
    rows = edited(rows, P11, lambda seed, run: Classified(), only=3)
    verdict = found(rows)["table-1"].verdict
    # All else is as claimed: it holds with this remark at best.
    assert verdict and verdict.word == "holds with a remark"
    assert verdict.remark == "Left out because they diverged: MD p=1.1, seed 3."
    assert tables(rows)["imdb-accuracy"].rows[0][-1].text == "4 (1 diverged)"


def test_weights_that_are_all_zero_have_no_index() -> None:
    def zero(seed: int, run: Classified) -> Classified:
        weights = run.scores.weights
        empty = replace(weights["key"], large=0, gini=None, hoyer=None)
        return measures(run, weights={**weights, "key": empty})

    rows = edited(made_up("imdb"), P11, zero, only=1)
    cells = [cell.text for cell in tables(rows)["imdb-weights"].rows[0]]
    assert cells[4] == "–" != cells[1]
    assert "Gini index of K: a run of MD p=1.1 has none" in found(rows)["figure-8"].failure


# --- tables ---------------------------------------------------------------------------------


def test_tables_say_what_the_runs_have() -> None:
    rows = made_up("imdb")
    rows = Rows(rows.study, {t: r for t, r in rows.by_trial.items() if t.method != "proximal l1"})
    shown = tables(rows)
    assert list(shown) == [
        "imdb-accuracy", "imdb-tuning", "imdb-pruned", "imdb-weights", "imdb-entropy",
        "imdb-eraser-val", "imdb-eraser-test", "imdb-cad-dev", "imdb-cad-test",
    ]  # fmt: skip
    for name, row in zip(rows.study.methods, shown["imdb-accuracy"].rows[:8], strict=False):
        test = np.array([run.test for run in rows.final(name)])
        assert row[2].text == f"{100 * test.mean():.2f} ± {100 * test.std(ddof=1):.2f}"
        assert row[3].text == f"{100 * test.min():.2f} to {100 * test.max():.2f}"
    last = [cell.text for cell in shown["imdb-accuracy"].rows[8]]
    assert last[:3] == ["proximal l1", "–", "–"] and last[-1] == "0"
    tuning = [cell.text for cell in shown["imdb-tuning"].rows[4]]
    assert tuning[1:] == [
        "0.00003: 85.00 (train 90.0)", "0.0001: 86.00 (train 90.0) *",
        "0.0003: 85.00 (train 90.0)", "0.001: diverged",
    ]  # fmt: skip
    every = [run for name in rows.study.methods for run in rows.final(name)]
    random = [run.scores.eraser["test"]["random"].auprc for run in every]
    last = shown["imdb-eraser-test"].rows[-1]
    assert last[1].text == "random" and last[2].text == f"{np.mean(random):.3f}"
    assert len(shown["imdb-eraser-test"].rows) == 2 * 8 + 1


@pytest.mark.parametrize(("study", "size"), [("imdb", "0.147"), ("cifar10", "0.06")])
def test_weights_are_large_from_a_size_that_fits_the_width(study: str, size: str) -> None:
    """Narrow text models start with larger weights: 0.06 at width 384 is 0.147 at width 64."""
    edges = (-1.0, -0.147, -0.06, 0.0, 0.06, 0.147, 1.0)

    def counted(*counts: int) -> WeightStatistics:
        return WeightStatistics(sum(counts) - 2 * counts[2], 0.5, 0.5, Histogram(edges, counts))

    rows = made_up(study)
    for name in rows.study.methods:
        one = counted(30, 20, 50, 50, 20, 30) if name == P11 else counted(40, 0, 60, 60, 0, 40)
        weights = dict.fromkeys(KINDS, one)
        rows = edited(rows, name, lambda seed, run, w=weights: measures(run, weights=w))
    table = tables(rows)[f"{study}-weights"]
    assert table.columns[1:4] == tuple(f"≥ {size} {kind}" for kind in "KQV")
    ours, theirs = (float(table.rows[k][1].key) for k in (0, -1))
    assert (ours, theirs) == pytest.approx((60, 80) if study == "imdb" else (100, 80), abs=0.1)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_sizes_keep_every_weight(counts: list[int]) -> None:
    histogram = Histogram((-2.0, -1.0, 0.0, 1.0, 2.0), tuple(counts))
    edges, density = sizes(histogram)
    total = float((density * np.diff(edges)).sum())
    assert total == pytest.approx(1.0 if any(counts) else 0.0)
    assert histogram.count_from(0) == sum(counts) and histogram.count_from(3) == 0
    assert histogram.count_from(1.5) == pytest.approx((counts[0] + counts[3]) / 2)


# --- the stored results ---------------------------------------------------------------------


def test_figure_8_and_table_1_come_out_as_the_docs_say() -> None:
    """From results/: the hand-written sentences of docs/evidence/imdb-to-the-end.md."""
    early, end = (
        read_rows(studies.load(name), RESULTS / f"{name}.jsonl")
        for name in ("imdb", "imdb-to-the-end")
    )
    first, both = found(early)["figure-8"], found(end)["figure-8-to-the-end"]
    assert first.word == "holds with a remark" and first.comparisons
    assert [row[-1].text for row in first.comparisons.rows[:3]] == ["as claimed"] * 3
    assert both.word == "not seen at this scale" and both.comparisons
    outcomes = [row[-1].text for row in both.comparisons.rows]
    assert outcomes[:3] == ["the other way"] * 3 and outcomes[3:] == ["(as claimed)"] * 6
    page = " ".join((ROOT / "docs/evidence/imdb-to-the-end.md").read_text().split())
    for name, p in ((P11, "1.1"), (P2, "2"), (P3, "3")):
        best = [100 * run.best_kept for run in end.final(name)]
        assert f"p = {p} {np.mean(best):.2f} ± {np.std(best, ddof=1):.2f}" in page
    for row in both.comparisons.rows[:3]:
        assert row[0].text.startswith("large weights of") and row[4].text in page


@pytest.mark.parametrize(("study", "sure"), [("imdb", "KQV"), ("imdb-to-the-end", "KQ")])
def test_interpolation_decides_one_sign_of_figure_8(study: str, sure: str) -> None:
    """Whichever way the weights of a bin lie, all differences but one keep their sign."""
    rows = read_rows(studies.load(study), RESULTS / f"{study}.jsonl")
    size = large_from(64)
    for kind in KINDS:
        bounds = []
        for name in (P11, P2):
            some = [run.scores.weights[kind].histogram for run in rows.final(name)]
            for edges in ([min(e for e in h.edges if e >= size) for h in some],
                          [max(e for e in h.edges if e <= size) for h in some]):  # fmt: skip
                bounds.append(np.mean([h.count_from(e) for h, e in zip(some, edges, strict=True)]))
        (low, high), (low_two, high_two) = bounds[:2], bounds[2:]
        decided = (low - high_two) * (high - low_two) > 0
        assert decided == (kind[0].upper() in sure)


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (["test"], 85.1, "`$.measured.test`"),
        (["test"], None, "either all test scores or none"),
        (["validation"], "x", "got `str` - at `$.measured.validation`"),
        (["best_epoch"], 0, "`int` >= 1"),
        (["elsewhere"], 1, "unknown field `elsewhere`"),
        (["measures", "pruned"], {"0.5": 0.8}, "pruned must have 0.8"),
        (["measures", "eraser"], {"val": {}}, "eraser.val must have 'attention'"),
        (["measures", "weights", "key", "histogram", "counts"], [1], "1 counts do not fit"),
        (["measures", "weights", "key", "histogram"], {"edges": [0, 1, 1], "counts": [1, 1]},
         "edges must grow"),
        (["measures", "weights", "key", "histogram"], {"edges": [0, 1, 2], "counts": [1, 1]},
         "edges must be symmetric about 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    tmp_path: Path, way: list[Any], value: Any, message: str
) -> None:
    line = (RESULTS / "imdb.jsonl").read_bytes().splitlines()[-1]
    content: Any = msgspec.json.decode(line)
    place = content["measured"]
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = value
    (tmp_path / "imdb.jsonl").write_bytes(msgspec.json.encode(content) + b"\n")
    with pytest.raises(RunError) as error:
        read_rows(studies.load("imdb"), tmp_path / "imdb.jsonl")
    assert message in str(error.value) and "imdb.jsonl" in str(error.value)
    assert len(str(error.value)) < 400
