"""Qwen2, with biases on queries, keys and values, and Qwen3, which norms queries and keys by head
instead. MiMo (Xiaomi 2025) is Qwen2 with a head that predicts further tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from aioinfer.layers.attention import Attention, QKNorms
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig, read_windows
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.mtp import MtpHead, MtpNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Qwen2's configuration: the biases of the projections, and whether queries and keys are normed
    by head."""

    qkv_bias: bool = True
    output_bias: bool = False
    head_norms: bool = False

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the windows: none unless `use_sliding_window`; by `layer_types`, or of the layers
        from `max_window_layers` on."""
        if not config.get("use_sliding_window", False):
            return {}
        config = {"sliding_window": 4096, **config}
        if config.get("layer_types"):
            return {"windows": read_windows(config)}
        given = config.get("max_window_layers")
        first = 28 if given is None else given
        window, layers = config["sliding_window"] or None, range(config["num_hidden_layers"])
        return {"windows": tuple(window if number >= first else None for number in layers)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Qwen3's configuration: heads are 128 wide where the configuration gives no `head_dim`."""

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the biases beside Qwen2's fields."""
        bias = bool(config.get("attention_bias", False))
        own = {"head_size": config.get("head_dim") or 128, "head_norms": True}
        return {**Qwen2Config.own_fields(config), **own, "qkv_bias": bias, "output_bias": bias}


@dataclass(frozen=True, slots=True, kw_only=True)
class MiMoConfig(Qwen2Config):
    """MiMo's configuration."""

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads whether there is a head beside Qwen2's fields."""
        own = {"has_mtp": bool(config.get("num_nextn_predict_layers"))}
        return {**Qwen2Config.own_fields(config), **own}


def qwen_attention(
    config: Qwen2Config, make: LayerMaker, number: int, prefix: str | None = None
) -> Attention:
    """Returns the attention of layer `number`, with the norm before it; `prefix`: of its modules,
    if they are not those of that layer."""
    prefix = prefix or f"model.layers.{number}"
    return make.attention(
        f"{prefix}.self_attn",
        **config.attention_shape(number),
        norm=make.norm(f"{prefix}.input_layernorm"),
        bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norms=QKNorms() if config.head_norms else None,
    )


_MIMO_PREFIX = "model.mtp_layers.0"
_MIMO_NAMES = MtpNames(
    f"{_MIMO_PREFIX}.token_layernorm",
    f"{_MIMO_PREFIX}.hidden_layernorm",
    f"{_MIMO_PREFIX}.input_proj",
    f"{_MIMO_PREFIX}.final_layernorm",
    is_hidden_first=True,
)


class QwenModel(DecoderModel):
    """Llama's layers, with biases of queries, keys and values, or with norms of heads."""

    def __init__(self, config: Qwen2Config, make: LayerMaker):
        def layer(number: int, prefix: str | None = None) -> Layer:
            prefix = prefix or f"model.layers.{number}"
            attention = qwen_attention(config, make, number, prefix)
            mlp = make.gated_mlp(
                f"{prefix}.mlp",
                config.intermediate_size,
                activation=config.activation,
                norm=make.norm(f"{prefix}.post_attention_layernorm"),
            )
            return Layer([attention, mlp])

        def mtp() -> MtpHead:
            last = config.num_layers - 1
            return MtpHead(_MIMO_NAMES, partial(layer, last, _MIMO_PREFIX), make)

        super().__init__(config, make, layer, mtp=mtp if config.has_mtp else None)


FAMILIES = {
    "Qwen2ForCausalLM": (Qwen2Config, QwenModel),
    "Qwen3ForCausalLM": (Qwen3Config, QwenModel),
    "MiMoForCausalLM": (MiMoConfig, QwenModel),
}
