"""Bamba (IBM, Princeton, CMU and UIUC 2024) and Granite 4 (IBM 2025): Mamba-2 in most layers,
attention in the others, and a gated MLP in each. Bamba rotates half of the channels; Granite 4
rotates none, has Granite 3's multipliers, and experts beside the MLP in its larger models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.experts import MixtureMLP
from aioinfer.layers.layer import Layer, Mixer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames, MixtureShape, Routing
from aioinfer.layers.mlp import GatedMLP
from aioinfer.layers.recurrence import Mamba2Shape
from aioinfer.models.config import DecoderConfig, read_attention_layers, read_num_experts
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.granite import GraniteConfig

_MAMBA = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
#: Granite 4's experts lie beside the MLP that every token takes.
_EXPERTS = ExpertNames(
    experts="block_sparse_moe",
    stacked=("input_linear.weight", "output_linear.weight"),
    router="block_sparse_moe.router.layer",
    shared="shared_mlp",
    shared_projections=("input_linear", "input_linear", "output_linear"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BambaConfig(GraniteConfig):
    """Bamba's configuration: Granite's without its multipliers.

    Attributes:
        mlp: the module of the MLP, the modules of its projections, and the one that holds gate and
            up together, if one does.
        mlp_norm, last_norm: the module of the MLP's norm in a layer, and of the model's last norm.
        mamba: the shape of Mamba-2.
        has_attention: of each layer, whether it has attention in its place.
        has_rope: whether attention rotates queries and keys.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **_MAMBA, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    mlp: ClassVar[tuple[str, tuple[str, str, str], str | None]] = (
        "feed_forward", ("gate_proj", "up_proj", "down_proj"), None,
    )  # fmt: skip
    mlp_norm: ClassVar[str] = "pre_ff_layernorm"
    last_norm: ClassVar[str] = "model.final_layernorm"

    mamba: Mamba2Shape
    has_attention: tuple[bool, ...]
    has_rope: bool = True

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the kinds of layers and the shape of Mamba-2."""
        mamba = Mamba2Shape.read(config)
        attention = config.get("attn_layer_indices") or ()
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return {
            **GraniteConfig.own_fields(config),
            "attention_multiplier": size**-0.5,
            "mamba": mamba,
            "state_heads": mamba.num_heads,
            "has_attention": tuple(n in attention for n in range(config["num_hidden_layers"])),
        }

    def attention_shape(self, number: int) -> dict[str, Any]:
        """Most models of Granite 4 do not rotate."""
        shape = DecoderConfig.attention_shape(self, number)
        return shape if self.has_rope else {**shape, "rope": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(BambaConfig):
    """Granite 4's configuration."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = _MAMBA
    mlp: ClassVar[tuple[str, tuple[str, str, str], str | None]] = (
        "shared_mlp", ("", "", "output_linear"), "input_linear",
    )  # fmt: skip
    mlp_norm: ClassVar[str] = "post_attention_layernorm"
    last_norm: ClassVar[str] = "model.norm"

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves out numbers of experts that are 0."""
        experts = ("num_local_experts", "num_experts_per_tok")
        given = {name: config[name] for name in config if name not in experts or config[name]}
        return {**cls.DEFAULTS, **given}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the kinds of layers, the multipliers and the experts."""
        own = GraniteConfig.own_fields(config)
        return {
            **BambaConfig.own_fields(config),
            **own,
            "intermediate_size": config["shared_intermediate_size"],
            "has_attention": read_attention_layers(config, lambda _: False),
            "has_rope": config.get("position_embedding_type") == "rope",
            "mixture": _read_mixture(config, own["residual_multiplier"]),
        }


def _read_mixture(config: Mapping[str, Any], scale: float) -> MixtureShape | None:
    """Returns the experts, if there are any, whose outputs are multiplied with `scale`."""
    if not config.get("num_local_experts"):
        return None
    routing = Routing(read_num_experts(config), config["num_experts_per_tok"], scale=scale)
    return MixtureShape(
        routing, config["intermediate_size"], config["shared_intermediate_size"],
        shared_scale=scale, is_stacked=True, is_out_first=True,
    )  # fmt: skip


class BambaModel(DecoderModel):
    """Mamba-2 or attention, and a gated MLP or experts, with multipliers."""

    def __init__(self, config: BambaConfig, make: LayerMaker):
        scale = config.residual_multiplier

        def mixer(prefix: str, number: int) -> Mixer:
            norm = make.norm(f"{prefix}.input_layernorm")
            if not config.has_attention[number]:
                name = f"{prefix}.mamba"
                return make.mamba2(name, config.mamba, norm=norm, residual_scale=scale)
            return make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=norm,
                residual_scale=scale,
                bias=config.attention_bias,
                output_bias=config.output_bias,
                scale=config.attention_multiplier,
            )

        def mlp(prefix: str) -> GatedMLP | MixtureMLP:
            norm, activation = make.norm(f"{prefix}.{config.mlp_norm}"), config.activation
            if config.mixture is not None:
                return make.mixture(
                    prefix, config.mixture, norm=norm, activation=activation, names=_EXPERTS
                )
            name, projections, merged = config.mlp
            return make.gated_mlp(
                f"{prefix}.{name}", config.intermediate_size, norm=norm, activation=activation,
                bias=config.mlp_bias, residual_scale=scale, projections=projections, merged=merged,
            )  # fmt: skip

        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            return Layer([mixer(prefix, number), mlp(prefix)])

        embedding = make.embedding(
            "model.embed_tokens", config.vocab_size, scale=config.embedding_multiplier
        )
        scale_of_logits = 1 / config.logits_scaling
        head = make.head("lm_head", embedding, tied=config.tied_embeddings, scale=scale_of_logits)
        norm = make.norm(config.last_norm)
        super().__init__(config, make, layer, embedding=embedding, norm=norm, head=head)


FAMILIES = {
    "BambaForCausalLM": (BambaConfig, BambaModel),
    "GraniteMoeHybridForCausalLM": (GraniteHybridConfig, BambaModel),
}
