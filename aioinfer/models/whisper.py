"""Whisper (Radford et al. 2022): an encoder of 30 seconds of sound, and a decoder that writes text,
with learned positions, LayerNorm and projections of keys without a bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from aioinfer.errors import ConfigError
from aioinfer.layers.cross_attention import SourceLengths
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.models.config import renamed
from aioinfer.models.encoder_decoder import (
    EncoderDecoderConfig,
    EncoderDecoderModel,
    EncoderLayer,
    SourceEncoder,
    encoder_fields,
)
from aioinfer.models.mel import HOP, log_mel, mel_filters
from aioinfer.models.source import SAMPLE_RATE

_NAMES = {
    "d_model": "hidden_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size",
    "max_target_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
}
#: Steps of the spectrogram for each token of the encoder's output.
STRIDE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperConfig(EncoderDecoderConfig):
    """Whisper's configuration. `num_mels`: of the spectrogram."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "activation_function": "gelu", "layer_norm_eps": 1e-5, "tie_word_embeddings": True,
        "num_mel_bins": 80, "max_source_positions": 1500,
    }  # fmt: skip

    num_mels: int

    @classmethod
    def standard_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Renames fields."""
        return renamed({**cls.DEFAULTS, **config}, _NAMES)

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the encoder's shape."""
        if config.get("scale_embedding"):
            raise ConfigError("scale_embedding = true is not supported")
        length = config["max_source_positions"]
        return {
            **encoder_fields(config),
            "source_kind": "sound",
            "max_values": length * STRIDE * HOP,
            "max_source_len": length,
            "source_rate": SAMPLE_RATE,
            "num_mels": config["num_mel_bins"],
        }


class SoundEncoder(torch.nn.Module):
    """Whisper's encoder: two convolutions of a spectrogram, and pre-normed layers.

    Args:
        size, num_layers, num_heads, mlp_size: of the layers.
        num_mels: of the spectrogram.
        max_tokens: of its output.
        activation: of the MLPs.
    """

    def __init__(
        self, *, size: int, num_layers: int, num_heads: int, mlp_size: int, num_mels: int,
        max_tokens: int, activation: str = "gelu",
    ):  # fmt: skip
        super().__init__()
        self._num_mels = num_mels
        self._filters: torch.Tensor | None = None
        self.conv1 = torch.nn.Conv1d(num_mels, size, 3, padding=1)
        self.conv2 = torch.nn.Conv1d(size, size, 3, stride=STRIDE, padding=1)
        self.embed_positions = torch.nn.Embedding(max_tokens, size)
        self.layers = torch.nn.ModuleList(
            EncoderLayer(size, num_heads, mlp_size, activation, key_bias=False)
            for _ in range(num_layers)
        )
        self.layer_norm = torch.nn.LayerNorm(size)

    def spectrogram(self, samples: torch.Tensor) -> torch.Tensor:
        """Returns the spectrogram [B, mels, n / HOP] of samples float32 [B, n]; see `log_mel`."""
        if self._filters is None:
            self._filters = mel_filters(self._num_mels, samples.device)
        return log_mel(samples, self._filters)

    def states(self, spectrogram: torch.Tensor, length: int | None = None) -> torch.Tensor:
        """Returns the states [B, length, size] behind the layers, before the norm, of spectrograms
        [B, mels, STRIDE * max_tokens], of which the first `length` tokens are read."""
        hidden = F.gelu(self.conv1(spectrogram.to(self.conv1.weight.dtype)))
        hidden = F.gelu(self.conv2(hidden)).transpose(1, 2) + self.embed_positions.weight
        hidden = hidden[:, :length]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, spectrogram: torch.Tensor) -> torch.Tensor:
        """Returns the output [B, max_tokens, size] for spectrograms [B, mels, STRIDE *
        max_tokens]."""
        output: torch.Tensor = self.layer_norm(self.states(spectrogram))
        return output


class WhisperEncoder(SourceEncoder):
    """A `SoundEncoder`. A source is filled up with silence to the maximum, as the model was
    trained."""

    prefix = "model."
    is_sound = True

    def __init__(self, config: WhisperConfig):
        super().__init__(config)
        self.encoder = SoundEncoder(
            size=config.hidden_size, num_layers=config.encoder_layers,
            num_heads=config.encoder_heads, mlp_size=config.encoder_size,
            num_mels=config.num_mels, max_tokens=config.max_source_len,
            activation=config.activation,
        )  # fmt: skip

    def encode(self, sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See `SourceEncoder.encode`."""
        padded = torch.stack([F.pad(each, (0, self.max_values - len(each))) for each in sources])
        return list(self.encoder(self.encoder.spectrogram(padded)))


class WhisperModel(EncoderDecoderModel):
    """Pre-normed attention, cross attention and an MLP."""

    def __init__(self, config: WhisperConfig, make: LayerMaker):
        lengths = SourceLengths(make.backend.device)
        projections = ("q_proj", "k_proj", "v_proj", "out_proj")

        def layer(number: int) -> Layer:
            prefix = f"model.decoder.layers.{number}"
            attention = make.attention(
                f"{prefix}.self_attn",
                **{**config.attention_shape(number), "rope": None},
                norm=make.layer_norm(f"{prefix}.self_attn_layer_norm"),
                bias=True,
                key_bias=False,
                output_bias=True,
                projections=projections,
            )
            cross = make.cross_attention(
                f"{prefix}.encoder_attn",
                num_heads=config.num_heads,
                head_size=config.head_size,
                source_size=config.hidden_size,
                max_len=config.max_source_len,
                norm=make.layer_norm(f"{prefix}.encoder_attn_layer_norm"),
                lengths=lengths,
                bias=True,
                key_bias=False,
            )
            mlp = make.mlp(
                f"{prefix}.fc1",
                f"{prefix}.fc2",
                config.intermediate_size,
                norm=make.layer_norm(f"{prefix}.final_layer_norm"),
                activation=config.activation,
                bias=True,
            )
            return Layer([attention, cross, mlp])

        embedding = make.embedding("model.decoder.embed_tokens", config.vocab_size)
        with torch.device("meta"):
            encoder = WhisperEncoder(config)
        super().__init__(
            config,
            make,
            layer,
            encoder=encoder,
            lengths=lengths,
            embedding=embedding,
            norm=make.layer_norm("model.decoder.layer_norm"),
            head=make.head("proj_out", embedding, tied=config.tied_embeddings),
            positions=make.positions("model.decoder.embed_positions", config.max_len),
            layers_name="model.decoder.layers",
        )


FAMILIES = {"WhisperForConditionalGeneration": (WhisperConfig, WhisperModel)}
