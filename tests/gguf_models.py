"""Small random models of every GGUF architecture, written as GGUF files the way llama.cpp's
converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS = [f"t{number}" for number in range(125)] + ["a", "b", "ab"]
Change = Callable[[dict[str, Any], dict[str, np.ndarray]], object]

_MODEL_TYPES = {"gemma3": "gemma3_text"}
_SHAPE = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 5, "initializer_range": 0.2,
}  # fmt: skip
#: What is particular to an architecture, none of it at transformers' default.
_FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8,
        "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0,
    },
    "gemma3": {
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7,
    },
    "phi3": {"sliding_window": 8},
    "granite": {
        "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "glm4": {"head_dim": 16, "attention_bias": True},
    "qwen3": {"head_dim": 32},
}  # fmt: skip
#: Metadata keys, beyond those of all architectures, and the fields of `config.json` they hold.
_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def random_model(architecture: str, folder: Path, **fields: Any) -> Path:
    """Saves a random model in float32 into `folder`, made by transformers, and returns it.

    `fields` go over those of the configuration.
    """
    kind = _MODEL_TYPES.get(architecture, architecture)
    config = AutoConfig.for_model(kind, **(_SHAPE | _FIELDS.get(architecture, {}) | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # zeros and ones would hide an omission
            torch.nn.init.uniform_(parameter, 0.25, 1.5)
    model.save_pretrained(folder)
    return folder


def write_gguf(
    file: Path,
    folder: Path,
    architecture: str,
    change: Change | None = None,
    quantize: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType({}),
) -> Path:
    """Writes the model of `folder` as a GGUF file.

    Args:
        change: may alter metadata (under the architecture's name) and tensors first; a tensor in
            uint16 is taken for bfloat16.
        quantize: the types of tensors that are not stored in the type they have.
    """
    config = AutoConfig.from_pretrained(folder)
    fields, tensors = _metadata(config), _tensors(folder, architecture, config)
    if change:
        change(fields, tensors)
    writer = gguf.GGUFWriter(file, fields.pop("architecture", architecture))
    for key, value in fields.items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(key if key.startswith("tokenizer.") else f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges(["a b"])
    for name, values in tensors.items():
        if name in quantize:
            writer.add_tensor(name, gguf.quantize(values, quantize[name]), raw_dtype=quantize[name])
        elif values.dtype == np.uint16:
            raw = values.view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _metadata(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_size = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_size,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_size * rope.get("partial_rotary_factor", 1.0)),
    }
    for key in ("bos", "eos"):
        fields[f"tokenizer.ggml.{key}_token_id"] = getattr(config, f"{key}_token_id")
    fields["tokenizer.ggml.padding_token_id"] = config.pad_token_id
    if rope["rope_type"] in ("linear", "yarn"):
        fields |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": float(rope["factor"]),
        }
    if original := getattr(config, "original_max_position_embeddings", None) or rope.get(
        "original_max_position_embeddings"
    ):
        fields["rope.scaling.original_context_length"] = original
    for key, name in _KEYS.items():
        if (value := getattr(config, name, None)) is not None:
            fields[key] = value
    if config.model_type == "phi3":
        fields.setdefault("attention.sliding_window", 0)
    if config.model_type == "qwen2":  # its configuration has one that is not in use
        fields.pop("attention.sliding_window", None)
    return fields


def _tensors(folder: Path, architecture: str, config: Any) -> dict[str, np.ndarray]:
    kind = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        values = tensor.numpy()
        if architecture in ("llama", "granite") and stem.split(".")[-1] in heads:
            # channel i and its partner half a head further become neighbours
            split = (heads[stem.split(".")[-1]], 2, -1, *values.shape[1:])
            values = values.reshape(split).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and "norm" in stem:
            values = values + 1
        tensors[f"{names.get_name(stem)}.{suffix}"] = np.ascontiguousarray(values)
    rope = config.rope_parameters
    for length in ("long", "short"):
        if f"{length}_factor" in rope:
            tensors[f"rope_factors_{length}.weight"] = np.float32(rope[f"{length}_factor"])
    return tensors


def config_of(folder: Path) -> dict[str, Any]:
    """Returns `config.json` as it is."""
    return json.loads((folder / "config.json").read_text())
