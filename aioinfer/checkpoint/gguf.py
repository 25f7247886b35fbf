"""Converts a GGUF file, once, into a model folder in Hugging Face's layout: config, weights,
tokenizer.

After that a GGUF model is a folder like any other, which loads in half a second where reading the
GGUF takes several. Weights are dequantized to float32, in which the values of all quantized formats
are exact. llama.cpp stores query and key rows of Llama models in another order (its RoPE pairs
neighbouring channels); that is undone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from aioinfer.errors import ConfigError
from aioinfer.layers.rotary import RopeConfig, inverse_wavelengths

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs"
#: How Llama 3.1 to 3.3 stretch RoPE. Their GGUF files hold the factors that it comes to, the
#: largest of which is the missing one.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer into
    `folder`, which must exist.

    Raises:
        ConfigError: the file is not a GGUF file, or holds a model that is not supported.
    """
    from aioinfer.text.gguf_tokenizer import write_tokenizer

    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{file} cannot be read as GGUF: {error}") from error
    config = _read_config(reader, file)
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), "utf-8")
    write_tokenizer(reader, folder)
    save_file(dict(_read_tensors(reader, config)), folder / "model.safetensors")


def _read_config(reader: gguf.GGUFReader, file: Path) -> dict[str, Any]:
    """Returns what `config.json` would hold."""
    name = _value(reader, "general.architecture")
    if name not in _FAMILIES:
        raise ConfigError(
            f"{file} holds a model of the architecture {name!r}; supported are: "
            f"{', '.join(_FAMILIES)}"
        )

    def field(key: str, default: Any = None) -> Any:
        value = _value(reader, f"{name}.{key}", default)
        if value is None:
            raise ConfigError(f"{file} lacks {name}.{key}")
        return value

    heads, hidden = field("attention.head_count"), field("embedding_length")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{file} holds no token_embd.weight")
    config = {
        "architectures": [_FAMILIES[name]],
        "model_type": name,
        # what to compute in on a GPU; the file below is float32 to keep every value
        "dtype": "bfloat16",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": field("attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": name == "llama" and "blk.0.attn_q.bias" in tensors,
        "rope_parameters": _read_rope(reader, name, field("rope.freq_base", 10_000.0), file),
    }
    for key in ("bos_token_id", "eos_token_id"):
        token = _value(reader, f"tokenizer.ggml.{key}")
        if token is not None:
            config[key] = token
    return config


def _read_rope(reader: gguf.GGUFReader, name: str, theta: float, file: Path) -> dict[str, Any]:
    """Returns `rope_parameters`."""
    for tensor in reader.tensors:
        if tensor.name.startswith(_ROPE_FACTORS):
            return _read_llama3_rope(gguf.dequantize(tensor.data, tensor.tensor_type), theta, file)
    kind = _value(reader, f"{name}.rope.scaling.type", "none")
    rope = {"rope_type": "default", "rope_theta": theta}
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(
            f"{file} stretches RoPE in the way {kind!r}, which is not supported, "
            f"only 'linear' and 'yarn' are"
        )
    if kind != "none":
        factor = _value(reader, f"{name}.rope.scaling.factor")
        if factor is None:
            raise ConfigError(f"{file} lacks {name}.rope.scaling.factor")
        rope |= {"rope_type": kind, "factor": factor}
        original = _value(reader, f"{name}.rope.scaling.original_context_length")
        if original is not None:
            rope["original_max_position_embeddings"] = original
    return rope


def _read_llama3_rope(factors: np.ndarray, theta: float, file: Path) -> dict[str, Any]:
    """Returns Llama 3's `rope_parameters`, if `factors` [head_size / 2], by which wavelengths are
    stretched, are what they come to."""
    scaling = {"factor": float(factors.max()), **_LLAMA3}
    ropes = RopeConfig(theta), RopeConfig(theta, "llama3", scaling)
    plain, stretched = (inverse_wavelengths(rope, 2 * len(factors))[0].numpy() for rope in ropes)
    if not np.allclose(plain / stretched, factors, rtol=1e-3):
        raise ConfigError(
            f"{file} stretches RoPE by a table of factors that is not Llama 3's: "
            f"use the model's safetensors"
        )
    return {"rope_type": "llama3", "rope_theta": theta, **scaling}


def _read_tensors(
    reader: gguf.GGUFReader, config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face's name, float32 values) of each tensor."""
    reorder = (
        {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        if config["model_type"] == "llama"
        else {}
    )
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
            if parts[2] in reorder:
                values = _halves_from_pairs(values, reorder[parts[2]])
            yield (
                f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}",
                np.ascontiguousarray(values),
            )
        elif parts[0] == _ROPE_FACTORS:
            continue
        elif parts[0] in _TENSORS:
            yield f"{_TENSORS[parts[0]]}.{parts[1]}", np.ascontiguousarray(values)
        else:
            raise ConfigError(f"the GGUF tensor {tensor.name} is not part of a supported model")


def _halves_from_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of each head from neighbouring pairs (0, 1), (2, 3)... to halves (0, n/2),
    (1, n/2 + 1)..."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _value(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    """Returns a scalar or a string of the metadata."""
    entry = reader.get_field(key)
    return default if entry is None else entry.contents()
