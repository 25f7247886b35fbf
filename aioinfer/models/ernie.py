"""ERNIE 4.5 (Baidu 2025): Llama's layers with RoPE in interleaved pairs, dense or with experts, of
which some take every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames, MixtureShape, Routing
from aioinfer.models.config import read_num_experts, read_rope, renamed
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.llama import LlamaConfig, LlamaModel

_NAMES = {
    "moe_k": "num_experts_per_tok",
    "moe_num_experts": "n_routed_experts",
    "moe_num_shared_experts": "n_shared_experts",
}
_EXPERT_NAMES = ExpertNames(
    shared="shared_experts", router_bias="moe_statics.e_score_correction_bias"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErnieConfig(LlamaConfig):
    """The configuration of dense models: one field for all biases."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True
    }  # fmt: skip

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the biases and the order of the rotated channels."""
        bias = bool(config.get("use_bias", False))
        rope = replace(read_rope(config), interleaved=True)
        return {"attention_bias": bias, "output_bias": bias, "mlp_bias": bias, "rope": rope}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErnieMoeConfig(ErnieConfig):
    """The configuration of models with experts."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {**ErnieConfig.DEFAULTS, "head_dim": None}

    mixture: MixtureShape

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames the fields of the experts."""
        return renamed({**cls.DEFAULTS, **config}, _NAMES)

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the experts, and which layers have them: every `moe_layer_interval`-th from
        `moe_layer_start_index` to `moe_layer_end_index`."""
        if config.get("use_bias"):
            raise ConfigError("use_bias = true is not supported with experts")
        first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
        every, layers = config.get("moe_layer_interval") or 1, config["num_hidden_layers"]
        last = layers - 1 if last in (None, -1) else last
        sparse = {n for n in range(first or 0, last + 1) if (n + 1) % every == 0}
        size, shared = config["moe_intermediate_size"], config.get("n_shared_experts") or 0
        routing = Routing(read_num_experts(config), config["num_experts_per_tok"], has_bias=True)
        dense = frozenset(range(layers)) - sparse
        return {
            **ErnieConfig.own_fields(config),
            "mixture": MixtureShape(routing, size, size * shared, dense_layers=dense),
        }


class ErnieMoeModel(DecoderModel):
    """Pre-normed attention, and experts in the place of the MLP in most layers."""

    def __init__(self, config: ErnieMoeConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm"),
            )
            norm = make.norm(f"{prefix}.post_attention_layernorm")
            mlp = make.mixture_or_mlp(f"{prefix}.mlp", number, config, norm, _EXPERT_NAMES)
            return Layer([attention, mlp])

        super().__init__(config, make, layer)


FAMILIES: dict[str, tuple[Any, Any]] = {
    "Ernie4_5ForCausalLM": (ErnieConfig, LlamaModel),
    "Ernie4_5_MoeForCausalLM": (ErnieMoeConfig, ErnieMoeModel),
}
