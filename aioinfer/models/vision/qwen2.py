"""The tower of Qwen2-VL (Wang et al. 2024): patches of pictures of any size, axial RoPE, and blocks
of 2 x 2 patches merged to one embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aioinfer.models.vision.qwen3 import Attention, Block, Patches, all_blocks
from aioinfer.models.vision.qwen_format import QwenFormat
from aioinfer.models.vision.tower import (
    Lengths,
    Places,
    Tower,
    activation,
    axial_angles,
    block_patches,
    block_places,
    rotation,
)

_EPS = 1e-6
_TOWER: Mapping[str, Any] = {
    "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu",
    "mlp_ratio": 4, "num_heads": 16, "temporal_patch_size": 2,
}  # fmt: skip


class _MLP(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size = config["embed_dim"]
        inner = int(size * config["mlp_ratio"])
        self.fc1, self.fc2 = nn.Linear(size, inner), nn.Linear(inner, size)
        self._activation = activation(config["hidden_act"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self._activation(self.fc1(x)))


def _block(config: Mapping[str, Any]) -> Block:
    size = config["embed_dim"]
    norms = [nn.LayerNorm(size, _EPS) for _ in range(2)]
    return Block(norms, Attention(size, config["num_heads"]), _MLP(config))


class Merger(nn.Module):
    """Makes an embedding of a block of patches, which are normed one by one.

    Args:
        norm: of patches.
        merged: channels of a block.
        size: of an embedding.
    """

    def __init__(self, norm: nn.Module, merged: int, size: int):
        super().__init__()
        self._merged = merged
        self.ln_q = norm
        self.mlp = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.ln_q(x).view(-1, self._merged))


class Qwen2Tower(Tower):
    """See the module; arguments as of `Qwen3Tower`."""

    prefix = "visual."

    def __init__(self, config: Mapping[str, Any], format: QwenFormat, hidden_size: int):
        super().__init__(format, hidden_size)
        config = {**_TOWER, **config["vision_config"]}
        size = config["embed_dim"]
        self._patch, self._merge = format.patch_size, format.merge_size
        self._head_size = size // config["num_heads"]
        self.patch_embed = Patches({**config, "hidden_size": size}, bias=False)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config["depth"]))
        norm = nn.LayerNorm(size, _EPS)
        self.merger = Merger(norm, size * self._merge**2, config["hidden_size"])

    def as_reference(self, normed: torch.Tensor) -> torch.Tensor:
        """See `Tower.as_reference`."""
        return self.patch_embed.frames_of(block_patches(normed[0], self._patch, self._merge))

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        merge = self._merge
        normed = [self.normalised(picture[0]) for picture in pixels]
        patches = [block_patches(each, self._patch, merge) for each in normed]
        places = [
            block_places(rows * merge, columns * merge, merge, each.device)
            for each, (rows, columns) in zip(normed, grids, strict=True)
        ]
        x = self.patch_embed(torch.cat(patches))
        rows, columns = torch.cat(places, dim=1)
        cos, sin = rotation(axial_angles(rows, columns, self._head_size))
        lengths = Lengths([len(each) for each in patches], x.device)
        places_of_all = [Places(cos, sin, lengths, self.has_kernels)] * len(self.blocks)
        return self.merger(all_blocks(self.blocks, x, places_of_all))
