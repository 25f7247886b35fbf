"""Attention of a checkpoint: which heads and tensors a rank has, and the `Attention` of them.

`LayerMaker.attention` is `make_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from aioinfer.layers.attention import Attention, QKNorms
from aioinfer.layers.distance_bias import DistanceBias
from aioinfer.layers.kv_cache import AttentionShape, KVScales
from aioinfer.layers.norm import Norm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.rotary import RopeConfig
from aioinfer.layers.shards import HeadVector, Shard, Source, merged_sources

if TYPE_CHECKING:
    from aioinfer.layers.part_maker import PartMaker


def head_shards(num_heads: int, num_kv_heads: int, group: ParallelGroup) -> tuple[Shard, Shard]:
    """Returns the query heads and the KV heads of a rank; ranks beyond the KV heads share them."""
    queries = Shard.of_rank(num_heads, group.rank, group.size)
    per_kv_head = num_heads // num_kv_heads
    first = queries.start // per_kv_head
    last = (queries.start + queries.size - 1) // per_kv_head
    return queries, Shard(first, last + 1 - first, num_kv_heads)


def alibi_slopes(heads: Shard) -> torch.Tensor:
    """Returns ALiBi's slopes of a rank's query heads (Press et al. 2022): float32 [heads].

    Of a power of two of heads the slopes are a geometric sequence from 2 ** (-8 / heads) on. Of
    another number they are the slopes of the next smaller power, then every other one of the next
    larger.
    """
    power = 1 << (heads.total.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (heads.total - power), 2)]
    return torch.tensor(slopes[heads.start : heads.start + heads.size])


def _qkv_sources(
    name: str,
    projections: Sequence[str],
    shards: Sequence[Shard],
    head_size: int,
    merged: str | None,
    *,
    by_group: bool = False,
    gated: bool = False,
    key_bias: bool = True,
) -> list[Source]:
    """Returns which rows of the checkpoint are this rank's queries, keys and values.

    Args:
        name: of the attention's checkpoint module.
        projections: its modules of queries, keys and values.
        shards: which heads of queries, keys and values this rank has.
        head_size: channels of a head.
        merged: the module that holds all three, if one does: queries, then keys, then values; or,
            `by_group`, for each KV head its queries, key and value (Falcon).
        gated, key_bias: as for `make_attention`.
    """
    assert merged is None or (key_bias and not gated)
    if not by_group or merged is None:
        channels = [shard.times(head_size) for shard in shards]
        sources = merged_sources(name, projections, channels, merged)
        if not key_bias:
            sources[1] = replace(sources[1], has_bias=False)
        if gated:
            sources[0] = Source(f"{name}.{projections[0]}", shards[0].times(2 * head_size))
        return sources
    queries, keys, _ = shards
    of_group = queries.total // keys.total
    total = keys.total * (of_group + 2)

    def source(head: int, count: int) -> Source:
        return Source(f"{name}.{merged}", Shard(head, count, total).times(head_size))

    firsts = [group * (of_group + 2) for group in range(keys.start, keys.start + keys.size)]
    first_query = queries.start % of_group if queries.size < of_group else 0
    count = min(of_group, queries.size)
    return [
        *(source(first + first_query, count) for first in firsts),
        *(source(first + of_group, 1) for first in firsts),
        *(source(first + of_group + 1, 1) for first in firsts),
    ]


def make_attention(
    make: PartMaker, name: str, *, num_heads: int, num_kv_heads: int, head_size: int,
    rope: RopeConfig | None, norm: Norm | None, post_norm: Norm | None = None,
    residual_scale: float = 1.0, bias: bool = False, output_bias: bool = False,
    qk_norms: QKNorms | None = None, window: int | None = None, scale: float | None = None,
    soft_cap: float = 0.0, sinks: bool = False, alibi: float = 0.0,
    projections: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    merged: str | None = None, merged_by_group: bool = False, gated: bool = False,
    value_norm: bool = False, input_size: int | None = None, key_bias: bool = True,
    distance_bias: DistanceBias | None = None,
) -> Attention:  # fmt: skip
    """Returns the attention of the checkpoint module `name`.

    Args:
        num_heads, num_kv_heads, head_size: of all ranks together.
        rope: of this layer; None for queries and keys that are not rotated.
        norm, post_norm, residual_scale: as in `Attention`.
        bias: of queries and values, and with `key_bias` of keys.
        output_bias: of the output projection.
        qk_norms: of queries and keys.
        window: the sliding window in tokens, or None.
        scale: of the scores; by default head_size ** -0.5.
        soft_cap: of the scores; 0 for none.
        sinks: whether heads have sinks; see `Attention`.
        alibi: multiplied with `alibi_slopes`, by which scores fall with the distance, behind
            `scale`; 0 for none.
        projections: the modules of queries, keys, values and output.
        merged: the module that holds queries, keys and values together in the checkpoint, if one
            does, all of a kind one after the other; `merged_by_group`: for each KV head its
            queries, key and value.
        gated: whether outputs are multiplied with the sigmoid of gates, of which each head has as
            many as channels; the projection of queries has them behind each head's queries.
        input_size: channels that the projection takes, if not those of the residual stream.
        value_norm: whether an RMSNorm without a weight is applied to each head's values.
        distance_bias: of the scores, or none.
    """
    heads, kv_heads = head_shards(num_heads, num_kv_heads, make.backend.group)
    device, scale = make.backend.device, head_size**-0.5 if scale is None else scale
    shape = AttentionShape(heads.size, kv_heads.size, head_size, scale, window, soft_cap)
    sources = _qkv_sources(
        name, projections[:3], (heads, kv_heads, kv_heads), head_size, merged,
        by_group=merged_by_group, gated=gated, key_bias=key_bias,
    )  # fmt: skip
    rotary = None if rope is None else make.rotary(rope, head_size)
    norms = None if qk_norms is None else qk_norms.make(make, name, heads, kv_heads, head_size)
    # a sink's score is not shifted with the others, and a norm after RoPE hides the rotation
    is_shiftable = shape.is_shift_invariant and not sinks and not (qk_norms or QKNorms()).after_rope
    attention = Attention(
        shape, make.column(sources, input_size, bias=bias),
        make.row(f"{name}.{projections[3]}", heads.times(head_size), bias=output_bias), rotary,
        KVScales(name, kv_heads, device, rotary if is_shiftable else None),
        qk_norms=norms, qk_norm_rule=qk_norms,
        sinks=make.keep(HeadVector(f"{name}.sinks", heads, device)) if sinks else None,
        slopes=(alibi_slopes(heads) * alibi).to(device) if alibi else None, gated=gated,
        distance_bias=distance_bias,
        norm=norm, post_norm=post_norm, residual_scale=residual_scale,
        compiled=make.has_compiled_weights, value_norm_eps=make.norm_eps if value_norm else None,
        backend=make.backend,
    )  # fmt: skip
    return make.prepare(attention)
