"""Decode attention of rows that share a prefix, beside the reference: for the interpreter's tests
and the tests on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from aioinfer.kernels.cascade_attention import CascadeConfig
from aioinfer.kernels.decode_plan import DecodeConfig, DecodeWorkspace, plan_decode
from aioinfer.kernels.paged_attention import paged_attention
from aioinfer.kernels.projection import Projection
from cases import Pair, RotationCase, cached, normal, poisoned, readable
from references import paged_attention_reference, qk_norm_rope_cache_reference

from aioinfer.layers.rotary import Sections


@dataclass(slots=True)
class CascadeCase:
    """Rows of one token.

    Attributes:
        rows: (keys, number of the prefix, blocks of it) of each row: its table begins with so many
            blocks of that prefix.
        projected: whether the kernels norm and rotate the queries, and write the newest keys.
        max_rows: of the workspace; by default as many as there are.
    """

    rows: list[tuple[int, int, int]]
    q_heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    device: str
    cascade: CascadeConfig
    projected: bool = False
    normed: bool = True
    rotary: int = 0
    sections: Sections | None = None
    soft_cap: float = 0.0
    cache_dtype: torch.dtype | None = None
    config: DecodeConfig | None = None
    programs: int | None = None
    has_sinks: bool = False
    max_rows: int | None = None
    expected: int | None = None


def tables_of(case: CascadeCase) -> torch.Tensor:
    """Returns block tables over blocks in random places."""
    size, device = case.block_size, case.device
    widths = [-(-keys // size) for keys, _, _ in case.rows]
    prefixes = {number: 0 for _, number, _ in case.rows}
    for _, number, blocks in case.rows:
        prefixes[number] = max(prefixes[number], blocks)
    total = sum(widths) + sum(prefixes.values())
    blocks = torch.randperm(total + 1, device=device).int()
    tables = torch.full((len(case.rows), max(widths) + 1), 2**30, dtype=torch.int32, device=device)
    heads = {}
    taken = 0
    for number, count in prefixes.items():
        heads[number] = blocks[taken : taken + count]
        taken += count
    for row, (width, (_, number, count)) in enumerate(zip(widths, case.rows, strict=True)):
        assert count <= width
        tables[row, :count] = heads[number][:count]
        tables[row, count:width] = blocks[taken : taken + width - count]
        taken += width - count
    return tables


def cascade_attention(case: CascadeCase) -> list[Pair]:
    """Runs the decode kernels with a shared prefix. Returns the output and what is in the caches
    beside the references."""
    device, dtype, size = case.device, case.dtype, case.block_size
    lens = torch.tensor([keys for keys, _, _ in case.rows], dtype=torch.int32, device=device)
    tables, count = tables_of(case), len(case.rows)
    num_blocks = int(tables[tables < 2**30].max()) + 1
    shape = (num_blocks, size, case.kv_heads, case.head_size)
    before = [poisoned(*shape, dtype=torch.float32, device=device) for _ in range(2)]
    for row, keys in enumerate(lens.tolist()):
        mine = tables[row, : -(-keys // size)].long()
        lines = (mine[:, None] * size + torch.arange(size, device=device)).flatten()[:keys]
        for cache in before:
            flat = cache.view(-1, case.kv_heads, case.head_size)
            fresh = normal(keys, case.kv_heads, case.head_size, dtype=dtype, device=device).float()
            flat[lines] = torch.where(flat[lines].isnan(), fresh, flat[lines])
    *caches, scales, wide = cached(*before, case.cache_dtype or dtype)
    heads = case.q_heads + 2 * case.kv_heads
    qkv = normal(count, heads * case.head_size, dtype=dtype, device=device)
    width = case.q_heads * case.head_size
    queries = qkv[:, :width].reshape(count, case.q_heads, case.head_size)
    rotation_case = RotationCase(case.rotary, case.normed, sections=case.sections)
    rotation = rotation_case.make(case.head_size, dtype, device, max_pos=max(1000, int(lens.max())))
    positions = rotation_case.positions(count, device)
    workspace = DecodeWorkspace.create(
        case.q_heads, caches[0], config=case.config, programs=case.programs,
        cascade_rows=case.max_rows or count, cascade_config=case.cascade,
    )  # fmt: skip
    assert workspace.cascade is not None
    workspace.cascade.states.fill_(float("nan"))
    plan_decode(workspace, lens, tables)
    if case.expected is not None:
        assert workspace.cascade.shared_len == case.expected
    sinks = 3.0 * torch.randn(case.q_heads, device=device) if case.has_sinks else None
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    out = paged_attention(
        queries, *caches, tables, starts, lens, num_decodes=count, workspace=workspace,
        soft_cap=case.soft_cap, scales=scales, sinks=sinks,
        projection=Projection(qkv, rotation, positions) if case.projected else None,
        out=poisoned(*queries.shape, dtype=dtype, device=device),
    )  # fmt: skip
    assert not workspace.parts.counters.any()
    wide_queries = queries.double()
    if case.projected:
        last = (lens - 1).clamp(min=0).long()
        row = torch.arange(count, device=device)
        slots = tables[row, last // size].long() * size + last % size
        slots[lens == 0] = -1
        wide_queries = qk_norm_rope_cache_reference(
            qkv.double(), last if positions is None else positions, slot_mapping=slots,
            k_cache=wide[0], v_cache=wide[1], num_q_heads=case.q_heads, scales=scales,
            **rotation_case.reference_options(rotation, device),
        )  # fmt: skip
    reference = paged_attention_reference(
        wide_queries, *wide, tables, starts, lens, soft_cap=case.soft_cap, sinks=sinks
    )
    written = [
        (torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(readable(list(caches), scales), wide, strict=True)
    ]
    return [(out, reference), *written]
