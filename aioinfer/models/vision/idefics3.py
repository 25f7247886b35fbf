"""Pictures of Idefics 3 (Laurençon et al. 2024) and SmolVLM (Marafioti et al. 2025): scaled to a
length, cut into square tiles, each with a marker of its row and column, and a tile of the whole
picture behind them. SigLIP's tower; squares of its patches become one embedding."""

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
    tiles_of,
)
from aioinfer.models.vision.siglip import SiglipTransformer
from aioinfer.models.vision.tower import Tower, merged_squares

_LANCZOS = 1
_HALF = (0.5, 0.5, 0.5)
#: Pixels of a side, at most.
_MAX_SIDE = 4096
#: Fields of towers that the checkpoints of SmolVLM with 256 and 500 million parameters leave out.
_TOWER: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 16, "image_size": 224, "patch_size": 32,
}  # fmt: skip
_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Format(PictureFormat):
    """See the module.

    Attributes:
        longest: pixels of a picture's longer side.
        tile: pixels of a tile's side.
        tokens: embeddings of a tile.
        splits: whether there are tiles beside that of the whole picture.
        resample: the filter, by Pillow's number.
    """

    longest: int
    tile: int
    tokens: int
    splits: bool = True
    resample: int = _LANCZOS

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """Reads the decoded `config.json` of the model and the configuration of its processor;
        `max_pixels` has no effect. Raises `ConfigError` if a size is wrong."""
        vision = {**_TOWER, **config["vision_config"]}
        tile = (processor.get("max_image_size") or {}).get("longest_edge", vision["image_size"])
        longest = (processor.get("size") or {}).get("longest_edge", 4 * tile)
        numbers = (tile, longest, vision["patch_size"], config.get("scale_factor", 2))
        if not all(isinstance(each, int) and each > 0 for each in numbers):
            raise ConfigError(f"sizes of pictures must be positive whole numbers, not {numbers}")
        tokens = (tile // vision["patch_size"] // config.get("scale_factor", 2)) ** 2
        return cls(
            marker_id=config["image_token_id"],
            placeholder_id=config["image_token_id"],
            mean=read_channels(processor, "image_mean", _HALF),
            std=read_channels(processor, "image_std", _HALF),
            longest=longest,
            tile=tile,
            tokens=tokens,
            splits=bool(processor.get("do_image_splitting", True)),
            resample=int(processor.get("resample", _LANCZOS)),
        )

    def process(self, picture: Image.Image) -> ProcessedPicture:
        """See `PictureFormat.process`. The grid is the rows and columns of tiles; zeros where the
        whole picture is one."""
        picture = self._resized(picture, *self._scaled_size(*picture.size))
        if not self.splits:
            return self._of([self._resized(picture, self.tile, self.tile)], (0, 0))
        width, height = self._tiled_size(*picture.size)
        picture = self._resized(picture, width, height)
        rows, columns, tile = height // self.tile, width // self.tile, self.tile
        if rows == columns == 1:
            return self._of([picture], (0, 0))
        whole = self._resized(picture, tile, tile)
        return self._of([*tiles_of(picture, tile), whole], (rows, columns))

    def text(self, picture: ProcessedPicture, text_of: TextOf) -> str:
        """See `PictureFormat.text`."""
        (rows, columns), image = picture.grid, text_of(self.placeholder_id)
        whole = f"{_FAKE}{_GLOBAL}{image}{_FAKE}"
        if not rows:
            return whole
        lines = (
            "".join(f"{_FAKE}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        return "".join(f"{line}\n" for line in lines) + f"\n{whole}"

    def dummy(self, num_embeddings: int) -> ProcessedPicture:
        """See `PictureFormat.dummy`."""
        count = max(1, num_embeddings // self.tokens)
        pixels = np.zeros((count, self.tile, self.tile, 3), np.uint8)
        return ProcessedPicture.of(pixels, (self.tokens,) * count)

    def _of(self, tiles: Sequence[Image.Image], grid: tuple[int, int]) -> ProcessedPicture:
        pixels = np.stack([as_pixels(tile) for tile in tiles])
        return ProcessedPicture.of(pixels, (self.tokens,) * len(tiles), grid)

    def _resized(self, picture: Image.Image, width: int, height: int) -> Image.Image:
        return resized(picture, width, height, self.resample)

    def _scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height with a longer side of `longest` and an even shorter one."""
        ratio = width / height
        if width >= height:
            width, height = self.longest, _even(int(self.longest / ratio))
        else:
            width, height = _even(int(self.longest * ratio)), self.longest
        width, height = max(width, 1), max(height, 1)
        if width >= height > 0 and width > _MAX_SIDE:
            ratio = width / height
            width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
        elif height > width and height > _MAX_SIDE:
            ratio = width / height
            width, height = int(_MAX_SIDE * ratio), _MAX_SIDE
        return max(width, 1), max(height, 1)

    def _tiled_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of whole tiles, nearly in the same ratio."""
        ratio = width / height
        if width >= height:
            width = self._whole_tiles(width)
            return width, self._whole_tiles(int(width / ratio))
        height = self._whole_tiles(height)
        return self._whole_tiles(int(height * ratio)), height

    def _whole_tiles(self, length: int) -> int:
        return math.ceil(length / self.tile) * self.tile


def _even(length: int) -> int:
    return length + length % 2


class _Projection(nn.Module):
    def __init__(self, size: int, hidden_size: int):
        super().__init__()
        self.proj = nn.Linear(size, hidden_size, bias=False)


class _Connector(nn.Module):
    """Makes an embedding of each square of patches."""

    def __init__(self, size: int, side: int, hidden_size: int):
        super().__init__()
        self._side = side
        self.modality_projection = _Projection(size * side**2, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.modality_projection.proj(merged_squares(x, self._side))


class Idefics3Tower(Tower):
    """See the module.

    Args:
        config: the decoded `config.json`.
        format: of pictures.
        hidden_size: of the text model.
    """

    def __init__(self, config: Mapping[str, Any], format: Idefics3Format, hidden_size: int):
        super().__init__(format, hidden_size)
        vision = {**_TOWER, **config["vision_config"]}
        self.vision_model = SiglipTransformer(vision)
        side = config.get("scale_factor", 2)
        self.connector = _Connector(vision["hidden_size"], side, hidden_size)

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        tiles = self.normalised(torch.cat(list(pixels))).permute(0, 3, 1, 2).contiguous()
        return self.connector(self.vision_model(tiles)).flatten(0, 1)
