"""The benchmark of patches: every method runs, lines are kept, a stopped study resumes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mirrorhead import MirrorAdam
from mirrorhead_lab.datasets import load_own_sentences
from tiny_bert import tiny_bert, toy_texts

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "patches.py"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The benchmark with a tiny BERT and toy texts in the place of MiniLM and the four sets."""
    spec = importlib.util.spec_from_file_location("benchmark_of_patches", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("bench")
    base, texts = tiny_bert(folder), toy_texts(folder / "own.csv")
    module.default_encoder = lambda: base  # type: ignore[attr-defined]
    module.load_task = lambda name: load_own_sentences(texts)  # type: ignore[attr-defined]
    return module


@pytest.mark.slow
def test_every_method_gives_a_curve(bench: ModuleType) -> None:
    for name in bench.SETTINGS:
        method = bench.METHODS[name]
        size = 0.1 if method.per_size else None
        run = bench.Run("trec", name, bench.SETTINGS[name][0], 0, size, True)
        line = bench.perform(run, texts=64)
        columns = {"all"} if not method.sized else {"0.1"} if method.per_size else None
        columns = columns or {"all", *(f"{s:g}" for s in bench.SIZES)}
        assert set(line["test"]) == columns and not line["validation"], name
        assert all(0 <= value <= 1 for value in line["test"].values())
        json.dumps(line)


@pytest.mark.parametrize(("change", "share"), [(0.0, 1.0), (1e-3, 0.75), (1.0, 0.5)])
def test_the_share_of_identical_weights(bench: ModuleType, change: float, share: float) -> None:
    base = {"weight": torch.ones(2, 2), "frozen": torch.ones(2, 2), "bias": torch.ones(2)}
    tuned = {name: tensor.clone() for name, tensor in base.items()}
    tuned["bias"] += 1  # BitFit changes these alone, and no matrix
    assert bench._identical(base, tuned) == {"F32": 1.0, "BF16": 1.0}
    tuned["weight"][0, 0] += change
    tuned["weight"][1, 1] += 1 if change == 1 else 0
    found = bench._identical(base, tuned)
    assert found["F32"] == share and found["BF16"] == (1.0 if change < 1 else share)


@pytest.mark.slow
def test_a_kept_model_is_the_trained_one(bench: ModuleType, tmp_path: Path) -> None:
    """DARE, LT-SFT and the final run of a tuning run's seed use models that were trained before."""
    settings = {"adamw": {"lr": 1e-4}, "dare": {"lr": 1e-4}, "lt-sft": {"lr": 1e-3}}
    for name, setting in settings.items():
        run = bench.Run("trec", name, setting, 0, 0.1 if name == "lt-sft" else None, True)
        lines = [bench.perform(run, 64, models) for models in (None, tmp_path, tmp_path)]
        scores = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
        assert scores[0] == scores[1] == scores[2]
    assert len(list(tmp_path.iterdir())) == 2  # AdamW's model, and LT-SFT's own


@pytest.mark.slow
def test_a_run_that_diverges_has_nothing_right(bench: ModuleType) -> None:
    run = bench.Run("trec", "adamw", {"lr": 1e30}, 0, None, False)
    line = bench.perform(run, texts=64)
    assert line["validation"] == {"all": 0.0, "0.001": 0.0, "0.0003": 0.0}
    assert not line["test"]


@pytest.mark.slow
def test_masks_and_low_rank_change_what_they_say(bench: ModuleType) -> None:
    setup = bench.Bench("trec", 0, texts=64)
    for name in ("random-mask", "gradient-mask"):
        model, matrices = bench.train(setup, name, {"lr": 1e-2}, 0.05)
        before = setup.model().train_matrices()
        changed = sum(int((w != before[n]).sum()) for n, w in matrices.items())
        total = sum(w.numel() for w in matrices.values())
        assert 0.04 * total < changed <= round(0.05 * total)
    model, matrices = bench.train(setup, "lora-1", {"lr": 1e-2, "rank": 1}, None)
    after = dict(model.encoder.named_parameters())
    for name, w in setup.model().train_matrices().items():
        change = (after[name] - w).detach().double()
        assert torch.linalg.matrix_rank(change, rtol=1e-3) <= 1


@pytest.mark.slow
def test_a_stopped_study_resumes(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(bench, "SETTINGS", {"adamw": bench.SETTINGS["adamw"]})
    file = tmp_path / "results.jsonl"
    command = ["patches.py", "run", "--results", str(file), "--tasks", "cr", "--texts", "32"]
    monkeypatch.setattr(sys, "argv", [*command, "--seeds", "2", "--limit", "2"])
    bench.main()
    whole = file.read_text()
    file.write_text(whole + whole[:40])  # a line that a power cut has cut short
    monkeypatch.setattr(sys, "argv", [*command, "--seeds", "2"])
    bench.main()
    found = bench.read_patch_runs(file)
    assert len({line.key for line in found}) == len(found) == 3 + 2
    assert [line.final for line in found] == [False] * 3 + [True] * 2
    best = max(found[:3], key=lambda run: run.tuning_score)
    assert all(line.setting == best.setting for line in found[3:])
    assert all(not line.test for line in found[:3])  # tuning never reads test data
    monkeypatch.setattr(sys, "argv", ["patches.py", "table", "--results", str(file)])
    capsys.readouterr()
    bench.main()
    assert "AdamW" in capsys.readouterr().out


@pytest.mark.parametrize("p", [1.5, 2.0])
def test_centred_mirror_descent_finds_the_closest_point(bench: ModuleType, p: float) -> None:
    assert bench.closest_point_error(p) < 1e-4


@pytest.mark.parametrize("p", [1.05, 1.1, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_form_of_the_step_is_the_optimizers(
    bench: ModuleType, p: float, dtype: torch.dtype
) -> None:
    start = torch.randn(50).to(dtype)
    plain, ours = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    # Twice as many steps as announced, so that the largest dual variable passes the reach.
    optimizers = (
        bench.CenteredAdam([plain], 0.5, bench.lp_link(p), steps=10),
        MirrorAdam([ours], 0.5, p, center="init", steps=10),
    )
    for step in range(20):
        gradient = torch.linspace(-1, 1, 50) + torch.randn(50, generator=torch.manual_seed(step))
        for weight, optimizer in zip((plain, ours), optimizers, strict=True):
            weight.grad = gradient.to(dtype)
            optimizer.step()
        relative = 1e-4 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(ours, plain, rtol=relative, atol=1e-6)
    assert float((ours.detach() - start).abs().max()) > 0.5
