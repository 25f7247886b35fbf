"""Pictures of LLaVA-NeXT, also called 1.6 (Liu et al. 2024): read as a whole, and in tiles of the
best of several resolutions ("anyres"). The embeddings of the tiles form a grid, which is cut to the
picture's shape, with a learned embedding behind each row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch import nn

from aioinfer.errors import ConfigError
from aioinfer.models.vision.format import (
    PictureFormat,
    ProcessedPicture,
    as_pixels,
    read_channels,
    resized,
    tiles_of,
)
from aioinfer.models.vision.llava import (
    MEAN,
    STD,
    LlavaTower,
    drops_first,
    read_placeholder,
    read_sides,
)
from aioinfer.models.vision.siglip import has_class_token

_BICUBIC = 3


class _Grid(NamedTuple):
    """The embeddings of a picture's tiles.

    Attributes:
        tile_rows, tile_columns: of tiles.
        top, left: rows above and columns before the picture, which are not read; as many follow it.
        rows, columns: to which the rest is scaled.
    """

    tile_rows: int
    tile_columns: int
    top: int
    left: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextFormat(PictureFormat):
    """See the module.

    Attributes:
        tile: pixels of a tile's side.
        patches: embeddings of a tile's side.
        resolutions: heights and widths of which one is chosen.
        max_tiles: the grid is scaled down to about as many embeddings as these have; None for any.
        resample: the filter, by Pillow's number.
        STATES: which states of the tower are read where `config.json` does not say it.
        TILES: rows and columns of the default resolutions.
    """

    STATES: ClassVar[str] = "default"
    TILES: ClassVar[Sequence[tuple[int, int]]] = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))

    tile: int
    patches: int
    resolutions: tuple[tuple[int, int], ...]
    max_tiles: int | None = None
    resample: int = _BICUBIC

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """Reads the decoded `config.json` of the model and the configuration of its processor;
        `max_pixels` has no effect. Raises `ConfigError` if a size is wrong."""
        vision = config["vision_config"]
        tile, patches = read_sides(vision)
        square = {"height": tile, "width": tile}
        size, crop = processor.get("size") or square, processor.get("crop_size") or square
        if size not in (square, {"shortest_edge": tile}, tile) or crop not in (square, tile):
            raise ConfigError(f"tiles of {size}, cut to {crop}, do not suit a tower for {tile}")
        if has_class_token(vision) != drops_first(config, cls.STATES):
            raise ConfigError("vision_feature_select_strategy must leave the patches alone")
        default = [[row * tile, column * tile] for row, column in cls.TILES]
        found = config.get("image_grid_pinpoints") or default
        if processor.get("image_grid_pinpoints", found) != found:
            raise ConfigError("image_grid_pinpoints of processor and model must be the same")
        if any(length % tile for resolution in found for length in resolution):
            raise ConfigError(f"image_grid_pinpoints must be of tiles of {tile}, not {found}")
        return cls(
            marker_id=read_placeholder(config),
            placeholder_id=read_placeholder(config),
            mean=read_channels(processor, "image_mean", MEAN),
            std=read_channels(processor, "image_std", STD),
            tile=tile,
            patches=patches,
            resolutions=tuple((height, width) for height, width in found),
            max_tiles=cls.read_max_tiles(config),
            resample=int(processor.get("resample", _BICUBIC)),
        )

    @classmethod
    def read_max_tiles(cls, config: Mapping[str, Any]) -> int | None:
        """Reads `max_tiles` in a decoded `config.json`. Raises `ConfigError`."""
        return None

    def process(self, picture: Image.Image) -> ProcessedPicture:
        """See `PictureFormat.process`. The grid is the picture's height and width."""
        width, height = picture.size
        target_height, target_width = self._resolution(height, width)
        by_width, by_height = target_width / width, target_height / height
        if by_width < by_height:
            size = target_width, min(math.ceil(height * by_width), target_height)
        else:
            size = min(math.ceil(width * by_height), target_width), target_height
        canvas = Image.new("RGB", (target_width, target_height))
        place = (target_width - size[0]) // 2, (target_height - size[1]) // 2
        canvas.paste(resized(picture, *size, self.resample), place)
        whole = resized(picture, self.tile, self.tile, self.resample)
        return self.of_tiles([whole, *tiles_of(canvas, self.tile)], (height, width))

    def dummy(self, num_embeddings: int) -> ProcessedPicture:
        """See `PictureFormat.dummy`."""
        fitting = [size for size in self.resolutions if self.num_embeddings(size) <= num_embeddings]
        size = max(fitting, key=self.num_embeddings, default=(0, 0))
        count = 1 + math.prod(size) // self.tile**2
        black = Image.new("RGB", (self.tile, self.tile))
        return self.of_tiles([black] * count, size)

    def of_tiles(self, tiles: Sequence[Image.Image], size: tuple[int, int]) -> ProcessedPicture:
        """Returns a picture of tiles, with its height and width; zeros where one tile is all."""
        pixels = np.stack([as_pixels(tile) for tile in tiles])
        return ProcessedPicture.of(pixels, (self.num_embeddings(size),), size)

    def num_embeddings(self, size: tuple[int, int]) -> int:
        """Returns the embeddings of a picture of a height and width; see `of_tiles`."""
        if not any(size):
            return self.patches**2 + 1
        grid = self.grid(*size)
        return self.patches**2 + grid.rows * (grid.columns + 1)

    def _resolution(self, height: int, width: int) -> tuple[int, int]:
        """Returns the resolution in which most pixels of a picture are seen; of several that with
        fewest others."""

        def seen(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            return pixels, pixels - math.prod(resolution)

        return max(self.resolutions, key=seen)

    def grid(self, height: int, width: int) -> _Grid:
        """Returns the grid of embeddings of a picture of a height and width."""
        tile_rows, tile_columns = (
            length // self.tile for length in self._resolution(height, width)
        )
        rows, columns = tile_rows * self.patches, tile_columns * self.patches
        top = left = 0
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        rows, columns = rows - 2 * top, columns - 2 * left
        if self.max_tiles is not None:
            ratio = math.sqrt(rows * columns / (self.max_tiles * self.patches**2))
            if ratio > 1.1:
                rows, columns = int(rows // ratio), int(columns // ratio)
        return _Grid(tile_rows, tile_columns, top, left, rows, columns)


class NextTower(LlavaTower):
    """See the module.

    Args:
        config: the decoded `config.json`.
        format: of pictures.
        hidden_size: of the text model.
    """

    format: NextFormat

    def __init__(self, config: Mapping[str, Any], format: NextFormat, hidden_size: int):
        super().__init__(config, format, hidden_size)
        self.image_newline = nn.Parameter(torch.empty(hidden_size))

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        states = self.states(torch.cat(list(pixels)))
        found = []
        for tiles, size in zip(states.split([len(each) for each in pixels]), grids, strict=True):
            found.append(tiles[0])
            if len(tiles) == 1:
                found.append(self.image_newline[None])
            else:
                found.append(self._rows(tiles[1:], self.format.grid(*size)))
        return torch.cat(found)

    def _rows(self, tiles: torch.Tensor, grid: _Grid) -> torch.Tensor:
        """Returns [rows * (columns + 1), hidden_size] of the states of tiles [N, patches**2,
        hidden_size]."""
        patches = self.format.patches
        x = tiles.view(grid.tile_rows, grid.tile_columns, patches, patches, -1)
        x = x.permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2)
        x = x[:, grid.top : x.shape[1] - grid.top, grid.left : x.shape[2] - grid.left]
        if x.shape[1:] != (grid.rows, grid.columns):
            size = [grid.rows, grid.columns]
            x = nn.functional.interpolate(x[None], size, mode="bilinear")[0]
        ends = self.image_newline.view(-1, 1, 1).expand(-1, grid.rows, 1)
        return torch.cat((x, ends), dim=2).flatten(1).t()
