"""attention_param_groups: what is attention, what is not, and that nothing is lost."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mirrorhead import MirrorAdam, MirrorDescent, attention_param_groups
from mirrorhead.optim.param_groups import ParamGroups

TINY: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TOKENS: dict[str, Any] = {
    "vocab_size": 11,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf() -> Any:
    """Return the package transformers, which takes seconds to import."""
    return importlib.import_module("transformers")


class TimmAttention(nn.Module):
    """As timm's vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.q_norm = nn.LayerNorm(4)
        self.k_norm = nn.LayerNorm(4)
        self.proj = nn.Linear(8, 8)


class TimmBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(8)
        self.attn = TimmAttention()
        self.ls1 = nn.Module()
        self.ls1.gamma = nn.Parameter(torch.ones(8))
        self.norm2 = nn.LayerNorm(8)
        self.mlp = nn.Module()
        self.mlp.fc1 = nn.Linear(8, 16)
        self.mlp.fc2 = nn.Linear(16, 8)


def bert() -> nn.Module:
    return hf().BertForMaskedLM(hf().BertConfig(**TINY, **TOKENS))


def bert_with_cross_attention() -> nn.Module:
    return hf().BertLMHeadModel(
        hf().BertConfig(**TINY, **TOKENS, is_decoder=True, add_cross_attention=True)
    )


def gpt2() -> nn.Module:
    config = hf().GPT2Config(
        n_embd=8, n_layer=2, n_head=2, n_positions=8, add_cross_attention=True, **TOKENS
    )
    return hf().GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = hf().LlamaConfig(
        **TINY, **TOKENS, num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True
    )
    return hf().LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = hf().ViTConfig(**TINY, image_size=8, patch_size=4)
    return hf().ViTForImageClassification(config)


def distilbert() -> nn.Module:
    config = hf().DistilBertConfig(dim=8, n_layers=2, n_heads=2, hidden_dim=16, vocab_size=11)
    return hf().DistilBertForSequenceClassification(config)


def t5() -> nn.Module:
    config = hf().T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, **TOKENS)
    return hf().T5ForConditionalGeneration(config)


def gpt_neox() -> nn.Module:
    return hf().GPTNeoXForCausalLM(hf().GPTNeoXConfig(**TINY, **TOKENS))


def deberta() -> nn.Module:  # in_proj, which is attention here ...
    return hf().DebertaModel(hf().DebertaConfig(**TINY, vocab_size=11))


def mamba() -> nn.Module:  # ... and is not here
    config = hf().MambaConfig(
        hidden_size=8, num_hidden_layers=2, state_size=4, use_cache=False, **TOKENS
    )
    return hf().MambaModel(config)


def deepseek() -> nn.Module:
    config = hf().DeepseekV2Config(
        **TINY,
        **TOKENS,
        q_lora_rank=4,
        kv_lora_rank=4,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        first_k_dense_replace=1,
    )
    return hf().DeepseekV2ForCausalLM(config)


