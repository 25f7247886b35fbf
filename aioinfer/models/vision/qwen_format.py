"""Pictures of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: of any size, rounded to whole blocks of
patches and scaled into bounds of their pixels. Tokens of a picture have three positions (M-RoPE,
Wang et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image

from aioinfer.errors import ConfigError
from aioinfer.models.vision.format import (
    PictureError,
    PictureFormat,
    ProcessedPicture,
    as_pixels,
    read_channels,
    resized,
)

_BICUBIC = 3
_MAX_RATIO = 200
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
#: Models whose sections of pairs of channels lie one after the other.
_ONE_BY_ONE = ("qwen2_vl", "qwen2_5_vl")
#: The bounds of pixels where the processor's configuration has none.
_BOUNDS = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenFormat(PictureFormat):
    """See the module.

    Attributes:
        patch_size: pixels of a patch's side.
        merge_size: patches of a block's side; a block has one embedding.
        min_pixels, max_pixels: of a picture, as far as whole blocks allow.
        resample: the filter, by Pillow's number.
    """

    has_sections: ClassVar[bool] = True

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    resample: int = _BICUBIC

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """Reads the decoded `config.json` of the model and the configuration of its processor.

        Args:
            max_pixels: of a picture, where the processor allows more.

        Raises:
            ConfigError: a size is missing or wrong.
        """
        vision, size = config["vision_config"], processor.get("size") or {}
        least = processor.get("min_pixels") or size.get("shortest_edge") or _BOUNDS[0]
        most = processor.get("max_pixels") or size.get("longest_edge") or _BOUNDS[1]
        patch, merge = vision["patch_size"], vision.get("spatial_merge_size", 2)
        numbers = (least, most, patch, merge)
        if not all(isinstance(each, int) and each > 0 for each in numbers):
            raise ConfigError(f"sizes of pictures must be positive whole numbers, not {numbers}")
        token = config["image_token_id"]
        return cls(
            marker_id=token,
            placeholder_id=token,
            mean=read_channels(processor, "image_mean", _CLIP_MEAN),
            std=read_channels(processor, "image_std", _CLIP_STD),
            patch_size=patch,
            merge_size=merge,
            min_pixels=least,
            max_pixels=max(least, min(most, max_pixels)),
            interleaves_sections=config["model_type"] not in _ONE_BY_ONE,
            resample=int(processor.get("resample", _BICUBIC)),
        )

    def process(self, picture: Image.Image) -> ProcessedPicture:
        """See `PictureFormat.process`."""
        width, height = self._size_for(*picture.size)
        return self._of(as_pixels(resized(picture, width, height, self.resample)))

    def dummy(self, num_embeddings: int) -> ProcessedPicture:
        """See `PictureFormat.dummy`."""
        side = self.patch_size * self.merge_size
        columns = max(1, math.isqrt(num_embeddings))
        rows = max(1, num_embeddings // columns)
        return self._of(np.zeros((rows * side, columns * side, 3), np.uint8))

    def _of(self, pixels: Any) -> ProcessedPicture:
        side = self.patch_size * self.merge_size
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        return ProcessedPicture.of(pixels[None], (rows * columns,), (rows, columns))

    def _size_for(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height in which a picture is read: nearly its shape, of whole
        blocks, and within the bounds."""
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise PictureError(f"one side is more than {_MAX_RATIO} times as long as the other")
        side = self.patch_size * self.merge_size
        rounded = [round(each / side) * side for each in (width, height)]
        pixels = rounded[0] * rounded[1]
        if pixels > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            return self._scaled(
                width, height, lambda x: max(side, math.floor(x / scale / side) * side)
            )
        if pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            return self._scaled(width, height, lambda x: math.ceil(x * scale / side) * side)
        return rounded[0], rounded[1]

    @staticmethod
    def _scaled(width: int, height: int, scale: Any) -> tuple[int, int]:
        return scale(width), scale(height)
