"""Granite 4 (IBM 2025): Granite 3's multipliers, Mamba-2 in most layers, attention without RoPE in
the others, and a gated MLP in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.layer import Layer, Mixer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.recurrence import Mamba2Shape
from aioinfer.models.config import DecoderConfig, read_attention_layers
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.granite import GraniteConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(GraniteConfig):
    """Granite 4's configuration.

    Attributes:
        mamba: the shape of Mamba-2.
        has_attention: of each layer, whether it has attention in its place.
        has_rope: whether attention rotates queries and keys.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
        "mamba_expand": 2,
    }  # fmt: skip

    mamba: Mamba2Shape
    has_attention: tuple[bool, ...]
    has_rope: bool

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves out numbers of experts that are 0."""
        experts = ("num_local_experts", "num_experts_per_tok")
        given = {name: config[name] for name in config if name not in experts or config[name]}
        return {**cls.DEFAULTS, **given}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the kinds of layers and the shape of Mamba-2, beside Granite's multipliers."""
        if config.get("num_local_experts"):
            raise ConfigError("Granite 4 with experts (num_local_experts) is not supported yet")
        mamba = Mamba2Shape.read(config)
        return {
            **GraniteConfig.own_fields(config),
            "mamba": mamba,
            "state_heads": mamba.num_heads,
            "intermediate_size": config["shared_intermediate_size"],
            "has_attention": read_attention_layers(config, lambda _: False),
            "has_rope": config.get("position_embedding_type") == "rope",
        }

    def attention_shape(self, number: int) -> dict[str, Any]:
        """Most models do not rotate."""
        shape = DecoderConfig.attention_shape(self, number)
        return shape if self.has_rope else {**shape, "rope": None}


class GraniteHybridModel(DecoderModel):
    """Mamba-2 or attention, and a gated MLP, with multipliers."""

    def __init__(self, config: GraniteHybridConfig, make: LayerMaker):
        scale = config.residual_multiplier

        def mixer(prefix: str, number: int) -> Mixer:
            norm = make.norm(f"{prefix}.input_layernorm")
            if not config.has_attention[number]:
                name = f"{prefix}.mamba"
                return make.mamba2(name, config.mamba, norm=norm, residual_scale=scale)
            return make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=norm,
                residual_scale=scale,
                bias=config.attention_bias,
                output_bias=config.output_bias,
                scale=config.attention_multiplier,
            )

        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            mlp = make.gated_mlp(
                f"{prefix}.shared_mlp",
                config.intermediate_size,
                activation=config.activation,
                norm=make.norm(f"{prefix}.post_attention_layernorm"),
                residual_scale=scale,
                projections=("", "", "output_linear"),
                merged="input_linear",
            )
            return Layer([mixer(prefix, number), mlp])

        embedding = make.embedding(
            "model.embed_tokens", config.vocab_size, scale=config.embedding_multiplier
        )
        scale_of_logits = 1 / config.logits_scaling
        head = make.head("lm_head", embedding, tied=config.tied_embeddings, scale=scale_of_logits)
        super().__init__(config, make, layer, embedding=embedding, head=head)


FAMILIES = {"GraniteMoeHybridForCausalLM": (GraniteHybridConfig, GraniteHybridModel)}
