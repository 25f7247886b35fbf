"""Linear layers for a few to 128 rows on Hopper GPUs, whose time is that of reading the weights, in
Triton's Gluon dialect.

Called by the linear layers in decode steps where `use_streamed` says so (`layers.formats.dense`);
elsewhere `linear`, `gated_product` or cuBLAS compute the same.

The weight is wgmma's left operand, 64 or 128 of its rows for each consumer warpgroup, and all
tokens are the columns. One warp loads both with TMA through a ring of shared-memory stages. The
pairs of a weight tile and a step of its inputs ("units") form one sequence, of which every program
takes an equal, contiguous span ("stream-K", Osama et al. 2023; `streamed_tiles`): all
multiprocessors read the same number of bytes, and the loads of a tile are under way while the tile
before is written. A tile that lies within one span is written by its program. Of other tiles each
program writes its sums to a workspace, and the last one to do so adds them, always in the same
order.

With programmatic dependent launch the first stages' weights are loaded before the preceding kernel
has ended, and the following kernel may start once the last load has been issued: while sums are
added and outputs written here, its programs load their weights, if shared memory and registers have
room for both (`StreamConfig.blocks`).
"""
# ruff: noqa: N803, N806, RUF005  (compile-time constants are written in capitals; Triton does not
# unpack tuples)

from __future__ import annotations

from dataclasses import dataclass

import torch
from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.gated_product import LOG2_E, TORCH_DTYPES, _rows_are_aligned
from aioinfer.kernels.linear_arguments import check_linear
from aioinfer.kernels.streamed_tiles import (
    CONSUMER_ROWS,
    MAX_ROWS,
    STEP_BYTES,
    StreamConfig,
    Tiling,
    stream_config,
    tiling,
    workspace_size,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Weight tiles of which a workspace can count the parts: half a million rows of 64.
MAX_COUNTERS = 8192


@dataclass(frozen=True, slots=True)
class StreamWorkspace:
    """What the programs of a launch exchange. All layers of a rank can share one, since launches on
    a stream use it one after the other, dependent launches too.

    Attributes:
        partials: float32, the sums of parts of tiles; may hold anything.
        counters: int32 [MAX_COUNTERS], how many parts of a tile have been written: zeros between
            launches.
    """

    partials: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def create(cls, device: torch.device, max_rows: int = MAX_ROWS) -> StreamWorkspace:
        """Returns a workspace for every configuration for so many tokens: of an H200, 17 MB for 64
        and 35 MB for 128."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        size = workspace_size(processors, max_rows)
        partials = torch.empty(size, dtype=torch.float32, device=device)
        counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
        return cls(partials, counters)


@gluon.jit
def _begin_of(program, span, longer):
    """Returns the first unit of a program: see `Tiling`."""
    return program * span + gl.minimum(program, longer)


@gluon.jit
def _program_of(unit, span, longer):
    """Returns the program that has a unit."""
    in_longer = unit // (span + 1)
    return gl.where(in_longer < longer, in_longer, longer + (unit - longer * (span + 1)) // span)


@gluon.jit
def _load_weights(weight, w_smem, full, stage, tile, k):
    """Loads each consumer's weight rows of a unit into a stage."""
    ROWS: gl.constexpr = weight.block_type.shape[0]
    STEP: gl.constexpr = weight.block_type.shape[1]
    PARTS: gl.constexpr = w_smem.shape[0] // full.shape[0]
    for part in gl.static_range(PARTS):
        place = [(tile * PARTS + part) * ROWS, k * STEP]
        tma.async_copy_global_to_shared(
            weight, place, full.index(stage), w_smem.index(stage * PARTS + part)
        )


@gluon.jit
def _next_unit(tile, k, steps):
    """Returns the tile and the step of the unit behind this one."""
    is_new = k + 1 == steps
    return gl.where(is_new, tile + 1, tile), gl.where(is_new, 0, k + 1)


@gluon.jit
def _produce(
    PDL: gl.constexpr, x, weight, x_smem, w_smem, full, empty, steps, span, longer
):  # fmt: skip
    """Loads the units of the program's span. With PDL, the first weights are loaded before waiting
    for the preceding kernel, which writes x.

    The consumers need not wait for the preceding kernel: they read its results and write theirs
    only after a stage whose x was loaded behind the wait.
    """
    STAGES: gl.constexpr = full.shape[0]
    STEP: gl.constexpr = weight.block_type.shape[1]
    PARTS: gl.constexpr = w_smem.shape[0] // STAGES
    NBYTES: gl.constexpr = x.block_type.nbytes + PARTS * weight.block_type.nbytes
    begin = _begin_of(gl.program_id(0), span, longer)
    count = _begin_of(gl.program_id(0) + 1, span, longer) - begin
    early = gl.minimum(count, STAGES)
    tile = begin // steps
    k = begin % steps
    for stage in range(early):
        mbarrier.expect(full.index(stage), NBYTES)
        _load_weights(weight, w_smem, full, stage, tile, k)
        tile, k = _next_unit(tile, k, steps)
    if PDL:
        gdc_wait()
    x_k = begin % steps
    for stage in range(early):
        tma.async_copy_global_to_shared(x, [0, x_k * STEP], full.index(stage), x_smem.index(stage))
        _, x_k = _next_unit(0, x_k, steps)
    for loaded in range(early, count):
        stage = loaded % STAGES
        mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), NBYTES)
        _load_weights(weight, w_smem, full, stage, tile, k)
        tma.async_copy_global_to_shared(x, [0, k * STEP], full.index(stage), x_smem.index(stage))
        tile, k = _next_unit(tile, k, steps)
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _sums(PART: gl.constexpr, used, count, x_smem, w_smem, full, empty, layout: gl.constexpr):
    """Returns the sums of a tile [ROWS, TOKENS] over `count` stages, behind `used` others."""
    STAGES: gl.constexpr = x_smem.shape[0]
    PARTS: gl.constexpr = w_smem.shape[0] // STAGES
    ROWS: gl.constexpr = w_smem.shape[1]
    TOKENS: gl.constexpr = x_smem.shape[1]
    acc = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, layout))
    for index in range(count):
        stage = used % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=index > 0)
        acc = warpgroup_mma(
            w_smem.index(stage * PARTS + PART), x_smem.index(stage).permute((1, 0)), acc,
            is_async=True,
        )  # fmt: skip
        used += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES))
    return acc


