"""Makes the attention layers of a model: methods of `LayerMaker`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aioinfer.layers.attention import Attention, AttentionSinks, heads_of_rank
from aioinfer.layers.kv_cache import AttentionShape, KVScales
from aioinfer.layers.latent_attention import LatentAttention
from aioinfer.layers.latents import LatentExpansion, LatentShape
from aioinfer.layers.linear import row_shard
from aioinfer.layers.norm import RMSNorm, SplitRMSNorm
from aioinfer.layers.part_maker import PartMaker
from aioinfer.layers.rotary import RopeConfig
from aioinfer.layers.shards import Shard, Source, merged_sources


def make_attention(
    make: PartMaker,
    name: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    rope: RopeConfig,
    norm: RMSNorm | None,
    post_norm: RMSNorm | None = None,
    residual_scale: float = 1.0,
    bias: bool = False,
    output_bias: bool = False,
    head_norms: bool = False,
    projection_norms: bool = False,
    unit_offset: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: bool = False,
    merged: str | None = None,
) -> Attention:
    """Returns the attention of the checkpoint module `name`.

    Args:
        num_heads, num_kv_heads, head_size: of all ranks together.
        rope: of this layer.
        norm, post_norm, residual_scale: as in `Attention`.
        bias: of queries, keys and values. output_bias: of the output projection.
        head_norms: whether queries and keys are normed by head (q_norm, k_norm).
        projection_norms: whether they are normed over all heads instead, by the same modules.
        unit_offset: of norms by head.
        window: the sliding window in tokens, or None.
        scale: of the scores; by default head_size ** -0.5.
        soft_cap: of the scores; 0 for none.
        sinks: whether heads have sinks; see `AttentionSinks`.
        merged: the module that holds queries, keys and values together in the checkpoint, if one
            does.
    """
    group = make.backend.group
    queries, keys = heads_of_rank(num_heads, num_kv_heads, group.rank, group.size)
    heads = Shard(queries.start, len(queries), num_heads)
    kv_heads = Shard(keys.start, len(keys), num_kv_heads)
    shards = [each.times(head_size) for each in (heads, kv_heads, kv_heads)]
    sources = merged_sources(name, ("q_proj", "k_proj", "v_proj"), shards, merged)
    qkv = make.column(sources, bias=bias)
    output = make.row(f"{name}.o_proj", shards[0], bias=output_bias)
    shape = AttentionShape(
        heads.size, kv_heads.size, head_size,
        head_size**-0.5 if scale is None else scale, window, soft_cap,
    )  # fmt: skip
    by_head = _head_norms(make, name, head_size, unit_offset) if head_norms else None
    copies = max(1, group.size // num_kv_heads)
    whole = _projection_norms(make, name, shards, copies) if projection_norms else None
    rotary = make.rotary(rope, head_size)
    # a sink's score is not shifted with the others
    shiftable = rotary if shape.is_shift_invariant and not sinks else None
    scales = KVScales(name, kv_heads, make.backend.device, shiftable)
    by_query = make.made.keep(AttentionSinks(name, heads, make.backend.device)) if sinks else None
    attention = Attention(
        shape, qkv, output, rotary, scales, head_norms=by_head, projection_norms=whole,
        sinks=by_query, norm=norm, post_norm=post_norm, residual_scale=residual_scale,
        backend=make.backend,
    )  # fmt: skip
    return make.made.prepare(attention)


def make_latent_attention(
    make: PartMaker,
    name: str,
    *,
    shape: LatentShape,
    query_rank: int | None,
    rope: RopeConfig,
    norm: RMSNorm,
    norm_eps: float,
    bias: bool = False,
) -> LatentAttention:
    """Returns the latent attention of the checkpoint module `name`.

    Args:
        shape: of all ranks together.
        query_rank: channels between the two projections of the queries; None for one projection.
        rope: of the rotated channels.
        norm: as in `Attention`.
        norm_eps: of the norms within.
        bias: of the first projections, for which there have to be two of the queries, and of the
            output's.
    """
    heads = row_shard(shape.num_heads, make.backend)
    local, backend = replace(shape, num_heads=heads.size), make.backend

    latents = Source(f"{name}.kv_a_proj_with_mqa", Shard.whole(shape.cached_size))
    query_up = None
    if query_rank is None:
        first = Source(f"{name}.q_proj", heads.times(shape.head_size))
    else:
        first = Source(f"{name}.q_a_proj", Shard.whole(query_rank))
        query_up = (
            make.norm(f"{name}.q_a_layernorm", query_rank, eps=norm_eps),
            make.column([Source(f"{name}.q_b_proj", heads.times(shape.head_size))], query_rank),
        )
    down = make.column([first, latents], bias=bias)
    latent_norm = make.norm(f"{name}.kv_a_layernorm", shape.latent_size, eps=norm_eps)
    expanded = [Source(f"{name}.kv_b_proj", heads.times(shape.plain_size + shape.value_size))]
    weight = make.weight(expanded, Shard.whole(shape.latent_size))
    expansion = make.made.keep(LatentExpansion(weight, local, backend))
    output = make.row(f"{name}.o_proj", heads.times(shape.value_size), bias=bias)
    rotary = make.rotary(rope, shape.rotary_size)
    attention = LatentAttention(
        local, down, query_up, latent_norm, expansion, output, rotary, norm=norm,
        backend=backend,
    )  # fmt: skip
    return make.made.prepare(attention)


def _head_norms(
    make: PartMaker, name: str, head_size: int, unit_offset: bool
) -> tuple[RMSNorm, RMSNorm]:
    """Returns the norms of queries and keys by head."""
    query_norm = make.norm(f"{name}.q_norm", head_size, unit_offset=unit_offset)
    return query_norm, make.norm(f"{name}.k_norm", head_size, unit_offset=unit_offset)


def _projection_norms(
    make: PartMaker, name: str, shards: Sequence[Shard], copies: int
) -> tuple[SplitRMSNorm, SplitRMSNorm]:
    """Returns the norms of queries and keys over all heads, of which this rank has `shards`;
    `copies` ranks have the same keys."""
    eps, backend = make.norm_eps, make.backend
    query_norm = SplitRMSNorm(f"{name}.q_norm", shards[0], 1, eps, backend)
    key_norm = SplitRMSNorm(f"{name}.k_norm", shards[1], copies, eps, backend)
    return make.made.keep(query_norm), make.made.keep(key_norm)
