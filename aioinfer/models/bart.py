"""BART (Lewis et al. 2019): LayerNorm behind each part, and learned positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.cross_attention import SourceLengths
from aioinfer.layers.layer import Layer, Part
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.norm_parts import StreamNorm
from aioinfer.models.encoder_decoder import (
    EncoderDecoderConfig,
    EncoderDecoderModel,
    EncoderLayer,
    SourceEncoder,
    decoder_parts,
    encoder_fields,
)
from aioinfer.models.replicated import Embedding

#: The first rows of the tables of positions are of none.
_FIRST_POSITION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig(EncoderDecoderConfig):
    """BART's configuration. `embedding_scale`: of the tokens' embeddings."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "activation_function": "gelu", "layer_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip

    embedding_scale: float

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the encoder's shape. Raises `ConfigError` for what mBART and Blenderbot have."""
        if config.get("normalize_before") or config.get("add_final_layer_norm"):
            raise ConfigError("norms before the parts of a layer are not supported")
        length = config["max_position_embeddings"]
        return {
            **encoder_fields(config),
            "max_values": length,
            "max_source_len": length,
            "embedding_scale": config["hidden_size"] ** 0.5
            if config.get("scale_embedding")
            else 1.0,
        }


class BartEncoder(SourceEncoder):
    """Embeddings of tokens and positions, normed, and layers that are normed behind their parts."""

    prefix = "model."

    def __init__(self, config: BartConfig):
        super().__init__(config)
        size = config.hidden_size
        self._scale = config.embedding_scale
        self.shared = Embedding(config.vocab_size, size)
        self.encoder = torch.nn.Module()
        positions = config.max_source_len + _FIRST_POSITION
        self.encoder.embed_positions = Embedding(positions, size)
        self.encoder.layernorm_embedding = torch.nn.LayerNorm(size)
        self.encoder.layers = torch.nn.ModuleList(
            EncoderLayer(
                size, config.encoder_heads, config.encoder_size, config.activation,
                norms_before=False,
            )
            for _ in range(config.encoder_layers)
        )  # fmt: skip

    def encode(self, sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See `SourceEncoder.encode`."""
        return [self._encode(source) for source in sources]

    def _encode(self, ids: torch.Tensor) -> torch.Tensor:
        positions: Any = self.encoder.embed_positions
        norm: Any = self.encoder.layernorm_embedding
        layers: Any = self.encoder.layers
        placed = positions.weight[_FIRST_POSITION : _FIRST_POSITION + len(ids)]
        hidden = norm(self.shared(ids) * self._scale + placed)[None]
        for layer in layers:
            hidden = layer(hidden)
        return hidden[0]


class BartModel(EncoderDecoderModel):
    """Attention, cross attention and an MLP, each with the norm of the stream behind it; the last
    of these norms is the model's."""

    def __init__(self, config: BartConfig, make: LayerMaker):
        lengths, last = SourceLengths(make.backend.device), config.num_layers - 1

        def layer(number: int) -> Layer:
            prefix = f"model.decoder.layers.{number}"

            def behind(name: str) -> Part:
                return StreamNorm(make.layer_norm(f"{prefix}.{name}"))

            attention, cross, mlp = decoder_parts(config, make, number, lengths)
            first = "model.decoder.layernorm_embedding"
            before = [] if number else [StreamNorm(make.layer_norm(first))]
            after = [] if number == last else [behind("final_layer_norm")]
            norms = behind("self_attn_layer_norm"), behind("encoder_attn_layer_norm")
            return Layer([*before, attention, norms[0], cross, norms[1], mlp, *after])

        scale = config.embedding_scale
        embedding = make.embedding("model.shared", config.vocab_size, scale=scale)
        with torch.device("meta"):
            encoder = BartEncoder(config)
        super().__init__(
            config,
            make,
            layer,
            encoder=encoder,
            lengths=lengths,
            embedding=embedding,
            norm=make.layer_norm(f"model.decoder.layers.{last}.final_layer_norm"),
            positions=make.positions(
                "model.decoder.embed_positions", config.max_len, offset=_FIRST_POSITION
            ),
            layers_name="model.decoder.layers",
        )


FAMILIES = {"BartForConditionalGeneration": (BartConfig, BartModel)}
