"""Mamba-2's recurrence (Dao and Gu, "Transformers are SSMs", 2024), after the short convolution.

    mamba_decode(inputs, weights, matrices, seq_lens, out, block_size=..., query_starts=...)
    mamba_prefill(inputs, weights, matrices, query_starts, seq_lens, chunks, out, block_size=...)
    mamba_lookahead(inputs, weights, matrices, seq_lens, replays, replayed, saved, out,
                    block_size=..., query_starts=...)

With the step d = softplus(dt + dt_bias) within its limits and the decay exp(g), g = -exp(a_log) d,
a head keeps the matrix S [N, P] of its state channels and its own:

    S = exp(g) S + B (d x)^T;   y = S^T C + skip x

Rows of one token are computed by `mamba_decode`, longer rows by `mamba_prefill`: each looks at a
row's length on the GPU and leaves the other rows alone. Within a chunk of a longer row, with the
cumulative sum G of g, y = exp(G) C S + (exp(G_i - G_j) C_i B_j)[j <= i] (d x) + skip x.

`mamba_lookahead` computes rows of one token where rows may look ahead: one launch, which reads each
state once and writes it once. A program computes one head of the adjacent rows of one slot
(`layers.step.Replays`): first the tokens that it replays, without an output, then the rows. It
writes the state behind the first of them, and keeps the steps of the others;
`convolution_lookahead` keeps their other inputs.
"""
# ruff: noqa: N803, N806  (compile-time constants and matrices are written in capitals)

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import softplus
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.replays import check_saved, end_of_block, keep_inputs, rows_of_slot
from aioinfer.kernels.short_convolution import block_of
from aioinfer.kernels.states import ChunkPlan, StateTables, decode_row, programs_for


class MambaInputs(NamedTuple):
    """The inputs of T tokens; rows may be strided.

    Attributes:
        mixed: [T, H P + 2 G N], after convolution and SiLU: x of all heads, then B, then C of all
            groups of heads.
        steps: [T, H], dt.
    """

    mixed: torch.Tensor
    steps: torch.Tensor


class MambaWeights(NamedTuple):
    """The weights of a layer on this rank: [H] each, and the least and the largest step."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    least: float
    largest: float


class MambaShape(NamedTuple):
    """The compile-time shape of a layer: heads, how many of them share B and C, channels of a head
    and of its state, powers of two that hold them, and tokens a block."""

    heads: int
    group: int
    head_size: int
    state_size: int
    head_pad: int
    state_pad: int
    block_size: int

    @classmethod
    def of(cls, inputs: MambaInputs, weights: MambaWeights, matrices: torch.Tensor,
           block_size: int) -> MambaShape:  # fmt: skip
        """Returns the shape for `matrices` [num_blocks, H, N, P].

        Raises:
            ValueError: shapes do not fit together, or lines are not contiguous.
        """
        heads, state, size = matrices.shape[1:]
        mixed, steps = inputs
        groups = (mixed.shape[1] - heads * size) // (2 * state)
        fits = (
            mixed.shape[1] == heads * size + 2 * groups * state
            and groups > 0
            and heads % groups == 0
            and steps.shape[1:] == weights.a_log.shape == weights.skip.shape == (heads,)
            and matrices.stride()[1:] == (state * size, size, 1)
            and mixed.stride(1) == steps.stride(1) == 1
        )
        if not fits:
            raise ValueError(
                f"mixed {tuple(mixed.shape)}, steps {tuple(steps.shape)} and matrices "
                f"{tuple(matrices.shape)} do not fit together, or are not contiguous"
            )
        pads = max(16, triton.next_power_of_2(size)), max(16, triton.next_power_of_2(state))
        return cls(heads, heads // groups, size, state, *pads, block_size)


@triton.jit
def _advance_state(
    S, mixed, steps, head, rate, bias, weight, least, largest, SHAPE: tl.constexpr
):  # fmt: skip
    """Returns the state of a head behind a token, and its output, in float32; `mixed` and `steps`
    point to the token's inputs."""
    X: tl.constexpr = SHAPE.heads * SHAPE.head_size
    GROUPS: tl.constexpr = SHAPE.heads // SHAPE.group
    i, j = tl.arange(0, SHAPE.state_pad), tl.arange(0, SHAPE.head_pad)
    is_i, is_j = i < SHAPE.state_size, j < SHAPE.head_size
    b_places = mixed + X + head // SHAPE.group * SHAPE.state_size + i
    B = tl.load(b_places, is_i, 0.0).to(tl.float32)
    C = tl.load(b_places + GROUPS * SHAPE.state_size, is_i, 0.0).to(tl.float32)
    x = tl.load(mixed + head * SHAPE.head_size + j, is_j, 0.0).to(tl.float32)
    dt = tl.load(steps + head).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(dt + bias), least), largest)
    S = S * tl.exp(-rate * step) + B[:, None] * (x * step)[None, :]
    return S, tl.sum(S * C[:, None], 0) + weight * x


