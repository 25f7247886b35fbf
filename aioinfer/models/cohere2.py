"""Cohere2 (Command R7B, Cohere 2024): attention and MLP side by side behind one LayerNorm, a window
and RoPE in interleaved pairs in three of four layers, and neither in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig, read_rope, read_windows
from aioinfer.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohere2Config(DecoderConfig):
    """Cohere2's configuration. `attention_bias`: of all four projections. `logit_scale`: multiplied
    with the logits."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096,
        "sliding_window_pattern": 4, "tie_word_embeddings": True,
    }  # fmt: skip

    logit_scale: float
    attention_bias: bool = False

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the windows, the order of the rotated channels, the scale and the biases."""
        return {
            "windows": read_windows(config, config["sliding_window_pattern"]),
            "rope": replace(read_rope(config), interleaved=True),
            "logit_scale": float(config["logit_scale"]),
            "attention_bias": bool(config.get("attention_bias", False)),
        }

    def attention_shape(self, number: int) -> dict[str, Any]:
        """Layers without a window are not rotated."""
        shape = DecoderConfig.attention_shape(self, number)
        return {**shape, "rope": None} if self.windows[number] is None else shape


class Cohere2Model(DecoderModel):
    """Attention and a gated MLP side by side."""

    def __init__(self, config: Cohere2Config, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            norm = make.layer_norm(f"{prefix}.input_layernorm", bias=False)
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=norm,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            )
            size, activation = config.intermediate_size, config.activation
            mlp = make.gated_mlp(f"{prefix}.mlp", size, activation=activation, norm=norm)
            return Layer([attention, mlp], parallel=True)

        embedding = make.embedding("model.embed_tokens", config.vocab_size)
        tied, scale = config.tied_embeddings, config.logit_scale
        head = make.head("lm_head", embedding, tied=tied, scale=scale)
        norm = make.layer_norm("model.norm", bias=False)
        super().__init__(config, make, layer, embedding=embedding, norm=norm, head=head)


FAMILIES = {"Cohere2ForCausalLM": (Cohere2Config, Cohere2Model)}