@gluon.jit
def _flat(acc):
    """Returns the sums of a tile [ROWS * TOKENS], so ordered that the four of a thread which belong
    to the same eight rows and sixteen columns follow each other: they are stored by one
    instruction, and those of a warp next to each other."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    parts = acc.reshape([ROWS // 16, 2, 8, TOKENS // 8, 4, 2])
    return parts.permute((3, 0, 2, 4, 1, 5)).reshape([ROWS * TOKENS])


@gluon.jit
def _unflat(flat, ROWS: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr):
    """Returns what `_flat` was given."""
    parts = flat.reshape([TOKENS // 8, ROWS // 16, 8, 4, 2, 2])
    acc = parts.permute((1, 4, 2, 0, 3, 5)).reshape([ROWS, TOKENS])
    return gl.convert_layout(acc, layout, assert_trivial=True)


@gluon.jit
def _merge(
    PART: gl.constexpr, PARTS: gl.constexpr, acc, partials, counters, tile, steps, span, longer,
    is_first, layout: gl.constexpr
):  # fmt: skip
    """Stores a part of a tile's sums; returns whether all parts have been stored, and then their
    sum, in the order of the inputs. The counter is then reset.

    A program has two places for each consumer: of a tile that it begins, and of one that an earlier
    program began.
    """
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = ROWS * TOKENS
    STRIDE: gl.constexpr = 2 * PARTS * SIZE  # between programs
    UNROLL: gl.constexpr = max(1, 4096 // SIZE)  # parts whose loads are under way together
    flat = _flat(acc)
    here = gl.arange(0, SIZE, layout=flat.type.layout)
    ours = partials + PART * SIZE
    slot = gl.where(is_first, PARTS * SIZE, 0)
    gl.store(ours + gl.program_id(0) * STRIDE + slot + here, flat)
    gl.thread_barrier()
    first = _program_of(tile * steps, span, longer)
    last = _program_of(tile * steps + steps - 1, span, longer)
    is_done = gl.atomic_add(counters + tile * PARTS + PART, 1, sem="acq_rel") == last - first
    if is_done:
        gl.store(counters + tile * PARTS + PART, 0)
        total = gl.load(ours + first * STRIDE + PARTS * SIZE + here, cache_modifier=".cg")
        for program in range(first + 1, last + 1, UNROLL):
            loaded = ()
            for more in gl.static_range(UNROLL):
                is_there = (program + more <= last) & (here >= 0)
                place = ours + (program + more) * STRIDE + here
                loaded = loaded + (gl.load(place, is_there, 0.0, cache_modifier=".cg"),)
            for more in gl.static_range(UNROLL):
                total += loaded[more]
        acc = _unflat(total, ROWS, TOKENS, layout)
    return acc, is_done


@gluon.jit
def _write(
    PART: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    SCALED: gl.constexpr, acc, tile, out, bias, x_scales, w_scales, rows, lines, mine
):  # fmt: skip
    """Applies scales, bias, residual (which lies in `mine`) and gate to the sums of a tile, and
    writes them."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    line = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    if SCALED:
        token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
        acc *= gl.load(w_scales + line, mask=line < lines, other=0.0)[:, None]
        of_tokens = gl.load(x_scales + token, mask=token < rows, other=0.0, cache_modifier=".cg")
        acc *= of_tokens[None, :]
    if HAS_BIAS:
        acc += gl.load(bias + line, mask=line < lines, other=0.0).to(gl.float32)[:, None]
    if HAS_RESIDUAL:
        acc += mine.permute((1, 0)).load(layout).to(gl.float32)
        gl.thread_barrier()
    value = acc
    if GATED:
        gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
        value = (gate / (1.0 + gl.exp2(-LOG2_E * gate)) * up).reshape([ROWS // 2, TOKENS])
    mine.permute((1, 0)).store(value.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [0, tile * out.block_type.shape[1]], mine)


@gluon.jit
def _consume(
    PART: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    SCALED: gl.constexpr, out, residual, bias, x_scales, w_scales, partials, counters, rows, lines,
    staging, added, x_smem, w_smem, full, empty, steps, span, longer
):  # fmt: skip
    """Computes the part of consumer `PART` of the program's span."""
    STAGES: gl.constexpr = x_smem.shape[0]
    PARTS: gl.constexpr = staging.shape[0]
    INSTRUCTION_STEP: gl.constexpr = 256 // x_smem.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, x_smem.shape[1], INSTRUCTION_STEP]
    )
    mine = staging.index(PART)
    begin = _begin_of(gl.program_id(0), span, longer)
    end = _begin_of(gl.program_id(0) + 1, span, longer)
    used = gl.program_id(0) * 0
    turn = gl.program_id(0) * 0
    for tile in range(begin // steps, (end - 1) // steps + 1):
        is_first = tile * steps >= begin
        count = gl.minimum(end, (tile + 1) * steps) - gl.maximum(begin, tile * steps)
        own_tile = tile * PARTS + PART
        tma.store_wait(0)  # until the store of the preceding tile has read `mine`
        gl.thread_barrier()
        if HAS_RESIDUAL:
            # behind the wait for a stage the preceding kernels have ended
            mbarrier.wait(full.index(used % STAGES), (used // STAGES) & 1)
            mbarrier.expect(added.index(PART), out.block_type.nbytes)
            place = [0, own_tile * out.block_type.shape[1]]
            tma.async_copy_global_to_shared(residual, place, added.index(PART), mine)
        acc = _sums(PART, used, count, x_smem, w_smem, full, empty, layout)
        used += count
        is_done = count == steps
        if count < steps:
            acc, is_done = _merge(
                PART, PARTS, acc, partials, counters, tile, steps, span, longer, is_first, layout
            )
        if HAS_RESIDUAL:
            mbarrier.wait(added.index(PART), turn & 1)
            turn += 1
        if is_done:
            _write(
                PART, GATED, HAS_BIAS, HAS_RESIDUAL, SCALED, acc, own_tile, out, bias, x_scales,
                w_scales, rows, lines, mine
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "lines", "steps", "span", "longer"])
def _streamed_kernel(
    x, weight, out, residual, bias, x_scales, w_scales, partials, counters, rows, lines, steps,
    span, longer,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SCALED: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    x_smem = gl.allocate_shared_memory(
        x.dtype, [STAGES, x.block_type.shape[0], x.block_type.shape[1]], x.layout
    )
    w_smem = gl.allocate_shared_memory(
        x.dtype,
        [STAGES * CONSUMERS, weight.block_type.shape[0], weight.block_type.shape[1]],
        weight.layout,
    )
    staging = gl.allocate_shared_memory(
        out.dtype, [CONSUMERS, out.block_type.shape[0], out.block_type.shape[1]], out.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), CONSUMERS)
    for part in gl.static_range(CONSUMERS):
        mbarrier.init(added.index(part), 1)
    fence_async_shared()
    gl.thread_barrier()
    ring = (x_smem, w_smem, full, empty, steps, span, longer)
    ends = (out, residual, bias, x_scales, w_scales, partials, counters, rows, lines)
    rest = ends + (staging, added) + ring
    # constants have to be named in each tuple: those of a variable would be constants of constants
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, GATED, HAS_BIAS, HAS_RESIDUAL, SCALED) + rest),
                (_produce, (PDL, x, weight) + ring),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, GATED, HAS_BIAS, HAS_RESIDUAL, SCALED) + rest),
                (_consume, (1, GATED, HAS_BIAS, HAS_RESIDUAL, SCALED) + rest),
                (_produce, (PDL, x, weight) + ring),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> bool:
    """Whether this kernel can compute x [T, K] times weight [N, K]: on Hopper, T <= 128, in bf16 or
    fp16, K a multiple of 64, N of 8.

    TMA needs the rows of x, out and residual to be contiguous and to begin at multiples of 16
    bytes.
    """
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and x.dtype in TORCH_DTYPES
        and weight.dtype == x.dtype
        and 0 < x.shape[0] <= MAX_ROWS
        and x.shape[1] * x.element_size() % STEP_BYTES == 0
        and weight.shape[0] % GATE_RUN == 0
        and weight.shape[0] <= MAX_COUNTERS * CONSUMER_ROWS
        and weight.is_contiguous()
        and _rows_are_aligned(x)
        and _rows_are_aligned(weight)
        and all(t is None or _is_like(t, x) for t in (out, residual))
    )


