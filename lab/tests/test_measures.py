"""What is measured of a run, against the plain way to compute it; and what is kept of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mirrorhead_lab.datasets import DataError
from mirrorhead_lab.evaluation import (
    EvaluationData,
    average_precision,
    gini,
    hoyer,
    measure,
)
from mirrorhead_lab.evaluation import measures as module
from mirrorhead_lab.evaluation.measures import kept_measures
from mirrorhead_lab.models import TextSettings, attention_maps
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.training import (
    OptimizerSettings,
    RunError,
    complete_run,
    evaluate,
    load_run,
    load_sets,
    preset,
)
from mirrorhead_lab.training.run_folder import milestone_path
from run_cases import make_slices, make_text_run, make_vit_run

TEXT_PARTS = ["test", "weights", "pruned", "entropy", "eraser", "cad"]


@pytest.fixture
def slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("MIRRORHEAD_CACHE", str(tmp_path / "cache"))
    return make_slices(tmp_path / "data")


def measured(folder: Path, slices: Path, *parts: str, told: list[str] | None = None) -> Any:
    run = load_run(folder)
    tell = (told if told is not None else []).append
    return measure(run, EvaluationData.of(run, slices, partial=True), parts or None, tell)


@pytest.mark.slow
def test_accuracy_along_training_is_that_of_the_kept_weights(slices: Path, tmp_path: Path) -> None:
    """A real run: what is kept at milestones is scored, and the results can be read back."""
    base = preset("laptop", OptimizerSettings("adamw", lr=3e-3))
    shares = (0.0, 0.5, 0.6, 1.0)
    changes: Any = {"epochs": 4, "choose": "last", "milestones": shares, "fused": False}
    small = TextSettings(vocabulary=30, dim=8, hidden=12, layers=1, heads=2, embedding_norm=True)
    chosen = replace(base, model=small, training=replace(base.training, **changes))
    sets = load_sets(chosen, slices, partial=True)
    outcome, _ = complete_run(chosen, sets, tmp_path / "run")
    found = measured(tmp_path / "run", slices)
    assert list(found) == [*TEXT_PARTS, "milestones"]
    reached = [epoch["train_accuracy"] for epoch in outcome.epochs]
    assert list(found["milestones"]) == [f"{s:g}" for s in shares if s <= max(reached)]
    model = chosen.build()
    for share, of in found["milestones"].items():
        assert of["epoch"] == next(i for i, r in enumerate(reached, 1) if r >= float(share))
        assert of["train_accuracy"] == reached[of["epoch"] - 1]
        model.load_state_dict(load_file(milestone_path(tmp_path / "run", float(share))))
        assert of["test_accuracy"] == evaluate(model, sets.test)["accuracy"]
    kept = kept_measures(tmp_path / "run", load_run(tmp_path / "run").preset)
    assert kept is not None and kept.milestones[0.0].epoch == 1


@pytest.mark.slow
def test_measures_of_texts_are_the_plain_ones(slices: Path, tmp_path: Path) -> None:
    folder = make_text_run(tmp_path / "run", layers=2)
    found = measured(folder, slices)
    assert list(found) == TEXT_PARTS
    run = load_run(folder)
    model: Any = run.model
    data = EvaluationData.of(run, slices, partial=True)
    test: Any = data.test

    # One text at a time, no padding.
    right, entropies = 0, []
    for i in range(len(test)):
        ids, label = test.batch([i])
        right += int(model(ids).argmax() == label)
        weights = attention_maps(model, ids)[-1][0, :, 0].double()
        entropies.append(-(weights * weights.log()).sum(dim=-1) / np.log(ids.shape[1]))
    by_head = torch.stack(entropies).mean(dim=0)
    assert found["test"]["accuracy"] == pytest.approx(right / len(test))
    assert found["entropy"]["by_head"] == pytest.approx(by_head.tolist(), abs=1e-6)
    assert found["entropy"]["mean"] == pytest.approx(float(by_head.mean()), abs=1e-6)

    for kind in ("key", "query", "value"):
        w = torch.cat([getattr(b.attention, kind).weight.detach().flatten() for b in model.blocks])
        of = found["weights"][kind]
        assert of["large"] == int((w.abs() >= 0.06).sum())
        assert (of["gini"], of["hoyer"]) == (gini(w), hoyer(w))
        edges, counts = (np.array(of["histogram"][name]) for name in ("edges", "counts"))
        assert len(counts) == 60 and counts.sum() == len(w)
        np.testing.assert_allclose(edges, -edges[::-1], atol=1e-12)
        assert edges[-1] == pytest.approx(float(w.abs().max()))
        inner = (w.numpy()[:, None] >= edges[None, 1:-1]).sum(axis=1)
        np.testing.assert_array_equal(np.bincount(inner, minlength=60), counts)

    # Of the document in the slice, words 1 and 2 of 9 are marked.
    words, marked = data.eraser["val"].words[0], data.eraser["val"].marked[0]
    assert data.share == pytest.approx(2 / 9)
    ids = torch.tensor([data.tokenizer.encode(list(words), is_pretokenized=True).ids])
    scores = attention_maps(model, ids)[-1][0, :, 0].mean(dim=0)[1:-1].double().numpy()
    wanted = average_precision(scores, marked)
    assert found["eraser"]["val"]["attention"]["auprc"] == pytest.approx(wanted)
    assert {*found["eraser"]} == {"val", "test"} and {*found["cad"]} == {"dev", "test"}
    for part in ("eraser", "cad"):
        for split in found[part].values():
            assert {*split} == {"attention", "gradient", "random"}
            assert all(0 < one["auprc"] <= 1 for one in split.values())


@pytest.mark.slow
def test_measures_of_pictures_are_the_plain_ones(slices: Path, tmp_path: Path) -> None:
    folder = make_vit_run(tmp_path / "run")
    found = measured(folder, slices)
    assert list(found) == ["test", "weights", "pruned", "entropy"]
    run = load_run(folder)
    x, y = EvaluationData.of(run, slices, partial=True).test.batch(range(10))
    weights = load_file(folder / "best.safetensors")
    for share, accuracy in found["pruned"].items():
        small = {}
        for name, w in weights.items():
            flat = w.flatten().clone()
            if w.ndim > 1:
                for i in sorted(range(len(flat)), key=flat.abs().tolist().__getitem__)[
                    : int(float(share) * len(flat))
                ]:
                    flat[i] = 0
            small[name] = flat.view_as(w)
        run.model.load_state_dict(small)
        right = (run.model(x).argmax(dim=1) == y).float().mean()
        assert accuracy == pytest.approx(float(right))
    assert [*found["pruned"]] == ["0.5", "0.8", "0.9", "0.95"]
    assert 0.5 < found["entropy"]["mean"] <= 1 and len(found["entropy"]["by_head"]) == 4


def test_weights_that_are_all_0_are_measured(slices: Path, tmp_path: Path) -> None:
    folder = make_text_run(tmp_path / "run")
    weights = load_file(folder / "best.safetensors")
    for name in ("key", "value"):
        weights[f"blocks.0.attention.{name}.weight"].zero_()
    save_file(weights, folder / "best.safetensors")
    found = measured(folder, slices)
    assert found["weights"]["key"]["gini"] is found["weights"]["value"]["hoyer"] is None
    assert sum(found["weights"]["key"]["histogram"]["counts"]) == 64
    assert found["entropy"]["mean"] == pytest.approx(1)
    gradient = found["cad"]["test"]["gradient"]  # nothing but [CLS] has one
    assert gradient["auprc"] == gradient["mass"] == pytest.approx(gradient["chance"])


def test_what_is_measured_is_kept_until_something_changes(
    slices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_text_run(tmp_path / "run")
    told: list[str] = []
    first = measured(folder, slices, "weights", "cad", told=told)
    kept = json.loads((folder / "measures.json").read_text())
    assert kept["measures"] == first and list(first) == ["weights", "cad"]
    assert measured(folder, slices, "cad", "entropy", told=told)["cad"] == first["cad"]
    assert told == ["weights", "cad", "entropy"]
    # Other data of one part.
    path = slices / "cad-imdb" / "dev_paired.tsv"
    path.write_text(path.read_text().replace("grand", "superb"))
    measured(folder, slices, "weights", "cad", told=told)
    assert told[3:] == ["cad"]
    # Other weights.
    make_text_run(tmp_path / "other", seed=1)
    (folder / "best.safetensors").write_bytes((tmp_path / "other/best.safetensors").read_bytes())
    second = measured(folder, slices, "weights", "cad", told=told)
    assert told[4:] == ["weights", "cad"] and second["weights"] != first["weights"]
    # Another meaning, and a file that is damaged.
    monkeypatch.setattr(module, "FORMATS", dict.fromkeys(module.MEASURES, 9))
    measured(folder, slices, "weights", told=told)
    (folder / "measures.json").write_text('{"measures": {}, "stamps": {"weights": "x"}}')
    assert measured(folder, slices, "weights", told=told)["weights"] == second["weights"]
    assert told[6:] == ["weights"] * 2
    for junk in ("{", "[]", '{"measures": 1}'):
        (folder / "measures.json").write_text(junk)
        with pytest.raises(RunError, match=r"measures\.json is damaged.*Delete it"):
            measured(folder, slices, "weights")


def test_bad_requests_are_refused_before_anything_is_computed(slices: Path, tmp_path: Path) -> None:
    text, vit = make_text_run(tmp_path / "text"), make_vit_run(tmp_path / "vit")
    with pytest.raises(UserError, match="weights, pruned, entropy for a run on cifar10, got cad"):
        measured(vit, slices, "weights", "cad")
    told: list[str] = []
    with pytest.raises(DataError, match="eraser, bert: there are no folders"):
        measured(text, tmp_path / "nowhere", "weights", "eraser", told=told)
    assert told == [] and not (text / "measures.json").exists()
