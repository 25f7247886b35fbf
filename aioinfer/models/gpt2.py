"""GPT-2 (Radford et al. 2019): LayerNorm, an embedding of each position, an MLP without a gate, and
weights of linear layers that are stored transposed."""

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
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """GPT-2's configuration. `scales`: of the scores of each layer."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True
    }  # fmt: skip

    scales: tuple[float, ...]

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames fields; the MLP is by default four times as wide as the hidden size."""
        config = renamed({**cls.DEFAULTS, **config}, _NAMES)
        return {"intermediate_size": four_times_hidden_size(config), **config}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads how scores are scaled."""
        head_size = config["hidden_size"] // config["num_attention_heads"]
        scale = head_size**-0.5 if config.get("scale_attn_weights", True) else 1.0
        falls = bool(config.get("scale_attn_by_inverse_layer_idx", False))
        layers = range(config["num_hidden_layers"])
        return {"scales": tuple(scale / (number + 1 if falls else 1) for number in layers)}


class GPT2Model(DecoderModel):
    """Pre-normed attention and an MLP."""

    def __init__(self, config: GPT2Config, make: LayerMaker):
        make.is_transposed = True

        def layer(number: int) -> Layer:
            prefix = f"transformer.h.{number}"
            attention = make.attention(
                f"{prefix}.attn",
                **{**config.attention_shape(number), "rope": None},
                norm=make.layer_norm(f"{prefix}.ln_1"),
                bias=True,
                output_bias=True,
                scale=config.scales[number],
                projections=("q", "k", "v", "c_proj"),
                merged="c_attn",
            )
            mlp = make.mlp(
                f"{prefix}.mlp.c_fc",
                f"{prefix}.mlp.c_proj",
                config.intermediate_size,
                norm=make.layer_norm(f"{prefix}.ln_2"),
                activation=config.activation,
                bias=True,
            )
            return Layer([attention, mlp])

        super().__init__(
            config,
            make,
            layer,
            embedding=make.embedding("transformer.wte", config.vocab_size),
            norm=make.layer_norm("transformer.ln_f"),
            positions=make.positions("transformer.wpe", config.max_len),
            layers_name="transformer.h",
        )


FAMILIES = {"GPT2LMHeadModel": (GPT2Config, GPT2Model)}
