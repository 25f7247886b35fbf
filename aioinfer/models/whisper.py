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
from aioinfer.models.encoder_decoder import (
    EncoderDecoderConfig,
    EncoderDecoderModel,
    EncoderLayer,
    SourceEncoder,
    decoder_parts,
    encoder_fields,
)
from aioinfer.models.replicated import Embedding
from aioinfer.models.source import SAMPLE_RATE

#: Samples of a window of the spectrogram, 25 ms, and from one window to the next.
WINDOW, HOP = 400, 160
# Slaney's scale: linear up to 1000 Hz, 15 mels there; logarithmic above, 27 mels for a factor of
# 6.4
_BREAK_HZ, _BREAK_MEL = 1000.0, 15.0
_MELS_A_FACTOR, _FACTOR = 27.0, 6.4
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


def log_mel(samples: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """Returns the spectrogram float32 [B, mels, n / HOP] of samples float32 [B, n], in logarithms
    within 8 decades of the loudest place of each row; `filters` are those of `mel_filters`."""
    window = torch.hann_window(WINDOW, device=samples.device)
    spectrum = torch.stft(samples, WINDOW, HOP, window=window, return_complex=True)
    power = spectrum[..., :-1].abs().square()
    decades = (filters @ power).clamp(min=1e-10).log10()
    loudest = decades.amax(dim=(1, 2), keepdim=True)
    return (torch.maximum(decades, loudest - 8.0) + 4.0) / 4.0


def mel_filters(num_mels: int, device: torch.device) -> torch.Tensor:
    """Returns triangular filters float32 [num_mels, WINDOW / 2 + 1] over the frequencies of a
    window, whose areas are equal (Slaney's norm)."""
    highest = _BREAK_MEL + _MELS_A_FACTOR * _log(SAMPLE_RATE / 2 / _BREAK_HZ) / _log(_FACTOR)
    mels = torch.linspace(0.0, float(highest), num_mels + 2, dtype=torch.float64)
    above = _BREAK_HZ * _FACTOR ** ((mels - _BREAK_MEL) / _MELS_A_FACTOR)
    edges = torch.where(mels < _BREAK_MEL, mels * (_BREAK_HZ / _BREAK_MEL), above)
    bins = torch.linspace(0.0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    widths = edges.diff()
    slopes = edges[:, None] - bins
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    filters = torch.minimum(rising, falling).clamp(min=0) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return filters.float().to(device)


def _log(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64).log()


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
        self.embed_positions = Embedding(max_tokens, size)
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

        def layer(number: int) -> Layer:
            options = {"key_bias": False, "norms_before": True}
            return Layer(decoder_parts(config, make, number, lengths, **options))

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
