"""Attention within pictures, in models whose picture tokens attend to each other both ways: in all
layers, as Gemma 3, or in layers with a window alone and within it, as Gemma 4.

Attention of a step is causal. Behind it the outputs of picture tokens are computed again, in plain
torch on any device: to all keys that causal attention reads, and to those of their picture. A step
computes a picture to its end (`StepFeature.fit`), so that its keys are in the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aioinfer.errors import ConfigError
from aioinfer.layers.kv_cache import AttentionShape, KVCache
from aioinfer.layers.pictures import PictureBlock
from aioinfer.layers.step import Step


def attend_within_pictures(
    attended: torch.Tensor,
    queries: torch.Tensor,
    shape: AttentionShape,
    group: int,
    cache: KVCache,
    step: Step,
) -> None:
    """Replaces the outputs of picture tokens.

    Args:
        attended: [T, num_heads, head_size], the outputs of causal attention.
        queries: [n, num_heads, head_size], of the tokens at `StepPictures.places`, rotated.
        shape, group, cache: of the layer, whose keys are in the cache.
        step: with `pictures`.

    Raises:
        ConfigError: the layer has soft caps, which no such model has.
    """
    if shape.soft_cap:
        raise ConfigError("pictures that are attended to both ways go without soft caps")
    pictures = step.pictures
    assert pictures is not None
    assert pictures.places is not None
    tables = step.inputs.groups[group].block_tables
    for block in pictures.blocks:
        tokens = slice(block.first, block.first + block.length)
        size = cache.keys.shape[1]
        skipped, hidden = 0, None  # all keys are before the queries, or of their picture
        if shape.window is not None:
            skipped, hidden = _hidden(
                block, shape.window, size, pictures.keeps_windows, queries.device
            )
        blocks = tables[block.row, skipped // size : -(-block.end // size)]
        stored = [kv.index_select(0, blocks).flatten(0, 1) for kv in (cache.keys, cache.values)]
        keys, values = (
            kv[: block.end - skipped].transpose(0, 1).unsqueeze(0)
            for kv in cache.read(stored[0], stored[1], queries.dtype)
        )
        found = F.scaled_dot_product_attention(
            queries[tokens].transpose(0, 1).unsqueeze(0), keys, values,
            attn_mask=None if hidden is None else ~hidden,
            scale=shape.scale, enable_gqa=shape.num_heads != shape.num_kv_heads,
        )  # fmt: skip
        attended.index_copy_(0, pictures.places[tokens], found[0].transpose(0, 1))


def _hidden(
    block: PictureBlock, window: int, size: int, keeps_windows: bool, device: torch.device
) -> tuple[int, torch.Tensor]:
    """Returns the position of the first key, that of a KV block of `size` tokens: earlier ones are
    hidden from all; and which keys the queries of a block do not attend to, bool [length, keys]."""
    first = block.position - window + 1
    skipped = max(0, first if keeps_windows else min(first, block.start)) // size * size
    last = block.position + block.length
    queries = torch.arange(block.position, last, device=device)[:, None]
    keys = torch.arange(skipped, block.end, device=device)
    hidden = keys <= queries - window
    return skipped, hidden if keeps_windows else hidden & (keys < block.start)
