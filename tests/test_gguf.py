"""Conversion of GGUF files: the real SmolLM2 against transformers' own reading, and small files for
what is stored how. What is particular to an architecture is in `test_gguf_architectures.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import aioinfer.checkpoint.gguf
from aioinfer.checkpoint.gguf import convert_gguf
from aioinfer.errors import ConfigError
from tests.gguf_models import config_of, random_model, write_gguf
from tests.real_tokenizers import smollm2_gguf

pytestmark = pytest.mark.slow


def convert(file: Path) -> Path:
    folder = file.with_suffix("")
    folder.mkdir()
    convert_gguf(file, folder)
    return folder


@pytest.mark.extended
def test_smollm2_is_as_transformers_reads_it(tmp_path: Path):
    convert_gguf(smollm2_gguf(), tmp_path)
    converted = load_file(tmp_path / "model.safetensors")
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(smollm2_gguf()), return_tensors=True, model_to_load=model)
    assert converted.keys() == theirs["tensors"].keys()
    for name, tensor in converted.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, theirs["tensors"][name].float()), name
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                 "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
                 "tie_word_embeddings", "bos_token_id", "eos_token_id"):  # fmt: skip
        if name in theirs["config"]:
            assert getattr(config, name) == theirs["config"][name], name
    assert config.rope_parameters["rope_theta"] == theirs["config"]["rope_theta"] == 100_000
    assert config.rms_norm_eps == pytest.approx(theirs["config"]["rms_norm_eps"])
    assert (config.head_dim, config.tie_word_embeddings) == (64, True)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    assert found == {"bos_token_id": 1, "eos_token_id": 2}
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.parametrize("slice_values", [1, 192, 1 << 20])
def test_slices_join_to_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_values: int
):
    """By one row, by 3 rows of 64 values (96 and 128 rows have no equal parts of 3), and whole; the
    rows of queries and keys are reordered on the way."""
    monkeypatch.setattr(aioinfer.checkpoint.gguf, "_SLICE_VALUES", slice_values)
    source = random_model("llama", tmp_path / "source")
    folder = convert(write_gguf(tmp_path / "model.gguf", source, "llama"))
    expected = load_file(source / "model.safetensors")
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(converted[name], tensor), name


def test_half_precision_is_kept_and_quantized_tensors_become_float32(tmp_path: Path):
    source = random_model("llama", tmp_path / "source")
    written: dict[str, np.ndarray] = {}

    def store(fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        up, down = tensors["blk.0.ffn_up.weight"], tensors["blk.0.ffn_down.weight"]
        query = tensors["blk.0.attn_q.weight"]
        written["up"] = tensors["blk.0.ffn_up.weight"] = up.astype(np.float16)
        written["query"] = tensors["blk.0.attn_q.weight"] = query.astype(np.float16)
        tensors["blk.0.ffn_down.weight"] = (down.view(np.uint32) >> 16).astype(np.uint16)
        written["down"] = tensors["blk.0.ffn_down.weight"].copy()

    folder = convert(write_gguf(tmp_path / "model.gguf", source, "llama", store))
    stored = load_file(folder / "model.safetensors")
    up = stored["model.layers.0.mlp.up_proj.weight"]
    down = stored["model.layers.0.mlp.down_proj.weight"]
    query = stored["model.layers.0.self_attn.q_proj.weight"]
    assert (up.dtype, query.dtype, down.dtype) == (torch.float16, torch.float16, torch.bfloat16)
    assert np.array_equal(up.numpy(), written["up"])
    assert np.array_equal(down.view(torch.uint16).numpy(), written["down"])
    # 4 heads of 16 rows: the pairs (0, 1), (2, 3) ... become (0, 8), (1, 9) ...
    assert np.array_equal(query[:16:8].numpy(), written["query"][:2])
    assert stored["model.norm.weight"].dtype == torch.float32


def test_the_end_of_a_turn_ends_a_text(tmp_path: Path):
    source = random_model("llama", tmp_path / "source")
    file = write_gguf(
        tmp_path / "model.gguf",
        source,
        "llama",
        lambda fields, tensors: fields.update({"tokenizer.ggml.eot_token_id": 9}),
    )
    folder = convert(file)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 3, "eos_token_id": [4, 9]}
    assert config_of(folder)["eos_token_id"] == 4


def test_a_type_that_cannot_be_dequantized(tmp_path: Path):
    source = random_model("llama", tmp_path / "source")

    def store(fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"].astype(np.float64)

    file = write_gguf(tmp_path / "model.gguf", source, "llama", store)
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_up\.weight is of the type F64"):
        convert(file)


def test_quantized_weights_are_those_of_the_gguf_package(tmp_path: Path):
    source = random_model("llama", tmp_path / "source", hidden_size=256, intermediate_size=512)
    file = write_gguf(tmp_path / "model.gguf", source, "llama", quantize={
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.0.ffn_down.weight": gguf.GGMLQuantizationType.Q5_1,
        "blk.1.attn_k.weight": gguf.GGMLQuantizationType.Q4_0,
    })  # fmt: skip
    stored = load_file(convert(file) / "model.safetensors")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, theirs in (
        ("blk.0.ffn_up", "model.layers.0.mlp.up_proj"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj"),
    ):
        tensor = reader[f"{name}.weight"]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(stored[f"{theirs}.weight"].numpy(), expected)
    key = reader["blk.1.attn_k.weight"]
    reordered = stored["model.layers.1.self_attn.k_proj.weight"].numpy()
    # 2 heads of 64 rows: the pairs (0, 1), (2, 3) ... become (0, 32), (1, 33) ...
    pairs = reordered.reshape(2, 2, 32, 256).swapaxes(1, 2).reshape(128, 256)
    assert np.array_equal(pairs, gguf.dequantize(key.data, key.tensor_type))
