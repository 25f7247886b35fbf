"""The gated delta rule for rows of one token where rows may look ahead: one launch a layer, which
reads each state once and writes it once.

    delta_lookahead(inputs, weights, windows, matrices, seq_lens, replays, saved, tickets, out,
                    block_size=..., query_starts=...)

A program computes one value head of the adjacent rows of one slot (`layers.step.Replays`): first
the tokens whose inputs the slot's last step has kept, without an output, then the rows. It writes
the state behind the first of them, and keeps the inputs of the others, which may be skipped. The
matrix stays in registers all the time; inputs of the convolution are loaded again for each token,
from the window, the kept inputs or the rows.
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import (
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    silu,
)
from aioinfer.kernels.delta_decode import (
    DeltaDecodeConfig,
    advance_state,
    channels_of,
    check_decode,
    delta_decode_config,
    gated_output,
    is_last_of_key_head,
    load_decay,
    load_head,
    tile_of,
    unit_vectors,
)
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.replays import (
    check_saved,
    convolved_at,
    end_of_block,
    keep_inputs,
    keep_windows,
    rows_of_slot,
)
from aioinfer.kernels.states import StateTables


class Strides(NamedTuple):
    """The strides of the lines of `DeltaInputs`."""

    mixed: int
    z: int
    b: int
    a: int


class Saved(NamedTuple):
    """The kept inputs of all slots, or of one."""

    mixed: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


class SavedShape(NamedTuple):
    """The compile-time shape of kept inputs: tokens of a slot, and numbers of each."""

    tokens: int
    mixed: int
    b: int
    a: int


class _Tokens(NamedTuple):
    """The tokens of a slot (see `replays`).

    Attributes:
        first, count: tokens that are replayed, and rows after them.
        row: the first row's token in the step.
        mixed: where the convolution's inputs are: the arguments of `replays.input_at` from `saved`
            to `is_started`.
        saved: the slot's kept inputs.
    """

    first: tl.tensor
    count: tl.tensor
    row: tl.tensor
    mixed: tuple[tl.tensor, ...]
    saved: Saved


class _Targets(NamedTuple):
    """Where states of one kind are written: `after_row` is the state behind the first row, and
    `after_end` the one behind the replayed token `end`, where a block ends; -1 if none does."""

    after_row: tl.tensor
    end: tl.tensor
    after_end: tl.tensor


@triton.jit
def _states_of(states, stride, table, start, first, last, BLOCK_SIZE: tl.constexpr):
    """Returns a pointer to a row's state of one kind before the slot's tokens, and the targets of
    the next states; `start`, `first` and `last` are from `rows_of_slot`."""
    before = tl.load(table + tl.maximum(start - 1, 0) // BLOCK_SIZE).to(tl.int64)
    block = tl.load(table + last).to(tl.int64)
    end, end_block = end_of_block(table, start, first, block, BLOCK_SIZE)
    targets = _Targets(states + block * stride, end, states + end_block * stride)
    return states + before * stride, targets


@triton.jit
def _load_token(
    t, tokens, inputs, strides, conv, head, channels, SHAPE: tl.constexpr, SAVED: tl.constexpr
):
    """Returns the inputs of a value head at token t of a slot: query, key and values after
    convolution and SiLU, the output gate's input (0 for replayed tokens), beta, and a pointer to
    the token's `a`."""
    j = tl.arange(0, SHAPE.value_pad)
    is_key, is_value = tl.arange(0, SHAPE.key_pad) < SHAPE.key_size, j < SHAPE.value_size
    first, x = tokens.first, tokens.mixed
    WIDTH: tl.constexpr = SHAPE.width
    at = tokens.row + t - first  # the row's token, if it is not a replayed one
    q = silu(convolved_at(t, first, *x, conv, channels[0], is_key, WIDTH, SAVED.mixed))
    k = silu(convolved_at(t, first, *x, conv, channels[1], is_key, WIDTH, SAVED.mixed))
    v = silu(convolved_at(t, first, *x, conv, channels[2], is_value, WIDTH, SAVED.mixed))
    is_row = t >= first
    z_places = inputs.z + at * strides.z + head * SHAPE.value_size + j
    gate = tl.load(z_places, is_value & is_row, 0.0).to(tl.float32)
    b = tl.where(is_row, inputs.b + at * strides.b, tokens.saved.b + t * SAVED.b)
    beta = tl.sigmoid(tl.load(b + head).to(tl.float32))
    a = tl.where(is_row, inputs.a + at * strides.a, tokens.saved.a + t * SAVED.a)
    return q, k, v, gate, beta, a


