"""RoPE tables against transformers' own, for every variant and for configurations that leave
numbers out."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, Qwen2_5_VLTextConfig, Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from aioinfer.errors import ConfigError
from aioinfer.layers.rotary import (
    RopeConfig,
    RotaryTable,
    apply_rope,
    half_split_order,
    inverse_wavelengths,
)
from aioinfer.models.config import DecoderConfig
from aioinfer.models.registry import load_model_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


def read(folder: Path, **fields: Any) -> DecoderConfig:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 256,
        "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 4096, "rope_theta": 1e6,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | fields))
    return load_model_config(folder)


def load_theirs(folder: Path) -> LlamaConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on numbers that transformers does not expect, and uses
        return LlamaConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 10_240),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": LLAMA3}, 4096),
        (
            {
                "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 512},
                "original_max_position_embeddings": 1024,
            },
            4096,
        ),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 4096}}, 16_384),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": YARN}, 16_384),
        ({"rope_scaling": YARN | {"attention_factor": 0.7}}, 16_384),
        ({"rope_scaling": YARN | {"mscale": 0.9, "mscale_all_dim": 0.7}}, 16_384),
        ({"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False}}, 16_384),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 1}, "rope_theta": 100.0}, 16_384),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": None,
                                 "original_max_position_embeddings": 512},
            },
            4096,
        ),
        (
            {
                "rope_parameters": YARN
                | {"rope_theta": 5e5, "original_max_position_embeddings": 2048}
            },
            8192,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_variants_equal_transformers(tmp_path: Path, fields: dict[str, Any], longest: int):
    config = read(tmp_path, **fields)
    theirs = load_theirs(tmp_path)
    expected, expected_scale = ROPE_INIT_FUNCTIONS[config.rope.kind](theirs)
    inverse, scale = inverse_wavelengths(config.rope, config.head_size)
    assert inverse.shape == (64,)
    torch.testing.assert_close(inverse, expected, rtol=2e-6, atol=0)
    assert scale == pytest.approx(expected_scale)
    assert config.max_len == longest


@pytest.mark.parametrize("numbers", [{}, {"attention_factor": 1.25}, {"factor": 32.0}], ids=str)
@pytest.mark.parametrize("served_len", [512, 513])
@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope_equals_transformers(
    tmp_path: Path, name: str, served_len: int, numbers: dict[str, Any]
):
    """Short factors as far as the original length, long ones where more is served."""
    factors = {"short_factor": [1 + i / 48 for i in range(48)], "long_factor": list(range(2, 50))}
    fields: dict[str, Any] = {
        "rope_scaling": {"type": name, **factors, **numbers},
        "original_max_position_embeddings": 512,
        "partial_rotary_factor": 0.75,
    }
    config = read(tmp_path, **fields)
    assert config.rope.rotary_size == 96
    fields["rope_scaling"]["type"] = "longrope"  # transformers fails with the old name
    read(tmp_path, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = Phi3Config.from_pretrained(tmp_path)
    expected, expected_scale = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=served_len)
    inverse, scale = inverse_wavelengths(config.rope, 96, served_len)
    torch.testing.assert_close(inverse, expected, rtol=2e-6, atol=0)
    assert scale == pytest.approx(expected_scale)
    assert config.max_len == 4096
    table = RotaryTable(config.rope, 128, 4096, torch.device("cpu"), served_len)
    torch.testing.assert_close(table.cos_sin[1, :48], expected.cos() * scale)


@pytest.mark.parametrize(
    "fields", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
def test_rotary_of_a_part_of_the_channels(tmp_path: Path, fields: dict[str, Any]):
    config = read(tmp_path, **fields)
    assert config.rope.rotary_size == 64
    table = RotaryTable(config.rope, config.head_size, 16, torch.device("cpu"))
    x = torch.randn(5, 2, 128)
    rotated = apply_rope(x, *table.at(torch.arange(5)))
    assert torch.equal(rotated[..., 64:], x[..., 64:])
    alone = RotaryTable(RopeConfig(config.rope.theta), 64, 16, torch.device("cpu"))
    assert torch.equal(rotated[..., :64], apply_rope(x[..., :64], *alone.at(torch.arange(5))))


def test_interleaved_heads_after_reordering():
    """Rotating reordered heads gives what transformers gives for heads in GPT-J's order."""
    table = RotaryTable(RopeConfig(100.0, rotary_size=8), 12, 16, torch.device("cpu"))
    order, positions = half_split_order(2, 12, 8), torch.arange(5)
    assert order[12:].tolist() == [12, 14, 16, 18, 13, 15, 17, 19, 20, 21, 22, 23]
    x = torch.randn(5, 2, 12)
    cos, sin = table.cos_sin[positions].chunk(2, dim=-1)
    theirs, _ = apply_interleaved(
        x[None], x[None], torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None], 2
    )
    ours = apply_rope(x.flatten(1)[:, order].view(5, 2, 12), *table.at(positions))
    torch.testing.assert_close(ours.flatten(1), theirs[0].flatten(1)[:, order])


