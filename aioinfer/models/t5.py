"""T5 (Raffel et al. 2019) and its like: RMSNorm, biases of scores by distance in the place of
positions, and scores that are not scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from aioinfer.layers.cross_attention import SourceLengths
from aioinfer.layers.distance_bias import buckets_of
from aioinfer.layers.formats.base import ACTIVATIONS
from aioinfer.layers.layer import Layer, Part
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import renamed
from aioinfer.models.encoder_decoder import (
    EncoderDecoderConfig,
    EncoderDecoderModel,
    SourceEncoder,
)
from aioinfer.models.replicated import Embedding

_NAMES = {
    "d_model": "hidden_size",
    "d_kv": "head_dim",
    "d_ff": "intermediate_size",
    "num_decoder_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
}
_PROJECTIONS = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(EncoderDecoderConfig):
    """T5's configuration.

    Attributes:
        is_gated: whether MLPs have a gate.
        num_buckets, max_distance: of the biases by distance.
        head_scale: multiplied with the logits.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "n_positions": 512, "layer_norm_epsilon": 1e-6, "tie_word_embeddings": True,
        "feed_forward_proj": "relu", "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128, "d_kv": 64,
    }  # fmt: skip

    is_gated: bool
    num_buckets: int
    max_distance: int
    head_scale: float

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames fields; the decoder has by default as many layers as the encoder."""
        given = {**cls.DEFAULTS, "num_decoder_layers": config.get("num_layers"), **config}
        activation = str(given["feed_forward_proj"]).removeprefix("gated-")
        if given["feed_forward_proj"] == "gated-gelu":
            activation = "gelu_new"
        return {**renamed(given, _NAMES), "hidden_act": activation}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the encoder's shape, and the biases."""
        is_scaled = config.get("scale_decoder_outputs", config["tie_word_embeddings"])
        return {
            "encoder_layers": config["num_layers"],
            "encoder_heads": config["num_attention_heads"],
            "encoder_size": config["intermediate_size"],
            "max_values": config["max_position_embeddings"],
            "max_source_len": config["max_position_embeddings"],
            "is_gated": str(config["feed_forward_proj"]).startswith("gated-"),
            "num_buckets": config["relative_attention_num_buckets"],
            "max_distance": config["relative_attention_max_distance"],
            "head_scale": config["hidden_size"] ** -0.5 if is_scaled else 1.0,
        }


