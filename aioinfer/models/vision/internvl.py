"""Pictures of InternVL 3 and 3.5 (Wang et al. 2025), in transformers' layout: cut into square
tiles, in as many rows and columns as distort the picture least, with a tile of the whole picture
behind them. InternViT, with a class token and scaled residuals; squares of its patches become one
embedding."""

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
from aioinfer.models.vision.tower import Tower, activation, attend, merged_squares

_BICUBIC = 3
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
_BEGIN, _END = "<img>", "</img>"
_TOWER: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 448, "patch_size": 14, "attention_bias": False,
    "use_qk_norm": False, "hidden_act": "gelu", "norm_type": "layer_norm", "layer_norm_eps": 1e-6,
    "use_absolute_position_embeddings": True, "use_mean_pooling": True,
}  # fmt: skip


def _tower_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `vision_config` of a decoded `config.json`, with defaults, and with sizes of squares
    as one number. Raises `ConfigError` for other shapes."""
    vision = {**_TOWER, **config["vision_config"]}
    for name in ("image_size", "patch_size"):
        if isinstance(given := vision[name], Sequence):
            vision[name], *others = given
            if others != [vision[name]]:
                raise ConfigError(f"{name} must be of a square, not {given}")
    return vision


def _merge(config: Mapping[str, Any]) -> int:
    """Returns how many patches have the side of a square with one embedding."""
    return round(1 / config.get("downsample_ratio", 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLFormat(PictureFormat):
    """See the module.

    Attributes:
        tile: pixels of a tile's side.
        tokens: embeddings of a tile.
        min_tiles, max_tiles: of a picture, without that of the whole.
        resample: the filter, by Pillow's number.
    """

    tile: int
    tokens: int
    min_tiles: int = 1
    max_tiles: int = 12
    resample: int = _BICUBIC

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """Reads the decoded `config.json` of the model and the configuration of its processor;
        `max_pixels` has no effect. Raises `ConfigError` if a size is wrong."""
        vision, size = _tower_config(config), processor.get("size") or {}
        tile, patch = vision["image_size"], vision["patch_size"]
        min_tiles, max_tiles = processor.get("min_patches", 1), processor.get("max_patches", 12)
        numbers = (tile, patch, min_tiles, max_tiles)
        if not all(isinstance(each, int) and each > 0 for each in numbers) or min_tiles > max_tiles:
            raise ConfigError(f"sizes of pictures must be positive whole numbers, not {numbers}")
        if (size.get("height", tile), size.get("width", tile)) != (tile, tile):
            raise ConfigError(f"tiles of {size} do not suit a tower for {tile}")
        return cls(
            marker_id=config["image_token_id"],
            placeholder_id=config["image_token_id"],
            mean=read_channels(processor, "image_mean", _MEAN),
            std=read_channels(processor, "image_std", _STD),
            tile=tile,
            tokens=(tile // patch // _merge(config)) ** 2,
            min_tiles=min_tiles,
            max_tiles=max_tiles,
            resample=int(processor.get("resample", _BICUBIC)),
        )

    def process(self, picture: Image.Image) -> ProcessedPicture:
        """See `PictureFormat.process`."""
        columns, rows = self._grid(*picture.size)
        size = columns * self.tile, rows * self.tile
        tiles = tiles_of(resized(picture, *size, self.resample), self.tile)
        if len(tiles) > 1:
            tiles.append(resized(picture, self.tile, self.tile, self.resample))
        return self._of(np.stack([as_pixels(tile) for tile in tiles]))

    def text(self, picture: ProcessedPicture, text_of: TextOf) -> str:
        """See `PictureFormat.text`."""
        return f"{_BEGIN}{text_of(self.placeholder_id)}{_END}"

    def dummy(self, num_embeddings: int) -> ProcessedPicture:
        """See `PictureFormat.dummy`."""
        count = max(1, min(num_embeddings // self.tokens, self.max_tiles + 1))
        return self._of(np.zeros((count, self.tile, self.tile, 3), np.uint8))

    def _of(self, tiles: Any) -> ProcessedPicture:
        return ProcessedPicture.of(tiles, (self.tokens * len(tiles),))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns the columns and rows of tiles: those whose shape is nearest to the picture's; of
        several the most that the picture's pixels fill by half."""
        numbers = range(1, self.max_tiles + 1)
        grids = [(columns, rows) for columns in numbers for rows in numbers]
        best, smallest = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            if not self.min_tiles <= columns * rows <= self.max_tiles:
                continue
            difference = abs(width / height - columns / rows)
            is_filled = width * height > 0.5 * self.tile**2 * columns * rows
            if difference < smallest or (difference == smallest and is_filled):
                best, smallest = (columns, rows), difference
        return best


