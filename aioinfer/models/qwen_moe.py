"""Qwen2-MoE, with an expert that every token takes, and Qwen3-MoE, which norms queries and keys by
head and has no such expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import MixtureShape, Routing
from aioinfer.models.config import read_num_experts
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.qwen import Qwen2Config, Qwen3Config, qwen_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeConfig(Qwen2Config):
    """Qwen2-MoE's configuration: the experts, beside Qwen2's fields."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"shared_expert_intermediate_size": 5632}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the experts and the biases."""
        shared = config["shared_expert_intermediate_size"]
        own = {"mixture": read_mixture(config, shared)}
        return {**Qwen2Config.own_fields(config), **own, "qkv_bias": config.get("qkv_bias", True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Qwen3-MoE's configuration: the experts, beside Qwen3's fields."""

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the experts."""
        return {**Qwen3Config.own_fields(config), "mixture": read_mixture(config, 0)}


def read_mixture(config: Mapping[str, Any], shared_size: int) -> MixtureShape:
    """Returns the experts. Layers in `mlp_only_layers` have none, and of the others only every
    `decoder_sparse_step`-th has."""
    step, layers = config.get("decoder_sparse_step") or 1, range(config["num_hidden_layers"])
    dense = set(config.get("mlp_only_layers") or ())
    dense.update(number for number in layers if (number + 1) % step)
    routing = Routing(
        read_num_experts(config),
        config["num_experts_per_tok"],
        is_normalized=bool(config.get("norm_topk_prob", False)),
    )
    # quantizers write a tensor for each expert
    is_wide = not config.get("quantization_config")
    is_out_first = config.get("model_type") == "qwen3_5_moe_text"
    is_stacked = is_out_first or config.get("model_type") == "qwen3_vl_moe_text"
    return MixtureShape(
        routing,
        config["moe_intermediate_size"],
        shared_size,
        is_shared_gated=shared_size > 0,
        dense_layers=frozenset(dense),
        is_stacked=is_stacked and is_wide,
        is_out_first=is_out_first,
    )


class QwenMoeModel(DecoderModel):
    """Qwen's attention, and experts in the place of the MLP in most layers."""

    def __init__(self, config: Qwen2Config, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = qwen_attention(config, make, number)
            norm = make.norm(f"{prefix}.post_attention_layernorm")
            mlp = make.mixture_or_mlp(f"{prefix}.mlp", number, config, norm)
            return Layer([attention, mlp])

        super().__init__(config, make, layer)


FAMILIES = {
    "Qwen2MoeForCausalLM": (Qwen2MoeConfig, QwenMoeModel),
    "Qwen3MoeForCausalLM": (Qwen3MoeConfig, QwenMoeModel),
}