# Each model with all the names, numbers written N, that its query, key and value weights have.
MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "torch packed": (lambda: nn.MultiheadAttention(8, 2), {"in_proj_weight"}),
    "torch kdim": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True),
        {"q_proj_weight", "k_proj_weight", "v_proj_weight"},
    ),
    "torch encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), num_layers=2
        ),
        {"layers.N.self_attn.in_proj_weight"},
    ),
    "torch transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        {
            "encoder.layers.N.self_attn.in_proj_weight",
            "decoder.layers.N.self_attn.in_proj_weight",
            "decoder.layers.N.multihead_attn.in_proj_weight",
        },
    ),
    "timm": (lambda: nn.Sequential(TimmBlock(), TimmBlock()), {"N.attn.qkv.weight"}),
    "bert": (
        bert,
        {f"bert.encoder.layer.N.attention.self.{x}.weight" for x in ("query", "key", "value")},
    ),
    "bert decoder": (
        bert_with_cross_attention,
        {
            f"bert.encoder.layer.N.{where}.self.{x}.weight"
            for where in ("attention", "crossattention")
            for x in ("query", "key", "value")
        },
    ),
    "gpt2": (
        gpt2,
        {
            "transformer.h.N.attn.c_attn.weight",
            "transformer.h.N.crossattention.c_attn.weight",
            "transformer.h.N.crossattention.q_attn.weight",
        },
    ),
    "llama": (llama, {f"model.layers.N.self_attn.{x}_proj.weight" for x in "qkv"}),
    "vit": (vit, {f"vit.layers.N.attention.{x}_proj.weight" for x in "qkv"}),
    "distilbert": (
        distilbert,
        {f"distilbert.transformer.layer.N.attention.{x}_lin.weight" for x in "qkv"},
    ),
    "t5": (
        t5,
        {
            f"{where}.{x}.weight"
            for where in (
                "encoder.block.N.layer.N.SelfAttention",
                "decoder.block.N.layer.N.SelfAttention",
                "decoder.block.N.layer.N.EncDecAttention",
            )
            for x in "qkv"
        },
    ),
    "gpt-neox": (gpt_neox, {"gpt_neox.layers.N.attention.query_key_value.weight"}),
    "deberta": (deberta, {"encoder.layer.N.attention.self.in_proj.weight"}),
    "mamba": (mamba, set()),
    "deepseek": (
        deepseek,
        {
            f"model.layers.N.self_attn.{x}.weight"
            for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
        },
    ),
}

NO_ATTENTION = pytest.mark.filterwarnings("ignore:no parameter of .* has the name:UserWarning")
# transformers' DeBERTa is scripted, which torch 2.13 deprecates.
SCRIPTED = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

each_model = pytest.mark.parametrize(
    ("build", "attention"),
    [
        pytest.param(
            *model, id=name, marks={"deberta": SCRIPTED, "mamba": NO_ATTENTION}.get(name, ())
        )
        for name, model in MODELS.items()
    ],
)


def names(groups: ParamGroups) -> dict[str, list[str]]:
    return {group["name"]: [name for name, _ in group["params"]] for group in groups}


@pytest.mark.slow
@each_model
def test_attention_is_the_query_key_and_value_weights(
    build: Callable[[], nn.Module], attention: set[str]
) -> None:
    groups = names(attention_param_groups(build()))
    found = {re.sub(r"\d+", "N", name) for name in groups.get("attention", [])}
    assert found == attention
    assert not {re.sub(r"\d+", "N", name) for name in groups["rest"]} & attention


@pytest.mark.slow
@each_model
def test_every_parameter_is_there_once(build: Callable[[], nn.Module], attention: set[str]) -> None:
    model = build()
    groups = attention_param_groups(model)
    got = [param for group in groups for _, param in group["params"]]
    assert len({id(param) for param in got}) == len(got)
    assert {id(param) for param in got} == {id(param) for param in model.parameters()}
    for group in groups:
        for name, param in group["params"]:
            assert model.get_parameter(name) is param


@pytest.mark.slow
@each_model
@pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])
def test_groups_have_their_own_p(
    cls: Any, build: Callable[[], nn.Module], attention: set[str]
) -> None:
    model = build()
    optimizer = cls(attention_param_groups(model, geometry=1.1, rest=2.0), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.step()
    for name, param in model.named_parameters():
        is_attention = re.sub(r"\d+", "N", name) in attention
        assert ("dual" in optimizer.state[param]) == is_attention, name
        if not is_attention:  # one step of SGD, and of Adam, on a gradient of 1
            expected = before[name] - 1e-3
            torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_tied_weights_are_there_once_under_their_first_name() -> None:
    model = llama()
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    rest = names(attention_param_groups(model))["rest"]
    assert "model.embed_tokens.weight" in rest
    assert "lm_head.weight" not in rest


def test_frozen_parameters_are_left_out() -> None:
    model = nn.MultiheadAttention(8, 2)
    model.in_proj_weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="no parameter of MultiheadAttention that requires"):
        groups = names(attention_param_groups(model))
    assert groups == {"rest": ["in_proj_bias", "out_proj.weight", "out_proj.bias"]}


