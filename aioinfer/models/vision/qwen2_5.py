"""The tower of Qwen2.5-VL (Bai et al. 2025): most layers attend within windows of a picture, some
to all of it. Patches are brought into the order of windows before the first layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aioinfer.models.vision.qwen2 import Merger
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


class _MLP(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(size, inner), nn.Linear(size, inner)
        self.down_proj = nn.Linear(inner, size)
        self._activation = activation(config.get("hidden_act") or "silu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


def _block(config: Mapping[str, Any]) -> Block:
    size = config["hidden_size"]
    norms = [nn.RMSNorm(size, _EPS) for _ in range(2)]
    return Block(norms, Attention(size, config["num_heads"]), _MLP(config))


class Qwen2_5Tower(Tower):  # noqa: N801
    """See the module; arguments as of `Qwen3Tower`."""

    prefix = "visual."

    def __init__(self, config: Mapping[str, Any], format: QwenFormat, hidden_size: int):
        super().__init__(format, hidden_size)
        config = {"temporal_patch_size": 2, **config["vision_config"]}
        self._patch, self._merge = format.patch_size, format.merge_size
        self._head_size = config["hidden_size"] // config["num_heads"]
        self._whole = frozenset(config["fullatt_block_indexes"])
        #: blocks of patches of a window's side
        self._window = config["window_size"] // (self._patch * self._merge)
        self.patch_embed = Patches(config, bias=False)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config["depth"]))
        merged = config["hidden_size"] * self._merge**2
        norm = nn.RMSNorm(config["hidden_size"], _EPS)
        self.merger = Merger(norm, merged, config["out_hidden_size"])

    def as_reference(self, normed: torch.Tensor) -> torch.Tensor:
        """See `Tower.as_reference`."""
        return self.patch_embed.frames_of(block_patches(normed[0], self._patch, self._merge))

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        patches, places, orders = [], [], []
        lengths: list[int] = []
        windows: list[int] = []
        for picture, (rows, columns) in zip(pixels, grids, strict=True):
            normed = self.normalised(picture[0])
            patches.append(block_patches(normed, self._patch, self._merge))
            merge = self._merge
            places.append(block_places(rows * merge, columns * merge, merge, normed.device))
            order, sizes = self._windows(rows, columns)
            orders.append(order + sum(lengths) // merge**2)
            windows += [size * merge**2 for size in sizes]
            lengths.append(rows * columns * merge**2)
        order, device = torch.cat(orders), pixels[0].device
        if device.type == "cuda":  # a copy from other memory waits for all that was launched
            order = order.pin_memory()
        order = order.to(device, non_blocking=True)
        x = self._in_order(self.patch_embed(torch.cat(patches)), order)
        row_places, column_places = torch.cat(places, dim=1)
        angles = axial_angles(row_places, column_places, self._head_size)
        cos, sin = rotation(self._in_order(angles, order))
        whole, within = (
            Places(cos, sin, Lengths(each, device), self.has_kernels) for each in (lengths, windows)
        )
        numbers = range(len(self.blocks))
        own = [whole if number in self._whole else within for number in numbers]
        merged = self.merger(all_blocks(self.blocks, x, own))
        return torch.empty_like(merged).index_copy_(0, order, merged)

    def _in_order(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Returns patches [T, ...] with their blocks in an order int64 [T / merge**2]."""
        return x.unflatten(0, (-1, self._merge**2))[order].flatten(0, 1)

    def _windows(self, rows: int, columns: int) -> tuple[torch.Tensor, list[int]]:
        """Returns the blocks of a picture window by window (int64 [rows * columns]), and how many
        each window has."""
        blocks = torch.arange(rows * columns).view(rows, columns)
        found = [
            blocks[top : top + self._window, left : left + self._window].flatten()
            for top in range(0, rows, self._window)
            for left in range(0, columns, self._window)
        ]
        return torch.cat(found), [len(window) for window in found]
