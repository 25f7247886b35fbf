"""Falcon-H1 (TII 2025): attention and Mamba-2 side by side in each layer, then a gated MLP. Inputs
and outputs have fixed multipliers (after the maximal update parametrization, Yang and Hu 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from aioinfer.errors import ConfigError
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.recurrence import Mamba2Shape
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.fields import read_multipliers
from aioinfer.models.llama import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(LlamaConfig):
    """Falcon-H1's configuration.

    Attributes:
        mamba: the shape of Mamba-2.
        mamba_scales: of what its projection gives: gates, x, B, C and steps.
        mamba_scale, attention_scale, mlp_scale: of what the parts add to the stream.
        score_scale: of the scores of attention.
        gate_scale: of the MLP's gate.
        embedding_scale, head_scale: of embeddings and logits.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
        "mamba_d_conv": 4, "mamba_expand": 2, "rms_norm_eps": 1e-5,
        "mamba_norm_before_gate": True, "mamba_rms_norm": False, "projectors_bias": False,
    }  # fmt: skip

    mamba: Mamba2Shape
    mamba_scales: tuple[float, ...]
    mamba_scale: float
    attention_scale: float
    mlp_scale: float
    score_scale: float
    gate_scale: float
    embedding_scale: float
    head_scale: float

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves out the kinds of layers, which are all the same."""
        return {**cls.DEFAULTS, **{name: config[name] for name in config if name != "layer_types"}}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the shape of Mamba-2 and the multipliers."""

        def scale(name: str) -> float:
            return float(config.get(name, 1.0))

        norm: Literal["after gate", "before gate", "none"] = "none"
        if config["mamba_rms_norm"]:
            norm = "before gate" if config["mamba_norm_before_gate"] else "after gate"
        read = Mamba2Shape.read(config)
        mamba = replace(read, norm=norm, output_bias=config["projectors_bias"])
        attention_in, mamba_in = scale("attention_in_multiplier"), scale("ssm_in_multiplier")
        own = LlamaConfig.own_fields(config)
        if (own["attention_bias"] and attention_in != 1) or (mamba.bias and mamba_in != 1):
            raise ConfigError(
                "attention_in_multiplier and ssm_in_multiplier are not supported for projections "
                "with biases (attention_bias, mamba_proj_bias)"
            )
        gate, mlp = read_multipliers(config, "mlp_multipliers", 2)
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return {
            **own,
            "output_bias": own["attention_bias"],
            "mamba": mamba,
            "state_heads": mamba.num_heads,
            "mamba_scales": tuple(
                mamba_in * each for each in read_multipliers(config, "ssm_multipliers", 5)
            ),
            "mamba_scale": scale("ssm_out_multiplier"),
            # queries, keys and values are of inputs times the first factor
            "attention_scale": attention_in * scale("attention_out_multiplier"),
            "score_scale": attention_in**2 * scale("key_multiplier") * size**-0.5,
            "gate_scale": gate,
            "mlp_scale": mlp,
            "embedding_scale": scale("embedding_multiplier"),
            "head_scale": scale("lm_head_multiplier"),
        }


class FalconH1Model(DecoderModel):
    """Attention and Mamba-2 side by side, then a gated MLP."""

    def __init__(self, config: FalconH1Config, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            norm = make.norm(f"{prefix}.input_layernorm")
            attention = make.attention(
                f"{prefix}.self_attn", **config.attention_shape(number), norm=norm,
                residual_scale=config.attention_scale, scale=config.score_scale,
                bias=config.attention_bias, output_bias=config.output_bias,
            )  # fmt: skip
            mamba = make.mamba2(
                f"{prefix}.mamba", config.mamba, norm=norm, residual_scale=config.mamba_scale,
                input_scales=config.mamba_scales,
            )  # fmt: skip
            mlp = make.gated_mlp(
                f"{prefix}.feed_forward", config.intermediate_size, activation=config.activation,
                norm=make.norm(f"{prefix}.pre_ff_layernorm"), bias=config.mlp_bias,
                residual_scale=config.mlp_scale, gate_scale=config.gate_scale,
            )  # fmt: skip
            return Layer([attention, mamba], parallel=True, then=[mlp])

        embedding = make.embedding(
            "model.embed_tokens", config.vocab_size, scale=config.embedding_scale
        )
        head = make.head("lm_head", embedding, tied=config.tied_embeddings, scale=config.head_scale)
        norm = make.norm("model.final_layernorm")
        super().__init__(config, make, layer, embedding=embedding, norm=norm, head=head)


FAMILIES = {"FalconH1ForCausalLM": (FalconH1Config, FalconH1Model)}