def test_first_match_wins() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    patterns = [
        (r"in_proj", {"geometry": 1.3}),
        (r"proj", {"geometry": 1.4}),
        (r"\.weight$", {"geometry": 1.5, "weight_decay": 0.1}),
        (r"norm1\.weight", {"geometry": 1.6}),  # taken already
    ]
    groups = attention_param_groups(model, geometry=1.1, rest=3.0, patterns=patterns)
    assert names(groups) == {
        "in_proj": ["self_attn.in_proj_weight", "self_attn.in_proj_bias"],
        "proj": ["self_attn.out_proj.weight", "self_attn.out_proj.bias"],
        r"\.weight$": ["linear1.weight", "linear2.weight", "norm1.weight", "norm2.weight"],
        "rest": ["linear1.bias", "linear2.bias", "norm1.bias", "norm2.bias"],
    }
    assert [group["geometry"] for group in groups] == [1.3, 1.4, 1.5, 3.0]
    assert groups[2]["weight_decay"] == 0.1


def test_options_of_a_group_win_over_those_of_all() -> None:
    groups = attention_param_groups(
        nn.TransformerEncoderLayer(8, 2, 16),
        geometry=1.2,
        rest={"geometry": 1.7, "lr": 0.3},
        patterns=[("norm", {"geometry": 2.0, "weight_decay": 0.0})],
        lr=0.1,
        weight_decay=0.5,
    )
    options = {
        group["name"]: (group["geometry"], group["lr"], group["weight_decay"]) for group in groups
    }
    assert options == {
        "norm": (2.0, 0.1, 0.0),
        "attention": (1.2, 0.1, 0.5),
        "rest": (1.7, 0.3, 0.5),
    }


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rset": 3.0}, TypeError, r"options has 'rset'; a group can set betas, .*, weight_decay"),
        ({"rest": {"decay": 0.1}}, TypeError, "rest has 'decay'; a group can set betas"),
        ({"patterns": [("norm", {"q": 2})]}, TypeError, r"patterns\['norm'\] has 'q'; a group can"),
        (
            {"patterns": {"norm": {"geometry": 2}}},
            TypeError,
            "patterns must be pairs .*; got {'norm': {",
        ),
        ({"patterns": [("norm", 1.5)]}, TypeError, "patterns must be pairs .*; got .*1.5"),
        ({"model": [nn.Parameter(torch.ones(2))]}, TypeError, "model must be a module, got list"),
    ],
)
def test_typos_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention_param_groups(**{"model": nn.TransformerEncoderLayer(8, 2, 16), **arguments})


def test_a_pattern_that_matches_nothing_gives_a_warning() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    with pytest.warns(UserWarning, match="'norn', which matches no parameter; names are like"):
        groups = attention_param_groups(model, patterns=[("norn", {"geometry": 2.0})])
    assert list(names(groups)) == ["attention", "rest"]


def test_options_of_schedulers_and_patterns_of_frozen_weights_are_accepted() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    model.norm1.requires_grad_(False)
    patterns = [
        ("norm1", {"geometry": 2.0}),
        ("norm2", {"geometry": 2.0, "lr_scale": 0.1, "name": "last"}),
    ]
    groups = attention_param_groups(model, patterns=patterns, max_lr=0.1, knee=None, momentum=0.9)
    assert list(names(groups)) == ["last", "attention", "rest"]
    assert groups[0]["lr_scale"] == 0.1


@pytest.mark.parametrize("pattern", ["(", "[a", "*"])
def test_bad_regular_expression(pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"patterns has {pattern!r}")):
        attention_param_groups(nn.MultiheadAttention(8, 2), patterns=[(pattern, {"geometry": 2.0})])


@pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])
def test_bad_option_of_a_group_is_refused(cls: Any) -> None:
    model = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match="geometry must be"):
        cls(attention_param_groups(model, geometry=1.0), lr=0.1)


def test_prints_what_it_grouped() -> None:
    model = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16)
    attention, rest = str(attention_param_groups(model, geometry=1.1, lr=0.5)).splitlines()
    assert attention == (
        "attention (lr=0.5, geometry=1.1): 1 tensors, 192 parameters: self_attn.in_proj_weight"
    )
    total = sum(param.numel() for param in model.parameters())
    assert rest.startswith(f"rest (lr=0.5, geometry=2.0): 11 tensors, {total - 192} parameters: ")
    assert rest.endswith(", and 7 more")