def _norm(config: Mapping[str, Any]) -> nn.Module:
    kind = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}.get(config["norm_type"])
    if kind is None:
        raise ConfigError(f"norm_type {config['norm_type']!r} of the vision tower is not supported")
    return kind(config["hidden_size"], config["layer_norm_eps"])


class _Attention(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, bias = config["hidden_size"], config["attention_bias"]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size, bias) for _ in range(3))
        self.projection_layer = nn.Linear(size, size)
        self._num_heads = config["num_attention_heads"]
        self._scale = (size // self._num_heads) ** -0.5
        self._norms = config["use_qk_norm"]
        if self._norms:
            self.q_norm, self.k_norm = nn.RMSNorm(size, 1e-6), nn.RMSNorm(size, 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self._norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.flatten(0, 1).unflatten(1, (self._num_heads, -1)) for each in (q, k, v))
        return self.projection_layer(attend(q, k, v, [length] * count, self._scale).view_as(x))


class _MLP(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.fc1, self.fc2 = nn.Linear(size, inner), nn.Linear(inner, size)
        self._activation = activation(config["hidden_act"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self._activation(self.fc1(x)))


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        self.attention, self.mlp = _Attention(config), _MLP(config)
        self.layernorm_before, self.layernorm_after = _norm(config), _norm(config)
        self.lambda_1, self.lambda_2 = (
            nn.Parameter(torch.empty(config["hidden_size"])) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.lambda_1 * self.attention(self.layernorm_before(x))
        return x + self.lambda_2 * self.mlp(self.layernorm_after(x))


class _Encoder(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        self.layer = nn.ModuleList(_Layer(config) for _ in range(config["num_hidden_layers"]))


class _Patches(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        patch = config["patch_size"]
        self.projection = nn.Conv2d(3, config["hidden_size"], patch, patch)


class _Embeddings(nn.Module):
    """A class token and patches, with their positions."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, count = config["hidden_size"], (config["image_size"] // config["patch_size"]) ** 2
        self.patch_embeddings = _Patches(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, size))
        self.position_embeddings = nn.Parameter(torch.empty(1, 1 + count, size))

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embeddings.projection(tiles).flatten(2).transpose(1, 2)
        first = self.cls_token.expand(len(patches), -1, -1)
        return torch.cat((first, patches), dim=1) + self.position_embeddings


class _VisionTower(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        self.embeddings, self.encoder = _Embeddings(config), _Encoder(config)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """Returns the states [N, patches, size] of tiles [N, 3, height, width]."""
        x = self.embeddings(tiles)
        for layer in self.encoder.layer:
            x = layer(x)
        return x[:, 1:]


class _Projector(nn.Module):
    def __init__(self, config: Mapping[str, Any], size: int, hidden_size: int):
        super().__init__()
        self._side = _merge(config)
        merged = size * self._side**2
        self.layer_norm = nn.LayerNorm(merged)
        self.linear_1 = nn.Linear(merged, hidden_size)
        self.linear_2 = nn.Linear(hidden_size, hidden_size)
        self._activation = activation(config.get("projector_hidden_act") or "gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.layer_norm(merged_squares(x, self._side))
        return self.linear_2(self._activation(self.linear_1(normed)))


class InternVLTower(Tower):
    """See the module.

    Args:
        config: the decoded `config.json`.
        format: of pictures.
        hidden_size: of the text model.

    Raises:
        ConfigError: the tower has no positions, or other states are read than those of patches
            behind its last layer.
    """

    def __init__(self, config: Mapping[str, Any], format: InternVLFormat, hidden_size: int):
        super().__init__(format, hidden_size)
        vision = _tower_config(config)
        for name, given, known in (
            ("vision_feature_layer", config.get("vision_feature_layer", -1), -1),
            ("vision_feature_select_strategy",
             config.get("vision_feature_select_strategy", "default"), "default"),
            ("use_absolute_position_embeddings", vision["use_absolute_position_embeddings"], True),
            ("use_mean_pooling", vision["use_mean_pooling"], True),
        ):  # fmt: skip
            if given != known:
                raise ConfigError(f"{name} must be {known!r}")
        self.vision_tower = _VisionTower(vision)
        self.multi_modal_projector = _Projector(config, vision["hidden_size"], hidden_size)

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        tiles = self.normalised(torch.cat(list(pixels))).permute(0, 3, 1, 2).contiguous()
        return self.multi_modal_projector(self.vision_tower(tiles)).flatten(0, 1)
