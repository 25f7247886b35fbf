"""OLMo 2 (Team OLMo 2024): the outputs of attention and MLP are normed, not their inputs; queries
and keys are normed over all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.attention import QKNorms
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig
from aioinfer.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """OLMo 2's configuration. `attention_bias`: of all four projections."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    attention_bias: bool = False

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the biases."""
        return {"attention_bias": bool(config.get("attention_bias", False))}


class Olmo2Model(DecoderModel):
    """Attention and a gated MLP, each with a norm after it."""

    def __init__(self, config: Olmo2Config, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=None,
                post_norm=make.norm(f"{prefix}.post_attention_layernorm"),
                bias=config.attention_bias,
                output_bias=config.attention_bias,
                qk_norms=QKNorms(over_heads=True),
            )
            mlp = make.gated_mlp(
                f"{prefix}.mlp",
                config.intermediate_size,
                activation=config.activation,
                norm=None,
                post_norm=make.norm(f"{prefix}.post_feedforward_layernorm"),
            )
            return Layer([attention, mlp])

        super().__init__(config, make, layer)


FAMILIES = {"Olmo2ForCausalLM": (Olmo2Config, Olmo2Model)}
