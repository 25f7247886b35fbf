"""Reading `config.json`: every family in the old style and the new, what is refused, and how ranks
share a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.attention_maker import head_shards
from aioinfer.layers.mixture import MixtureShape, Routing
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.recurrence import DeltaNetShape
from aioinfer.layers.rotary import RopeConfig
from aioinfer.models.config import DecoderConfig
from aioinfer.models.registry import families, load_model_config
from tests.tiny_models import FAMILIES, tiny_model

BASE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip


def read(
    folder: Path, family: str = "Llama", without: str | None = None, **fields: Any
) -> DecoderConfig:
    fields = {"architectures": [f"{family}ForCausalLM"]} | BASE | fields
    fields.pop(without, None)
    (folder / "config.json").write_text(json.dumps(fields))
    return load_model_config(folder)


def biases_of(config: Any) -> tuple[bool, bool, bool]:
    """Returns whether queries, keys and values, the output projection and the MLP have biases."""
    if hasattr(config, "attention_bias"):
        return config.attention_bias, config.attention_bias, config.mlp_bias
    return config.qkv_bias, config.output_bias, False


@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_both_styles(tmp_path: Path, family: str, style: str):
    yarn = {"factor": 4.0, "original_max_position_embeddings": 1024}
    if style == "old":
        fields = {
            "torch_dtype": "bfloat16",
            "rope_theta": 5e5,
            "rope_scaling": {"type": "yarn", **yarn},
        }
    else:
        fields = {
            "dtype": "bfloat16",
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **yarn},
        }
    config = read(tmp_path, family, head_dim=8, sliding_window=None, **fields)
    assert config.dtype == torch.bfloat16
    assert (config.rope.theta, config.rope.kind, config.rope.scaling) == (5e5, "yarn", yarn)
    found = (config.max_len, config.head_size, config.num_heads, config.num_kv_heads)
    assert found == (4096, 8, 8, 2)
    assert config.windows == (None,) * 4
    assert not config.tied_embeddings
    assert biases_of(config) == (family == "Qwen2", False, False)
    assert getattr(config, "head_norms", False) == (family == "Qwen3")


# DeepSeek's heads have parts
OTHER_HEADS = ("deepseek_v2", "deepseek_v3", "kimi_linear")
#: Families whose heads are as wide as the hidden size over their number, and of these families
#: without heads that share keys.
NARROW_HEADS = (
    "cohere2", "ernie4_5_moe", "falcon", "gpt2", "olmo3", "olmoe", "opt", "phi", "stablelm"
)  # fmt: skip
SINGLE_HEADS = ("gpt2", "opt")
#: Families of which some layers read the KV cache of earlier ones: a small model takes five.
SHARED_KV = ("gemma3n_text", "gemma4_text")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OTHER_HEADS])
def test_what_transformers_writes(tmp_path: Path, family: str):
    config = load_model_config(
        tiny_model(family, tmp_path, tie_word_embeddings=True, dtype=torch.float16)
    )
    architecture = json.loads((tmp_path / "config.json").read_text("utf-8"))["architectures"][0]
    assert type(config) is families()[architecture].config
    found = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers)
    assert found == (512, 64, 96, 5 if family in SHARED_KV else 2)
    assert (config.num_heads, config.num_kv_heads, config.head_size, config.max_len) == (
        8, 8 if family in SINGLE_HEADS else 2, 8 if family in NARROW_HEADS else 16, 512,
    )  # fmt: skip
    found = (config.tied_embeddings, config.dtype, config.rope.kind)
    assert found == (True, torch.float16, "proportional" if family == "gemma4_text" else "default")


def test_what_may_be_left_out(tmp_path: Path):
    config = read(tmp_path, without="num_key_value_heads")
    found = (config.num_kv_heads, config.head_size, config.rope.theta, config.dtype)
    assert found == (8, 8, 10_000.0, torch.float32)
    assert read(tmp_path, "Qwen3").head_size == 128


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("Llama", {"sliding_window": 9}, (None,) * 4),
        ("Mistral", {"sliding_window": 9}, (9,) * 4),
        ("Mistral", {"sliding_window": None}, (None,) * 4),
        ("Mistral", {}, (4096,) * 4),
        ("Qwen2", {"sliding_window": 9}, (None,) * 4),
        (
            "Qwen2",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 9),
        ),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": True}, (None,) * 4),
        (
            "Qwen3",
            {"sliding_window": 9, "use_sliding_window": True,
             "layer_types": ["sliding_attention", "full_attention"] * 2},
            (9, None, 9, None),
        ),
        ("Gemma2", {}, (4096, None, 4096, None)),
        ("Gemma2", {"sliding_window": 9, "layer_types": ["sliding_attention"] * 4}, (9,) * 4),
        ("Gemma3", {"sliding_window": 9}, (9,) * 4),
        ("Gemma3", {"sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, None, 9)),
        ("Phi3", {}, (None,) * 4),
        ("Phi3", {"sliding_window": 2047}, (2047,) * 4),
        ("Phi3", {"sliding_window": 2048}, (None,) * 4),
        (
            "Qwen3",
            {
                "sliding_window": None,
                "use_sliding_window": False,
                "layer_types": ["full_attention"] * 4,
            },
            (None,) * 4,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_sliding_windows(
    tmp_path: Path, family: str, fields: dict[str, Any], windows: tuple[int | None, ...]
):
    assert read(tmp_path, family, **fields).windows == windows


ROPE = {"original_max_position_embeddings": 2048}
GRANITE = {
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
}
#: What published models have beside `BASE`, and what is read: the rest has a family's defaults.
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma-2-2b": (
        "Gemma2", {"rope_theta": 10_000.0},
        {
            "activation": "gelu_pytorch_tanh", "head_size": 256, "scale": 1 / 16, "soft_cap": 50.0,
            "logit_soft_cap": 30.0, "tied_embeddings": True, "head_norms": False,
            "rope": RopeConfig(10_000.0, "default", ROPE),
            "local_rope": RopeConfig(10_000.0, "default", ROPE),
        },
    ),
    "gemma-3-4b": (
        "Gemma3",
        {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        {
            "activation": "gelu_pytorch_tanh", "head_size": 256, "scale": 1 / 16, "soft_cap": 0.0,
            "logit_soft_cap": 0.0, "tied_embeddings": True, "head_norms": True, "max_len": 2048,
            "rope": RopeConfig(1e6, "linear", {"factor": 8.0, **ROPE}),
            "local_rope": RopeConfig(1e4, "default", ROPE),
        },
    ),
    "GLM-4-9B-0414": (
        "Glm4", {"attention_bias": False},
        {
            "attention_bias": False, "head_size": 128,
            "rope": RopeConfig(1e4, "default", ROPE, 64, interleaved=True),
        },
    ),
    "granite-3.3-2b": ("Granite", GRANITE, GRANITE),
    "OLMo-2-1124-7B": (
        "Olmo2", {"rope_theta": 5e5},
        {"attention_bias": False, "tied_embeddings": False},
    ),
    "Kimi-Linear-48B-A3B": (
        "KimiLinear",
        {
            "model_max_length": 4096, "num_hidden_layers": 5, "head_dim": 72, "kv_lora_rank": 512,
            "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
            "num_expert_group": 1, "topk_group": 1, "moe_intermediate_size": 1024,
            "moe_renormalize": True, "moe_layer_freq": 1, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
            "linear_attn_config": {
                "full_attn_layers": [4], "kda_layers": [1, 2, 3, 5], "head_dim": 96,
                "num_heads": 16, "short_conv_kernel_size": 4,
            },
        },
        {
            "max_len": 4096,
            "has_attention": (False, False, False, True, False),
            "delta": DeltaNetShape(16, 16, 96, 96, 4, by_channel=True),
            "mixture": MixtureShape(
                Routing(256, 8, "sigmoid", scale=2.446, has_bias=True),
                1024, 1024, dense_layers=frozenset([0]),
            ),
        },
    ),
    "phi-4": (
        "Phi3",
        {"rope_theta": 2.5e5, "rope_scaling": None, "partial_rotary_factor": 1.0},
        {"rope": RopeConfig(2.5e5, "default", {"original_max_position_embeddings": 4096})},
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_fields_of_a_family(tmp_path: Path, model: str):
    family, fields, expected = PUBLISHED[model]
    config = read(tmp_path, family, **fields)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("family", "biases"),
    [
        ("Llama", (True, True, True)),
        ("Mistral", (False, False, False)),
        ("Qwen2", (True, False, False)),
        ("Qwen3", (True, True, False)),
    ],
)
def test_biases(tmp_path: Path, family: str, biases: tuple[bool, bool, bool]):
    config = read(tmp_path, family, attention_bias=True, mlp_bias=True)
    assert biases_of(config) == biases


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["MptForCausalLM"]},
            r"\['MptForCausalLM'\] is none of BambaForCausalLM, .*; transformers cannot read",
        ),
        ({"architectures": None}, "None is none of .* cannot read"),
        ({"hidden_act": "relu6"}, "'relu6' is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq' is not supported.*gptq"),
        ({"dtype": "int3"}, "'int3'"),
        ({"rope_scaling": {"type": "xpos"}}, "'xpos' is not supported"),
        ({"family": "Gemma3", "use_bidirectional_attention": True}, "only causal models"),
        ({"family": "Phi3", "rope_scaling": {"type": "yarn"}}, "Phi-3 has no RoPE variant 'yarn'"),
        ({"without": "hidden_size"}, r"config\.json lacks 'hidden_size'"),
        ({"family": "Qwen3_5", "layer_types": ["full_attention"]}, "layer_types has 1 entries for"),
        ({"family": "Qwen3_5", "linear_num_value_heads": 24}, "must be a multiple of linear_num_k"),
        ({"family": "Bamba", "mamba_n_groups": 3}, "128 heads of Mamba-2 must be a multiple of"),
        ({"family": "FalconH1", "mlp_multipliers": [1.0]}, "must be a list of 2 numbers"),
        ({"family": "FalconH1", "ssm_multipliers": 5 * ["a"]}, "ssm_multipliers must be a number"),
        (
            {"family": "FalconH1", "attention_bias": True, "attention_in_multiplier": 0.5},
            "not supported for projections with biases",
        ),
        ({"family": "Cohere2", "layer_types": ["conv"]}, "'conv', which this family has not"),
    ],
    ids=str,
)
def test_models_that_are_not_supported(tmp_path: Path, fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **fields)


@pytest.mark.parametrize("content", [None, "{", "[1]", "\x80"])
def test_a_config_that_cannot_be_read(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "config.json"))):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "fitting", "others"),
    [
        (9, 3, 1536, [1, 3], [2, 4, 9]),  # SmolLM2-135M: nine ranks would not divide the MLP
        (9, 3, 1539, [1, 3, 9], [2]),
        (8, 2, 96, [1, 2, 4, 8], [3, 16]),
        (14, 2, 4864, [1, 2], [7, 14]),  # Qwen2.5-0.5B
        (12, 4, 96, [1, 2, 4, 12], [3, 6]),
    ],
)
def test_ranks_that_divide_the_model(
    tmp_path: Path,
    heads: int,
    kv_heads: int,
    intermediate: int,
    fitting: list[int],
    others: list[int],
):
    config = read(
        tmp_path, hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
    )  # fmt: skip
    for size in fitting:
        config.check_tensor_parallel(size)
    for size in others:
        with pytest.raises(
            ConfigError,
            match=rf"tensor_parallel_size = {size} .*these do: "
            rf"{', '.join(map(str, fitting))}$",
        ):
            config.check_tensor_parallel(size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 2, 8), (9, 3, 3), (9, 3, 9), (4, 4, 2), (6, 1, 3)],
)
def test_ranks_have_the_kv_heads_of_their_queries(heads: int, kv_heads: int, size: int):
    group, queries = heads // kv_heads, []
    for rank in range(size):
        mine, kv = (
            range(shard.start, shard.start + shard.size)
            for shard in head_shards(heads, kv_heads, ParallelGroup(rank, size))
        )
        queries += mine
        assert {head // group for head in mine} == set(kv)
        assert len(mine) % len(kv) == 0
    assert queries == list(range(heads))


GPT_OSS_YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
}  # fmt: skip


def test_gpt_oss_as_it_is_published(tmp_path: Path):
    """The fields of the 20B model that are read; with heads, windows and experts of a family whose
    defaults are not those of others."""
    fields = {
        "attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_scaling": GPT_OSS_YARN,
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
    }  # fmt: skip
    config: Any = read(tmp_path, "GptOss", **fields)
    assert config.windows == (128, None) * 12
    assert (config.rope.theta, config.rope.kind) == (150_000.0, "yarn")
    assert config.rope.scaling == {
        name: value for name, value in GPT_OSS_YARN.items() if name != "rope_type"
    }
    assert (config.max_len, config.head_size, config.attention_bias) == (131_072, 64, True)
    assert (config.swiglu.alpha, config.swiglu.limit) == (1.702, 7.0)
    routing = config.mixture.routing
    assert (routing.num_experts, routing.top_k, routing.has_logit_bias) == (32, 4, True)
    assert config.mixture.expert_size == 2880
    for size in (1, 2, 4, 8):
        config.check_tensor_parallel(size)
    for name in ("layer_types", "head_dim", "rope_theta", "sliding_window"):
        left_out: Any = read(tmp_path, "GptOss", without=name, **fields)
        assert left_out == config
    with pytest.raises(ConfigError, match="swiglu_limit must be above 0, not 0"):
        read(tmp_path, "GptOss", **{**fields, "swiglu_limit": 0})
    with pytest.raises(ConfigError, match="num_experts_per_tok = 33 exceeds the 32 experts"):
        read(tmp_path, "GptOss", **{**fields, "num_experts_per_tok": 33})
