"""Every family over the kernels gives what it gives in plain torch, in float32: a prefill, a mixed
step, and decodes of three rows and of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.layers.kv_cache import FLOAT8
from tests.kernels.bound_model import Bound, assert_close, last_tokens, random_ids
from tests.test_models import NEMOTRON_EXPERTS, rope
from tests.tiny_models import tiny_model

_WINDOWED = ["sliding_attention", "full_attention"]
#: One layer of each kind; heads of 64 channels.
SIZES = {"vocab_size": 100, "hidden_size": 128, "head_dim": 64, "num_attention_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    # layers that read the cache of others, norms of values, two head sizes, keys as values
    "gemma4": ("gemma4_text", {"global_head_dim": 128}),
    "gemma4 keys as values": (
        "gemma4_text",
        {"global_head_dim": 128, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
         "hidden_size_per_layer_input": 0, "num_hidden_layers": 3,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
         "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
         "moe_intermediate_size": 24},
    ),
    "gemma3n": ("gemma3n_text", {}),
    # queries scaled by position
    "ministral3": (
        "ministral3",
        rope("yarn", original_max_position_embeddings=4, llama_4_scaling_beta=0.7),
    ),
    "phi3": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "stablelm": ("stablelm", {"qk_layernorm": True}),
    "phi": ("phi", {}),
    "opt": ("opt", {"num_key_value_heads": 2}),
    "falcon": ("falcon", {"num_kv_heads": 1}),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "glm4": ("glm4", {}),
    "gpt_oss": ("gpt_oss", {}),
    # norms of queries and keys behind the rotation; layers without rotation; ALiBi
    "hunyuan": ("hunyuan_v1_dense", {}),
    "cohere2": ("cohere2", {"sliding_window": 6, "layer_types": _WINDOWED}),
    "gpt2": ("gpt2", {"num_key_value_heads": 2}),
    "falcon_rw": (
        "falcon",
        {
            "alibi": True,
            "new_decoder_architecture": False,
            "multi_query": False,
            "parallel_attn": False,
        },
    ),
    # states, and gates of attention's outputs
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_next": ("qwen3_next", {"mlp_only_layers": [0, 1], "linear_value_head_dim": 16}),
    "lfm2": ("lfm2", {"conv_bias": True}),
    "bamba": ("bamba", {"mamba_n_heads": 8, "mamba_d_head": 32}),
    "kimi_linear": (
        "kimi_linear",
        {"num_key_value_heads": 2, "linear_head_dim": 24, "mlp_layer_types": ["dense", "dense"]},
    ),
    "falcon_h1": ("falcon_h1", {"mamba_n_groups": 1}),
    "falcon_h1 norm before the gate": ("falcon_h1", {"mamba_rms_norm": True}),
    "granite experts": (
        "granitemoehybrid",
        {"mamba_d_head": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron experts": ("nemotron_h", NEMOTRON_EXPERTS | {"layers_block_type": ["mamba", "moe"]}),
    # both projections of the queries, and one; without experts
    "deepseek_v3": ("deepseek_v3", {"num_key_value_heads": 2, "first_k_dense_replace": 2}),
    "deepseek_v2": ("deepseek_v2", {"num_key_value_heads": 2, "first_k_dense_replace": 2}),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_a_prefill_and_decodes(name: str, tmp_path: Path) -> None:
    family, fields = FAMILIES[name]
    tiny_model(family, tmp_path, **{**SIZES, "num_key_value_heads": 1, **fields})
    over_kernels, plain = (Bound(tmp_path, kernels=use, fill=torch.nan) for use in (True, False))
    assert "they lack" not in over_kernels.model.describe(16)
    for starts, lengths in (
        ([0, 0, 0], [20, 5, 33]),
        ([20, 5, 33], [1, 1, 5]),
        ([21, 6, 38], [1, 1, 1]),
    ):
        ids = random_ids(lengths)
        expected = plain.run(plain.step(starts, lengths, ids))
        step = over_kernels.step(starts, lengths, ids)
        step.sampled = last_tokens(step, [0, 1, 2])
        hidden = over_kernels.run(step)
        assert_close(hidden, expected[step.sampled.last])
        for rows in (3, 1):
            logits = plain.model.logits(hidden[:rows])
            assert_close(over_kernels.model.logits(hidden[:rows]), logits)


@torch.inference_mode()
def test_a_float8_cache(tmp_path: Path) -> None:
    """A prefill and decodes, the last layer for sampled rows alone; scales and shifts of two
    heads."""
    tiny_model("qwen3", tmp_path, **{**SIZES, "num_attention_heads": 4})
    over_kernels, plain = (
        Bound(tmp_path, kernels=use, fill=torch.nan, cache_dtype=FLOAT8) for use in (True, False)
    )
    for bound in (over_kernels, plain):
        for scales in bound.model.kv_scales.values():
            scales.set(torch.tensor([0.02, 0.1]), torch.tensor([0.05, 0.004]))
            assert scales.key_shifts is not None
            scales.key_shifts.copy_(torch.linspace(-1, 1, scales.key_shifts.numel()).view(2, -1))
    for starts, lengths in (([0, 0, 0], [20, 5, 33]), ([20, 5, 33], [1, 1, 5])):
        ids = random_ids(lengths)
        expected = plain.run(plain.step(starts, lengths, ids))
        step = over_kernels.step(starts, lengths, ids)
        step.sampled = last_tokens(step, [0, 1, 2])
        hidden, wanted = over_kernels.run(step), expected[step.sampled.last]
        # rounding to another number of float8, rarely, is far below rounding to them at all
        assert (hidden - wanted).norm() < 5e-3 * wanted.norm()
    for found, wanted in zip(over_kernels.kv, plain.kv, strict=True):
        found, wanted = found.float().nan_to_num(), wanted.float().nan_to_num()
        assert (found != wanted).float().mean() < 1e-3
