"""Qwen3-Next (Qwen 2025) and Qwen3.5 (2026): Gated DeltaNet in three of four layers, and in the
others attention with gates on its outputs and RoPE on a quarter of the channels; a gated MLP, or
experts with one that every token takes. Norms store their weights less one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.attention import QKNorms
from aioinfer.layers.layer import Layer, Mixer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.recurrence import DeltaNetShape
from aioinfer.models.config import DecoderConfig, read_attention_layers, read_rope
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.mtp import MtpHead, MtpNames
from aioinfer.models.qwen_moe import read_mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(DecoderConfig):
    """Qwen3-Next's configuration.

    Attributes:
        by_group: whether projections of Gated DeltaNet have the rows of each head of keys together.
        delta_net: its shape.
        has_attention: of each layer, whether it has attention in its place.
        attention_bias: of all four projections of attention.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "intermediate_size": 5632, "norm_topk_prob": True,
    }  # fmt: skip
    by_group: ClassVar[bool] = True

    delta_net: DeltaNetShape
    has_attention: tuple[bool, ...]
    attention_bias: bool

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the kinds of layers, their shapes and the experts."""
        every = config["full_attention_interval"]
        delta_net = DeltaNetShape(
            config["linear_num_key_heads"], config["linear_num_value_heads"],
            config["linear_key_head_dim"], config["linear_value_head_dim"],
            config["linear_conv_kernel_dim"],
        )  # fmt: skip
        if delta_net.num_heads % delta_net.num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads = {delta_net.num_heads} must be a multiple of "
                f"linear_num_key_heads = {delta_net.num_key_heads}"
            )
        shared = config.get("shared_expert_intermediate_size")
        return {
            "delta_net": delta_net,
            "state_heads": delta_net.num_key_heads,
            "has_attention": read_attention_layers(config, lambda n: (n + 1) % every == 0),
            # the three positions of M-RoPE are equal for text
            "rope": replace(read_rope(config), sections=None),
            "attention_bias": bool(config.get("attention_bias", False)),
            "has_mtp": True,
            "mixture": None if not shared else read_mixture(config, shared),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config(Qwen3NextConfig):
    """Qwen3.5's configuration."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Qwen3NextConfig.DEFAULTS, "shared_expert_intermediate_size": 0,
    }  # fmt: skip
    by_group: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35MoeConfig(Qwen3NextConfig):
    """Qwen3.5-MoE's configuration: probabilities of experts are always normalized."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Qwen3NextConfig.DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8,
        "intermediate_size": 512,
    }  # fmt: skip
    by_group: ClassVar[bool] = False


#: Qwen3.5's are the same.
_MTP_NAMES = MtpNames(
    "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
)  # fmt: skip


class Qwen3NextModel(DecoderModel):
    """Gated DeltaNet or gated attention, and experts or an MLP."""

    def __init__(self, config: Qwen3NextConfig, make: LayerMaker):
        def mixer(prefix: str, *, has_attention: bool) -> Mixer:
            norm = make.norm(f"{prefix}.input_layernorm", unit_offset=True)
            if has_attention:
                return make.attention(
                    f"{prefix}.self_attn",
                    **config.attention_shape(0),
                    norm=norm,
                    bias=config.attention_bias,
                    output_bias=config.attention_bias,
                    qk_norms=QKNorms(unit_offset=True),
                    gated=True,
                )
            name, shape = f"{prefix}.linear_attn", config.delta_net
            return make.gated_delta_net(name, shape, norm=norm, by_group=config.by_group)

        def layer(prefix: str, number: int, *, has_attention: bool) -> Layer:
            first = mixer(prefix, has_attention=has_attention)
            norm = make.norm(f"{prefix}.post_attention_layernorm", unit_offset=True)
            return Layer([first, make.mixture_or_mlp(f"{prefix}.mlp", number, config, norm)])

        def numbered(number: int) -> Layer:
            kind = config.has_attention[number]
            return layer(f"model.layers.{number}", number, has_attention=kind)

        def mtp() -> MtpHead:
            last = partial(layer, "mtp.layers.0", config.num_layers, has_attention=True)
            return MtpHead(_MTP_NAMES, last, make, unit_offset=True)

        norm = make.norm("model.norm", unit_offset=True)
        super().__init__(config, make, numbered, norm=norm, mtp=mtp)


FAMILIES = {
    "Qwen3NextForCausalLM": (Qwen3NextConfig, Qwen3NextModel),
    "Qwen3_5ForCausalLM": (Qwen35Config, Qwen3NextModel),
    "Qwen3_5MoeForCausalLM": (Qwen35MoeConfig, Qwen3NextModel),
}
