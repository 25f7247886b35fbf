"""Pictures of Gemma 3 (Gemma Team 2025): scaled to a square, whatever their shape, with a fixed
number of embeddings; SigLIP's tower, whose patches are averaged. The tokens of a picture attend to
each other both ways. Pan and scan, further crops of long pictures, is off by default and not
supported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import nn

from aioinfer.errors import ConfigError
from aioinfer.models.vision.format import (
    PictureFormat,
    ProcessedPicture,
    TextOf,
    as_pixels,
    read_channels,
    resized,
)
from aioinfer.models.vision.siglip import SiglipTransformer
from aioinfer.models.vision.tower import Tower

_BILINEAR = 2
_HALF = (0.5, 0.5, 0.5)
_BEGIN, _SOFT, _END = 255_999, 262_144, 256_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Format(PictureFormat):
    """See the module.

    Attributes:
        end_id: the token behind the embeddings; `marker_id` is before them.
        height, width: of all pictures.
        tokens: embeddings of a picture.
        resample: the filter, by Pillow's number.
    """

    is_bidirectional: bool = True

    end_id: int
    height: int
    width: int
    tokens: int
    resample: int = _BILINEAR

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """Reads the decoded `config.json` of the model and the configuration of its processor;
        `max_pixels` has no effect. Raises `ConfigError` if a size is wrong."""
        side, size = config["vision_config"]["image_size"], processor.get("size") or {}
        height, width = size.get("height", side), size.get("width", side)
        tokens = config.get("mm_tokens_per_image", 256)
        if (height, width) != (side, side) or not isinstance(tokens, int) or tokens < 1:
            raise ConfigError(f"pictures of {height} x {width} do not suit a tower for {side}")
        return cls(
            marker_id=config.get("boi_token_index", _BEGIN),
            placeholder_id=config.get("image_token_index", config.get("image_token_id", _SOFT)),
            end_id=config.get("eoi_token_index", _END),
            mean=read_channels(processor, "image_mean", _HALF),
            std=read_channels(processor, "image_std", _HALF),
            height=height,
            width=width,
            tokens=tokens,
            resample=int(processor.get("resample", _BILINEAR)),
        )

    def process(self, picture: Image.Image) -> ProcessedPicture:
        """See `PictureFormat.process`."""
        pixels = as_pixels(resized(picture, self.width, self.height, self.resample))
        return ProcessedPicture.of(pixels[None], (self.tokens,))

    def text(self, picture: ProcessedPicture, text_of: TextOf) -> str:
        """See `PictureFormat.text`."""
        tokens = (self.marker_id, self.placeholder_id, self.end_id)
        return f"\n\n{''.join(map(text_of, tokens))}\n\n"

    def dummy(self, num_embeddings: int) -> ProcessedPicture:
        """See `PictureFormat.dummy`."""
        return ProcessedPicture.of(
            np.zeros((1, self.height, self.width, 3), np.uint8), (self.tokens,)
        )


class _Projector(nn.Module):
    """Averages squares of patches, norms them, and projects them to the text model's size."""

    def __init__(self, config: Mapping[str, Any], tokens: int, hidden_size: int):
        super().__init__()
        size = config["hidden_size"]
        self._squares = math.isqrt(tokens)
        self._eps = config.get("layer_norm_eps", 1e-6)
        self.mm_input_projection_weight = nn.Parameter(torch.empty(size, hidden_size))
        self.mm_soft_emb_norm = _Norm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = math.isqrt(x.shape[1])
        squares = x.transpose(1, 2).unflatten(2, (side, side))
        pooled = nn.functional.avg_pool2d(squares, side // self._squares).flatten(2).transpose(1, 2)
        weight = 1.0 + self.mm_soft_emb_norm.weight.float()
        normed = nn.functional.rms_norm(pooled.float(), weight.shape, weight, self._eps)
        return normed.to(x.dtype) @ self.mm_input_projection_weight


class _Norm(nn.Module):
    """The weight of a norm, less 1."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))


class Gemma3Tower(Tower):
    """See the module.

    Args:
        config: the decoded `config.json`.
        format: of pictures.
        hidden_size: of the text model.
    """

    def __init__(self, config: Mapping[str, Any], format: Gemma3Format, hidden_size: int):
        super().__init__(format, hidden_size)
        vision = config["vision_config"]
        self.vision_tower = SiglipTransformer(vision)
        self.multi_modal_projector = _Projector(vision, format.tokens, hidden_size)

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        pictures = self.normalised(torch.cat(list(pixels))).permute(0, 3, 1, 2).contiguous()
        states = self.vision_tower(pictures)
        return self.multi_modal_projector(states).flatten(0, 1)
