"""The tower of Qwen3-VL (Qwen Team 2025) and, without DeepStack, of Qwen3.5: patches of pictures of
any size, learned positions interpolated to the picture's grid, axial RoPE, blocks of 2 x 2 patches
merged to one embedding. The outputs of some of its layers go into the first layers of the text
model, through mergers of their own (DeepStack, Meng et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aioinfer.models.replicated import Embedding
from aioinfer.models.vision.qwen_format import QwenFormat
from aioinfer.models.vision.tower import (
    Lengths,
    Places,
    Tower,
    activated,
    activation,
    add_norm,
    axial_angles,
    bilinear,
    block_patches,
    block_places,
    rotated,
    rotation,
)

_EPS = 1e-6


class Patches(nn.Module):
    """The projection of patches, stored as a convolution: of two frames, since it reads films."""

    def __init__(self, config: Mapping[str, Any], *, bias: bool = True):
        super().__init__()
        patch, frames = config["patch_size"], config["temporal_patch_size"]
        shape = (frames, patch, patch)
        self.proj = nn.Conv3d(3, config["hidden_size"], shape, shape, bias=bias)
        self._frames = frames

    def frames_of(self, patches: torch.Tensor) -> torch.Tensor:
        """Returns patches [T, 3, patch, patch] of a picture as of a film that stands still."""
        return patches.unsqueeze(2).expand(-1, -1, self._frames, -1, -1).flatten(1)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        weight = self.proj.weight.flatten(1)
        return nn.functional.linear(self.frames_of(patches), weight, self.proj.bias)


class Attention(nn.Module):
    """Attention of a layer within pictures, or within other sequences of patches."""

    def __init__(self, size: int, num_heads: int):
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)
        self._num_heads, self._scale = num_heads, (size // num_heads) ** -0.5

    def forward(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        projected = self.qkv(x).unflatten(1, (3 * self._num_heads, -1))
        q_and_k, v = projected.split((2 * self._num_heads, self._num_heads), dim=1)
        if places.has_kernels:
            from aioinfer.kernels.rotation import rotate_heads

            rotate_heads(projected, 2 * self._num_heads, places.cos, places.sin)
        else:
            q_and_k = rotated(q_and_k, places.cos, places.sin)
        q, k = q_and_k.chunk(2, dim=1)
        return self.proj(places.lengths.attend(q, k, v, self._scale))


class Block(nn.Module):
    """A layer of norms, attention and an MLP."""

    def __init__(self, norms: Sequence[nn.Module], attention: Attention, mlp: nn.Module):
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor, addend: torch.Tensor | None, places: Places) -> torch.Tensor:
        """Adds to x [T, size], in place, what the layer before has left to be added, and what
        attention adds. Returns what the MLP leaves to be added."""
        normed = add_norm(x, addend, self.norm1, has_kernels=places.has_kernels)
        attended = self.attn(normed, places)
        return self.mlp(add_norm(x, attended, self.norm2, has_kernels=places.has_kernels))


def all_blocks(blocks: nn.ModuleList, x: torch.Tensor, places: Sequence[Places]) -> torch.Tensor:
    """Computes layers in place on x [T, size], each with its places; returns x."""
    addend = None
    for block, own in zip(blocks, places, strict=True):
        addend = block(x, addend, own)
    return x if addend is None else x.add_(addend)


class _MLP(nn.Module):
    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.linear_fc1, self.linear_fc2 = nn.Linear(size, inner), nn.Linear(inner, size)
        self._activation = config.get("hidden_act") or "gelu_pytorch_tanh"
        activation(self._activation)  # which refuses an unknown one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(activated(x, self.linear_fc1, self._activation))


def _block(config: Mapping[str, Any]) -> Block:
    size = config["hidden_size"]
    norms = [nn.LayerNorm(size, _EPS) for _ in range(2)]
    return Block(norms, Attention(size, config["num_heads"]), _MLP(config))


class _Merger(nn.Module):
    """Makes an embedding of a block of patches, normed one by one or together."""

    def __init__(self, config: Mapping[str, Any], *, norms_blocks: bool):
        super().__init__()
        size = config["hidden_size"]
        self._merged = size * config["spatial_merge_size"] ** 2
        self._norms_blocks = norms_blocks
        self.norm = nn.LayerNorm(self._merged if norms_blocks else size, _EPS)
        self.linear_fc1 = nn.Linear(self._merged, self._merged)
        self.linear_fc2 = nn.Linear(self._merged, config["out_hidden_size"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = x.view(-1, self._merged)
        normed = self.norm(blocks) if self._norms_blocks else self.norm(x).view_as(blocks)
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(normed)))


class Qwen3Tower(Tower):
    """See the module.

    Args:
        config: the decoded `config.json`.
        format: of pictures.
        hidden_size: of the text model.
    """

    prefix = "visual."

    def __init__(self, config: Mapping[str, Any], format: QwenFormat, hidden_size: int):
        super().__init__(format, hidden_size)
        config = config["vision_config"]
        self._patch, self._merge = format.patch_size, format.merge_size
        self._head_size = config["hidden_size"] // config["num_heads"]
        self._deep = list(config.get("deepstack_visual_indexes") or ())
        self.num_deep = len(self._deep)
        self.patch_embed = Patches(config)
        self.pos_embed = Embedding(config["num_position_embeddings"], config["hidden_size"])
        self.blocks = nn.ModuleList(_block(config) for _ in range(config["depth"]))
        self.merger = _Merger(config, norms_blocks=False)
        if self._deep:
            self.deepstack_merger_list = nn.ModuleList(
                _Merger(config, norms_blocks=True) for _ in self._deep
            )

    def as_reference(self, normed: torch.Tensor) -> torch.Tensor:
        """See `Tower.as_reference`."""
        return self.patch_embed.frames_of(block_patches(normed[0], self._patch, self._merge))

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """See `Tower.encode`."""
        patches, learned, places, lengths = [], [], [], []
        for picture in pixels:
            normed = self.normalised(picture[0])
            patches.append(block_patches(normed, self._patch, self._merge))
            height, width = (size // self._patch for size in normed.shape[:2])
            rows, columns = block_places(height, width, self._merge, normed.device)
            learned.append(bilinear(self.pos_embed.weight, rows, columns, height, width))
            places.append(torch.stack((rows, columns)))
            lengths.append(height * width)
        x = self.patch_embed(torch.cat(patches)) + torch.cat(learned)
        rows, columns = torch.cat(places, dim=1)
        cos, sin = rotation(axial_angles(rows, columns, self._head_size))
        own = Places(cos, sin, Lengths(lengths, x.device), self.has_kernels)
        deep, addend = [], None
        for number, block in enumerate(self.blocks):
            addend = block(x, addend, own)
            if number in self._deep:
                x, addend = x.add_(addend), None
                deep.append(self.deepstack_merger_list[self._deep.index(number)](x))
        x = x if addend is None else x.add_(addend)
        return torch.cat((self.merger(x), *deep), dim=1)
