"""Mapping from GGUF to Hugging Face for each model family: tensor names, configuration fields,
stored layout.

One entry of `ARCHITECTURES` for each `general.architecture` of GGUF files. The names of tensors
come from `gguf.get_tensor_name_map`, which the tests compare them with; metadata keys come from
`gguf.Keys`. Facts that llama.cpp keeps in its code, not in the files, are marked with their source:
its converter (`conversion/*.py`) and its loader (`src/llama-model.cpp`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aioinfer.checkpoint.gguf_file import GgufFile
from aioinfer.errors import ConfigError

#: GGUF's names and Hugging Face's of the tensors outside of the layers.
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
#: GGUF's names and Hugging Face's of a layer's tensors, as most architectures have them.
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
#: Both sublayers have a norm before and a norm after them.
_SANDWICH_NORMS = _LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_POST_NORMS = {
    name: theirs
    for name, theirs in _SANDWICH_NORMS.items()
    if name not in ("attn_norm", "ffn_norm")
}
_MERGED_GATE_UP = _LAYER_TENSORS | {"ffn_up": "mlp.gate_up_proj"}
#: Tensors that hold factors of RoPE, which become part of the configuration.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: How Llama 3.1 to 3.3 stretch RoPE. Their GGUF files hold the factors that it comes to, the
#: largest of which is the missing one.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GgufFields:
    """The metadata of a file under its architecture's name, with errors that name the missing
    field.

    Attributes:
        file: the file.
        architecture: its `general.architecture`.
    """

    def __init__(self, file: GgufFile):
        self.file = file
        self.architecture = file.metadata.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of `ARCHITECTURE.key`, or `default` if the file has none."""
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Returns the value of `ARCHITECTURE.key`. Raises `ConfigError` if the file has none."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.file.path} lacks {self.architecture}.{key}")
        return value

    @property
    def head_size(self) -> int:
        """Channels of an attention head."""
        default = self.need("embedding_length") // self.need("attention.head_count")
        return self.get("attention.key_length", default)


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How the files of one `general.architecture` become a folder in Hugging Face's layout.

    Attributes:
        model_class: the name under `architectures` in `config.json`.
        model_type: as in `config.json`.
        layer_tensors: GGUF's names of a layer's tensors and Hugging Face's.
        interleaved_rope: query and key rows are stored in the order in which RoPE pairs
            neighbouring channels, (0, 1), (2, 3) ..., where Hugging Face's model pairs the halves
            of a head, (0, n / 2), (1, n / 2 + 1) ...
        norm_offset: the number that was added to each norm's weight when the file was made.
        activation: the MLP's, under the name that `config.json` gives it.
        fields: names in `config.json` and the metadata keys whose values they take, if present.
        extra: computes further fields of `config.json`, which replace the fields of all
            architectures.
    """

    model_class: str
    model_type: str
    layer_tensors: Mapping[str, str] = field(default_factory=lambda: _LAYER_TENSORS)
    interleaved_rope: bool = False
    norm_offset: float = 0.0
    activation: Mapping[str, str] = field(default_factory=lambda: {"hidden_act": "silu"})
    fields: Mapping[str, str] = field(default_factory=dict)
    extra: Callable[[GgufFields], Mapping[str, Any]] = lambda fields: {}


def read_config(file: GgufFile) -> dict[str, Any]:
    """Returns the content of `config.json`.

    Raises:
        ConfigError: a field is missing, or the model is of a kind that is not supported.
    """
    fields = GgufFields(file)
    architecture = architecture_of(file)
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} holds no token_embd.weight")
    heads = fields.need("attention.head_count")
    config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        # The dtype of the computation on a GPU, not the dtype of the stored weights.
        "dtype": "bfloat16",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": fields.need("embedding_length"),
        "intermediate_size": fields.need("feed_forward_length"),
        "num_hidden_layers": fields.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", heads),
        "head_dim": fields.head_size,
        "rms_norm_eps": fields.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.need("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _read_rope(fields),
        **architecture.activation,
    }
    for name, key in architecture.fields.items():
        if (value := fields.get(key)) is not None:
            config[name] = value
    config |= architecture.extra(fields)
    lists = {name for name, value in config.items() if isinstance(value, list)}
    if by_layer := lists - {"architectures", "layer_types"}:
        raise ConfigError(
            f"{file.path} gives {', '.join(sorted(by_layer))} by layer, which is not supported"
        )
    for key in ("bos_token_id", "eos_token_id", "padding_token_id"):
        if (token := file.metadata.get(f"tokenizer.ggml.{key}")) is not None:
            config[key.replace("padding", "pad")] = token
    return config


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Returns the entry of a file's architecture. Raises `ConfigError` if there is none."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path} holds a model of the architecture {name!r}; supported are: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _read_rope(fields: GgufFields) -> dict[str, Any]:
    """Returns `rope_parameters`."""
    tensors, path = fields.file.tensors, fields.file.path
    rope = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base", 10_000.0)}
    rotated = fields.get("rope.dimension_count", fields.head_size)
    if rotated != fields.head_size:
        rope["partial_rotary_factor"] = rotated / fields.head_size
    if "rope_freqs.weight" in tensors:
        return rope | _llama3_rope(tensors["rope_freqs.weight"].values(), fields)
    original = fields.get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in tensors:
        return rope | {
            "rope_type": "longrope",
            "long_factor": tensors["rope_factors_long.weight"].values().tolist(),
            "short_factor": tensors["rope_factors_short.weight"].values().tolist(),
            "original_max_position_embeddings": original,
        }
    kind = fields.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(
            f"{path} stretches RoPE in the way {kind!r}, which is not supported, "
            f"only 'linear' and 'yarn' are"
        )
    if kind != "none":
        rope |= {"rope_type": kind, "factor": fields.need("rope.scaling.factor")}
        if original is not None:
            rope["original_max_position_embeddings"] = original
    return rope


def _llama3_rope(factors: np.ndarray, fields: GgufFields) -> dict[str, Any]:
    """Returns Llama 3's scaling, if it gives `factors` [head_size / 2], by which wavelengths are
    stretched.

    Wavelengths up to `original / high_freq_factor` stay, wavelengths from `original /
    low_freq_factor` on are stretched by `factor`, and the inverse is interpolated between them.
    """
    scaling = {"factor": float(factors.max()), **_LLAMA3}
    theta = fields.get("rope.freq_base", 10_000.0)
    wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    periods = scaling["original_max_position_embeddings"] / wavelengths
    kept = np.clip((periods - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1 / (kept + (1 - kept) / scaling["factor"]), factors, rtol=1e-3):
        raise ConfigError(
            f"{fields.file.path} stretches RoPE by a table of factors that is not Llama 3's: "
            f"use the model's safetensors"
        )
    return {"rope_type": "llama3", **scaling}


def _attention_bias(fields: GgufFields) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in fields.file.tensors}


def _layer_types(fields: GgufFields, pattern: int) -> dict[str, Any]:
    """Returns which layers see a window: all but each `pattern`-th, none without a window."""
    window = fields.get("attention.sliding_window")
    types = [
        "sliding_attention" if window and (layer + 1) % pattern else "full_attention"
        for layer in range(fields.need("block_count"))
    ]
    return {"sliding_window": window, "layer_types": types}


def _gemma_query_scale(fields: GgufFields, layers_of_largest: int) -> int:
    """Returns `query_pre_attn_scalar`: the head size, except in the largest model of a generation,
    which llama.cpp's loader recognizes by its number of layers."""
    if fields.need("block_count") == layers_of_largest:
        return fields.need("embedding_length") // fields.need("attention.head_count")
    return fields.head_size


