"""Phi-3 (Abdin et al. 2024) and Phi-4: Llama's layers with merged projections in the checkpoint,
longrope, and in some models RoPE over a part of the channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig, read_rope, read_windows
from aioinfer.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """Phi-3's configuration: all layers have the same window, or none."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the window, which is left out where no sequence is longer.

        Raises:
            ConfigError: a variant of RoPE that the family does not have.
        """
        kind = read_rope(config).kind
        if kind not in ("default", "longrope"):
            raise ConfigError(f"Phi-3 has no RoPE variant {kind!r}, only longrope")
        max_len = config["max_position_embeddings"]
        windows = read_windows(config)
        return {"windows": tuple(size if size and size < max_len else None for size in windows)}


class Phi3Model(DecoderModel):
    """Pre-normed attention and a gated MLP."""

    def __init__(self, config: Phi3Config, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm"),
                merged="qkv_proj",
            )
            mlp = make.gated_mlp(
                f"{prefix}.mlp",
                config.intermediate_size,
                activation=config.activation,
                norm=make.norm(f"{prefix}.post_attention_layernorm"),
                merged="gate_up_proj",
            )
            return Layer([attention, mlp])

        super().__init__(config, make, layer)


FAMILIES = {"Phi3ForCausalLM": (Phi3Config, Phi3Model)}
