"""What crosses between the halves of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array
from aioinfer.models.vision.format import U8


@dataclass(frozen=True, slots=True)
class PictureRows(Section):
    """The rows of a step with tokens of pictures, or before such tokens, and the pictures whose
    embeddings the step computes first.

    Attributes:
        slots, lengths: int32 [R], the slot and the tokens of each row.
        sources: int32 [N], N the sum of lengths: the row of the embeddings' cache that takes the
            place of each token; -1 for text.
        positions: int32 [3, N], where RoPE places each token; [3, 0] in models that have one
            position a token.
        shapes: int32 [P, 6], of each picture: tiles, height, width, the two numbers of its grid,
            and how many embeddings it has.
        targets: int32 [E], E the sum of embeddings: where each goes in the cache.
        pixels: int32 [B], the pixels of all pictures, uint8, filled up with zeros to whole words.
        blocks: int32 [Q, 3], of pictures whose tokens attend to each other both ways: the row among
            `slots`, the position of the first token, and the one behind the last.
    """

    slots: I32 = array(np.int32)
    lengths: I32 = array(np.int32)
    sources: I32 = array(np.int32)
    positions: I32 = array(np.int32, ndim=2)
    shapes: I32 = array(np.int32, ndim=2)
    targets: I32 = array(np.int32)
    pixels: I32 = array(np.int32)
    blocks: I32 = array(np.int32, ndim=2)


def pack_pixels(pictures: Sequence[U8]) -> I32:
    """Returns the pixels of pictures as words."""
    total = sum(each.size for each in pictures)
    packed = np.zeros(-(-total // 4), np.int32)
    flat, start = packed.view(np.uint8), 0
    for each in pictures:
        flat[start : start + each.size] = each.reshape(-1)
        start += each.size
    return packed
