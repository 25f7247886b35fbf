"""GLM-4 (the models of 2025, GLM-4-0414): norms before and after attention and MLP, RoPE over half
of the channels in interleaved pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig, read_rope
from aioinfer.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4Config(DecoderConfig):
    """GLM-4's configuration. `attention_bias`: of queries, keys and values."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    }

    attention_bias: bool

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the biases and the order of the rotated channels."""
        return {
            "attention_bias": bool(config["attention_bias"]),
            "rope": replace(read_rope(config), interleaved=True),
        }


class Glm4Model(DecoderModel):
    """Attention and a gated MLP, each with a norm before and after it."""

    def __init__(self, config: Glm4Config, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm"),
                post_norm=make.norm(f"{prefix}.post_self_attn_layernorm"),
                bias=config.attention_bias,
            )
            mlp = make.gated_mlp(
                f"{prefix}.mlp",
                config.intermediate_size,
                activation=config.activation,
                norm=make.norm(f"{prefix}.post_attention_layernorm"),
                post_norm=make.norm(f"{prefix}.post_mlp_layernorm"),
                merged="gate_up_proj",
            )
            return Layer([attention, mlp])

        super().__init__(config, make, layer)


FAMILIES = {"Glm4ForCausalLM": (Glm4Config, Glm4Model)}
