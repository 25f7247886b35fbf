"""GLM-4-MoE (GLM-4.5, Zeng et al. 2025): DeepSeek-V3's routing behind attention with RoPE over half
of the channels; the first layers have a dense MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from aioinfer.layers.attention import QKNorms
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertNames, MixtureShape
from aioinfer.models.config import DecoderConfig
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.deepseek import read_v3_mixture
from aioinfer.models.mtp import MtpHead, MtpNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(DecoderConfig):
    """GLM-4-MoE's configuration. `attention_bias`: of queries, keys and values. `head_norms`: of
    queries and keys."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}

    mixture: MixtureShape
    attention_bias: bool = False
    head_norms: bool = False

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the experts, biases and norms. Checkpoints have a layer more than the model, which
        predicts further tokens (`mtp`)."""
        return {
            "mixture": read_v3_mixture(config),
            "attention_bias": bool(config.get("attention_bias", False)),
            "head_norms": bool(config.get("use_qk_norm", False)),
            "unused_layers": config.get("num_nextn_predict_layers") or 0,
            "has_mtp": bool(config.get("num_nextn_predict_layers")),
        }


class Glm4MoeModel(DecoderModel):
    """Pre-normed attention, and experts in the place of the MLP in all but the first layers."""

    def __init__(self, config: Glm4MoeConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(0),  # no layer has a window
                norm=make.norm(f"{prefix}.input_layernorm"),
                bias=config.attention_bias,
                qk_norms=QKNorms() if config.head_norms else None,
            )
            norm = make.norm(f"{prefix}.post_attention_layernorm")
            name = f"{prefix}.mlp"
            mlp = make.mixture_or_mlp(
                name, number, config, norm, ExpertNames(shared="shared_experts")
            )
            return Layer([attention, mlp])

        def mtp() -> MtpHead:
            number = config.num_layers
            return MtpHead(MtpNames.of_layer(number), partial(layer, number), make)

        super().__init__(config, make, layer, mtp=mtp if config.has_mtp else None)


FAMILIES = {"Glm4MoeForCausalLM": (Glm4MoeConfig, Glm4MoeModel)}
