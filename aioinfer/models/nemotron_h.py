"""Nemotron-H (NVIDIA 2025): each layer is one part, Mamba-2, attention without RoPE, or an MLP
without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.layer import Layer, Part
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.recurrence import Mamba2Shape
from aioinfer.models.config import DecoderConfig, renamed
from aioinfer.models.decoder import DecoderModel

#: The kinds of layers by the letters of `hybrid_override_pattern`, and by older names.
_KINDS = {
    "M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe",
    "mamba": "linear_attention", "attention": "full_attention",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(DecoderConfig):
    """Nemotron-H's configuration.

    Attributes:
        mamba: the shape of Mamba-2.
        kinds: of each layer.
        mlp_bias: of both projections of an MLP.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "mlp_hidden_act": "relu2", "head_dim": 128, "ssm_state_size": 128, "n_groups": 8,
        "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "time_step_min": 0.001,
    }  # fmt: skip

    mamba: Mamba2Shape
    kinds: tuple[str, ...]
    mlp_bias: bool

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames fields, and reads the kinds of layers, which say how many there are."""
        names = {"mlp_hidden_act": "hidden_act", "layer_norm_epsilon": "layer_norm_eps"}
        given = renamed({**cls.DEFAULTS, **config}, names)
        kinds = given.get("layers_block_type") or given.get("layer_types")
        kinds = kinds or list(given["hybrid_override_pattern"])
        kinds = [_KINDS.get(kind, kind) for kind in kinds]
        return {**given, "layer_types": kinds, "num_hidden_layers": len(kinds)}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the shape of Mamba-2 and the bias."""
        if "moe" in config["layer_types"]:
            raise ConfigError("Nemotron-H with experts (layers of kind 'moe') is not supported yet")
        mamba = Mamba2Shape(
            config["mamba_num_heads"],
            config["mamba_head_dim"],
            config["n_groups"],
            config["ssm_state_size"],
            config["conv_kernel"],
            (float(config["time_step_min"]), float("inf")),
            bool(config.get("use_conv_bias", True)),
            bool(config.get("use_bias", False)),
        )
        return {
            "mamba": mamba,
            "state_heads": mamba.num_heads,
            "kinds": tuple(config["layer_types"]),
            "mlp_bias": bool(config.get("mlp_bias", False)),
        }


class NemotronHModel(DecoderModel):
    """Layers of one part."""

    def __init__(self, config: NemotronHConfig, make: LayerMaker):
        def part(number: int) -> Part:
            prefix = f"model.layers.{number}"
            name, norm = f"{prefix}.mixer", make.norm(f"{prefix}.norm")
            if config.kinds[number] == "linear_attention":
                return make.mamba2(name, config.mamba, norm=norm)
            if config.kinds[number] == "full_attention":
                shape = {**config.attention_shape(number), "rope": None}
                return make.attention(name, **shape, norm=norm)
            size, activation = config.intermediate_size, config.activation
            up, down, bias = f"{name}.up_proj", f"{name}.down_proj", config.mlp_bias
            return make.mlp(up, down, size, norm=norm, activation=activation, bias=bias)

        embedding = make.embedding("model.embeddings", config.vocab_size)
        norm = make.norm("model.norm_f")
        super().__init__(
            config, make, lambda number: Layer([part(number)]), embedding=embedding, norm=norm
        )


FAMILIES = {"NemotronHForCausalLM": (NemotronHConfig, NemotronHModel)}
