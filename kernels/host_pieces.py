"""A kernel that copies pieces of memory by their addresses, of the device or of pinned memory of
the host, which has one address for both."""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Words of 4 bytes that a program moves at a time.
_TILE = 4096


@triton.jit
def _move(sources, targets, count, words, TILE: tl.constexpr):
    tiles = tl.cdiv(words, TILE)
    for index in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
        piece = index // tiles
        places = index % tiles * TILE + tl.arange(0, TILE)
        source = tl.load(sources + piece).to(tl.pointer_type(tl.int32))
        target = tl.load(targets + piece).to(tl.pointer_type(tl.int32))
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        mask = places < words
        tl.store(target + places, tl.load(source + places, mask), mask)


def move_pieces(sources: torch.Tensor, targets: torch.Tensor, nbytes: int, programs: int) -> None:
    """Copies pieces of `nbytes` bytes each from the addresses `sources` to the addresses `targets`
    (int64 [n]), all multiples of 16."""
    _move[(programs,)](sources, targets, len(sources), nbytes // 4, TILE=_TILE, num_warps=8)
