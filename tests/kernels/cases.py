"""Random inputs for every kernel, and its result beside that of the reference: for the
interpreter's tests and the tests on a GPU.

Each case fills the outputs with NaN, or with a token id that cannot occur, generates random inputs,
and returns results together with those of the float64 reference. KV caches contain NaN wherever no
token of a row was written.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from aioinfer.kernels.activation import gated_activation
from aioinfer.kernels.decode_plan import DecodeConfig, DecodeWorkspace, plan_decode
from aioinfer.kernels.few_rows_dense import FewRowsConfig, few_rows_dense
from aioinfer.kernels.norm import add_parts, add_parts_rms_norm, add_rms_norm, rms_norm
from aioinfer.kernels.paged_attention import make_prefill_plan, paged_attention
from aioinfer.kernels.prefill_plan import plan_prefill
from aioinfer.kernels.projection import Projection, Rotation
from aioinfer.kernels.qk_norm_rope_cache import qk_norm_rope_cache, rotated_queries
from references import (
    add_rms_norm_reference,
    gated_activation_reference,
    paged_attention_reference,
    product_reference,
    qk_norm_rope_cache_reference,
    rms_norm_reference,
)

from aioinfer.layers.kv_cache import FLOAT8, KVScales, to_float8
from aioinfer.layers.rotary import Sections
from aioinfer.layers.shards import Shard

Pair = tuple[torch.Tensor, torch.Tensor]
NAN = float("nan")


def error(pair: Pair) -> float:
    """Returns the normwise relative error of a result against its reference. It is NaN if the
    result contains NaN, and NaN compares as not smaller than any bound."""
    result, reference = (t.double() for t in pair)
    return float((result - reference).norm() / reference.norm())


def normal(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Returns standard normal numbers rounded to `dtype`."""
    return torch.randn(shape, device=device).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Returns a tensor of NaN."""
    return torch.full(shape, NAN, dtype=dtype, device=device)


@dataclass(slots=True)
class AttentionCase:
    """One attention problem.

    `rows` are the numbers (tokens, keys) of each row; rows of one token are sorted to the front.
    """

    rows: list[tuple[int, int]]
    q_heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    device: str
    window: int = 0
    soft_cap: float = 0.0
    cache_dtype: torch.dtype | None = None
    config: DecodeConfig | None = None
    programs: int | None = None
    hopper: bool = False
    has_sinks: bool = False
    has_slopes: bool = False

    def sinks(self) -> torch.Tensor | None:
        """Returns a logit for each query head, of about the size of the largest scores, or None."""
        return 3.0 * torch.randn(self.q_heads, device=self.device) if self.has_sinks else None

    def slopes(self) -> torch.Tensor | None:
        """Returns a slope for each query head, or None."""
        return torch.rand(self.q_heads, device=self.device) if self.has_slopes else None


@dataclass(frozen=True, slots=True)
class RotationCase:
    """How queries and keys are normed and rotated.

    Attributes:
        size: the rotated channels of a head; 0 for none.
        normed, norm_last: whether they are normed, and after the rotation.
        sections: of the pairs of channels, for three positions a token.
        moved: whether RoPE has positions of its own; with sections always.
        values_normed: whether values are normed, without a weight.
    """

    size: int
    normed: bool = False
    norm_last: bool = False
    sections: Sections | None = None
    moved: bool = False
    values_normed: bool = False

    @property
    def axes(self) -> torch.Tensor | None:
        """Which position rotates each pair of channels."""
        return None if self.sections is None else self.sections.axes()

    def positions(self, tokens: int, device: str) -> torch.Tensor | None:
        """Returns RoPE's positions, below 1000, if it has any of its own."""
        shape = (tokens,) if self.sections is None else (3, tokens)
        if not self.moved and self.sections is None:
            return None
        return torch.randint(0, 1000, shape, dtype=torch.int32, device=device)

    def make(
        self, head_size: int, dtype: torch.dtype, device: str, max_pos: int = 1000
    ) -> Rotation:
        """Returns a random rotation for positions below `max_pos`."""
        angles = torch.rand(max_pos, self.size // 2, device=device) * 6.3
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1) if self.size else None
        weights = [normal(head_size, dtype=dtype, device=device) for _ in range(2 * self.normed)]
        return Rotation(
            cos_sin, *weights, sections=self.sections, norm_last=self.norm_last,
            value_norm_eps=1e-6 if self.values_normed else None,
        )  # fmt: skip

    def reference_options(self, rotation: Rotation, device: str) -> dict[str, Any]:
        """Returns the arguments for `qk_norm_rope_cache_reference`."""
        arguments = rotation.arguments
        cos_sin, weights = arguments.cos_sin, (arguments.q_weight, arguments.k_weight)
        q_weight, k_weight = (None if w is None else w.double() for w in weights)
        return {
            "cos_sin": torch.empty(2**16, 0, device=device) if cos_sin is None else cos_sin,
            "q_weight": q_weight, "k_weight": k_weight, "axes": self.axes,
            "norm_last": self.norm_last, "values_normed": self.values_normed,
        }  # fmt: skip


