"""The study of weight sync: what a run notes is what the weights say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from mirrorhead_lab.datasets import find
from mirrorhead_lab.models.gpt import GPTSettings
from mirrorhead_lab.studies.study import Row, Rows, Trial
from mirrorhead_lab.studies.weight_sync import ALL, GPT, METHODS, STUDY, Watch, run
from mirrorhead_lab.training.language_model import Corpus, LanguageSettings, windows
from mirrorhead_lab.training.tuning import TuneSettings
from tiny_bert import tiny_bert, toy_texts

SMALL = LanguageSettings(
    GPTSettings(length=8, dim=8, layers=1, heads=2),
    steps=34,
    batch_size=2,
    record_every=17,
    windows=6,
)


def test_shares_and_bytes_are_those_of_the_weights() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 40, bias=False)
    watch = Watch(model)
    states = [model.weight.detach().bfloat16()]
    for _ in range(16):
        with torch.no_grad():
            model.weight.add_(1e-4 * torch.randn_like(model.weight))
        states.append(model.weight.detach().bfloat16())
        watch.after_step()
    found = watch.result(0.5, None)
    for span in (1, 8):
        pairs = list(zip(states[::span], states[span::span], strict=False))
        shares = [float((a != b).double().mean()) for a, b in pairs]
        assert found.shares[span] == pytest.approx(np.mean(shares))
        assert found.shares[span] < found.bytes[span] < 1
    assert found.shares[ALL] == pytest.approx(float((states[0] != states[-1]).double().mean()))
    assert 32 not in found.shares
    assert watch.result(math.nan, None).validation is None


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_each_method_trains_and_fills_its_table(name: str, tmp_path: Path) -> None:
    (task,) = STUDY.tasks_of(name)
    setting = METHODS[name].settings[0]
    trial = Trial(method=name, setting=setting, seed=1, final=True, task=task)
    if task == GPT:
        text = torch.from_numpy(np.random.default_rng(0).integers(0, 96, 900, dtype=np.uint8))
        corpus = Corpus(text, windows(text[:400], SMALL), windows(text[400:], SMALL))
        measured = run(trial, corpus, tmp_path, SMALL)
        assert {*measured.shares} == {1, 8, 32, ALL}
    else:
        data = tiny_bert(tmp_path / "bert"), find(str(toy_texts(tmp_path / "own.csv"))).read()
        measured = run(trial, data, tmp_path, tune=TuneSettings(texts=64, seed=1))
    assert measured.test is not None and measured.validation is not None
    assert 0 < measured.shares[1] <= 1 and 0 < measured.bytes[ALL] < 2
    tuned = {one: structs.replace(measured, test=None) for one in STUDY.tuning_trials(name, task)}
    finals = {structs.replace(trial, seed=seed): measured for seed in STUDY.seeds}
    rows = Rows(STUDY, {one: Row(one, found, 1.0) for one, found in (tuned | finals).items()})
    shown = next(t for t in STUDY.part(rows).tables if t.name == f"weight-sync-{task.lower()}")
    assert [str(row[0].text) for row in shown.rows] == [name]
    assert len(shown.rows[0]) == len(shown.columns) == 11
