"""Hunyuan (Tencent 2025), dense and with experts, of which one takes every token: queries and keys
are normed by head once they are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.attention import QKNorms
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames, MixtureShape, Routing
from aioinfer.models.config import DecoderConfig, read_num_experts, renamed
from aioinfer.models.decoder import DecoderModel

_NAMES = ExpertNames(shared="shared_mlp", router="gate.wg")
_QK_NORMS = QKNorms(names=("query_layernorm", "key_layernorm"), after_rope=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HunyuanConfig(DecoderConfig):
    """The configuration of dense models. `attention_bias`: of all four projections."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    attention_bias: bool = False

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the variant of RoPE: with `alpha`, its base is larger by alpha ** (R / (R - 2)), R
        being the channels of a head (NTK-aware)."""
        config = renamed({**cls.DEFAULTS, **config}, {"attention_head_dim": "head_dim"})
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        rope = config.get(key)
        if not isinstance(rope, Mapping) or not rope.get("alpha"):
            return config
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
        theta *= rope["alpha"] ** (size / (size - 2))
        return {**config, key: {"rope_type": "default", "rope_theta": theta}}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the biases."""
        return {"attention_bias": bool(config.get("attention_bias", False))}


@dataclass(frozen=True, slots=True, kw_only=True)
class HunyuanMoeConfig(HunyuanConfig):
    """The configuration of models with experts."""

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Numbers of experts may be given for each layer; they have to be the same."""
        config = renamed(HunyuanConfig.standard_fields(config), {"moe_topk": "num_experts_per_tok"})
        for name in ("num_experts", "num_experts_per_tok"):
            given = config.get(name)
            if isinstance(given, list) and given:
                if given != given[:1] * len(given):
                    raise ConfigError(f"{name} must be the same in each layer, not {given}")
                config[name] = given[0]
        return config

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the experts."""
        size = config["intermediate_size"]
        routing = Routing(read_num_experts(config), config["num_experts_per_tok"])
        return {**HunyuanConfig.own_fields(config), "mixture": MixtureShape(routing, size, size)}


class HunyuanModel(DecoderModel):
    """Pre-normed attention, and an MLP or experts."""

    def __init__(self, config: HunyuanConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm"),
                bias=config.attention_bias,
                output_bias=config.attention_bias,
                qk_norms=_QK_NORMS,
            )
            norm = make.norm(f"{prefix}.post_attention_layernorm")
            mlp = make.mixture_or_mlp(f"{prefix}.mlp", number, config, norm, _NAMES)
            return Layer([attention, mlp])

        super().__init__(config, make, layer)


FAMILIES = {
    "HunYuanDenseV1ForCausalLM": (HunyuanConfig, HunyuanModel),
    "HunYuanMoEV1ForCausalLM": (HunyuanMoeConfig, HunyuanModel),
}