#: For heads of 64 channels or more.
ROTATIONS = [
    RotationCase(0),
    RotationCase(0, normed=True),
    RotationCase(32, normed=True, norm_last=True),
    RotationCase(64, normed=True, moved=True),
    RotationCase(64, normed=True, sections=Sections(16, 8, 8)),
    RotationCase(32, sections=Sections(6, 5, 5, is_interleaved=True)),
    RotationCase(64, normed=True, values_normed=True),
]


def attention(case: AttentionCase) -> Pair:
    """Runs `paged_attention` over blocks in random places; with an fp8 cache the keys and values
    are scaled."""
    rows = sorted(case.rows, key=lambda row: row[0] != 1)
    decodes = sum(tokens == 1 for tokens, _ in rows)
    device, cache_dtype = case.device, case.cache_dtype or case.dtype
    blocks_of = [-(-keys // case.block_size) for _, keys in rows]
    blocks = torch.randperm(sum(blocks_of) + 3, device=device)
    shape = (len(blocks), case.block_size, case.kv_heads, case.head_size)
    k_cache, v_cache = (poisoned(*shape, dtype=torch.float32, device=device) for _ in range(2))
    tables = torch.full((len(rows), max(blocks_of) + 1), 2**30, dtype=torch.int32, device=device)
    taken = 0
    for row, (_, keys) in enumerate(rows):
        mine = blocks[taken : taken + blocks_of[row]]
        taken += blocks_of[row]
        tables[row, : len(mine)] = mine.int()
        lines = (
            mine[:, None] * case.block_size + torch.arange(case.block_size, device=device)
        ).flatten()[:keys]
        for cache in (k_cache, v_cache):
            cache.view(-1, case.kv_heads, case.head_size)[lines] = normal(
                keys, case.kv_heads, case.head_size, dtype=case.dtype, device=device
            ).float()
    k_cache, v_cache, scales, read = cached(k_cache, v_cache, cache_dtype)
    starts = torch.tensor([0] + [tokens for tokens, _ in rows], device=device).cumsum(0).int()
    lens = torch.tensor([keys for _, keys in rows], dtype=torch.int32, device=device)
    q = normal(int(starts[-1]), case.q_heads, case.head_size, dtype=case.dtype, device=device)
    workspace = DecodeWorkspace.create(
        case.q_heads, k_cache, window=case.window, config=case.config, programs=case.programs
    )
    for buffer in (workspace.parts.outputs, workspace.parts.maxima, workspace.parts.sums):
        buffer.fill_(NAN)
    if decodes:
        plan_decode(workspace, lens[:decodes])
    prefill_plan = make_prefill_plan(
        len(rows), len(q), case.q_heads, case.dtype, k_cache, v_cache, hopper=case.hopper
    )
    prefill_plan.tiles.fill_(-1)
    plan_prefill(prefill_plan, starts, lens, decodes, len(q))
    sinks, slopes = case.sinks(), case.slopes()
    out = paged_attention(
        q, k_cache, v_cache, tables, starts, lens, num_decodes=decodes, workspace=workspace,
        prefill_plan=prefill_plan,
        soft_cap=case.soft_cap, scales=scales, sinks=sinks, slopes=slopes,
        out=poisoned(*q.shape, dtype=q.dtype, device=device),
    )  # fmt: skip
    assert not workspace.parts.counters.any()
    return out, paged_attention_reference(
        q.double(), *read, tables, starts, lens,
        window=case.window, soft_cap=case.soft_cap, sinks=sinks, slopes=slopes,
    )  # fmt: skip


def cached(
    keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """Returns caches [..., Hkv, D] in `dtype`, the scales of their heads if that is float8, and in
    float64 what is read from them."""
    if dtype != FLOAT8:
        caches = [keys.to(dtype), values.to(dtype)]
        return *caches, None, readable(caches, None)
    scales = KVScales("", Shard.whole(keys.shape[-2]), keys.device)
    # the largest values lie beyond the range of some heads
    scales.set(*(0.005 * 10 ** torch.rand(2, keys.shape[-2], device=keys.device)))
    caches = [to_float8(keys, scales.table[2]), to_float8(values, scales.table[3])]
    return *caches, scales.table, readable(caches, scales.table)


def projected_attention(case: AttentionCase, rotation_case: RotationCase) -> list[Pair]:
    """Runs decodes from a `Projection`, with norm, RoPE and KV write in the attention kernel; all
    older keys are cached before. Returns the output and the caches beside those of the references,
    one operation after the other."""
    device, dtype, heads = case.device, case.dtype, case.q_heads + 2 * case.kv_heads
    lens = torch.tensor([keys for _, keys in case.rows], dtype=torch.int32, device=device)
    width = max(1, -(-int(lens.max()) // case.block_size))
    blocks = torch.randperm(width * len(lens) + 1, device=device)
    tables = blocks[:-1].view(len(lens), width).int()
    shape = (len(blocks), case.block_size, case.kv_heads, case.head_size)
    before = [normal(*shape, dtype=torch.float32, device=device) for _ in range(2)]
    *caches, scales, wide = cached(*before, case.cache_dtype or dtype)
    shifts = None if scales is None else torch.randn(case.kv_heads, case.head_size, device=device)
    qkv = normal(len(lens), heads * case.head_size, dtype=dtype, device=device)
    max_pos = max(1000, int(lens.max()))
    rotation = rotation_case.make(case.head_size, dtype, device, max_pos)
    positions = rotation_case.positions(len(lens), device)
    workspace = DecodeWorkspace.create(
        case.q_heads, caches[0], window=case.window, config=case.config, programs=case.programs
    )
    plan_decode(workspace, lens)
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=device)
    sinks, slopes = case.sinks(), case.slopes()
    out = paged_attention(
        qkv[:, : case.q_heads * case.head_size].view(len(lens), case.q_heads, case.head_size),
        *caches, tables, starts, lens,
        num_decodes=len(lens), workspace=workspace, soft_cap=case.soft_cap,
        projection=Projection(qkv, rotation, positions, shifts), older_keys_cached=True,
        scales=scales, sinks=sinks, slopes=slopes,
    )  # fmt: skip
    assert not workspace.parts.counters.any()
    last = (lens - 1).clamp(min=0).long()
    slots = (
        tables[torch.arange(len(lens), device=device), last // case.block_size].long()
        * case.block_size
        + last % case.block_size
    )
    slots[lens == 0] = -1
    q = qk_norm_rope_cache_reference(
        qkv.double(), last if positions is None else positions, slot_mapping=slots,
        k_cache=wide[0], v_cache=wide[1], num_q_heads=case.q_heads, scales=scales,
        key_shifts=shifts, **rotation_case.reference_options(rotation, device),
    )  # fmt: skip
    reference = paged_attention_reference(
        q, *wide, tables, starts, lens, window=case.window, soft_cap=case.soft_cap, sinks=sinks,
        slopes=slopes,
    )  # fmt: skip
    pairs = zip(readable(caches, scales), wide, strict=True)
    return [(out, reference), *pairs]


def readable(caches: list[torch.Tensor], scales: torch.Tensor | None) -> list[torch.Tensor]:
    """Returns what is read from the caches of keys and of values, in float64."""
    if scales is None:
        return [cache.double() for cache in caches]
    factors = scales[:2, :, None].double()
    return [cache.float().double() * f for cache, f in zip(caches, factors, strict=True)]


def norm(rows: int, hidden: int, dtype: torch.dtype, device: str) -> list[Pair]:
    """Runs `rms_norm`, and `add_rms_norm` with the residual that it updates."""
    x, residual = (normal(rows, hidden, dtype=dtype, device=device) for _ in range(2))
    weight = normal(hidden, dtype=dtype, device=device)
    alone = rms_norm(x, weight, 1e-6, out=poisoned(rows, hidden, dtype=dtype, device=device))
    normed, total = add_rms_norm_reference(x.double(), residual.double(), weight.double(), 1e-6)
    result = add_rms_norm(
        x, residual, weight, 1e-6, out=poisoned(rows, hidden, dtype=dtype, device=device)
    )
    return [
        (alone, rms_norm_reference(x.double(), weight.double(), 1e-6)),
        (result, normed),
        (residual, total),
    ]


def norm_of_parts(
    count: int, rows: int, hidden: int, dtype: torch.dtype, device: str
) -> list[Pair]:
    """Runs `add_parts_rms_norm` and `add_parts`, with the residuals that they update."""
    parts = normal(count, rows, hidden, dtype=torch.float32, device=device)
    weight = normal(hidden, dtype=dtype, device=device)
    residual = normal(rows, hidden, dtype=dtype, device=device)
    other = residual.clone()
    total = residual.double() + parts.double().sum(0)
    # the norm is that of what was rounded
    expected = rms_norm_reference(total.to(dtype).double(), weight.double(), 1e-6)
    out = poisoned(rows, hidden, dtype=dtype, device=device)
    result = add_parts_rms_norm(parts, residual, weight, 1e-6, out=out)
    add_parts(parts, other)
    return [(result, expected), (residual, total), (other, total)]


def activation(rows: int, width: int, dtype: torch.dtype, device: str, kind: str = "silu") -> Pair:
    """Runs `gated_activation`; `width` is a multiple of 8."""
    gate_up = normal(rows, 2 * width, dtype=dtype, device=device)
    out = poisoned(rows, width, dtype=dtype, device=device)
    return (
        gated_activation(gate_up, kind=kind, out=out),
        gated_activation_reference(gate_up.double(), kind),
    )


def qk_norm_rope(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_size: int,
    rotation_case: RotationCase,
    dtype: torch.dtype,
    device: str,
    cache_dtype: torch.dtype | None = None,
) -> list[Pair]:
    """Runs `qk_norm_rope_cache` with one token of padding, and `rotated_queries`. Returns q of
    both, and what is read from the whole caches, the entries that must not be written included."""
    block_size, blocks = 16, tokens // 8 + 2
    qkv = normal(tokens, (q_heads + 2 * kv_heads) * head_size, dtype=dtype, device=device)
    rotation = rotation_case.make(head_size, dtype, device)
    positions = replace(rotation_case, moved=True).positions(tokens, device)
    assert positions is not None
    slots = torch.randperm(blocks * block_size, device=device)[:tokens]
    slots[tokens // 2] = -1
    before = torch.full((blocks, block_size, kv_heads, head_size), 1.75, device=device)
    *caches, scales, wide_caches = cached(before, before.clone(), cache_dtype or dtype)
    shifts = None if scales is None else torch.randn(kv_heads, head_size, device=device)
    q = qk_norm_rope_cache(
        Projection(qkv, rotation, positions, shifts), slots, *caches,
        num_q_heads=q_heads, scales=scales,
        out=poisoned(tokens, q_heads, head_size, dtype=dtype, device=device),
    )  # fmt: skip
    reference = qk_norm_rope_cache_reference(
        qkv.double(), positions, slot_mapping=slots, k_cache=wide_caches[0],
        v_cache=wide_caches[1], num_q_heads=q_heads, scales=scales, key_shifts=shifts,
        **rotation_case.reference_options(rotation, device),
    )  # fmt: skip
    alone = Projection(qkv[:, : q_heads * head_size], rotation, positions)
    queries = rotated_queries(alone, caches[0]), reference
    return [(q, reference), queries, *zip(readable(caches, scales), wide_caches, strict=True)]


def dense_rows(
    rows: int,
    features: int,
    inputs: int,
    dtype: torch.dtype,
    device: str,
    *,
    normed: bool,
    gated: bool,
    config: FewRowsConfig | None = None,
) -> Pair:
    """Runs `few_rows_dense`: with a residual where it is not gated; where it is, `features` is a
    multiple of 8."""
    x = normal(rows, inputs, dtype=dtype, device=device)
    weight = (torch.randn(features * (1 + gated), inputs, device=device) * inputs**-0.5).to(dtype)
    norm_weight = normal(inputs, dtype=dtype, device=device) if normed else None
    residual = None if gated else normal(rows, features, dtype=dtype, device=device)
    out = few_rows_dense(
        x, weight, norm_weight=norm_weight, residual=residual, gated=gated, config=config,
        out=poisoned(rows, features, dtype=dtype, device=device),
    )  # fmt: skip
    wide_norm, wide_residual = (None if t is None else t.double() for t in (norm_weight, residual))
    return out, product_reference(
        x.double(), weight.double(), norm_weight=wide_norm, residual=wide_residual, gated=gated
    )


def random_rows(
    count: int, max_keys: int, max_tokens: int, rng: random.Random
) -> list[tuple[int, int]]:
    """Returns rows of a mixed batch: (tokens, keys), about half of them decodes."""
    rows = []
    for _ in range(count):
        tokens = 1 if rng.random() < 0.5 else rng.randint(2, max_tokens)
        rows.append(
            (tokens, tokens + rng.randint(0, max_keys - tokens) if rng.random() < 0.7 else tokens)
        )
    return rows
