"""Granite 3 (IBM 2024): Llama's layers with fixed multipliers of the embeddings, of each layer's
addend, of the scores and of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.llama import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """Granite's configuration: the multipliers. Logits are divided by `logits_scaling`."""

    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_scaling: float

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the multipliers, each 1 where it is left out, beside Llama's biases."""
        names = (
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
        )
        own = {name: float(config.get(name, 1.0)) for name in names}
        return {**LlamaConfig.own_fields(config), **own}


class GraniteModel(DecoderModel):
    """Pre-normed attention and a gated MLP."""

    def __init__(self, config: GraniteConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm"),
                residual_scale=config.residual_multiplier,
                bias=config.attention_bias,
                output_bias=config.output_bias,
                scale=config.attention_multiplier,
            )
            mlp = make.gated_mlp(
                f"{prefix}.mlp",
                config.intermediate_size,
                activation=config.activation,
                norm=make.norm(f"{prefix}.post_attention_layernorm"),
                residual_scale=config.residual_multiplier,
                bias=config.mlp_bias,
            )
            return Layer([attention, mlp])

        embedding = make.embedding(
            "model.embed_tokens", config.vocab_size, scale=config.embedding_multiplier
        )
        head = make.head(
            "lm_head", embedding, tied=config.tied_embeddings, scale=1 / config.logits_scaling
        )
        super().__init__(config, make, layer, embedding=embedding, head=head)


FAMILIES = {"GraniteForCausalLM": (GraniteConfig, GraniteModel)}