def streamed_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: StreamWorkspace,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: StreamConfig | None = None,
    spans: Tiling | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T, accumulated in float32.

    Args:
        x: [T, K], T <= 128; bf16 or fp16; rows may be strided by multiples of 16 bytes.
        weight: [N, K]; with `gated` [2 * N, K], interleaved, N a multiple of 8; of x's dtype.
        workspace: of this device, not in use by another stream.
        bias: [N] ([2 * N], interleaved, with `gated`), added to the product before the gate.
        residual: [T, N], added to the product; its rows are aligned as x's; may be `out`. Not with
            `gated`.
        gated: weight holds two projections: eight rows of the gate, then the matching eight of up,
            and so on; returns silu(x @ gate.T) * (x @ up.T).
        out: [T, N] to write to, its rows aligned as x's; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before; `weight` is read before that
            kernel ends, so that kernel must not write it.
        config, spans: instead of `stream_config`'s and `tiling`'s (for tests and tuning).

    Returns:
        [T, N] in x's dtype.

    Raises:
        ValueError: the shapes do not fit, or `supports` returns false.
    """
    (rows, inputs), lines = x.shape, weight.shape[0]
    features = check_linear(
        x, (lines, weight.shape[1]), gated=gated, max_rows=MAX_ROWS, stored=(weight,)
    )
    if not supports(x, weight, out, residual) or (gated and residual is not None):
        raise ValueError(f"no kernel for x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    if any(t is not None and t.shape != (rows, features) for t in (out, residual)):
        raise ValueError(f"out and residual must be [{rows}, {features}]")
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device) if out is None else out
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    steps = inputs * x.element_size() // STEP_BYTES
    config = config or stream_config(rows, lines, steps, processors)
    spans = spans or tiling(config, lines, steps, processors)
    if spans.exchanged_numbers(config) > workspace.partials.numel():
        raise ValueError(f"the workspace is too small for {config} and {spans}")
    _launch(
        x, weight, workspace, spans, config, out=out,
        residual=residual, bias=bias, scales=None, gated=gated, pdl=pdl
    )  # fmt: skip
    return out


def _is_like(t: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether TMA can read or write rows of x's dtype there."""
    return t.dtype == x.dtype and t.stride(0) > 0 and _rows_are_aligned(t)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: StreamWorkspace,
    spans: Tiling,
    config: StreamConfig,
    *,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    gated: bool,
    pdl: bool,
) -> None:
    """`scales`: float32, of the tokens [T] and of the weight's rows [N]."""
    step = STEP_BYTES // x.element_size()
    outputs = config.consumer_rows // 2 if gated else config.consumer_rows
    target = _descriptor(out, [config.tokens, outputs])
    x_scales, w_scales = scales or (workspace.partials, workspace.partials)
    _streamed_kernel[(spans.programs,)](
        _descriptor(x, [config.tokens, step]),
        _descriptor(weight, [config.consumer_rows, step]),
        target,
        target if residual is None else _descriptor(residual, [config.tokens, outputs]),
        out if bias is None else bias, x_scales, w_scales, workspace.partials, workspace.counters,
        len(x), len(weight), spans.steps, spans.span, spans.longer,
        **constants(config, gated=gated, biased=bias is not None, added=residual is not None,
                    scaled=scales is not None, pdl=pdl),
        num_warps=4, maxnreg=config.max_registers, launch_pdl=pdl,
    )  # fmt: skip


def constants(
    config: StreamConfig, *, gated: bool, biased: bool, added: bool, scaled: bool, pdl: bool
) -> dict[str, int]:
    """Returns the constants with which the kernel is compiled."""
    return {
        "STAGES": config.stages, "CONSUMERS": config.consumers, "GATED": gated,
        "HAS_BIAS": biased, "HAS_RESIDUAL": added, "SCALED": scaled,
        "REGISTERS": config.consumer_registers, "PDL": pdl,
    }  # fmt: skip


def _descriptor(t: torch.Tensor, block: list[int]) -> TensorDescriptor:
    kind = gl.float8e4nv if t.dtype == torch.float8_e4m3fn else TORCH_DTYPES[t.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    # a single row may have any stride, which TMA would not accept
    strides = [t.stride(0) if len(t) > 1 else t.shape[1], 1]
    return TensorDescriptor(t, list(t.shape), strides, block, layout)
