"""Clips of sound in conversations, for models that hear: Whisper's encoder and a projector, whose
embeddings take the place of tokens as a picture's do.

The samples of a clip, float32, travel in the place of pixels, as bytes of a picture of one row
whose grid has their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from aioinfer.errors import ConfigError
from aioinfer.models.source import SAMPLE_RATE
from aioinfer.models.vision.format import PictureError, PictureFormat, ProcessedPicture
from aioinfer.models.vision.tower import Tower, activation
from aioinfer.models.whisper import HOP, STRIDE, SoundEncoder

_DEFAULTS: Mapping[str, Any] = {
    "num_mel_bins": 128, "max_source_positions": 1500, "activation_function": "gelu",
    "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20,
    "intermediate_size": 5120,
}  # fmt: skip
#: Names of Whisper's fields, which configurations of its encoder may have.
_NAMES = {
    "d_model": "hidden_size", "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads", "encoder_ffn_dim": "intermediate_size",
}  # fmt: skip


def read_encoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `audio_config` of a decoded `config.json`. Raises `ConfigError`."""
    given = {_NAMES.get(name, name): value for name, value in config["audio_config"].items()}
    fields = {**_DEFAULTS, **given}
    if fields.get("scale_embedding"):
        raise ConfigError("audio_config.scale_embedding = true is not supported")
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundFormat(PictureFormat):
    """Base class of the formats of clips.

    Attributes:
        part: samples that the encoder hears at once.
    """

    hears: ClassVar[bool] = True

    part: int
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @classmethod
    def fields(cls, config: Mapping[str, Any], token: int) -> dict[str, Any]:
        """Returns the fields that a decoded `config.json` and the placeholder token give."""
        token = config.get("audio_token_id", config.get("audio_token_index")) or token
        part = read_encoder(config)["max_source_positions"] * STRIDE * HOP
        return {"part": part, "marker_id": token, "placeholder_id": token}

    def process(self, picture: Any) -> ProcessedPicture:
        """Returns samples float32 [n] as the tower takes them. Raises `PictureError`."""
        samples: npt.NDArray[np.float32] = picture
        count = self.count(len(samples))
        padded = np.zeros(-(-4 * len(samples) // 3) * 3, np.uint8)
        padded[: 4 * len(samples)] = samples.view(np.uint8)
        return ProcessedPicture.of(padded.reshape(1, 1, -1, 3), (count,), (len(samples), 0))

    def count(self, length: int) -> int:
        """Returns the embeddings of so many samples. Raises `PictureError`."""
        raise NotImplementedError

    def dummy(self, num_embeddings: int) -> ProcessedPicture:
        """See `PictureFormat.dummy`."""
        parts = max(1, num_embeddings // self.count(self.part))
        return self.process(np.zeros(self.part * parts, np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class VoxtralFormat(SoundFormat):
    """Clips of any length, in parts. `tokens`: the embeddings of one."""

    tokens: int

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """Reads the decoded `config.json`."""
        encoder = read_encoder(config)
        states = encoder["max_source_positions"] * encoder["hidden_size"]
        if states % encoder["intermediate_size"]:
            raise ConfigError("intermediate_size of audio_config does not divide a part's states")
        return cls(**cls.fields(config, 24), tokens=states // encoder["intermediate_size"])

    def count(self, length: int) -> int:
        """See `SoundFormat.count`."""
        return -(-length // self.part) * self.tokens


class Qwen2AudioFormat(SoundFormat):
    """Clips of one part at most, with an embedding for each 40 ms."""

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """Reads the decoded `config.json`."""
        return cls(**cls.fields(config, 151_646))

    def count(self, length: int) -> int:
        """See `SoundFormat.count`."""
        if length > self.part:
            raise PictureError(f"it is longer than {self.part / SAMPLE_RATE:g} seconds")
        if not (count := length_of(length) // 2):
            raise PictureError("it is too short")
        return count


def length_of(samples: int) -> int:
    """Returns the tokens of the encoder that so many samples make."""
    steps = -(-samples // HOP)
    return -(-steps // STRIDE)


class SoundTower(Tower):
    """Base class of towers of sound.

    Args:
        config: the decoded `config.json`.
        format: of clips.
        hidden_size: of the text model.
    """

    def __init__(self, config: Mapping[str, Any], format: SoundFormat, hidden_size: int):
        super().__init__(format, hidden_size)
        fields = read_encoder(config)
        self._part = format.part
        self.audio_tower = SoundEncoder(
            size=fields["hidden_size"], num_layers=fields["num_hidden_layers"],
            num_heads=fields["num_attention_heads"], mlp_size=fields["intermediate_size"],
            num_mels=fields["num_mel_bins"], max_tokens=fields["max_source_positions"],
            activation=fields["activation_function"],
        )  # fmt: skip

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        clips = [
            each.reshape(-1)[: 4 * length].clone().view(torch.float32)
            for each, (length, _) in zip(pixels, grids, strict=True)
        ]
        return torch.cat([self.heard(clip) for clip in clips])

    def parts(self, clip: torch.Tensor) -> torch.Tensor:
        """Returns the spectrograms [parts, mels, n] of a clip float32 [samples], which is filled up
        with silence to whole parts; the loudest place of all scales them."""
        padded = F.pad(clip, (0, -len(clip) % self._part))
        whole = self.audio_tower.spectrogram(padded[None])[0]
        return whole.unflatten(1, (-1, self._part // HOP)).transpose(0, 1)

    def heard(self, clip: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [n, hidden_size] of a clip."""
        raise NotImplementedError


class _Projector(nn.Module):
    def __init__(self, size: int, hidden_size: int, name: str):
        super().__init__()
        self.linear_1 = nn.Linear(size, hidden_size, bias=False)
        self.linear_2 = nn.Linear(hidden_size, hidden_size, bias=False)
        self._activation = activation(name)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self._activation(self.linear_1(states)))


class VoxtralTower(SoundTower):
    """Voxtral (Liu et al. 2025): adjacent states of the encoder make one embedding."""

    def __init__(self, config: Mapping[str, Any], format: VoxtralFormat, hidden_size: int):
        super().__init__(config, format, hidden_size)
        self._size = read_encoder(config)["intermediate_size"]
        name = config.get("projector_hidden_act") or "gelu"
        self.multi_modal_projector = _Projector(self._size, hidden_size, name)

    def heard(self, clip: torch.Tensor) -> torch.Tensor:
        """See `SoundTower.heard`."""
        states = self.audio_tower(self.parts(clip))
        return self.multi_modal_projector(states.reshape(-1, self._size))


class Qwen2AudioTower(SoundTower):
    """Qwen2-Audio (Chu et al. 2024): the mean of two adjacent states makes an embedding; silence
    behind a clip is not attended to."""

    def __init__(self, config: Mapping[str, Any], format: Qwen2AudioFormat, hidden_size: int):
        super().__init__(config, format, hidden_size)
        self.multi_modal_projector = nn.Module()
        size = read_encoder(config)["hidden_size"]
        self.multi_modal_projector.linear = nn.Linear(size, hidden_size)

    def heard(self, clip: torch.Tensor) -> torch.Tensor:
        """See `SoundTower.heard`."""
        states = self.audio_tower.states(self.parts(clip), length_of(len(clip)))
        pooled = F.avg_pool1d(states.transpose(1, 2), 2).transpose(1, 2)[0]
        projector: Any = self.multi_modal_projector.linear
        output: torch.Tensor = projector(self.audio_tower.layer_norm(pooled))
        return output
