"""Reading `config.json`: every family in the old style and the new, what is refused, and how ranks
share a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from aioinfer.models.architecture import Architecture

from aioinfer.errors import ConfigError
from tests.tiny_models import tiny_model

BASE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip


def read(
    folder: Path, family: str = "Llama", without: str | None = None, **fields: Any
) -> Architecture:
    config = {"architectures": [f"{family}ForCausalLM"]} | BASE | fields
    config.pop(without, None)
    (folder / "config.json").write_text(json.dumps(config))
    return Architecture.load(folder)


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
    arch = read(tmp_path, family, head_dim=8, sliding_window=None, **fields)
    assert arch.dtype == torch.bfloat16
    assert (arch.rope.theta, arch.rope.kind, arch.rope.scaling) == (5e5, "yarn", yarn)
    assert (arch.max_position_embeddings, arch.head_size, arch.num_heads, arch.num_kv_heads) == (
        4096,
        8,
        8,
        2,
    )
    assert arch.sliding_windows == (None,) * 4
    assert not arch.tie_word_embeddings
    assert (arch.qkv_bias, arch.output_bias, arch.mlp_bias, arch.qk_norm) == (
        family == "Qwen2",
        False,
        False,
        family == "Qwen3",
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_writes(tmp_path: Path, family: str):
    arch = Architecture.load(
        tiny_model(family, tmp_path, tie_word_embeddings=True, dtype=torch.float16)
    )
    assert arch.family.lower() == f"{family}forcausallm"
    assert (arch.vocab_size, arch.hidden_size, arch.intermediate_size, arch.num_layers) == (
        512,
        64,
        96,
        2,
    )
    assert (arch.num_heads, arch.num_kv_heads, arch.head_size, arch.max_position_embeddings) == (
        8,
        2,
        16,
        512,
    )
    assert (arch.tie_word_embeddings, arch.dtype, arch.rope.kind) == (
        True,
        torch.float16,
        "default",
    )


def test_what_may_be_left_out(tmp_path: Path):
    arch = read(tmp_path, without="num_key_value_heads")
    assert (arch.num_kv_heads, arch.head_size, arch.rope.theta, arch.dtype) == (
        8,
        8,
        10_000.0,
        torch.float32,
    )
    assert read(tmp_path, "Qwen3").head_size == 128


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("Llama", {"sliding_window": 9}, (None,) * 4),
        ("Mistral", {"sliding_window": 9}, (9,) * 4),
        ("Mistral", {"sliding_window": None}, (None,) * 4),
        ("Mistral", {}, (4096,) * 4),
        ("Qwen2", {"sliding_window": 9}, (None,) * 4),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 9)),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": True}, (None,) * 4),
        ("Qwen3", {"sliding_window": 9, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
         (9, None, 9, None)),
        ("Qwen3", {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
    ids=str,
)  # fmt: skip
def test_sliding_windows(
    tmp_path: Path, family: str, fields: dict[str, Any], windows: tuple[int | None, ...]
):
    assert read(tmp_path, family, **fields).sliding_windows == windows


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
    arch = read(tmp_path, family, attention_bias=True, mlp_bias=True)
    assert (arch.qkv_bias, arch.output_bias, arch.mlp_bias) == biases


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"\['GPT2LMHeadModel'\] is not "
            r"supported.*LlamaForCausalLM, .*Qwen3ForCausalLM",
        ),
        ({"architectures": None}, "not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"dtype": "int3"}, "'int3'"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "'su' is not supported"),
        ({"without": "hidden_size"}, r"config\.json lacks 'hidden_size'"),
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
        Architecture.load(tmp_path)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "fitting", "others"),
    [
        (9, 3, 1536, [1, 3], [2, 4, 9]),  # SmolLM2-135M: nine ranks would not divide the MLP
        (9, 3, 1539, [1, 3, 9], [2]),
        (8, 2, 96, [1, 2, 4, 8], [3, 16]),
        (14, 2, 4864, [1, 2], [7, 14]),  # Qwen2.5-0.5B
        (6, 4, 96, [1, 2], [3, 6]),
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
    arch = read(
        tmp_path,
        hidden_size=8 * heads,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
    )
    for size in fitting:
        arch.check_tensor_parallel(size)
    for size in others:
        with pytest.raises(
            ConfigError,
            match=rf"tensor_parallel_size = {size} .*these do: "
            rf"{', '.join(map(str, fitting))}$",
        ):
            arch.check_tensor_parallel(size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 2, 8), (9, 3, 3), (9, 3, 9), (4, 4, 2), (6, 1, 3)],
)
def test_ranks_hold_the_kv_heads_of_their_queries(
    tmp_path: Path, heads: int, kv_heads: int, size: int
):
    arch = read(
        tmp_path, hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    group, queries = heads // kv_heads, []
    for rank in range(size):
        mine, kv = arch.heads_of_rank(rank, size)
        queries += mine
        assert {head // group for head in mine} == set(kv)
        assert len(mine) % len(kv) == 0
        assert arch.kv_bytes_per_token(size, 2) == 2 * 4 * len(kv) * 8 * 2
    assert queries == list(range(heads))