@triton.jit(do_not_specialize_on_alignment=["tables", "seq_lens", "query_starts"])
def _decode_kernel(
    mixed, steps, a_log, dt_bias, skip, least, largest, out, matrices, tables, seq_lens,
    query_starts, mixed_stride, step_stride, out_stride, matrix_stride, table_stride,
    SHAPE: tl.constexpr, HAS_STARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, SHAPE.state_pad), tl.arange(0, SHAPE.head_pad)
    is_i, is_j = i < SHAPE.state_size, j < SHAPE.head_size
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    weight = tl.load(skip + head).to(tl.float32)
    wait_for_kernel(PDL)
    token, is_started, first, last = decode_row(
        seq_lens, query_starts, row, HAS_STARTS, SHAPE.block_size
    )
    if token < 0:
        return
    table = tables + row.to(tl.int64) * table_stride
    before, after = block_of(table, first), block_of(table, last)
    places = (head * SHAPE.state_size + i)[:, None] * SHAPE.head_size + j[None, :]
    is_state = is_i[:, None] & is_j[None, :]
    S = tl.load(matrices + before * matrix_stride + places, is_state & is_started, 0.0)
    S, y = _advance_state(
        S.to(tl.float32), mixed + token * mixed_stride, steps + token * step_stride, head, rate,
        bias, weight, least, largest, SHAPE,
    )  # fmt: skip
    target = matrices + after * matrix_stride + places
    tl.store(target, S.to(matrices.dtype.element_ty), is_state)
    places = out + token * out_stride + head * SHAPE.head_size + j
    tl.store(places, y.to(out.dtype.element_ty), is_j)


