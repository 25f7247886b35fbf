"""Attention of rows of several tokens over the paged KV cache on Hopper GPUs, in Triton's Gluon
dialect.

Called through `paged_attention` where `supports` returns true; elsewhere `prefill_attention`
computes the same. The schedule is FlashAttention-3's (Shah et al., 2024): one
warp loads KV blocks with TMA through a ring of shared-memory stages; two warpgroups, 64 packed
query rows each, multiply them with asynchronous wgmma, so that the scores of the next block and the
output of the last one are computed while the softmax runs. Programs are persistent: while the
consumers write a tile's output, the loads of the next tile are under way.

A tile of keys is a KV block, but with heads of 256 channels, of which two stages of 128 tokens do
not fit into shared memory: there it is 64 tokens of a block.

From a KV cache in float8 blocks are loaded into a ring of their own, and a third warpgroup converts
them to float16 into the ring of the operands, which wgmma reads in 16 bits. Queries and
probabilities are float16 then, as in `DecodeConfig.fp16_operands`: float8 becomes float16 in one
instruction for two numbers, bfloat16 in three.
"""
# ruff: noqa: E741, N803, N806, RUF005  (compile-time constants are written in capitals; l is the
# softmax's sum; Triton does not unpack tuples)

from __future__ import annotations

import torch
from aioinfer.kernels.attention_tiles import ScoreArguments
from aioinfer.kernels.prefill_plan import PrefillPlan
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = 128  # packed query rows of a tile
FLOAT8 = torch.float8_e4m3fn
LOG2_E = gl.constexpr(1.4426950408889634)
TORCH_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def supports(dtype: torch.dtype, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether this kernel can compute queries of `dtype`: on Hopper, in bf16 or fp16, with head
    size 64, 128 or 256 and KV blocks of 64 or 128 tokens; with a cache in float8 head size 64 or
    128."""
    _, block_size, _, head_size = k_cache.shape
    return (
        k_cache.is_cuda
        and torch.cuda.get_device_capability(k_cache.device)[0] == 9
        and dtype in TORCH_DTYPES
        and k_cache.dtype == v_cache.dtype
        and (k_cache.dtype == dtype or (k_cache.dtype == FLOAT8 and head_size <= 128))
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and head_size in (64, 128, 256)
        and block_size in (64, 128)
    )


@gluon.jit
def _item(wave):
    """Returns this program's work item of a wave (one item for each program).

    Items are sorted by descending work, so they are assigned in snake order: every second wave in
    reverse.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    return wave * programs + program + (wave & 1) * (programs - 1 - 2 * program)


@gluon.jit
def _count_items(items):
    """Returns how many of the `items` work items this program computes."""
    waves = items // gl.num_programs(0)
    return waves + (_item(waves) < items).to(gl.int32)


@gluon.jit
def _work(
    plan, item, query_starts, seq_lens, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    WINDOW: gl.constexpr, TILE: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Returns of work item `item`: the tile within its row, the row's first token and number of
    tokens, its context, and the visible KV tiles begin .. end - 1."""
    row = gl.load(plan + 2 + item // KV_HEADS * 2)
    tile = gl.load(plan + 3 + item // KV_HEADS * 2)
    start = gl.load(query_starts + row)
    length = gl.load(query_starts + row + 1) - start
    context = gl.load(seq_lens + row) - length
    last = gl.minimum(((tile + 1) * ROWS - 1) // GROUP, length - 1)
    end = (context + last) // TILE + 1
    begin = end * 0
    if WINDOW > 0:
        begin = gl.maximum(context + tile * ROWS // GROUP - WINDOW + 1, 0) // TILE
    return tile, start, length, context, begin, end


@gluon.jit
def _produce(
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr, ROWS: gl.constexpr,
    TILES: gl.constexpr,
    keys, values, block_tables, table_stride, query_starts, seq_lens, plan, count, k_smem, v_smem,
    k_full, k_empty, v_full, v_empty,
):  # fmt: skip
    """Loads the KV tiles of every work item, last tile first, as stages of the ring become free. A
    block has TILES of them."""
    STAGES: gl.constexpr = k_smem.shape[0]
    TILE: gl.constexpr = k_smem.shape[1]
    HEAD_SIZE: gl.constexpr = k_smem.shape[2]
    loaded = gl.program_id(0) * 0
    for wave in range(count):
        item = _item(wave)
        _, _, _, _, begin, end = _work(
            plan, item, query_starts, seq_lens, KV_HEADS, GROUP, WINDOW, TILE, ROWS
        )
        column = item % KV_HEADS * HEAD_SIZE
        table = block_tables + gl.load(plan + 2 + item // KV_HEADS * 2).to(gl.int64) * table_stride
        block = gl.load(table + (end - 1) // TILES)
        for index in range(end - begin):
            stage = loaded % STAGES
            phase = (loaded // STAGES) & 1
            following = gl.load(table + gl.maximum(end - 2 - index, begin) // TILES)
            line = (block * TILES + (end - 1 - index) % TILES) * TILE
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), keys.block_type.nbytes)
            tma.async_copy_global_to_shared(
                keys, [line, column], k_full.index(stage), k_smem.index(stage)
            )
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), values.block_type.nbytes)
            tma.async_copy_global_to_shared(
                values, [line, column], v_full.index(stage), v_smem.index(stage)
            )
            block = following
            loaded += 1


@gluon.jit
def _convert_block(raw, operand, HEAD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Converts a block of float8 in shared memory to the operands' dtype, for wgmma to read.

    A thread has 8 numbers at a time: the 16 bytes that 8 neighbouring threads each store are one
    row of the operand's swizzle, without bank conflicts.
    """
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0]
    )
    for chunk in gl.static_range(0, TILE, 32):
        part = raw.slice(chunk, 32).load(layout)
        operand.slice(chunk, 32).store(part.to(operand.dtype))
    # every thread makes its stores visible to wgmma before one thread arrives for all
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _convert(
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr, ROWS: gl.constexpr,
    query_starts, seq_lens, plan, count, k_raw, v_raw, raw_k_full, raw_k_empty, raw_v_full,
    raw_v_empty, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
):  # fmt: skip
    """Converts the float8 KV blocks of every work item, in the order in which they are loaded."""
    STAGES: gl.constexpr = k_smem.shape[0]
    RAW_STAGES: gl.constexpr = k_raw.shape[0]
    TILE: gl.constexpr = k_smem.shape[1]
    HEAD_SIZE: gl.constexpr = k_smem.shape[2]
    converted = gl.program_id(0) * 0
    for wave in range(count):
        _, _, _, _, begin, end = _work(
            plan, _item(wave), query_starts, seq_lens, KV_HEADS, GROUP, WINDOW, TILE, ROWS
        )
        for _index in range(end - begin):
            stage, raw = converted % STAGES, converted % RAW_STAGES
            phase, raw_phase = (converted // STAGES) & 1, (converted // RAW_STAGES) & 1
            mbarrier.wait(raw_k_full.index(raw), raw_phase)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _convert_block(k_raw.index(raw), k_smem.index(stage), HEAD_SIZE, TILE)
            mbarrier.arrive(k_full.index(stage))
            mbarrier.arrive(raw_k_empty.index(raw))
            mbarrier.wait(raw_v_full.index(raw), raw_phase)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            _convert_block(v_raw.index(raw), v_smem.index(stage), HEAD_SIZE, TILE)
            mbarrier.arrive(v_full.index(stage))
            mbarrier.arrive(raw_v_empty.index(raw))
            converted += 1


@gluon.jit
def _adjust(
    s, index, limit, scale, soft_cap, SOFT_CAP: gl.constexpr, MASKED: gl.constexpr,
    WINDOW: gl.constexpr, TILE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Caps the scores, and masks for each row the keys after its own position (`limit`) and those
    before its window."""
    if SOFT_CAP:  # tanh by way of exp; the result is in base 2
        s = soft_cap * LOG2_E * (1.0 - 2.0 / (gl.exp2(s * (scale * 2.0 / soft_cap)) + 1.0))
    if MASKED:
        position = index * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
        visible = position[None, :] <= limit[:, None]
        if WINDOW > 0:
            visible = visible & (position[None, :] > limit[:, None] - WINDOW)
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def _softmax(s, m, l, scale, SOFT_CAP: gl.constexpr):
    """Online softmax: returns exp2(s - new maximum), the new maxima and sums, and the factor by
    which to rescale the outputs so far."""
    if SOFT_CAP:  # already scaled
        scale = 1.0
    new_m = gl.maximum(m, gl.max(s, 1))
    safe_m = gl.where(new_m == float("-inf"), 0.0, new_m) * scale
    p = gl.exp2(s * scale - safe_m[:, None])
    factor = gl.exp2(m * scale - safe_m)
    return p, new_m, l * factor + gl.sum(p, 1), factor


@gluon.jit
def _step(
    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, count, index, begin, limit, acc,
    operand, m, l,
    scale, soft_cap, SOFT_CAP: gl.constexpr, MASKED: gl.constexpr, WINDOW: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Multiplies the probabilities of the previous block with its values while the softmax of block
    `index` is computed.

    The assembler hoists the wait for the output above the softmax unless a branch lies between
    them: the wait for the next keys is placed there as that branch.
    """
    k_stage = count % STAGES
    v_stage = (count - 1) % STAGES
    zero = gl.zeros([operand.shape[0], TILE], gl.float32, s_layout)
    s = warpgroup_mma(
        q_smem, k_smem.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(v_stage), ((count - 1) // STAGES) & 1)
    acc = warpgroup_mma(operand, v_smem.index(v_stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(k_empty.index(k_stage))
    s = _adjust(s, index, limit, scale, soft_cap, SOFT_CAP, MASKED, WINDOW, TILE, s_layout)
    p, m, l, factor = _softmax(s, m, l, scale, SOFT_CAP)
    following = gl.convert_layout(p.to(operand.dtype), p_layout)
    mbarrier.wait(
        k_full.index((count + 1) % STAGES), ((count + 1) // STAGES) & 1, pred=index > begin
    )
    acc, operand = warpgroup_mma_wait(0, [acc, operand])
    mbarrier.arrive(v_empty.index(v_stage))
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
    return acc, following, m, l


@gluon.jit
def _clear_rows(smem, begin, TILE: gl.constexpr, layout: gl.constexpr):
    """Writes zeros to the rows of a block from `begin` on: past the end of a sequence the cache may
    contain NaN, and 0 * NaN is not 0."""
    for chunk in gl.static_range(0, TILE, 16):
        part = smem.slice(chunk, 16)
        rows = chunk + gl.arange(0, 16, gl.SliceLayout(1, layout))
        value = part.load(layout)
        part.store(gl.where(rows[:, None] < begin, value, gl.zeros_like(value)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _first_step(
    q_smem, k_smem, v_smem, k_full, k_empty, v_full, count, index, begin, limit, seq_end, scale,
    soft_cap,
    SOFT_CAP: gl.constexpr, WINDOW: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    s_layout: gl.constexpr, p_layout: gl.constexpr, wide: gl.constexpr,
):  # fmt: skip
    """Computes the scores of the last block and their softmax; returns the probabilities with the
    first maxima and sums."""
    stage = count % STAGES
    phase = (count // STAGES) & 1
    rows: gl.constexpr = q_smem.shape[0]
    zero = gl.zeros([rows, TILE], gl.float32, s_layout)
    m = gl.full([rows], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    l = gl.zeros([rows], gl.float32, gl.SliceLayout(1, s_layout))
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(
        q_smem, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k_empty.index(stage))
    s = _adjust(s, index, limit, scale, soft_cap, SOFT_CAP, True, WINDOW, TILE, s_layout)
    p, m, l, _ = _softmax(s, m, l, scale, SOFT_CAP)
    if (index + 1) * TILE > seq_end:
        mbarrier.wait(v_full.index(stage), phase)
        _clear_rows(v_smem.index(stage), seq_end - index * TILE, TILE, wide)
    mbarrier.wait(
        k_full.index((count + 1) % STAGES), ((count + 1) // STAGES) & 1, pred=index > begin
    )
    return gl.convert_layout(p.to(q_smem.dtype), p_layout), m, l


@gluon.jit
def _add_sinks(
    m, l, sinks, first, scale, SOFT_CAP: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr
):
    """Returns the sums of the softmax with the weights of sinks, as `attention_tiles.add_sinks`;
    maxima are not scaled yet, but where scores are capped."""
    if not SOFT_CAP:
        m = m * scale
    packed = first + gl.arange(0, m.shape[0], gl.SliceLayout(1, layout))
    sink = gl.load(sinks + packed % GROUP) * LOG2_E
    return l + gl.exp2(sink - gl.where(m == float("-inf"), 0.0, m))


@gluon.jit
def _attend(
    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, used, begin, end, whole, limit,
    seq_end, scale, soft_cap, v_scale, sinks, first,
    HEAD_SIZE: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, HAS_SINKS: gl.constexpr,
    s_layout: gl.constexpr, wide: gl.constexpr,
):  # fmt: skip
    """Returns the attention of the queries in shared memory over the KV blocks end - 1 .. begin.
    The blocks from `whole` on contain masked keys. The packed queries begin with number `first` of
    their row, and `sinks` are the sinks of the queries' KV head."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = q_smem.shape[0]
    acc = gl.zeros([rows, HEAD_SIZE], gl.float32, o_layout)
    operand, m, l = _first_step(
        q_smem, k_smem, v_smem, k_full, k_empty, v_full, used, end - 1, begin, limit, seq_end,
        scale, soft_cap,
        SOFT_CAP, WINDOW, TILE, STAGES, s_layout, p_layout, wide,
    )  # fmt: skip
    first_unmasked = gl.maximum(end - whole, 1)
    for index in range(1, first_unmasked):
        acc, operand, m, l = _step(
            q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, used + index, end - 1 - index,
            begin, limit, acc, operand, m, l,
            scale, soft_cap, SOFT_CAP, True, WINDOW, TILE, STAGES, s_layout, o_layout, p_layout,
        )  # fmt: skip
    for index in range(first_unmasked, end - begin):
        acc, operand, m, l = _step(
            q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, used + index, end - 1 - index,
            begin, limit, acc, operand, m, l,
            scale, soft_cap, SOFT_CAP, False, WINDOW, TILE, STAGES, s_layout, o_layout, p_layout,
        )  # fmt: skip
    count = used + end - begin - 1
    stage = count % STAGES
    mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
    acc = warpgroup_mma(operand, v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(v_empty.index(stage))
    if HAS_SINKS:
        l = _add_sinks(m, l, sinks, first, scale, SOFT_CAP, GROUP, s_layout)
    inverse = v_scale / gl.where(l == 0.0, 1.0, l)
    return acc * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]


@gluon.jit
def _consume(
    WARPGROUP: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr,
    ROWS: gl.constexpr, SOFT_CAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_SCALES: gl.constexpr,
    q, out, query_starts, seq_lens, plan, count, scale, soft_cap, scales, sinks,
    q_stride, out_stride, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
):  # fmt: skip
    """Computes half of the packed query rows of every work item, in one warpgroup."""
    HALF: gl.constexpr = ROWS // 2
    STAGES: gl.constexpr = k_smem.shape[0]
    TILE: gl.constexpr = k_smem.shape[1]
    HEAD_SIZE: gl.constexpr = k_smem.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0]
    )
    columns = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, wide))[None, :]
    used = gl.program_id(0) * 0
    for wave in range(count):
        item = _item(wave)
        tile, start, length, context, begin, end = _work(
            plan, item, query_starts, seq_lens, KV_HEADS, GROUP, WINDOW, TILE, ROWS
        )
        first = tile * ROWS + WARPGROUP * HALF
        packed = first + gl.arange(0, HALF, gl.SliceLayout(1, wide))
        token = packed // GROUP
        in_row = (token < length)[:, None]
        column = (item % KV_HEADS * GROUP + packed % GROUP)[:, None] * HEAD_SIZE + columns
        query = gl.load(q + (start + token).to(gl.int64)[:, None] * q_stride + column, in_row, 0.0)
        q_smem.store(query.to(q_smem.dtype))
        fence_async_shared()
        limit = context + (first + gl.arange(0, HALF, gl.SliceLayout(1, s_layout))) // GROUP
        whole = gl.maximum((context + tile * ROWS // GROUP + 1) // TILE, begin)
        if WINDOW > 0:
            whole = begin
        score_scale, value_scale = scale, 1.0
        if HAS_SCALES:
            score_scale = scale * gl.load(scales + item % KV_HEADS)
            value_scale = gl.load(scales + KV_HEADS + item % KV_HEADS)
        result = _attend(
            q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, used, begin, end, whole,
            limit, context + length,
            score_scale, soft_cap, value_scale, sinks + item % KV_HEADS * GROUP, first,
            HEAD_SIZE, WINDOW, SOFT_CAP, TILE, STAGES, GROUP, HAS_SINKS, s_layout, wide,
        )  # fmt: skip
        used += end - begin
        place = out + (start + token).to(gl.int64)[:, None] * out_stride + column
        gl.store(place, gl.convert_layout(result.to(q.dtype.element_ty), wide), in_row)


@gluon.jit
def _ring(
    dtype: gl.constexpr, layout: gl.constexpr, STAGES: gl.constexpr, TILE: gl.constexpr,
    HEAD_SIZE: gl.constexpr, READERS: gl.constexpr,
):  # fmt: skip
    """Returns shared memory for `STAGES` KV blocks, keys and values, and the barriers of its stages
    (keys full, keys empty, values full, values empty). A stage is empty when `READERS` warpgroups
    have read it."""
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_SIZE], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_SIZE], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), 1)
        mbarrier.init(v_full.index(stage), 1)
        mbarrier.init(k_empty.index(stage), READERS)
        mbarrier.init(v_empty.index(stage), READERS)
    return k_smem, v_smem, k_full, k_empty, v_full, v_empty


@gluon.jit(do_not_specialize_on_alignment=["block_tables", "query_starts", "seq_lens"])
def _prefill_kernel(
    q, keys, values, out, block_tables, query_starts, seq_lens, plan, scale, soft_cap,
    scales, sinks, q_stride, out_stride, table_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_SCALES: gl.constexpr,
    TILE: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    RAW_STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = gl.float16 if RAW_STAGES > 0 else q.dtype.element_ty
    count = _count_items(gl.load(plan) * KV_HEADS)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, HEAD_SIZE], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS // 2, HEAD_SIZE], q_layout)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, HEAD_SIZE], dtype)
    ring = _ring(dtype, kv_layout, STAGES, TILE, HEAD_SIZE, 2)
    rows = (query_starts, seq_lens, plan, count)
    ends = (q, out) + rows + (scale, soft_cap, scales, sinks, q_stride, out_stride)
    # Constants must be named first in each tuple: in a variable they would become constants of
    # constants. A table's stride of 1 is one, too.
    if RAW_STAGES == 0:
        fence_async_shared()
        gl.thread_barrier()
        gl.warp_specialize(
            [
                (_consume, (0, KV_HEADS, GROUP, WINDOW, ROWS, SOFT_CAP, HAS_SINKS, HAS_SCALES)
                           + ends + (q_smem.index(0),) + ring),
                (_consume, (1, KV_HEADS, GROUP, WINDOW, ROWS, SOFT_CAP, HAS_SINKS, HAS_SCALES)
                           + ends + (q_smem.index(1),) + ring),
                (_produce, (KV_HEADS, GROUP, WINDOW, ROWS, TILES, keys, values, block_tables,
                            table_stride) + rows + ring),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        raw_layout: gl.constexpr = keys.layout
        raw = _ring(gl.float8e4nv, raw_layout, RAW_STAGES, TILE, HEAD_SIZE, 1)
        fence_async_shared()
        gl.thread_barrier()
        gl.warp_specialize(
            [
                (_consume, (0, KV_HEADS, GROUP, WINDOW, ROWS, SOFT_CAP, HAS_SINKS, HAS_SCALES)
                           + ends + (q_smem.index(0),) + ring),
                (_consume, (1, KV_HEADS, GROUP, WINDOW, ROWS, SOFT_CAP, HAS_SINKS, HAS_SCALES)
                           + ends + (q_smem.index(1),) + ring),
                (_convert, (KV_HEADS, GROUP, WINDOW, ROWS) + rows + raw + ring),
                (_produce, (KV_HEADS, GROUP, WINDOW, ROWS, TILES, keys, values, block_tables,
                            table_stride) + rows + raw),
            ],
            [4, 4, 1],
            [224, 40, 24],
        )  # fmt: skip


def tile_tokens(head_size: int, block_size: int) -> int:
    """Returns the number of tokens of a tile of keys, which divides the block size."""
    return min(block_size, 64 if head_size == 256 else 128)


def pipeline_stages(head_size: int, tile: int, *, is_float8: bool = False) -> int:
    """Returns the number of KV tiles of operands in shared memory: as many as fit beside the
    queries, at most four; with float8 beside `raw_stages`, too."""
    size = 128 * 1024 if is_float8 else 160 * 1024
    return min(4, size // (4 * head_size * tile))


def raw_stages(head_size: int, tile: int) -> int:
    """Returns the number of float8 KV tiles in flight in shared memory, before they are converted:
    as many as fit beside the queries, the operands, and 18 KiB for conversions of layouts and
    barriers, at most four."""
    operands = pipeline_stages(head_size, tile, is_float8=True) * 4 * head_size * tile
    left = (227 - 18) * 1024 - 2 * ROWS * head_size - operands
    return min(4, left // (2 * head_size * tile))


def launch_prefill_hopper(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    plan: PrefillPlan,
    *,
    window: int,
    scores: ScoreArguments,
    scales: torch.Tensor | None = None,
) -> None:
    """Launches the kernel; arguments as checked by `paged_attention`; there are no slopes. A cache
    in float8 is multiplied in float16: queries above 65504 would be infinite."""
    blocks, block_size, kv_heads, head_size = k_cache.shape
    is_float8 = k_cache.dtype == FLOAT8
    element = gl.float8e4nv if is_float8 else TORCH_DTYPES[q.dtype]
    tile = tile_tokens(head_size, block_size)
    layout = gl.NVMMASharedLayout.get_default_for([tile, head_size], element)

    def descriptor(cache: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(
            cache,
            [blocks * block_size, kv_heads * head_size],
            [kv_heads * head_size, 1],
            [tile, head_size],
            layout,
        )

    programs = min(
        plan.capacity * kv_heads, torch.cuda.get_device_properties(q.device).multi_processor_count
    )
    _prefill_kernel[(programs,)](
        q, descriptor(k_cache), descriptor(v_cache), out, block_tables, query_starts, seq_lens,
        plan.tiles,
        scores.scale, scores.soft_cap or 0.0, plan.tiles if scales is None else scales,
        plan.tiles if scores.sinks is None else scores.sinks,
        q.stride(0), out.stride(0), block_tables.stride(0),
        KV_HEADS=kv_heads, GROUP=q.shape[1] // kv_heads, HEAD_SIZE=head_size, WINDOW=window,
        SOFT_CAP=scores.soft_cap is not None, HAS_SINKS=scores.sinks is not None,
        HAS_SCALES=scales is not None,
        TILE=tile, TILES=block_size // tile, ROWS=ROWS,
        STAGES=pipeline_stages(head_size, tile, is_float8=is_float8),
        RAW_STAGES=raw_stages(head_size, tile) if is_float8 else 0, num_warps=4,
    )  # fmt: skip