@triton.jit
def _keep_tokens(
    tokens, targets, inputs, strides, tickets, row, head, channels, SHAPE: tl.constexpr,
    SAVED: tl.constexpr,
):  # fmt: skip
    """Keeps what the slot's next step reads of a value head: stores the windows of its channels at
    their targets, and the inputs of the rows after the first. The last program of a key head does
    so for queries and keys."""
    writes_keys = is_last_of_key_head(tickets, row, head, SHAPE)
    is_key = tl.arange(0, SHAPE.key_pad) < SHAPE.key_size
    is_value = tl.arange(0, SHAPE.value_pad) < SHAPE.value_size
    query, key, values = channels
    first, x, saved = tokens.first, tokens.mixed, tokens.saved
    after_row, end, after_end = targets
    mixed = inputs.mixed + tokens.row * strides.mixed + strides.mixed
    keep_windows(first, end, *x, after_row, after_end, values, is_value, SHAPE.width, SAVED.mixed)
    count = tokens.count - 1
    keep_inputs(saved.mixed, SAVED.mixed, mixed, strides.mixed, count, values, is_value)
    ahead = tokens.row + 1
    b, a = inputs.b + ahead * strides.b, inputs.a + ahead * strides.a
    keep_inputs(saved.b, SAVED.b, b, strides.b, count, head, True)
    d = head * SHAPE.key_size + tl.arange(0, SHAPE.key_pad) if SHAPE.by_channel else head
    keep_inputs(saved.a, SAVED.a, a, strides.a, count, d, is_key if SHAPE.by_channel else True)
    if writes_keys:
        keep_windows(first, end, *x, after_row, after_end, query, is_key, SHAPE.width, SAVED.mixed)
        keep_windows(first, end, *x, after_row, after_end, key, is_key, SHAPE.width, SAVED.mixed)
        keep_inputs(saved.mixed, SAVED.mixed, mixed, strides.mixed, count, query, is_key)
        keep_inputs(saved.mixed, SAVED.mixed, mixed, strides.mixed, count, key, is_key)
        if SHAPE.group > 1:
            tl.store(tickets + row * SHAPE.key_heads + head // SHAPE.group, 0)


@triton.jit(
    do_not_specialize_on_alignment=[
        "window_tables", "matrix_tables", "seq_lens", "query_starts", "slots", "pending", "counts",
    ]
)  # fmt: skip
def _delta_lookahead_kernel(
    inputs, out, weights, windows, matrices, window_tables, matrix_tables, seq_lens, query_starts,
    slots, pending, counts, saved, tickets, strides, out_stride, window_stride, matrix_stride,
    window_table_stride, matrix_table_stride,
    SHAPE: tl.constexpr, SAVED: tl.constexpr, HAS_STARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, SHAPE.key_pad), tl.arange(0, SHAPE.value_pad)
    wait_for_kernel(PDL)
    token, first, count, slot, start, last = rows_of_slot(
        seq_lens, query_starts, slots, pending, counts, row, HAS_STARTS, SHAPE.block_size
    )
    if token < 0:
        return
    is_started = start > 0
    channels = channels_of(head, SHAPE)
    decay_rate, bias, norm_weight = load_head(
        weights.a_log, weights.dt_bias, weights.norm, head, SHAPE
    )
    window_table = window_tables + row.to(tl.int64) * window_table_stride
    matrix_table = matrix_tables + row.to(tl.int64) * matrix_table_stride
    window, window_targets = _states_of(
        windows, window_stride, window_table, start, first, last, SHAPE.block_size
    )
    matrix, matrix_targets = _states_of(
        matrices, matrix_stride, matrix_table, start, first, last, SHAPE.block_size
    )

    kept = Saved(
        saved.mixed + slot * (SAVED.tokens * SAVED.mixed),
        saved.b + slot * (SAVED.tokens * SAVED.b),
        saved.a + slot * (SAVED.tokens * SAVED.a),
    )
    mixed = kept.mixed, inputs.mixed + token * strides.mixed, strides.mixed, window, is_started
    tokens = _Tokens(first, count, token, mixed, kept)
    places, is_state = tile_of(head, SHAPE)
    state = tl.load(matrix + places, is_state & is_started, 0.0).to(tl.float32)
    # Places in the matrix, a number for each of its numbers, would take as many registers if they
    # were kept through the loop: they are computed where they are needed, from other terms.
    end_offset = head * (SHAPE.key_size * SHAPE.value_size)
    for t in tl.range(0, first + count, disable_licm=True):
        q, k, v, gate, beta, a = _load_token(
            t, tokens, inputs, strides, weights.conv, head, channels, SHAPE, SAVED
        )
        decay = load_decay(a, head, decay_rate, bias, SHAPE)
        q, k, product = unit_vectors(q, k, SHAPE)
        state, o = advance_state(state, q, k, v, product, beta, decay, SHAPE)
        # rounded after each token, whatever the number of tokens in the step
        stored = state.to(matrices.dtype.element_ty)
        state = stored.to(tl.float32)
        if (t == first) | (t == matrix_targets.end):
            target = tl.where(t == first, matrix_targets.after_row, matrix_targets.after_end)
            target += end_offset
            tl.store(target + (i[:, None] * SHAPE.value_size + j[None, :]), stored, is_state)
        o = gated_output(o, gate, norm_weight, weights.norm_eps, SHAPE)
        out_places = out + (token + t - first) * out_stride + head * SHAPE.value_size + j
        own = (j < SHAPE.value_size) & (t >= first)
        tl.store(out_places, o.to(out.dtype.element_ty), own)
    _keep_tokens(
        tokens, window_targets, inputs, strides, tickets, row, head, channels, SHAPE, SAVED
    )


def delta_lookahead(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    windows: StateTables,
    matrices: StateTables,
    seq_lens: torch.Tensor,
    replays: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    tickets: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    query_starts: torch.Tensor | None = None,
    config: DeltaDecodeConfig | None = None,
    pdl: bool = False,
) -> None:
    """Computes a layer for the rows of one token, of which several may be of one slot; replays the
    inputs of earlier ones, and updates states and kept inputs.

    The first row of a slot, with the tokens that it replays, reads the slot's states from entry
    (s - 1) // block_size of its tables, s being the position of the first of these tokens. It
    writes them into the entry of its own token, and at the end of a block between both, if there is
    a block. There may be one such end: at most block_size - 1 tokens are replayed.

    Args:
        inputs, weights, windows, matrices, tickets, out: as for `delta_decode`.
        seq_lens: int32 [R], tokens of each row, this step's included; 0 for padding rows.
        replays: slots, pending and counts of the rows, int32 [R] each: see `layers.step.Replays`.
        saved: [slots, K, C], [slots, K, HV] and [slots, K, decays], contiguous, the kept `mixed`,
            `b` and `a` of K lookahead rows of each slot, in their dtypes.
        block_size, query_starts, config, pdl: as for `delta_decode`.

    Raises:
        ValueError: shapes do not fit together.
    """
    shape = DeltaShape.of(inputs, weights, matrices.states, block_size)
    check_decode(shape, inputs, windows, tickets, len(seq_lens))
    check_saved(saved, (inputs.mixed, inputs.b, inputs.a), block_size)
    rows = len(seq_lens) if query_starts is None else min(len(seq_lens), len(inputs.mixed))
    if rows == 0:
        return
    config = delta_decode_config(shape) if config is None else config
    _delta_lookahead_kernel[(shape.key_heads * shape.group, rows)](
        inputs, out, weights, windows.states, matrices.states, windows.tables, matrices.tables,
        seq_lens, seq_lens if query_starts is None else query_starts, *replays,
        Saved(*saved), tickets, Strides(*(x.stride(0) for x in inputs)), out.stride(0),
        windows.states.stride(0), matrices.states.stride(0), windows.tables.stride(0),
        matrices.tables.stride(0), SHAPE=shape,
        SAVED=SavedShape(saved[0].shape[1], *(x.shape[2] for x in saved)),
        HAS_STARTS=query_starts is not None, PDL=pdl, num_warps=config.num_warps,
        maxnreg=config.max_registers, launch_pdl=pdl,
    )  # fmt: skip
