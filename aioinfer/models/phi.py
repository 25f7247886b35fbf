"""Phi-1 to Phi-2 (Li et al. 2023): attention and an MLP without a gate side by side behind one
LayerNorm, RoPE over a part of the channels, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.attention import QKNorms
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig
from aioinfer.models.decoder import DecoderModel

_QK_NORMS = QKNorms(names=("q_layernorm", "k_layernorm"), kind="layer", bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhiConfig(DecoderConfig):
    """Phi's configuration. `has_qk_norms`: whether queries and keys are normed by head."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5
    }  # fmt: skip

    has_qk_norms: bool

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads whether queries and keys are normed."""
        return {"has_qk_norms": bool(config.get("qk_layernorm", False))}


class PhiModel(DecoderModel):
    """Attention and an MLP side by side."""

    def __init__(self, config: PhiConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            norm = make.layer_norm(f"{prefix}.input_layernorm")
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=norm,
                bias=True,
                output_bias=True,
                qk_norms=_QK_NORMS if config.has_qk_norms else None,
                projections=("q_proj", "k_proj", "v_proj", "dense"),
            )
            mlp = make.mlp(
                f"{prefix}.mlp.fc1",
                f"{prefix}.mlp.fc2",
                config.intermediate_size,
                norm=norm,
                activation=config.activation,
                bias=True,
            )
            return Layer([attention, mlp], parallel=True)

        embedding = make.embedding("model.embed_tokens", config.vocab_size)
        head = make.head("lm_head", embedding, tied=config.tied_embeddings, bias=True)
        norm = make.layer_norm("model.final_layernorm")
        super().__init__(config, make, layer, embedding=embedding, norm=norm, head=head)


FAMILIES = {"PhiForCausalLM": (PhiConfig, PhiModel)}
