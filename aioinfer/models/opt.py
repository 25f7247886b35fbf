"""OPT (Zhang et al. 2022): LayerNorm, an embedding of each position, an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import DecoderConfig, renamed
from aioinfer.models.decoder import DecoderModel

_NAMES = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig(DecoderConfig):
    """OPT's configuration. `bias`: of all projections."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "activation_function": "relu", "layer_norm_eps": 1e-5, "tie_word_embeddings": True
    }  # fmt: skip

    bias: bool

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames fields."""
        return renamed({**cls.DEFAULTS, **config}, _NAMES)

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the biases. Raises `ConfigError` for what OPT-350M and Galactica alone have."""
        for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
            if not config.get(name, True):
                raise ConfigError(f"{name} = false is not supported")
        if config.get("_remove_final_layer_norm"):
            raise ConfigError("_remove_final_layer_norm = true is not supported")
        if config.get("word_embed_proj_dim") not in (None, config["hidden_size"]):
            raise ConfigError("word_embed_proj_dim other than hidden_size is not supported")
        return {"bias": bool(config.get("enable_bias", True))}


class OPTModel(DecoderModel):
    """Pre-normed attention and an MLP."""

    def __init__(self, config: OPTConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.decoder.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **{**config.attention_shape(number), "rope": None},
                norm=make.layer_norm(f"{prefix}.self_attn_layer_norm"),
                bias=config.bias,
                output_bias=config.bias,
                projections=("q_proj", "k_proj", "v_proj", "out_proj"),
            )
            mlp = make.mlp(
                f"{prefix}.fc1",
                f"{prefix}.fc2",
                config.intermediate_size,
                norm=make.layer_norm(f"{prefix}.final_layer_norm"),
                activation=config.activation,
                bias=config.bias,
            )
            return Layer([attention, mlp])

        # the first two rows of the table are of no position
        super().__init__(
            config,
            make,
            layer,
            embedding=make.embedding("model.decoder.embed_tokens", config.vocab_size),
            norm=make.layer_norm("model.decoder.final_layer_norm"),
            positions=make.positions("model.decoder.embed_positions", config.max_len, offset=2),
            layers_name="model.decoder.layers",
        )


FAMILIES = {"OPTForCausalLM": (OPTConfig, OPTModel)}
