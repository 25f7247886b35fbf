"""gpt-oss (OpenAI 2025): experts with biases and a clamped activation in every layer; attention
with sinks, and with a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.experts import ClampedSwiGLU
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import MixtureShape, Routing
from aioinfer.models.config import DecoderConfig, read_num_experts, read_windows
from aioinfer.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """gpt-oss's configuration. `attention_bias`: of all four projections."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
    }

    mixture: MixtureShape
    swiglu: ClampedSwiGLU
    attention_bias: bool = True

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the experts, the activation, the biases and the windows; without `layer_types`
        layers 0, 2, 4 ... have one."""
        kinds = ("sliding_attention", "full_attention")
        alternating = [kinds[number % 2] for number in range(config["num_hidden_layers"])]
        types = config.get("layer_types") or alternating
        # the softmax over the selected experts' logits is that over all, divided by their sum
        routing = Routing(
            read_num_experts(config), config["num_experts_per_tok"], has_logit_bias=True
        )
        alpha, limit = config.get("swiglu_alpha"), config.get("swiglu_limit")
        return {
            "mixture": MixtureShape(routing, config["intermediate_size"]),
            "swiglu": ClampedSwiGLU(1.702 if alpha is None else alpha, limit or 7.0),
            "windows": read_windows({**config, "layer_types": types}),
            "attention_bias": bool(config.get("attention_bias", True)),
        }


class GptOssModel(DecoderModel):
    """Pre-normed attention and experts."""

    def __init__(self, config: GptOssConfig, make: LayerMaker):
        def layer(number: int) -> Layer:
            prefix = f"model.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **config.attention_shape(number),
                norm=make.norm(f"{prefix}.input_layernorm"),
                bias=config.attention_bias,
                output_bias=config.attention_bias,
                sinks=True,
            )
            mixture = make.biased_mixture(
                f"{prefix}.mlp",
                config.mixture,
                config.swiglu,
                norm=make.norm(f"{prefix}.post_attention_layernorm"),
            )
            return Layer([attention, mixture])

        super().__init__(config, make, layer)


FAMILIES = {"GptOssForCausalLM": (GptOssConfig, GptOssModel)}
