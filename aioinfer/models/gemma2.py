"""Gemma 2 (Gemma Team 2024): norms before and after attention and MLP, scaled embeddings, a window
in every other layer, soft caps on the scores of attention and on the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.attention import QKNorms
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.rotary import RopeConfig
from aioinfer.models.config import DecoderConfig, read_rope, read_windows
from aioinfer.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """Gemma 2's configuration: all but every n-th layer have a window, with n =
    `sliding_window_pattern`.

    Attributes:
        scale: of the scores.
        soft_cap, logit_soft_cap: of the scores and of the logits; 0 for none.
        local_rope: of layers with a window.
        head_norms: whether queries and keys are normed by head.
        bias: whether the projections of attention have one.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }

    scale: float
    soft_cap: float
    logit_soft_cap: float
    local_rope: RopeConfig
    head_norms: bool = False
    bias: bool = False

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the windows, from `layer_types` if it is there."""
        if config.get("use_bidirectional_attention"):
            raise ConfigError("use_bidirectional_attention: only causal models are supported")
        every = config["sliding_window_pattern"] or cls.DEFAULTS["sliding_window_pattern"]
        return {
            "windows": read_windows(config, every),
            "scale": config["query_pre_attn_scalar"] ** -0.5,
            "soft_cap": config["attn_logit_softcapping"] or 0.0,
            "logit_soft_cap": config["final_logit_softcapping"] or 0.0,
            "local_rope": read_rope(config),
            "bias": bool(config.get("attention_bias", False)),
        }

    def attention_shape(self, number: int) -> dict[str, Any]:
        """Layers with a window have a RoPE of their own."""
        shape = DecoderConfig.attention_shape(self, number)
        return shape if self.windows[number] is None else {**shape, "rope": self.local_rope}


class Gemma2Model(DecoderModel):
    """Norms before and after attention and MLP; all norms store their weights less one."""

    def __init__(self, config: Gemma2Config, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm", unit_offset=True),
                post_norm=make.norm(f"{prefix}.post_attention_layernorm", unit_offset=True),
                bias=config.bias,
                output_bias=config.bias,
                qk_norms=QKNorms(unit_offset=True) if config.head_norms else None,
                scale=config.scale,
                soft_cap=config.soft_cap,
            )
            mlp = make.gated_mlp(
                f"{prefix}.mlp",
                config.intermediate_size,
                activation=config.activation,
                norm=make.norm(f"{prefix}.pre_feedforward_layernorm", unit_offset=True),
                post_norm=make.norm(f"{prefix}.post_feedforward_layernorm", unit_offset=True),
            )
            return Layer([attention, mlp])

        embedding = make.embedding(
            "model.embed_tokens", config.vocab_size, scale=config.hidden_size**0.5
        )
        norm = make.norm("model.norm", unit_offset=True)
        head = make.head(
            "lm_head", embedding, tied=config.tied_embeddings, soft_cap=config.logit_soft_cap
        )
        super().__init__(config, make, layer, embedding=embedding, norm=norm, head=head)


FAMILIES = {"Gemma2ForCausalLM": (Gemma2Config, Gemma2Model)}
