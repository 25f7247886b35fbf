"""MiniMax-M2 (MiniMax 2025): queries and keys normed over all heads together, RoPE over a part of
the channels, and experts in every layer, by their sigmoid scores and a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.attention import QKNorms
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames, MixtureShape, Routing
from aioinfer.models.config import DecoderConfig, read_num_experts
from aioinfer.models.decoder import DecoderModel

_NAMES = ExpertNames(("w1", "w3", "w2"), router_bias="e_score_correction_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxM2Config(DecoderConfig):
    """MiniMax-M2's configuration."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"head_dim": 128, "num_key_value_heads": 8}

    mixture: MixtureShape

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Checkpoints have the rotated channels as a number, `rotary_dim`."""
        config = {**cls.DEFAULTS, **config}
        rotated = config.get("rotary_dim")
        if rotated and not config.get("rope_parameters"):
            config["partial_rotary_factor"] = rotated / config["head_dim"]
        return config

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the experts."""
        routing = Routing(
            read_num_experts(config),
            config["num_experts_per_tok"],
            scores="sigmoid",
            has_bias=True,
        )
        return {"mixture": MixtureShape(routing, config["intermediate_size"])}


class MiniMaxM2Model(DecoderModel):
    """Pre-normed attention and experts."""

    def __init__(self, config: MiniMaxM2Config, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm"),
                qk_norms=QKNorms(over_heads=True),
            )
            mixture = make.mixture(
                f"{prefix}.block_sparse_moe",
                config.mixture,
                norm=make.norm(f"{prefix}.post_attention_layernorm"),
                activation=config.activation,
                names=_NAMES,
            )
            return Layer([attention, mixture])

        super().__init__(config, make, layer)


FAMILIES = {"MiniMaxM2ForCausalLM": (MiniMaxM2Config, MiniMaxM2Model)}