def _gemma2(fields: GgufFields) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_query_scale(fields, 46),
        **_layer_types(fields, 2),
    }


def _gemma3(fields: GgufFields) -> dict[str, Any]:
    """The window's layers have a RoPE of their own, which llama.cpp's loader knows."""
    local = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base_swa", 10_000.0)}
    rope = {"full_attention": _read_rope(fields), "sliding_attention": local}
    return {
        "query_pre_attn_scalar": _gemma_query_scale(fields, 62),
        "rope_parameters": rope,
        **_layer_types(fields, 6),
    }


def _phi3(fields: GgufFields) -> dict[str, Any]:
    """A window of 0 means that there is none. Files of the first Phi-3 do not name it: llama.cpp's
    loader takes the 2047 tokens of the models of 4096."""
    unnamed = 2047 if fields.need("context_length") == 4096 else None
    window = fields.get("attention.sliding_window", unnamed)
    extra: dict[str, Any] = {"sliding_window": window or None}
    if original := fields.get("rope.scaling.original_context_length"):
        extra["original_max_position_embeddings"] = original
    return extra


def _olmo2(fields: GgufFields) -> dict[str, Any]:
    if fields.get("attention.sliding_window"):
        raise ConfigError(f"{fields.file.path} holds OLMo 3, which is not supported: OLMo 2 is")
    return {}


_GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
#: By `general.architecture`.
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "LlamaForCausalLM", "llama", interleaved_rope=True, extra=_attention_bias
    ),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM",
        "gemma2",
        _SANDWICH_NORMS,
        norm_offset=1.0,
        activation=_GEMMA_ACTIVATION,
        fields={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        extra=_gemma2,
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _SANDWICH_NORMS,
        norm_offset=1.0,
        activation=_GEMMA_ACTIVATION,
        fields={"final_logit_softcapping": "final_logit_softcapping"},
        extra=_gemma3,
    ),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM", "phi3", _MERGED_GATE_UP | {"attn_qkv": "self_attn.qkv_proj"}, extra=_phi3
    ),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", "olmo2", _POST_NORMS, extra=_olmo2),
    "granite": GgufArchitecture(
        "GraniteForCausalLM",
        "granite",
        interleaved_rope=True,
        fields={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        extra=_attention_bias,
    ),
    "glm4": GgufArchitecture(
        "Glm4ForCausalLM",
        "glm4",
        _MERGED_GATE_UP
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        extra=_attention_bias,
    ),
}
