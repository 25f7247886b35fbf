"""LFM2 (Liquid AI 2025): gated short convolutions in most layers, and in the others attention with
norms of queries and keys by head; a gated MLP, or experts in all layers but the first few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.attention import QKNorms
from aioinfer.layers.layer import Layer, Mixer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames, MixtureShape, Routing
from aioinfer.models.config import DecoderConfig, read_attention_layers, renamed
from aioinfer.models.decoder import DecoderModel

_NAMES = ExpertNames(projections=("w1", "w3", "w2"), router_bias="expert_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """LFM2's configuration.

    Attributes:
        width: tokens of the convolutions.
        conv_bias: of the convolutions, and of the projections around them.
        has_attention: of each layer, whether it has attention in the place of a convolution.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "rope_theta": 1_000_000.0, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        "tie_word_embeddings": True,
    }  # fmt: skip

    width: int
    conv_bias: bool
    has_attention: tuple[bool, ...]

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames fields; older files have names of their own for two of them."""
        names = {
            "norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size",
            "tie_embedding": "tie_word_embeddings",
        }  # fmt: skip
        return renamed({**cls.DEFAULTS, **config}, names)

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the kinds of layers, the convolutions, and the channels of the MLP."""
        attention = config.get("full_attn_idxs")
        return {
            "width": config["conv_L_cache"],
            "conv_bias": config["conv_bias"],
            "has_attention": read_attention_layers(
                config, lambda number: attention is None or number in attention
            ),
            "intermediate_size": cls.mlp_size(config),
        }

    @classmethod
    def mlp_size(cls, config: Mapping[str, Any]) -> int:
        """Returns the channels of the MLP, which may follow from `intermediate_size` by a rule."""
        size: int = config["intermediate_size"]
        if not config["block_auto_adjust_ff_dim"]:
            return size
        multiple = config["block_multiple_of"]
        size = int((config["block_ffn_dim_multiplier"] or 1.0) * int(2 * size / 3))
        return -(-size // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config):
    """LFM2-MoE's configuration: the experts, beside LFM2's fields."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Lfm2Config.DEFAULTS, "block_auto_adjust_ff_dim": False, "num_dense_layers": 2,
        "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0,
    }  # fmt: skip

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the experts."""
        routing = Routing(
            config["num_experts"],
            config["num_experts_per_tok"],
            scores="sigmoid",
            has_bias=config["use_expert_bias"],
            is_normalized=config["norm_topk_prob"],
            scale=config["routed_scaling_factor"],
        )
        dense = frozenset(range(config["num_dense_layers"]))
        mixture = MixtureShape(routing, config["moe_intermediate_size"], dense_layers=dense)
        return {**Lfm2Config.own_fields(config), "mixture": mixture}


class Lfm2Model(DecoderModel):
    """A convolution or attention, and an MLP or experts."""

    def __init__(self, config: Lfm2Config, make: LayerMaker):
        def mixer(prefix: str, number: int) -> Mixer:
            norm = make.norm(f"{prefix}.operator_norm")
            if not config.has_attention[number]:
                name = f"{prefix}.conv"
                return make.short_convolution(name, config.width, norm=norm, bias=config.conv_bias)
            return make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=norm,
                qk_norms=QKNorms(("q_layernorm", "k_layernorm")),
                projections=("q_proj", "k_proj", "v_proj", "out_proj"),
            )

        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            first, norm = mixer(prefix, number), make.norm(f"{prefix}.ffn_norm")
            name = f"{prefix}.feed_forward"
            return Layer([first, make.mixture_or_mlp(name, number, config, norm, _NAMES)])

        super().__init__(config, make, layer, norm=make.norm("model.embedding_norm"))


FAMILIES = {
    "Lfm2ForCausalLM": (Lfm2Config, Lfm2Model),
    "Lfm2MoeForCausalLM": (Lfm2MoeConfig, Lfm2Model),
}
