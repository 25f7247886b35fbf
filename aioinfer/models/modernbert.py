"""ModernBERT (Warner et al. 2024): pre-normed, rotary positions, a gated MLP, and in most layers a
window of tokens on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.rotary import RopeConfig
from aioinfer.models.config import read_ropes, read_windows, renamed
from aioinfer.models.encoder import EncoderConfig, EncoderEmbedding, EncoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    """ModernBERT's configuration.

    Attributes:
        local_rope: of layers with a window; `rope` is that of the others.
        attention_bias, mlp_bias, norm_bias: whether projections and norms have biases.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"hidden_activation": "gelu", "norm_eps": 1e-5}

    local_rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames a field."""
        return renamed({**cls.DEFAULTS, **config}, {"norm_eps": "layer_norm_eps"})

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads windows, of which one half is on each side of a token, ropes and biases."""
        every = config.get("global_attn_every_n_layers") or 3
        window = config.get("local_attention") or 128
        kinds = config.get("layer_types") or [
            "sliding_attention" if number % every else "full_attention"
            for number in range(config["num_hidden_layers"])
        ]
        theta = config.get("global_rope_theta") or 160_000.0
        local_theta = config.get("local_rope_theta") or 10_000.0
        rope, local_rope = read_ropes(config, theta, local_theta)
        return {
            "rope": rope,
            "local_rope": local_rope,
            "windows": read_windows({**config, "layer_types": kinds, "sliding_window": window}),
            "attention_bias": bool(config.get("attention_bias", False)),
            "mlp_bias": bool(config.get("mlp_bias", False)),
            "norm_bias": bool(config.get("norm_bias", False)),
        }


class ModernBertModel(EncoderModel):
    """Pre-normed attention and a gated MLP; the first layer's attention reads the embedding, which
    is normed, as it is."""

    def __init__(self, config: ModernBertConfig, make: LayerMaker):
        biased = config.norm_bias

        def layer(number: int) -> Layer:
            name, window = f"layers.{number}", config.windows[number]
            norm = make.layer_norm(f"{name}.attn_norm", bias=biased) if number else None
            attention = make.bidirectional_attention(
                f"{name}.attn", num_heads=config.num_heads, head_size=config.head_size, norm=norm,
                rope=config.rope if window is None else config.local_rope,
                reach=None if window is None else window // 2, bias=config.attention_bias,
                projections=("", "", "", "Wo"), merged="Wqkv",
            )  # fmt: skip
            mlp = make.gated_mlp(
                f"{name}.mlp", config.intermediate_size, activation=config.activation,
                norm=make.layer_norm(f"{name}.mlp_norm", bias=biased), bias=config.mlp_bias,
                projections=("", "", "Wo"), merged="Wi",
            )  # fmt: skip
            return Layer([attention, mlp])

        words = make.embedding("embeddings.tok_embeddings", config.vocab_size)
        embedding = EncoderEmbedding(words, make.layer_norm("embeddings.norm", bias=biased))
        norm = make.layer_norm("final_norm", bias=biased)
        super().__init__(config, make, layer, embedding, norm)


FAMILIES = {
    f"ModernBert{head}": (ModernBertConfig, ModernBertModel)
    for head in ("Model", "ForMaskedLM", "ForSequenceClassification")
}
