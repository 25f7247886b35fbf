"""Llama, and Mistral and Ministral 3, which are Llama with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig
from aioinfer.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Llama's configuration. `attention_bias`: of queries, keys and values. `output_bias`: of
    attention's output. `mlp_bias`: of the MLP's three projections."""

    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the biases."""
        bias = bool(config.get("attention_bias", False))
        mlp_bias = bool(config.get("mlp_bias", False))
        return {"attention_bias": bias, "output_bias": bias, "mlp_bias": mlp_bias}


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Mistral's configuration: all layers have the same window."""

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the window; 4096 where the key is left out, as in transformers."""
        window = config.get("sliding_window", 4096) or None
        return {"windows": (window,) * config["num_hidden_layers"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ministral3Config(LlamaConfig):
    """Ministral 3's configuration: all layers have the same window, by default none. Queries are
    scaled by position, as `rope_parameters.llama_4_scaling_beta` says."""

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the window."""
        return {"windows": (config.get("sliding_window") or None,) * config["num_hidden_layers"]}


class LlamaModel(DecoderModel):
    """Pre-normed attention and a gated MLP."""

    def __init__(self, config: LlamaConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm"),
                bias=config.attention_bias,
                output_bias=config.output_bias,
            )
            mlp = make.gated_mlp(
                f"{prefix}.mlp",
                config.intermediate_size,
                activation=config.activation,
                norm=make.norm(f"{prefix}.post_attention_layernorm"),
                bias=config.mlp_bias,
            )
            return Layer([attention, mlp])

        super().__init__(config, make, layer)


FAMILIES = {
    "LlamaForCausalLM": (LlamaConfig, LlamaModel),
    "MistralForCausalLM": (MistralConfig, LlamaModel),
    "Ministral3ForCausalLM": (Ministral3Config, LlamaModel),
}
