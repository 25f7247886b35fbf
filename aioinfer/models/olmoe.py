"""OLMoE (Muennighoff et al. 2024): queries and keys normed over all heads together, and experts in
the place of every MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.attention import QKNorms
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import MixtureShape, Routing
from aioinfer.models.config import DecoderConfig, read_num_experts
from aioinfer.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoeConfig(DecoderConfig):
    """OLMoE's configuration. `attention_bias`: of all four projections."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    mixture: MixtureShape
    attention_bias: bool = False

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the experts and the biases. Raises `ConfigError` for `clip_qkv`, which no published
        checkpoint sets."""
        if config.get("clip_qkv") is not None:
            raise ConfigError("clip_qkv is not supported")
        routing = Routing(
            read_num_experts(config),
            config["num_experts_per_tok"],
            is_normalized=bool(config.get("norm_topk_prob", False)),
        )
        return {
            "mixture": MixtureShape(routing, config["intermediate_size"]),
            "attention_bias": bool(config.get("attention_bias", False)),
        }


class OlmoeModel(DecoderModel):
    """Pre-normed attention and experts."""

    def __init__(self, config: OlmoeConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm"),
                bias=config.attention_bias,
                output_bias=config.attention_bias,
                qk_norms=QKNorms(over_heads=True),
            )
            norm = make.norm(f"{prefix}.post_attention_layernorm")
            mlp = make.mixture_or_mlp(f"{prefix}.mlp", number, config, norm)
            return Layer([attention, mlp])

        super().__init__(config, make, layer)


FAMILIES = {"OlmoeForCausalLM": (OlmoeConfig, OlmoeModel)}
