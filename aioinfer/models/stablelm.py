"""StableLM (Stability AI 2024): Llama's layers with LayerNorm, RoPE over a part of the channels, in
some models norms of queries and keys by head, or attention and MLP side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.attention import QKNorms
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig
from aioinfer.models.decoder import DecoderModel

_QK_NORMS = QKNorms(names=("q_layernorm", "k_layernorm"), kind="layer by head")


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLmConfig(DecoderConfig):
    """StableLM's configuration.

    Attributes:
        attention_bias: of queries, keys and values.
        has_qk_norms: whether queries and keys are normed.
        is_parallel: whether attention and MLP are side by side.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}

    attention_bias: bool
    has_qk_norms: bool
    is_parallel: bool

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the three switches."""
        return {
            "attention_bias": bool(config.get("use_qkv_bias", False)),
            "has_qk_norms": bool(config.get("qk_layernorm", False)),
            "is_parallel": bool(config.get("use_parallel_residual", False)),
        }


class StableLmModel(DecoderModel):
    """Attention and a gated MLP."""

    def __init__(self, config: StableLmConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            norm = make.layer_norm(f"{prefix}.input_layernorm")
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=norm,
                bias=config.attention_bias,
                qk_norms=_QK_NORMS if config.has_qk_norms else None,
            )
            if not config.is_parallel:
                norm = make.layer_norm(f"{prefix}.post_attention_layernorm")
            size, activation = config.intermediate_size, config.activation
            mlp = make.gated_mlp(f"{prefix}.mlp", size, activation=activation, norm=norm)
            return Layer([attention, mlp], parallel=config.is_parallel)

        super().__init__(config, make, layer, norm=make.layer_norm("model.norm"))


FAMILIES = {"StableLmForCausalLM": (StableLmConfig, StableLmModel)}
