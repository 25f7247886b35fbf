"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 in most layers, attention with RoPE on half of
the channels in the others, and a gated MLP in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.layer import Layer, Mixer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.recurrence import Mamba2Shape
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.llama import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BambaConfig(LlamaConfig):
    """Bamba's configuration.

    Attributes:
        mamba: the shape of Mamba-2.
        has_attention: of each layer, whether it has attention in its place.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
        "mamba_expand": 2, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    }  # fmt: skip

    mamba: Mamba2Shape
    has_attention: tuple[bool, ...]

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the kinds of layers and the shape of Mamba-2, beside Llama's biases."""
        mamba = Mamba2Shape.read(config)
        attention = config.get("attn_layer_indices") or ()
        return {
            **LlamaConfig.own_fields(config),
            "mamba": mamba,
            "state_heads": mamba.num_heads,
            "has_attention": tuple(n in attention for n in range(config["num_hidden_layers"])),
        }


class BambaModel(DecoderModel):
    """Mamba-2 or attention, and a gated MLP."""

    def __init__(self, config: BambaConfig, make: LayerMaker):
        def mixer(prefix: str, number: int) -> Mixer:
            norm = make.norm(f"{prefix}.input_layernorm")
            if not config.has_attention[number]:
                return make.mamba2(f"{prefix}.mamba", config.mamba, norm=norm)
            return make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=norm,
                bias=config.attention_bias,
                output_bias=config.output_bias,
            )

        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            mlp = make.gated_mlp(
                f"{prefix}.feed_forward",
                config.intermediate_size,
                activation=config.activation,
                norm=make.norm(f"{prefix}.pre_ff_layernorm"),
                bias=config.mlp_bias,
            )
            return Layer([mixer(prefix, number), mlp])

        super().__init__(config, make, layer, norm=make.norm("model.final_layernorm"))


FAMILIES = {"BambaForCausalLM": (BambaConfig, BambaModel)}