class _EncoderAttention(torch.nn.Module):
    """Attention of the encoder; the first layer's has the biases of all."""

    def __init__(self, config: T5Config, *, has_biases: bool):
        super().__init__()
        size, inner = config.hidden_size, config.num_heads * config.head_size
        self._heads = config.num_heads
        self.q, self.k, self.v = (torch.nn.Linear(size, inner, bias=False) for _ in range(3))
        self.o = torch.nn.Linear(inner, size, bias=False)
        if has_biases:
            buckets, heads = config.num_buckets, config.num_heads
            self.relative_attention_bias = Embedding(buckets, heads)

    def forward(self, hidden: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        """Returns [n, size] for hidden states alike, and biases [heads, n, n] of the scores."""
        queries, keys, values = (
            module(hidden).unflatten(1, (self._heads, -1)).transpose(0, 1)[None]
            for module in (self.q, self.k, self.v)
        )
        found = F.scaled_dot_product_attention(queries, keys, values, biases[None], scale=1.0)
        return self.o(found[0].transpose(0, 1).flatten(1))


class _EncoderMLP(torch.nn.Module):
    """The MLP of a layer of the encoder."""

    def __init__(self, config: T5Config):
        super().__init__()
        size, channels = config.hidden_size, config.encoder_size
        self._activate = ACTIVATIONS[config.activation]
        for name in ("wi_0", "wi_1") if config.is_gated else ("wi",):
            self.add_module(name, torch.nn.Linear(size, channels, bias=False))
        self.wo = torch.nn.Linear(channels, size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [n, size] for hidden states alike."""
        first, *second = self._inputs
        activated = self._activate(first(hidden))
        for gate in second:
            activated = activated * gate(hidden)
        output: torch.Tensor = self.wo(activated)
        return output

    @property
    def _inputs(self) -> list[torch.nn.Module]:
        return [module for name, module in self.named_children() if name != "wo"]


def _named(**modules: torch.nn.Module) -> torch.nn.Module:
    """Returns a module with others below it."""
    found = torch.nn.Module()
    for name, module in modules.items():
        found.add_module(name, module)
    return found


class T5Encoder(SourceEncoder):
    """Embeddings of tokens, pre-normed layers, and a norm."""

    def __init__(self, config: T5Config):
        super().__init__(config)
        size, eps = config.hidden_size, config.norm_eps
        self._num_buckets, self._max_distance = config.num_buckets, config.max_distance
        self.shared = Embedding(config.vocab_size, size)

        def norm() -> torch.nn.Module:
            return torch.nn.RMSNorm(size, eps)

        def block(number: int) -> torch.nn.Module:
            attention = _EncoderAttention(config, has_biases=number == 0)
            parts = (
                _named(SelfAttention=attention, layer_norm=norm()),
                _named(DenseReluDense=_EncoderMLP(config), layer_norm=norm()),
            )
            return _named(layer=torch.nn.ModuleList(parts))

        blocks = torch.nn.ModuleList(block(number) for number in range(config.encoder_layers))
        self.encoder = _named(block=blocks, final_layer_norm=norm())

    def encode(self, sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See `SourceEncoder.encode`."""
        return [self._encode(source) for source in sources]

    def _encode(self, ids: torch.Tensor) -> torch.Tensor:
        encoder: Any = self.encoder
        places = torch.arange(len(ids), device=ids.device)
        distances = places - places[:, None]
        table = encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        buckets = buckets_of(distances, self._num_buckets, self._max_distance)
        biases, hidden = table[buckets].permute(2, 0, 1), self.shared(ids)
        for block in encoder.block:
            attention, mlp = block.layer
            hidden = hidden + attention.SelfAttention(attention.layer_norm(hidden), biases)
            hidden = hidden + mlp.DenseReluDense(mlp.layer_norm(hidden))
        output: torch.Tensor = encoder.final_layer_norm(hidden)
        return output


class T5Model(EncoderDecoderModel):
    """Pre-normed attention, cross attention and an MLP."""

    def __init__(self, config: T5Config, make: LayerMaker):
        lengths = SourceLengths(make.backend.device)
        bias = make.distance_bias(
            "model.decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            num_buckets=config.num_buckets, num_heads=config.num_heads, max_len=config.max_len,
            max_distance=config.max_distance, both_ways=False,
        )  # fmt: skip

        def layer(number: int) -> Layer:
            prefix = f"model.decoder.block.{number}.layer"
            attention = make.attention(
                f"{prefix}.0.SelfAttention",
                **{**config.attention_shape(number), "rope": None},
                norm=make.norm(f"{prefix}.0.layer_norm"),
                scale=1.0,
                projections=_PROJECTIONS,
                distance_bias=bias,
            )
            cross = make.cross_attention(
                f"{prefix}.1.EncDecAttention",
                num_heads=config.num_heads,
                head_size=config.head_size,
                source_size=config.hidden_size,
                max_len=config.max_source_len,
                norm=make.norm(f"{prefix}.1.layer_norm"),
                lengths=lengths,
                scale=1.0,
                projections=_PROJECTIONS,
            )
            return Layer([attention, cross, mlp(f"{prefix}.2")])

        def mlp(name: str) -> Part:
            norm, dense = make.norm(f"{name}.layer_norm"), f"{name}.DenseReluDense"
            options: dict[str, Any] = {"norm": norm, "activation": config.activation}
            size = config.intermediate_size
            if config.is_gated:
                return make.gated_mlp(dense, size, projections=("wi_0", "wi_1", "wo"), **options)
            return make.mlp(f"{dense}.wi", f"{dense}.wo", size, **options)

        embedding = make.embedding("shared", config.vocab_size)
        tied = config.tied_embeddings
        with torch.device("meta"):
            encoder = T5Encoder(config)
        super().__init__(
            config,
            make,
            layer,
            encoder=encoder,
            lengths=lengths,
            embedding=embedding,
            norm=make.norm("model.decoder.final_layer_norm"),
            head=make.head("lm_head", embedding, tied=tied, scale=config.head_scale),
            layers_name="model.decoder.block",
        )


FAMILIES = {
    "T5ForConditionalGeneration": (T5Config, T5Model),
    "T5WithLMHeadModel": (T5Config, T5Model),
}
