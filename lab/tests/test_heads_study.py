"""The study of heads: verdicts that can come out each way, and what is missing is named."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mirrorhead_lab.evaluation.head_margins import (
    CheckpointMargins,
    HeadMargins,
    ModelMargins,
    Nearness,
)
from mirrorhead_lab.studies.heads import ENCODER, EXPONENTS, STUDY, draw
from mirrorhead_lab.studies.study import Rows, Trial
from results_cases import edited, filled

PS = (1.1, 2.0, 3.0)


def heads(q: float | None, share: float, near: float) -> tuple[HeadMargins, ...]:
    """Two heads at a divergence from the solution of q, and at .5 from others."""
    by_p = tuple(Nearness(p, "optimal", 1e-9, share, near if p == q else 0.5) for p in PS)
    return tuple(HeadMargins(0, head, 0.3, by_p) for head in range(2))


def made_up(near: float = 0.1, rise: float = 0.1, spread: float = 1e-3) -> Rows[ModelMargins]:
    def measure(trial: Trial) -> ModelMargins:
        if trial.method == ENCODER:
            lost = HeadMargins(0, 1, 0.3, (Nearness(2.0, "infeasible"),))
            end = CheckpointMargins("as it is", (*heads(None, 0.1, 0.9), lost))
            return ModelMargins(ENCODER, 8, 8, None, (end,))
        q, share = EXPONENTS.get(trial.method), 0.1 + spread * trial.seed
        at = [("before", 0, share), ("first", 1, share), ("end", 9, share + rise)]
        along = (
            CheckpointMargins(name, heads(q, one, near + 1e-3 * trial.seed), epoch, 0.99)
            for name, epoch, one in at
        )
        return ModelMargins(str(trial), 8, 8, None, tuple(along), p=q, seed=trial.seed)

    return filled(STUDY, measure)


@pytest.mark.parametrize(
    ("near", "rise", "words"),
    [
        (0.1, 0.1, ["holds", "holds"]),
        (0.6, 0.1, ["does not hold", "holds"]),
        (0.1, -0.05, ["holds", "does not hold"]),
        (0.498, 0.0, ["not decided", "not decided"]),
    ],
)
def test_the_verdicts_can_come_out_each_way(near: float, rise: float, words: list[str]) -> None:
    part = STUDY.part(made_up(near, rise))
    assert [finding.word for finding in part.findings] == words
    (table,) = part.tables
    assert [row[0].text for row in table.rows][:2] == [ENCODER, "adamw weight_decay=0.01"]
    assert table.rows[0][-1].text == "18 of 21" and len(table.rows) == 5
    assert draw(made_up()).axes


def test_growth_is_judged_within_each_run() -> None:
    """Runs differ by more than they grow, and each of them grows."""
    assert STUDY.part(made_up(rise=0.001, spread=0.01)).findings[1].word == "holds"


@pytest.mark.parametrize("what", ["lost", "unsolved"])
def test_what_is_missing_is_named_and_the_rest_is_shown(what: str) -> None:
    rows = made_up()
    if what == "lost":
        kept = {t: r for t, r in rows.by_trial.items() if (t.method, t.seed) != ("MD p=2", 3)}
        rows, says = Rows(STUDY, kept), "MD p=2 has no final run of seeds 3"
    else:

        def unsolved(seed: int, run: ModelMargins) -> ModelMargins:
            found: Any = [replace(h, by_p=(Nearness(1.1, "unfinished"),)) for h in run.last.heads]
            return replace(run, checkpoints=(*run.checkpoints[:2], replace(run.last, heads=found)))

        rows, says = edited(rows, "MD p=1.1", unsolved, 3), "no head has a solution for p = 1.1"
    part = STUDY.part(rows)
    assert all(says in finding.failure for finding in part.findings)
    assert part.tables[0].rows
