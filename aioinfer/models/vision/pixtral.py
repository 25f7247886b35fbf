"""Pictures of Pixtral (Agrawal et al. 2024), in LLaVA's layout, and of Mistral Small 3.1 and later
(Mistral AI 2025): of any size up to a length, a line of tokens for each row of patches with a token
behind it. Pixtral's tower, with axial RoPE; Mistral Small merges squares of its patches to one
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
)
from aioinfer.models.vision.llava import LlavaProjector
from aioinfer.models.vision.tower import Lengths, Tower, activation, rotated, rotation

_BICUBIC = 3
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_EPS = 1e-5
_TOWER: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralFormat(PictureFormat):
    """See the module.

    Attributes:
        longest: pixels of a side, at most.
        side: pixels of the side of the square of patches that has one embedding.
        resample: the filter, by Pillow's number.
    """

    longest: int
    side: int
    resample: int = _BICUBIC

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """Reads the decoded `config.json` of the model and the configuration of its processor;
        `max_pixels` bounds the longer side. Raises `ConfigError` if a size is wrong."""
        vision = {**_TOWER, **config["vision_config"]}
        longest = (processor.get("size") or {}).get("longest_edge", vision["image_size"])
        numbers = (longest, vision["patch_size"], config.get("spatial_merge_size", 1))
        if not all(isinstance(each, int) and each > 0 for each in numbers):
            raise ConfigError(f"sizes of pictures must be positive whole numbers, not {numbers}")
        token = config.get("image_token_index", config.get("image_token_id", 10))
        return cls(
            marker_id=token,
            placeholder_id=token,
            mean=read_channels(processor, "image_mean", _MEAN),
            std=read_channels(processor, "image_std", _STD),
            longest=min(longest, math.isqrt(max_pixels)),
            side=vision["patch_size"] * config.get("spatial_merge_size", 1),
            resample=int(processor.get("resample", _BICUBIC)),
        )

    def process(self, picture: Image.Image) -> ProcessedPicture:
        """See `PictureFormat.process`."""
        width, height = picture.size
        ratio = max(width / self.longest, height / self.longest)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        columns, rows = (max(1, -(-length // self.side)) for length in (width, height))
        whole = resized(picture, columns * self.side, rows * self.side, self.resample)
        return self._of(as_pixels(whole))

    def text(self, picture: ProcessedPicture, text_of: TextOf) -> str:
        """See `PictureFormat.text`: a run of placeholders for each row."""
        image = text_of(self.placeholder_id)
        return _BREAK.join([image] * len(picture.runs)) + _END

    def dummy(self, num_embeddings: int) -> ProcessedPicture:
        """See `PictureFormat.dummy`."""
        columns = max(1, math.isqrt(num_embeddings))
        rows = max(1, num_embeddings // columns)
        return self._of(np.zeros((rows * self.side, columns * self.side, 3), np.uint8))

    def _of(self, pixels: Any) -> ProcessedPicture:
        rows, columns = pixels.shape[0] // self.side, pixels.shape[1] // self.side
        return ProcessedPicture.of(pixels[None], (columns,) * rows, (rows, columns))


class _Attention(nn.Module):
    def __init__(self, size: int, num_heads: int, head_size: int):
        super().__init__()
        inner = num_heads * head_size
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(size, inner, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(inner, size, bias=False)
        self._num_heads, self._scale = num_heads, head_size**-0.5

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: Lengths
    ) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(1, (self._num_heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return self.o_proj(lengths.attend(q, k, v, self._scale))


class _MLP(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=False)
        self._activation = activation(config["hidden_act"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any], head_size: int):
        super().__init__()
        size = config["hidden_size"]
        self.attention_norm, self.ffn_norm = nn.RMSNorm(size, _EPS), nn.RMSNorm(size, _EPS)
        self.attention = _Attention(size, config["num_attention_heads"], head_size)
        self.feed_forward = _MLP(config)

    def forward(self, x: torch.Tensor, *places: Any) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), *places)
        return x + self.feed_forward(self.ffn_norm(x))


class _Transformer(nn.Module):
    def __init__(self, config: Mapping[str, Any], head_size: int):
        super().__init__()
        count = config["num_hidden_layers"]
        self.layers = nn.ModuleList(_Layer(config, head_size) for _ in range(count))


class _VisionTower(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, patch = config["hidden_size"], config["patch_size"]
        self._head_size = config.get("head_dim") or size // config["num_attention_heads"]
        rope = config.get("rope_parameters") or {}
        self._theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
        self.patch_conv = nn.Conv2d(3, size, patch, patch, bias=False)
        self.ln_pre = nn.RMSNorm(size, _EPS)
        self.transformer = _Transformer(config, self._head_size)

    def forward(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the states [rows, columns, size] of the patches of pictures [3, height,
        width]."""
        patches = [self.patch_conv(picture[None])[0] for picture in pictures]
        shapes = [each.shape[1:] for each in patches]
        x = self.ln_pre(torch.cat([each.flatten(1).t() for each in patches]))
        cos, sin = rotation(self._angles(shapes, x.device))
        lengths = [rows * columns for rows, columns in shapes]
        within = Lengths(lengths, x.device)
        for layer in self.transformer.layers:
            x = layer(x, cos, sin, within)
        return [each.view(*shape, -1) for each, shape in zip(x.split(lengths), shapes, strict=True)]

    def _angles(self, shapes: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
        """Returns angles [T, head_size / 2]: pairs with even numbers are rotated by the row, with
        odd ones by the column."""
        exponents = torch.arange(0, self._head_size, 2, dtype=torch.float32, device=device)
        inverse = 1.0 / self._theta ** (exponents / self._head_size)
        places = torch.cat([
            torch.cartesian_prod(*(torch.arange(length, device=device) for length in shape))
            for shape in shapes
        ]).float()  # fmt: skip
        by_row, by_column = inverse[0::2], inverse[1::2]
        return torch.cat(
            (torch.outer(places[:, 0], by_row), torch.outer(places[:, 1], by_column)), dim=1
        )


class _PatchMerger(nn.Module):
    def __init__(self, size: int, merge: int):
        super().__init__()
        self._merge = merge
        self.merging_layer = nn.Linear(size * merge**2, size, bias=False)

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        """Returns [squares, size] of states [rows, columns, size]."""
        rows, columns, _ = grid.shape
        merge = self._merge
        squares = grid.view(rows // merge, merge, columns // merge, merge, -1)
        return self.merging_layer(squares.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1))


class _Projector(LlavaProjector):
    """LLaVA's projector, in Mistral Small behind a norm and the merger of patches."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int):
        merges = config["model_type"] != "llava"
        super().__init__(config, hidden_size, has_bias=not merges)
        self._merges = merges
        if merges:
            size = config["vision_config"]["hidden_size"]
            eps = config.get("text_config", {}).get("rms_norm_eps", _EPS)
            self.norm = nn.RMSNorm(size, eps)
            self.patch_merger = _PatchMerger(size, config.get("spatial_merge_size", 1))

    def of_grids(self, grids: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the embeddings of states [rows, columns, size] of each picture."""
        if self._merges:
            return self(torch.cat([self.patch_merger(self.norm(grid)) for grid in grids]))
        return self(torch.cat([grid.flatten(0, 1) for grid in grids]))


class PixtralTower(Tower):
    """See the module.

    Args:
        config: the decoded `config.json`.
        format: of pictures.
        hidden_size: of the text model.

    Raises:
        ConfigError: other layers than the last are read.
    """

    def __init__(self, config: Mapping[str, Any], format: PixtralFormat, hidden_size: int):
        super().__init__(format, hidden_size)
        if config.get("vision_feature_layer", -1) != -1:
            raise ConfigError("vision_feature_layer must be -1")
        config = {**config, "vision_config": {**_TOWER, **config["vision_config"]}}
        self.vision_tower = _VisionTower(config["vision_config"])
        self.multi_modal_projector = _Projector(config, hidden_size)

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        pictures = [self.normalised(each[0]).permute(2, 0, 1).contiguous() for each in pixels]
        return self.multi_modal_projector.of_grids(self.vision_tower(pictures))
