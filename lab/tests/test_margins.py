"""`mirrorhead margins`: W of real heads, shares and divergences, and models it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import mirrorhead as mh
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.evaluation.head_margins import (
    Batch,
    ModelMargins,
    head_margins,
    measure_heads,
)
from mirrorhead_lab.models import TextClassifier, TextSettings, all_rows, attention_maps
from mirrorhead_lab.models.attention_maps import LayerHeads, read_heads
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.training.run_folder import milestone_path
from run_cases import make_slices, make_text_run, make_vit_run
from tiny_bert import tiny_bert

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 7, 9, 3, 0], [2, 4, 8, 8, 3]])
MASK = IDS != 0


def classifier(layers: int = 2) -> TextClassifier:
    torch.manual_seed(0)
    settings = TextSettings(vocabulary=12, dim=8, hidden=16, layers=layers, heads=2)
    return TextClassifier(settings).eval()


def config(**changes: Any) -> dict[str, Any]:
    return {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 2, **changes}


def hugging_face(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 8}
    if name == "bert":
        model: nn.Module = transformers.BertModel(transformers.BertConfig(**config(**heads)))
    elif name == "distilbert":
        small = transformers.DistilBertConfig(
            vocab_size=12, dim=8, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=8
        )
        model = transformers.DistilBertModel(small)
    elif name == "gpt2":
        small = transformers.GPT2Config(
            vocab_size=12, n_embd=8, n_layer=2, n_head=2, n_positions=8,
            bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
        model = transformers.GPT2Model(small)
    else:
        model = transformers.LlamaModel(transformers.LlamaConfig(**config(**heads)))
    for parameter in model.parameters():  # biases too: they start at 0
        nn.init.normal_(parameter, std=0.5)
    return model.eval()


def layer_of(X: torch.Tensor, z: torch.Tensor, W: torch.Tensor) -> LayerHeads:
    attention = torch.einsum("ntd,dc,nc->nt", X, W, z).softmax(dim=-1)
    mask = torch.ones(X.shape[:2], dtype=torch.bool)
    return LayerHeads(W[None], X, z, mask, attention[None])


def test_w_gives_the_attention_that_the_model_computes() -> None:
    model = classifier()
    with all_rows(model):
        maps = attention_maps(model, IDS)
    for layer, expected in zip(read_heads(model, IDS, MASK), maps, strict=True):
        torch.testing.assert_close(
            layer.attention.float(), expected[:, :, 0].transpose(0, 1), atol=1e-5, rtol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2"])
@pytest.mark.parametrize("query", ["first", "last", None])
def test_heads_of_hugging_face_models_have_biases(name: str, query: Any) -> None:
    model = hugging_face(name)
    named = {"input_ids": IDS, "attention_mask": MASK.long()}
    layers = read_heads(model, IDS, MASK, query, named)  # compares with the model's attention
    assert len(layers) == 2
    for layer in layers:
        assert layer.W.shape == (2, 8, 9)  # with a column for the bias of the query
        assert bool((layer.z[:, -1] == 1).all())
        assert float(layer.attention.masked_fill(MASK, 0).sum()) == 0
    if name == "gpt2" and query == "first":  # it sees itself alone
        assert bool((layers[0].attention[..., 0] == 1).all())
    if name == "gpt2" and query is None:
        last = read_heads(model, IDS, MASK, "last", named)
        assert torch.equal(last[0].attention, layers[0].attention)


@pytest.mark.slow
def test_models_that_are_not_x_w_z_are_refused() -> None:
    named = {"input_ids": IDS, "attention_mask": MASK.long()}
    with pytest.raises(UserError, match="rotary or relative"):
        read_heads(hugging_face("llama"), IDS, MASK, "last", named)
    with pytest.raises(UserError, match="no attention that can be read"):
        read_heads(nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 2)), IDS, MASK)


@pytest.mark.parametrize("p", [1.1, 2.0, 3.0])
def test_a_solution_has_the_whole_margin_and_no_other_w_has(p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(4, 5, 6, generator=generator, dtype=torch.float64)
    z = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    W = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    tokens = torch.einsum("ntd,dc,nc->nt", X, W, z).argmax(dim=-1)
    best = mh.attention_svm(X, z, tokens, p).W
    (exact,) = head_margins(layer_of(X, z, 3 * best), 0, 0, [p]).by_p
    assert exact.share == pytest.approx(1, abs=1e-5)
    assert exact.divergence == pytest.approx(0, abs=1e-4)
    (other,) = head_margins(layer_of(X, z, W), 0, 0, [p]).by_p
    assert other.share is not None and 0 < other.share < 0.99
    # The solution is certified to 1e-6 here, which moves its direction by about 1e-3.
    expected = float(mh.PNorm(p).direction_divergence(best, W))
    assert other.divergence == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("p", [1.1, 1.5, 2.0, 3.0])
def test_one_query_for_all_texts_needs_fewer_unknowns(p: float) -> None:
    """The short cut against the problem at full size."""
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    z = torch.randn(1, 5, generator=generator, dtype=torch.float64).expand(3, 5)
    W = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    layer = layer_of(X, z, W)
    tokens = layer.attention[0].argmax(dim=-1)
    full = mh.attention_svm(X, z, tokens, p, 1e-11)
    logits = torch.einsum("ntd,dc,nc->nt", X, W, z)
    ahead = logits.gather(1, tokens[:, None]) - logits
    margin = ahead.scatter(1, tokens[:, None], math.inf).min()
    psi = mh.PNorm(p)
    (found,) = head_margins(layer, 0, 0, [p]).by_p
    assert found.share == pytest.approx(float(margin / psi.norm(W) * full.norm), rel=1e-5)
    assert found.divergence == pytest.approx(
        float(psi.direction_divergence(full.W, W)), rel=1e-2, abs=1e-4
    )


def test_tokens_that_tie_are_infeasible_and_say_so() -> None:
    X = torch.eye(4, dtype=torch.float64).expand(2, 4, 4).clone()
    X[0, 1] = X[0, 0]  # the same token twice
    z = torch.eye(4, dtype=torch.float64)[:2]
    W = torch.zeros(4, 4, dtype=torch.float64)
    W[0] = 1
    (found,) = head_margins(layer_of(X, z, W), 0, 0, [2.0]).by_p
    assert found.status == "infeasible"
    assert found.share is None and found.divergence is None


def test_one_hotness_is_the_largest_weight() -> None:
    model = classifier(layers=1)
    (map_,) = attention_maps(model, IDS)
    for one in measure_heads(model, Batch(IDS, MASK), [2.0]):
        assert one.one_hot == pytest.approx(float(map_[:, one.head, 0].amax(-1).mean()), abs=1e-5)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_slices(tmp_path / "data")
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> int:
    return main(["margins", *words, "--n", "4", "--tokens", "8", "--p", "1.5", "2", "--partial"])


@pytest.mark.slow
def test_a_run_is_measured_along_its_milestones(here: Path, capsys: Any) -> None:
    run = make_text_run(here / "run")
    chosen = json.loads((run / "preset.json").read_text())
    chosen["training"]["milestones"] = [0.0, 0.5, 0.9]
    (run / "preset.json").write_text(json.dumps(chosen))
    other = make_text_run(here / "other", seed=1)
    from safetensors.torch import load_file

    (run / "milestones").mkdir()
    for share, epoch, folder in ((0.0, 1, other), (0.5, 2, run)):
        weights = load_file(folder / "best.safetensors")
        save_file(weights, milestone_path(run, share), {"epoch": str(epoch)})
    assert command("run", "--json") == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=ModelMargins)
    names = [one.name for one in found.checkpoints]
    assert names == ["before training", "milestone 0", "milestone 0.5", "chosen weights"]
    first, early, middle, last = (one.heads for one in found.checkpoints)
    assert first == middle == last != early  # the weights of a seed, and those of another
    assert [one.p for one in last[0].by_p] == [1.5, 2.0]
    assert found.optimizer == "sgd" and found.seed == 0 and found.texts == 4
    assert command("run", "--last") == 0
    printed = capsys.readouterr().out
    assert "chosen weights" in printed and "milestone" not in printed
    assert "0, 1" in printed and "one-hot" in printed


@pytest.mark.slow
def test_a_hugging_face_folder_is_measured(here: Path, capsys: Any) -> None:
    tiny_bert(here / "bert")
    (here / "texts.txt").write_text("good film\n\nthe plot a bad cast\ndull\nfine a film the\n")
    assert command("bert", "--texts", "texts.txt", "--json") == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=ModelMargins)
    (only,) = found.checkpoints
    assert [(one.layer, one.head) for one in only.heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    shares = [n.share for one in only.heads for n in one.by_p if n.share is not None]
    assert shares and all(0 < share <= 1 + 1e-6 for share in shares)


@pytest.mark.slow
def test_a_model_of_half_precision_is_read_in_float32(here: Path, capsys: Any) -> None:
    """In bfloat16, attention is too coarse to be compared with the formula."""
    import transformers

    tiny_bert(here / "bert")
    model = transformers.AutoModel.from_pretrained(here / "bert", dtype=torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(here / "bert")
    (here / "texts.txt").write_text("good film\nthe plot a bad cast\ndull\nfine a film the\n")
    assert command("bert", "--texts", "texts.txt", "--json") == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=ModelMargins)
    assert len(found.last.heads) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "nothing does not exist"),
        (["one.txt"], "one.txt"),
        (["data"], "neither preset.json"),
        (["vit"], "a run on cifar10, which has no texts"),
        (["run", "--p", "0.5"], "--p must be from 1.02 to 100, got 0.5"),
        (["run", "--n", "0"], "--n must be at least 1"),
        (["run", "--tokens", "1"], "--tokens must be at least 2"),
        (["run", "--texts", "one.txt", "--n", "2"], "--n must be at most 1"),
        (["run", "--texts", "gone.txt"], "gone.txt is missing"),
        (["broken"], "cannot be read as a Hugging Face model"),
    ],
)
def test_wrong_use_is_one_line(here: Path, capsys: Any, words: list[str], says: str) -> None:
    make_text_run(here / "run")
    make_vit_run(here / "vit")
    (here / "one.txt").write_text("a film")
    (here / "broken").mkdir()
    (here / "broken" / "config.json").write_text('{"model_type": "none such"}')
    assert main(["margins", *words, "--partial"]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
