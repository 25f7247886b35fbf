"""Nemotron-H and Nemotron-3 (NVIDIA 2025): each layer is one part, Mamba-2, attention without RoPE,
an MLP without a gate, or experts without gates, which Nemotron-3's larger models compute of latent
vectors. Experts are selected as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from aioinfer.errors import ConfigError
from aioinfer.layers.layer import Layer, Part
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames, MixtureShape
from aioinfer.layers.recurrence import Mamba2Shape
from aioinfer.models.config import DecoderConfig, renamed
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.deepseek import read_v3_mixture

_EXPERTS = ExpertNames(projections=("", "up_proj", "down_proj"), shared="shared_experts")
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
        "num_experts_per_tok": 2, "n_shared_experts": 1,
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
        kinds = kinds or given["hybrid_override_pattern"]
        if not isinstance(kinds, list | str) or not all(isinstance(kind, str) for kind in kinds):
            raise ConfigError("the kinds of layers must be a list of names, or a text of letters")
        kinds = [_KINDS.get(kind, kind) for kind in kinds]
        return {**given, "layer_types": kinds, "num_hidden_layers": len(kinds)}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the shape of Mamba-2, the bias and the experts."""
        has_bias = bool(config.get("use_bias", False))
        mamba = Mamba2Shape(
            config["mamba_num_heads"],
            config["mamba_head_dim"],
            config["n_groups"],
            config["ssm_state_size"],
            config["conv_kernel"],
            (float(config["time_step_min"]), float("inf")),
            bool(config.get("use_conv_bias", True)),
            bias=has_bias,
            output_bias=has_bias,
        )
        return {
            "mamba": mamba,
            "state_heads": mamba.num_heads,
            "kinds": tuple(config["layer_types"]),
            "mlp_bias": bool(config.get("mlp_bias", False)),
            "mixture": _read_mixture(config) if "moe" in config["layer_types"] else None,
        }


def _read_mixture(config: Mapping[str, Any]) -> MixtureShape:
    """Returns the experts."""
    if config.get("mlp_bias"):
        raise ConfigError("mlp_bias is not supported in models with experts")
    shared, latent = config["moe_shared_expert_intermediate_size"], config.get("moe_latent_size")
    return replace(read_v3_mixture(config), shared_size=shared, latent_size=latent or 0)


class NemotronHModel(DecoderModel):
    """Layers of one part."""

    def __init__(self, config: NemotronHConfig, make: LayerMaker):
        def part(number: int) -> Part:
            prefix = f"model.layers.{number}"
            name, norm = f"{prefix}.mixer", make.norm(f"{prefix}.norm")
            if config.kinds[number] == "linear_attention":
                return make.mamba2(name, config.mamba, norm=norm)
            if config.kinds[number] == "full_attention":
                fields = {**config.attention_shape(number), "rope": None}
                return make.attention(name, **fields, norm=norm)
            activation = config.activation
            if config.kinds[number] == "moe":
                assert config.mixture is not None
                shape = config.mixture
                return make.mixture(name, shape, norm=norm, activation=activation, names=_EXPERTS)
            size = config.intermediate_size
            up, down, bias = f"{name}.up_proj", f"{name}.down_proj", config.mlp_bias
            return make.mlp(up, down, size, norm=norm, activation=activation, bias=bias)

        embedding = make.embedding("model.embeddings", config.vocab_size)
        norm = make.norm("model.norm_f")
        super().__init__(
            config, make, lambda number: Layer([part(number)]), embedding=embedding, norm=norm
        )


FAMILIES = {"NemotronHForCausalLM": (NemotronHConfig, NemotronHModel)}