def test_dynamic_has_the_factor_of_its_longest_text(tmp_path: Path):
    config = read(tmp_path, rope_scaling={"type": "dynamic", "factor": 3.0})
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](load_theirs(tmp_path), seq_len=3 * 4096)
    inverse, scale = inverse_wavelengths(config.rope, config.head_size)
    torch.testing.assert_close(inverse, expected, rtol=2e-6, atol=0)
    assert (scale, config.max_len) == (1.0, 12_288)


@pytest.mark.parametrize(
    "fields", [{}, {"rope_scaling": None}, {"rope_scaling": YARN}], ids=["default", "null", "yarn"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_rope_equals_transformers(tmp_path: Path, fields: dict[str, Any], dtype: torch.dtype):
    """Down to the last positions; in bfloat16 the result alone is rounded."""
    config = read(tmp_path, **fields)
    theirs = LlamaRotaryEmbedding(load_theirs(tmp_path))
    positions = torch.tensor([0, 1, 2, 100, config.max_len - 1])
    torch.manual_seed(0)
    queries, keys = torch.randn(5, 3, 128).to(dtype), torch.randn(5, 2, 128).to(dtype)
    cos, sin = theirs(queries.float(), positions[None])
    expected = apply_rotary_pos_emb(
        queries.float().transpose(0, 1)[None], keys.float().transpose(0, 1)[None], cos, sin
    )
    table = RotaryTable(config.rope, config.head_size, config.max_len, torch.device("cpu"))
    angles = table.at(positions)
    assert [tuple(part.shape) for part in angles] == [(5, 1, 128)] * 2
    for x, right in zip((queries, keys), expected, strict=True):
        rotated = apply_rope(x, *angles)
        assert rotated.dtype == dtype
        if dtype == torch.float32:
            # an angle of 16 000 rounds
            torch.testing.assert_close(rotated, right[0].transpose(0, 1), rtol=0, atol=5e-4)
        else:
            torch.testing.assert_close(
                rotated.float(), right[0].transpose(0, 1), rtol=2**-8, atol=5e-4
            )


SECTIONS = [
    ({"type": "mrope", "mrope_section": [16, 24, 24]}, Qwen2_5_VLTextConfig,
     Qwen2_5_VLRotaryEmbedding),
    ({"mrope_section": [24, 20, 20], "mrope_interleaved": True}, Qwen3VLTextConfig,
     Qwen3VLTextRotaryEmbedding),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "config_class", "embedding"), SECTIONS)
def test_three_positions_a_token_equal_transformers(
    tmp_path: Path, scaling: dict[str, Any], config_class: Any, embedding: Any
):
    """In time, height and width, which differ."""
    config = read(tmp_path, rope_scaling=scaling, rope_theta=1e4)
    given = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": scaling["mrope_section"]}
    theirs = embedding(config_class(
        hidden_size=256, num_attention_heads=2, num_key_value_heads=2, head_dim=128,
        rope_parameters=given,
    ))  # fmt: skip
    positions = torch.tensor([[0, 5, 5, 5, 90], [0, 5, 6, 7, 90], [0, 9, 2, 77, 90]])
    torch.manual_seed(0)
    x = torch.randn(5, 3, 128)
    cos, sin = theirs(x, positions[:, None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    table = RotaryTable(config.rope, 128, config.max_len, torch.device("cpu"))
    rotated = apply_rope(x, *table.at(positions))
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1))
    assert not torch.allclose(rotated[2], apply_rope(x, *table.at(positions[0]))[2], atol=0.1)
    one_each = torch.stack([positions[0]] * 3)
    assert torch.equal(apply_rope(x, *table.at(one_each)), apply_rope(x, *table.at(positions[0])))


def test_sections_of_other_heads_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"mrope_section .* 64 pairs"):
        read(tmp_path, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 25]})
    with pytest.raises(ConfigError, match="three integers"):
        read(tmp_path, rope_scaling={"type": "mrope", "mrope_section": [16, 48]})


def test_scores_depend_on_distances_alone():
    table = RotaryTable(RopeConfig(theta=10_000.0), 64, 2048, torch.device("cpu"))
    query, key = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0))

    def score(at: int, distance: int) -> float:
        return float(
            (
                apply_rope(query, *table.at(torch.tensor([at])))
                * apply_rope(key, *table.at(torch.tensor([at - distance])))
            ).sum()
        )

    assert score(50, 7) == pytest.approx(score(2000, 7), abs=1e-3)
    assert score(50, 7) != pytest.approx(score(50, 8), abs=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "axial", "factor": 2}}, "'axial' is not supported.*yarn"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0] * 64}},
         "'longrope' lacks 'long_factor'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}},
         "'llama3' lacks 'low_freq_factor'"),
    ],
    ids=str,
)  # fmt: skip
def test_variants_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **fields)