@triton.jit(do_not_specialize_on_alignment=["tables", "seq_lens", "query_starts"])
def _prefill_kernel(
    mixed, steps, a_log, dt_bias, skip, least, largest, out, matrices, tables, rows, query_starts,
    seq_lens, mixed_stride, step_stride, out_stride, matrix_stride, table_stride,
    SHAPE: tl.constexpr, LENGTH: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The outputs of a row's tokens for VALUES channels of one head, and its states."""
    X: tl.constexpr = SHAPE.heads * SHAPE.head_size
    GROUPS: tl.constexpr = SHAPE.heads // SHAPE.group
    PARTS: tl.constexpr = (SHAPE.head_size + VALUES - 1) // VALUES
    wait_for_kernel(PDL)
    items = tl.load(rows) * (SHAPE.heads * PARTS)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        row = tl.load(rows + 1 + item // (SHAPE.heads * PARTS))
        head = item // PARTS % SHAPE.heads
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
        bias = tl.load(dt_bias + head).to(tl.float32)
        weight = tl.load(skip + head).to(tl.float32)
        row_token = tl.load(query_starts + row)
        seq_len = tl.load(seq_lens + row)
        start = seq_len - (tl.load(query_starts + row + 1) - row_token)
        t = tl.arange(0, LENGTH)
        i = tl.arange(0, SHAPE.state_pad)
        j = item % PARTS * VALUES + tl.arange(0, VALUES)
        is_i, is_j = (i < SHAPE.state_size)[None, :], (j < SHAPE.head_size)[None, :]
        is_state = (i < SHAPE.state_size)[:, None] & is_j
        places = (head * SHAPE.state_size + i)[:, None] * SHAPE.head_size + j[None, :]
        table = tables + row.to(tl.int64) * table_stride
        before = block_of(table, tl.maximum(start - 1, 0) // SHAPE.block_size)
        S = tl.load(matrices + before * matrix_stride + places, is_state & (start > 0), 0.0)
        S = S.to(tl.float32)
        for chunk in range(start // LENGTH * LENGTH, seq_len, LENGTH):
            position = tl.maximum(chunk, start)
            end = tl.minimum(chunk + LENGTH, seq_len)
            line = (row_token + position - start + t).to(tl.int64)
            is_token = t < end - position
            source = mixed + line[:, None] * mixed_stride
            b_places = source + X + head // SHAPE.group * SHAPE.state_size + i
            B = tl.load(b_places, is_token[:, None] & is_i, 0.0)
            C = tl.load(b_places + GROUPS * SHAPE.state_size, is_token[:, None] & is_i, 0.0)
            x = tl.load(source + head * SHAPE.head_size + j, is_token[:, None] & is_j, 0.0)
            dt = tl.load(steps + line * step_stride + head, is_token, 0.0).to(tl.float32)
            step = tl.minimum(tl.maximum(softplus(dt + bias), least), largest)
            step = tl.where(is_token, step, 0.0)
            G = tl.cumsum(-rate * step, 0)
            last = tl.sum(-rate * step)
            decay = tl.exp(tl.minimum(G[:, None] - G[None, :], 0.0))
            P = tl.dot(C, tl.trans(B), input_precision=PRECISION) * decay
            P = tl.where(t[:, None] >= t[None, :], P, 0.0).to(x.dtype)
            V = x.to(tl.float32) * step[:, None]
            y = tl.dot(C, S.to(x.dtype), input_precision=PRECISION) * tl.exp(G)[:, None]
            y = tl.dot(P, V.to(x.dtype), y, input_precision=PRECISION) + weight * x.to(tl.float32)
            V = (V * tl.exp(tl.minimum(last - G, 0.0))[:, None]).to(x.dtype)
            S = tl.dot(tl.trans(B), V, S * tl.exp(last), input_precision=PRECISION)
            target = out + line[:, None] * out_stride + head * SHAPE.head_size + j
            tl.store(target, y.to(out.dtype.element_ty), is_token[:, None] & is_j)
            is_last = (end == seq_len) | (end % SHAPE.block_size == 0)
            block = tl.load(table + (end - 1) // SHAPE.block_size, is_last, -1).to(tl.int64)
            target = matrices + block * matrix_stride + places
            tl.store(target, S.to(matrices.dtype.element_ty), is_state & (block >= 0))


def _decode_warps(shape: MambaShape) -> int:
    """Returns the warps of a decode's program: a thread has 64 numbers of the matrix at most."""
    return max(1, min(8, shape.head_pad * shape.state_pad // 2048))


def prefill_values(shape: MambaShape, element_size: int) -> int:
    """Returns the channels of a head that a program of longer rows computes, for inputs of
    `element_size` bytes: fewer where their products take more registers."""
    return min(shape.head_pad, 32 if element_size == 4 or shape.state_pad > 128 else 64)


def mamba_decode(
    inputs: MambaInputs,
    weights: MambaWeights,
    matrices: StateTables,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    query_starts: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Computes the recurrence of the rows of one token and updates their states in the cache.

    Args:
        inputs: for T tokens.
        weights: see `MambaWeights`.
        matrices: [num_blocks, H, N, P] in tables: see `StateTables`.
        seq_lens: int32 [R], tokens of each row, this step's included; 0 for padding rows, for which
            nothing is read or written. A row of 1 starts from zero.
        out: [T, H * P] of any dtype, rows may be strided.
        block_size: tokens a block.
        query_starts: int32 [R + 1], the first token of each row: rows of another number of tokens
            than one are left alone. None: row r is token r.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes do not fit together.
    """
    shape = MambaShape.of(inputs, weights, matrices.states, block_size)
    if len(seq_lens) == 0:
        return
    (mixed, steps), (states, tables) = inputs, matrices
    _decode_kernel[(shape.heads, len(seq_lens))](
        mixed, steps, *weights, out, states, tables, seq_lens,
        seq_lens if query_starts is None else query_starts, mixed.stride(0), steps.stride(0),
        out.stride(0), states.stride(0), tables.stride(0), SHAPE=shape,
        HAS_STARTS=query_starts is not None, PDL=pdl, num_warps=_decode_warps(shape),
        launch_pdl=pdl,
    )  # fmt: skip


def mamba_prefill(
    inputs: MambaInputs,
    weights: MambaWeights,
    matrices: StateTables,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    chunks: ChunkPlan,
    out: torch.Tensor,
    *,
    block_size: int,
    pdl: bool = False,
) -> None:
    """Computes the recurrence of the rows of two or more tokens and writes their states.

    Args:
        inputs, weights, matrices, out, block_size, pdl: as for `mamba_decode`. The state is written
            into each entry of the row's tokens that is not negative.
        query_starts: int32 [R + 1], the first token of each row.
        seq_lens: int32 [R], tokens of each row, this step's included; 0 for padding rows.
        chunks: aligned, of a length that divides the block size and is at least 16, and without
            rows of one token; filled by `plan_chunks` for this step.

    Raises:
        ValueError: shapes do not fit together.
    """
    shape = MambaShape.of(inputs, weights, matrices.states, block_size)
    if not chunks.is_aligned or block_size % chunks.length or chunks.min_tokens < 2:
        raise ValueError(f"chunks of {chunks.length} do not fit blocks of {block_size} tokens")
    if len(seq_lens) == 0:
        return
    (mixed, steps), (states, tables) = inputs, matrices
    is_wide, values = mixed.element_size() == 4, prefill_values(shape, mixed.element_size())
    items = len(seq_lens) * shape.heads * triton.cdiv(shape.head_size, values)
    _prefill_kernel[(programs_for(items, mixed.device),)](
        mixed, steps, *weights, out, states, tables, chunks.rows, query_starts, seq_lens,
        mixed.stride(0), steps.stride(0), out.stride(0), states.stride(0), tables.stride(0),
        SHAPE=shape, LENGTH=chunks.length, VALUES=values, PRECISION="ieee" if is_wide else "tf32",
        PDL=pdl, num_warps=4, num_stages=1 if is_wide else 2, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "tables", "seq_lens", "query_starts", "slots", "pending", "counts",
    ]
)  # fmt: skip
def _mamba_lookahead_kernel(
    mixed, steps, a_log, dt_bias, skip, least, largest, out, matrices, tables, seq_lens,
    query_starts, slots, pending, counts, replayed, saved, mixed_stride, step_stride, out_stride,
    matrix_stride, table_stride,
    SHAPE: tl.constexpr, SAVED: tl.constexpr, HAS_STARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    GROUPS: tl.constexpr = SHAPE.heads // SHAPE.group
    CHANNELS: tl.constexpr = SHAPE.heads * SHAPE.head_size + 2 * GROUPS * SHAPE.state_size
    i, j = tl.arange(0, SHAPE.state_pad), tl.arange(0, SHAPE.head_pad)
    is_j = j < SHAPE.head_size
    is_state = (i < SHAPE.state_size)[:, None] & is_j[None, :]
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    weight = tl.load(skip + head).to(tl.float32)
    wait_for_kernel(PDL)
    token, first, count, slot, start, last = rows_of_slot(
        seq_lens, query_starts, slots, pending, counts, row, HAS_STARTS, SHAPE.block_size
    )
    if token < 0:
        return
    table = tables + row.to(tl.int64) * table_stride
    before = tl.load(table + tl.maximum(start - 1, 0) // SHAPE.block_size).to(tl.int64)
    block = tl.load(table + last).to(tl.int64)
    end, end_block = end_of_block(table, start, first, block, SHAPE.block_size)
    places = (head * SHAPE.state_size + i)[:, None] * SHAPE.head_size + j[None, :]
    of_slot = saved + slot * (SAVED * SHAPE.heads)
    S = tl.load(matrices + before * matrix_stride + places, is_state & (start > 0), 0.0)
    S = S.to(tl.float32)
    for t in tl.range(0, first + count, disable_licm=True):
        at = token + t - first  # the row's token, if it is not a replayed one
        is_row = t >= first
        earlier = replayed + (slot * SAVED + t) * CHANNELS
        S, y = _advance_state(
            S, tl.where(is_row, mixed + at * mixed_stride, earlier),
            tl.where(is_row, steps + at * step_stride, of_slot + t * SHAPE.heads), head, rate,
            bias, weight, least, largest, SHAPE,
        )  # fmt: skip
        # rounded after each token, whatever the number of tokens in the step
        stored = S.to(matrices.dtype.element_ty)
        S = stored.to(tl.float32)
        if (t == first) | (t == end):
            target = matrices + tl.where(t == first, block, end_block) * matrix_stride
            tl.store(target + places, stored, is_state)
        out_places = out + at * out_stride + head * SHAPE.head_size + j
        tl.store(out_places, y.to(out.dtype.element_ty), is_j & is_row)
    tl.debug_barrier()  # every thread has read the kept steps
    keep_inputs(
        of_slot, SHAPE.heads, steps + (token + 1) * step_stride, step_stride, count - 1, head, True
    )  # fmt: skip


def mamba_lookahead(
    inputs: MambaInputs,
    weights: MambaWeights,
    matrices: StateTables,
    seq_lens: torch.Tensor,
    replays: Sequence[torch.Tensor],
    replayed: torch.Tensor,
    saved: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    query_starts: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Computes the recurrence of the rows of one token, of which several may be of one slot;
    replays earlier tokens, and updates states and kept steps. Which entries of the tables are read
    and written is said in `delta_lookahead`.

    Args:
        inputs, weights, matrices, seq_lens, out, block_size, query_starts, pdl: as for
            `mamba_decode`.
        replays: slots, pending and counts of the rows, int32 [R] each: see `layers.step.Replays`.
        replayed: [slots, K, H P + 2 G N], contiguous, the convolution of the replayed tokens, in
            the dtype of `inputs.mixed`.
        saved: [slots, K, H], contiguous, the kept `inputs.steps` of K lookahead rows of each slot.

    Raises:
        ValueError: shapes do not fit together.
    """
    shape = MambaShape.of(inputs, weights, matrices.states, block_size)
    check_saved([replayed, saved], inputs, block_size)
    (mixed, steps), (states, tables) = inputs, matrices
    rows = len(seq_lens) if query_starts is None else min(len(seq_lens), len(mixed))
    if rows == 0:
        return
    _mamba_lookahead_kernel[(shape.heads, rows)](
        mixed, steps, *weights, out, states, tables, seq_lens,
        seq_lens if query_starts is None else query_starts, *replays, replayed, saved,
        mixed.stride(0), steps.stride(0), out.stride(0), states.stride(0), tables.stride(0),
        SHAPE=shape, SAVED=saved.shape[1], HAS_STARTS=query_starts is not None, PDL=pdl,
        num_warps=_decode_warps(shape), launch_pdl=pdl,
    )  # fmt: skip
