"""Conversion of GGUF files: the real SmolLM2 against transformers' own reading, and tiny files of
every family against their source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aioinfer.checkpoint.gguf import convert_gguf
from aioinfer.errors import ConfigError
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.registry import load_model_config
from tests.paged_model import PagedModel, load_model
from tests.real_tokenizers import smollm2_gguf
from tests.tiny_models import tiny_model

TOKENS = [f"t{number}" for number in range(125)] + ["a", "b", "ab"]


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
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "max_position_embeddings", "tie_word_embeddings", "bos_token_id",
                 "eos_token_id"):  # fmt: skip
        if name in theirs["config"]:
            assert getattr(config, name) == theirs["config"][name], name
    assert config.rope_parameters["rope_theta"] == theirs["config"]["rope_theta"] == 100_000
    assert config.rms_norm_eps == pytest.approx(theirs["config"]["rms_norm_eps"])
    config_of_ours = load_model_config(tmp_path)
    assert (
        config_of_ours.num_layers,
        config_of_ours.num_heads,
        config_of_ours.num_kv_heads,
        config_of_ours.head_size,
        config_of_ours.tied_embeddings,
    ) == (30, 9, 3, 64, True)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert (tmp_path / "tokenizer.json").is_file()


def write_gguf(
    file: Path,
    folder: Path,
    family: str,
    change: Callable[[dict[str, Any], dict[str, np.ndarray]], object] | None = None,
) -> Path:
    """Writes a tiny model as llama.cpp's converter does; `change` may alter the metadata and the
    tensors first."""
    config = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config["num_hidden_layers"])
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }.get(name.split(".")[-2])
        values = tensor.float().numpy()
        if family == "llama" and heads:  # channel i and its partner n/2 further are made neighbours
            values = (
                values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            )
        stem, _, kind = name.rpartition(".")
        tensors[f"{names.get_name(stem)}.{kind}"] = np.ascontiguousarray(values)
    fields = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }
    if change:
        change(fields, tensors)
    writer = gguf.GGUFWriter(file, fields.pop("architecture", family))
    for key, value in fields.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[
            type(value)
        ]
        add(f"{family}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def convert(file: Path) -> Path:
    folder = file.with_suffix("")
    folder.mkdir()
    convert_gguf(file, folder)
    return folder


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 8}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
        ("qwen2", {"tie_word_embeddings": True}),
        (
            "qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("qwen3", {}),
    ],
    ids=str,
)
def test_tiny_models_come_back(tmp_path: Path, family: str, fields: dict[str, Any]):
    source = tiny_model(family, tmp_path / "source", vocab_size=len(TOKENS), **fields)

    def stretch(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        rope = fields.get("rope_parameters", {})
        if rope:
            metadata |= {
                "rope.scaling.type": rope["rope_type"],
                "rope.scaling.factor": rope["factor"],
            }
        if "original_max_position_embeddings" in rope:
            metadata["rope.scaling.original_context_length"] = rope[
                "original_max_position_embeddings"
            ]

    folder = convert(write_gguf(tmp_path / "model.gguf", source, family, stretch))
    expected, converted = (
        load_file(source / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    assert converted.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(converted[name], tensor), name
    text = {0: [5, 99, 17, 17, 3, 60, 8]}
    logits = [
        PagedModel(load_model(place, ParallelGroup.single()), 4).step(text)[0]
        for place in (source, folder)
    ]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-4)
    assert AutoConfig.from_pretrained(folder).eos_token_id == 4


def test_llama_3_stretches_by_a_table(tmp_path: Path):
    """The file holds what the wavelengths are divided by, as llama.cpp computes it; the folder
    Llama 3's own parameters."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 8192
    source = tiny_model(
        "llama",
        tmp_path / "source",
        vocab_size=len(TOKENS),
        rope_parameters=rope,
        max_position_embeddings=16384,
    )
    config = AutoConfig.from_pretrained(source)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)

    def stretch(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors["rope_freqs.weight"] = (plain / stretched).numpy()
        assert len(set(tensors["rope_freqs.weight"].round(3))) > 2

    folder = convert(write_gguf(tmp_path / "model.gguf", source, "llama", stretch))
    assert load_model_config(folder).rope == load_model_config(source).rope
    text = {0: [5, 99, 17, 17, 3, 60, 8]}
    logits = [
        PagedModel(load_model(place, ParallelGroup.single()), 4).step(text)[0]
        for place in (source, folder)
    ]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-4)


def test_biases_of_queries_are_reordered_too(tmp_path: Path):
    source = tiny_model("llama", tmp_path / "source", vocab_size=len(TOKENS), attention_bias=True)

    def without_output_bias(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.endswith("output.bias")]:
            tensors[name] = np.zeros_like(tensors[name])

    folder = convert(write_gguf(tmp_path / "model.gguf", source, "llama", without_output_bias))
    name = "model.layers.1.self_attn.k_proj.bias"
    assert torch.equal(
        load_file(folder / "model.safetensors")[name], load_file(source / "model.safetensors")[name]
    )
    assert load_model_config(folder).attention_bias


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda fields, tensors: fields.update(architecture="bert"),
            "architecture 'bert'.*llama, qwen2, qwen3",
        ),
        (lambda fields, tensors: fields.pop("block_count"), r"lacks llama\.block_count"),
        (
            lambda fields, tensors: fields.update({"rope.scaling.type": "longrope"}),
            "'longrope'.*only 'linear' and 'yarn'",
        ),
        (
            lambda fields, tensors: fields.update({"rope.scaling.type": "yarn"}),
            r"lacks llama\.rope\.scaling\.factor",
        ),
        (
            lambda fields, tensors: tensors.update(
                {"rope_freqs.weight": np.linspace(1, 2, 8, dtype=np.float32)}
            ),
            "not Llama 3's",
        ),
        (
            lambda fields, tensors: tensors.update(
                {"blk.0.ffn_gate_exps.weight": np.ones(8, np.float32)}
            ),
            r"blk\.0\.ffn_gate_exps\.weight",
        ),
        (lambda fields, tensors: tensors.pop("token_embd.weight"), r"no token_embd\.weight"),
    ],
    ids=["architecture", "field", "rope", "factor", "rope table", "experts", "embedding"],
)
def test_models_that_are_not_supported(tmp_path: Path, change: Callable[..., object], message: str):
    source = tiny_model("llama", tmp_path / "source", vocab_size=len(TOKENS))
    file = write_gguf(tmp_path / "model.gguf", source, "llama", change)
    with pytest.raises(ConfigError, match=message):
        convert(file)


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"not a model at all", b"GGUF" + bytes(range(60)), None], ids=str
)
def test_files_that_are_not_gguf(tmp_path: Path, content: bytes | None):
    if content is None:  # a download that was cut off
        source = tiny_model("llama", tmp_path / "source", vocab_size=len(TOKENS))
        content = write_gguf(tmp_path / "whole.gguf", source, "llama").read_bytes()[:-1000]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.gguf cannot be read as GGUF"):
        convert(file)
