"""Kimi-Linear (Moonshot AI 2025): Kimi delta attention in three of four layers, latent attention
without rotation in the others, and DeepSeek-V3's experts in all layers but the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from aioinfer.layers.layer import Layer, Mixer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames
from aioinfer.layers.recurrence import DeltaNetShape
from aioinfer.layers.rotary import RopeConfig
from aioinfer.models.config import read_attention_layers, renamed
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.deepseek import LATENT_NORM_EPS, DeepseekV3Config

_EXPERTS = ExpertNames(
    projections=("w1", "w3", "w2"),
    shared="shared_experts",
    shared_projections=("gate_proj", "up_proj", "down_proj"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearConfig(DeepseekV3Config):
    """Kimi-Linear's configuration.

    Attributes:
        delta: the shape of Kimi delta attention.
        has_attention: of each layer, whether it has latent attention in its place.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5, "linear_head_dim": 128, "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "routed_scaling_factor": 2.446, "num_experts_per_tok": 8,
    }  # fmt: skip

    delta: DeltaNetShape
    has_attention: tuple[bool, ...]

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames fields, and takes those of the linear layers out of an object of their own, which
        numbers layers from 1."""
        names = {
            "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        }  # fmt: skip
        given = renamed(config, names)
        linear = given.pop("linear_attn_config", None) or {}
        own = {
            "head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
            "short_conv_kernel_size": "linear_conv_kernel_dim",
        }  # fmt: skip
        given |= {new: linear[old] for old, new in own.items() if old in linear}
        full = linear.get("full_attn_layers")
        if full and not given.get("layer_types"):
            layers = range(1, given["num_hidden_layers"] + 1)
            given["layer_types"] = [
                "full_attention" if number in full else "linear_attention" for number in layers
            ]
        return {**cls.DEFAULTS, **given}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads attention, the kinds of layers and the experts."""
        heads, size = config["linear_num_heads"], config["linear_head_dim"]
        width, own = config["linear_conv_kernel_dim"], DeepseekV3Config.own_fields(config)
        kinds = config.get("mlp_layer_types")
        if kinds:
            dense = frozenset(number for number, kind in enumerate(kinds) if kind == "dense")
            own["mixture"] = replace(own["mixture"], dense_layers=dense)
        return {
            **own,
            "rope": RopeConfig(kind="none"),
            "delta": DeltaNetShape(heads, heads, size, size, width, by_channel=True),
            "state_heads": heads,
            "has_attention": read_attention_layers(config, lambda n: n > 0 and n % 4 == 0),
        }


class KimiLinearModel(DecoderModel):
    """Kimi delta attention or latent attention, and an MLP or experts."""

    def __init__(self, config: KimiLinearConfig, make: LayerMaker):
        def mixer(prefix: str, number: int) -> Mixer:
            name, norm = f"{prefix}.self_attn", make.norm(f"{prefix}.input_layernorm")
            if not config.has_attention[number]:
                return make.kimi_delta_attention(name, config.delta, norm=norm)
            return make.latent_attention(
                name, shape=config.latent, query_rank=config.query_rank, rope=config.rope,
                norm=norm, norm_eps=LATENT_NORM_EPS, bias=config.attention_bias,
            )  # fmt: skip

        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            first, norm = mixer(prefix, number), make.norm(f"{prefix}.post_attention_layernorm")
            shape, activation = config.mixture, config.activation
            if shape is None or number in shape.dense_layers:
                size, name = config.intermediate_size, f"{prefix}.mlp"
                return Layer([first, make.gated_mlp(name, size, norm=norm, activation=activation)])
            name = f"{prefix}.block_sparse_moe"
            mixture = make.mixture(name, shape, norm=norm, activation=activation, names=_EXPERTS)
            return Layer([first, mixture])

        super().__init__(config, make, layer)


FAMILIES = {"KimiLinearForCausalLM": (KimiLinearConfig, KimiLinearModel)}
