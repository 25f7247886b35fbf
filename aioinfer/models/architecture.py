"""What a model is made of, read from the `config.json` of its folder.

The supported families are one transformer with few differences, and each difference is a field
here: Qwen2 has biases on queries, keys and values; Qwen3 norms queries and keys by head; Mistral,
Qwen2 and Qwen3 may have sliding windows. The worker builds the model from it, the parent checks
sizes with it before it spawns anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aioinfer.errors import ConfigError

#: What each variant of RoPE must be told.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "dynamic": ("factor",),
}
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings (Su et al. 2021), and how they are stretched to longer texts.

    Attributes:
        theta: the base of the wavelengths.
        kind: "default", "linear", "llama3", "yarn" or "dynamic".
        scaling: the other numbers of the configuration, by the names they have there.
    """

    theta: float = 10_000.0
    kind: str = "default"
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model's shape. `sliding_windows` holds a window in tokens, or None, for each layer."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Rope
    sliding_windows: tuple[int | None, ...]
    dtype: torch.dtype

    @classmethod
    def load(cls, folder: Path) -> Architecture:
        """Reads `config.json`.

        Raises `ConfigError` if it is missing, or the model is not supported.
        """
        file = folder / "config.json"
        try:
            config = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{file} does not hold an object")
        try:
            return cls._from_config(config)
        except KeyError as error:
            raise ConfigError(f"{file} lacks {error}") from error

    @classmethod
    def _from_config(cls, config: Mapping[str, Any]) -> Architecture:
        family = next(
            (name for name in config.get("architectures") or [] if name in FAMILIES), None
        )
        if family is None:
            raise ConfigError(
                f"the architecture {config.get('architectures')} is not supported; "
                f"these are: {', '.join(FAMILIES)}"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(
                f"the activation {config['hidden_act']!r} is not supported, only 'silu' is"
            )
        if config.get("quantization_config"):
            raise ConfigError(
                "quantized safetensors are not supported: use the model's bfloat16 "
                "or float16 weights, or a GGUF file"
            )
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        rope = _read_rope(config)
        bias = bool(config.get("attention_bias", False)) and family in (
            "LlamaForCausalLM",
            "Qwen3ForCausalLM",
        )
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim")
            or (128 if family == "Qwen3ForCausalLM" else config["hidden_size"] // heads),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            max_position_embeddings=_stretched_length(config["max_position_embeddings"], rope),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or family == "Qwen2ForCausalLM",
            output_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and family == "LlamaForCausalLM",
            qk_norm=family == "Qwen3ForCausalLM",
            rope=rope,
            sliding_windows=_read_windows(config, family, layers),
            dtype=_read_dtype(config),
        )

    def heads_of_rank(self, rank: int, size: int) -> tuple[range, range]:
        """Returns the query heads and the KV heads of a tensor-parallel rank; ranks beyond the KV
        heads share them."""
        heads = self.num_heads // size
        queries = range(rank * heads, (rank + 1) * heads)
        group = self.num_heads // self.num_kv_heads
        return queries, range(queries.start // group, (queries.stop - 1) // group + 1)

    def check_tensor_parallel(self, size: int) -> None:
        """Raises `ConfigError`, naming the sizes that would work, unless heads and MLP divide among
        `size` ranks."""
        if not self._divides(size):
            fitting = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self._divides(n))
            raise ConfigError(
                f"parallel.tensor_parallel_size = {size} does not divide this model "
                f"({self.num_heads} heads, {self.num_kv_heads} KV heads, "
                f"intermediate size {self.intermediate_size}); these do: {fitting}"
            )

    def _divides(self, size: int) -> bool:
        kv_fit = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        return self.num_heads % size == 0 and kv_fit and self.intermediate_size % size == 0

    def kv_bytes_per_token(self, size: int, itemsize: int) -> int:
        """Returns the bytes of a token's keys and values on one of `size` ranks, all layers
        together."""
        _, kv_heads = self.heads_of_rank(0, size)
        return 2 * self.num_layers * len(kv_heads) * self.head_size * itemsize


def _read_rope(config: Mapping[str, Any]) -> Rope:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    kinds = [scaling.pop(name, None) for name in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    if kind not in _ROPE_KEYS:
        raise ConfigError(
            f"the RoPE variant {kind!r} is not supported; these are: {', '.join(_ROPE_KEYS)}"
        )
    if (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        raise ConfigError(
            "partial_rotary_factor: RoPE over a part of the channels is not supported"
        )
    longest = config["max_position_embeddings"]
    original = (
        config.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or longest
    )
    scaling["original_max_position_embeddings"] = original
    if kind == "yarn" and scaling.get("factor") is None:
        scaling["factor"] = longest / original
    for key in _ROPE_KEYS[kind]:
        if scaling.get(key) is None:
            raise ConfigError(
                f"the RoPE variant {kind!r} lacks {key!r} in rope_parameters (or rope_scaling)"
            )
    return Rope(float(theta), kind, scaling)


def _stretched_length(max_position_embeddings: int, rope: Rope) -> int:
    """Returns the longest text for which a model's RoPE was stretched; Llama 3's configurations
    give it as it is."""
    scaling = rope.scaling or {}
    if rope.kind in ("default", "llama3"):
        return max_position_embeddings
    return max(
        max_position_embeddings,
        int(scaling["original_max_position_embeddings"] * scaling["factor"]),
    )


def _read_windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, in tokens, or None."""
    window = config.get("sliding_window", 4096)  # as transformers, where the key is left out
    if family == "LlamaForCausalLM" or not window:
        return (None,) * layers
    if family == "MistralForCausalLM":
        return (window,) * layers
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return tuple(
        window if layer >= config.get("max_window_layers", 28) else None for layer in range(layers)
    )


def _read_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Reads `dtype` (transformers 5) or `torch_dtype` (before)."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"the dtype {name!r} is not supported")
    return dtype
