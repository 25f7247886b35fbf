"""Falcon (Almazrouei et al. 2023), in its three shapes: attention and MLP one after the other with
ALiBi (RW), side by side behind one LayerNorm (7B), or each behind its own (40B and later)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig, renamed
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.fields import four_times_hidden_size

_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconConfig(DecoderConfig):
    """Falcon's configuration. `bias`: of all projections. `has_alibi`: ALiBi in the place of RoPE.
    `is_parallel`: whether attention and MLP are side by side. `norms`: in a layer."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "activation": "gelu", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048,
        "multi_query": True, "parallel_attn": True, "tie_word_embeddings": True,
    }  # fmt: skip

    bias: bool
    has_alibi: bool
    is_parallel: bool
    norms: int

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames fields; the MLP is by default four times as wide as the hidden size."""
        config = renamed({**cls.DEFAULTS, **config}, _NAMES)
        if not config.get("new_decoder_architecture"):
            heads = config["num_attention_heads"]
            config["num_key_value_heads"] = 1 if config["multi_query"] else heads
        return {"intermediate_size": four_times_hidden_size(config), **config}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the shape of the layers."""
        is_new = bool(config.get("new_decoder_architecture", False))
        is_parallel = is_new or bool(config["parallel_attn"])
        given = config.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
        switches = {"bias": bool(config.get("bias")), "has_alibi": bool(config.get("alibi"))}
        return {**switches, "is_parallel": is_parallel, "norms": given if is_parallel else 2}

    def attention_shape(self, number: int) -> dict[str, Any]:
        """With ALiBi, which is scaled as the scores are, nothing is rotated."""
        shape = DecoderConfig.attention_shape(self, number)
        return {**shape, "rope": None, "alibi": self.head_size**-0.5} if self.has_alibi else shape


class FalconModel(DecoderModel):
    """Attention and an MLP without a gate."""

    def __init__(self, config: FalconConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"transformer.h.{number}"
            names = ("input_layernorm", "post_attention_layernorm")
            if config.is_parallel and config.norms == 2:
                names = ("ln_attn", "ln_mlp")
            norms = [make.layer_norm(f"{prefix}.{name}") for name in names[: config.norms]]
            attention = make.attention(
                f"{prefix}.self_attention",
                **config.attention_shape(number),
                norm=norms[0],
                bias=config.bias,
                output_bias=config.bias,
                projections=("q", "k", "v", "dense"),
                merged="query_key_value",
                merged_by_group=True,
            )
            mlp = make.mlp(
                f"{prefix}.mlp.dense_h_to_4h",
                f"{prefix}.mlp.dense_4h_to_h",
                config.intermediate_size,
                norm=norms[-1],
                activation=config.activation,
                bias=config.bias,
            )
            return Layer([attention, mlp], parallel=config.is_parallel)

        embedding = make.embedding("transformer.word_embeddings", config.vocab_size)
        norm = make.layer_norm("transformer.ln_f")
        super().__init__(
            config, make, layer, embedding=embedding, norm=norm, layers_name="transformer.h"
        )


FAMILIES = {"FalconForCausalLM": (FalconConfig, FalconModel)}
