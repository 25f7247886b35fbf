"""Mixtral (Jiang et al. 2024): Mistral's attention, and experts in the place of every MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames, MixtureShape, Routing
from aioinfer.models.config import DecoderConfig, read_num_experts
from aioinfer.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """Mixtral's configuration: all layers have the same window, or none."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    mixture: MixtureShape

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the experts and the window."""
        window = config.get("sliding_window") or None
        routing = Routing(read_num_experts(config), config["num_experts_per_tok"])
        return {
            "mixture": MixtureShape(routing, config["intermediate_size"]),
            "windows": (window,) * config["num_hidden_layers"],
        }


class MixtralModel(DecoderModel):
    """Pre-normed attention and experts."""

    def __init__(self, config: MixtralConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm"),
            )
            mixture = make.mixture(
                f"{prefix}.block_sparse_moe",
                config.mixture,
                norm=make.norm(f"{prefix}.post_attention_layernorm"),
                activation=config.activation,
                names=ExpertNames(("w1", "w3", "w2")),
            )
            return Layer([attention, mixture])

        super().__init__(config, make, layer)


FAMILIES = {"MixtralForCausalLM": (MixtralConfig, MixtralModel)}