def test_names_reach_the_error_message() -> None:
    model = nn.MultiheadAttention(8, 2)
    optimizer = MirrorDescent(attention_param_groups(model), lr=0.1)
    model.in_proj_weight.grad = torch.full_like(model.in_proj_weight, torch.nan)
    with pytest.raises(RuntimeError, match="gradient of 'in_proj_weight' is not"):
        optimizer.step()


def test_groups_survive_a_checkpoint() -> None:
    def build(seed: int) -> tuple[nn.Module, MirrorDescent]:
        torch.manual_seed(seed)
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        return model, MirrorDescent(attention_param_groups(model, geometry=1.1), lr=0.1)

    def train(model: nn.Module, optimizer: MirrorDescent) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 32).view(1, 4, 8)).square()[..., 0].sum().backward()
            optimizer.step()

    model, optimizer = build(0)
    train(model, optimizer)
    other, resumed = build(1)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert [group["name"] for group in resumed.param_groups] == ["attention", "rest"]
    train(model, optimizer)
    train(other, resumed)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def linears(*names: str) -> nn.Module:
    module = nn.Module()
    for name in names:
        module.add_module(name, nn.Linear(2, 2, bias=False))
    return module


def test_key_and_value_need_a_query() -> None:
    model = nn.Module()
    model.critic = linears("value", "key")
    model.attn = linears("query", "key", "value")
    model.reformer = linears("query_key", "value")
    model.rwkv = linears("receptance", "key", "value")
    model.attn.query.requires_grad_(False)  # a query that is not trained is one, too
    groups = names(attention_param_groups(model))
    assert groups["rest"] == ["critic.value.weight", "critic.key.weight", "rwkv.receptance.weight"]
    assert len(groups["attention"]) == 6


@pytest.mark.parametrize("projections", ["wq wk wv", "w_q w_k w_v", "wqkv", "W_q W_kv"])
def test_names_of_llama_and_others(projections: str) -> None:
    found = projections.split()
    groups = names(attention_param_groups(linears(*found, "wo", "w1")))
    assert groups == {
        "attention": [f"{name}.weight" for name in found],
        "rest": ["wo.weight", "w1.weight"],
    }


def test_a_model_without_attention_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match="no parameter of Linear that requires a gradient"):
        groups = attention_param_groups(nn.Linear(3, 2))
    assert names(groups) == {"rest": ["weight", "bias"]}


class Adapter(nn.Module):
    """A projection as PEFT wraps it: names like q_proj.lora_A.default.weight."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})


def test_names_of_adapters_parametrizations_and_wrappers() -> None:
    block = nn.Module()
    block.q_proj = Adapter(nn.Linear(8, 8))
    block.up_proj = Adapter(nn.Linear(8, 8))
    block.k_proj = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.Module()
    model.module = nn.Module()  # as DDP has it
    model.module.self_attn = block
    groups = names(attention_param_groups(model))
    at = "module.self_attn."
    assert groups["attention"] == [
        f"{at}q_proj.base_layer.weight",
        f"{at}q_proj.lora_A.default.weight",
        f"{at}q_proj.lora_B.default.weight",
        f"{at}k_proj.parametrizations.weight.original0",
        f"{at}k_proj.parametrizations.weight.original1",
    ]
    assert f"{at}up_proj.lora_A.default.weight" in groups["rest"]
    own = attention_param_groups(model, patterns=[(r"q_proj\.weight$", {"geometry": 1.3})])
    assert len(names(own)[r"q_proj\.weight$"]) == 3


@pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])
def test_plain_parameters(cls: Any) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0)
    groups = attention_param_groups(model, geometry=1.1, named=False)
    assert "attention (geometry=1.1): 1 tensors, 192 parameters: (24, 8)" in str(groups)
    model(torch.ones(2, 3, 8)).square().sum().backward()
    for group in groups:
        nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimizer = cls(groups, lr=0.1)
    optimizer.step()
    assert [group["geometry"] for group in optimizer.param_groups] == [1.1, 2.0]
