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

import torch
import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import (
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    log_decay,
    silu,
)
from aioinfer.kernels.delta_decode import (
    DeltaDecodeConfig,
    advance_state,
    check_decode,
    delta_decode_config,
    gated_output,
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


@triton.jit(
    do_not_specialize_on_alignment=[
        "window_tables", "matrix_tables", "seq_lens", "query_starts", "slots", "pending", "counts",
    ]
)  # fmt: skip
def _delta_lookahead_kernel(
    mixed, z, b, a, out, conv, a_log, dt_bias, norm, norm_eps, windows, matrices, window_tables,
    matrix_tables, seq_lens, query_starts, slots, pending, counts, saved_mixed, saved_b, saved_a,
    tickets, mixed_stride, z_stride, b_stride, a_stride, out_stride, window_stride, matrix_stride,
    window_table_stride, matrix_table_stride,
    SHAPE: tl.constexpr, SAVED: tl.constexpr, HAS_STARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    key_head = head // SHAPE.group
    KEYS: tl.constexpr = SHAPE.key_heads * SHAPE.key_size
    HEADS: tl.constexpr = SHAPE.key_heads * SHAPE.group
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * SHAPE.value_size
    DECAYS: tl.constexpr = SHAPE.key_size if SHAPE.by_channel else 1  # of a head
    WIDTH: tl.constexpr = SHAPE.width
    i = tl.arange(0, SHAPE.key_pad)
    j = tl.arange(0, SHAPE.value_pad)
    is_key, is_value = i < SHAPE.key_size, j < SHAPE.value_size
    wait_for_kernel(PDL)
    token, first, count, slot, start, last = rows_of_slot(
        seq_lens, query_starts, slots, pending, counts, row, HAS_STARTS, SHAPE.block_size
    )
    if token < 0:
        return
    is_started = start > 0
    before = tl.maximum(start - 1, 0) // SHAPE.block_size

    q_channels = key_head * SHAPE.key_size + i
    k_channels = KEYS + q_channels
    v_channels = 2 * KEYS + head * SHAPE.value_size + j
    decay_rate = tl.load(a_log + head).to(tl.float32)
    if SHAPE.by_channel:
        d = head * SHAPE.key_size + i
        bias = tl.load(dt_bias + d, is_key, 0.0).to(tl.float32)
    else:
        d = head
        bias = tl.load(dt_bias + head).to(tl.float32)
    norm_weight = tl.load(norm + j, is_value, 0.0).to(tl.float32)

    window_table = window_tables + row.to(tl.int64) * window_table_stride
    matrix_table = matrix_tables + row.to(tl.int64) * matrix_table_stride
    window = windows + tl.load(window_table + before).to(tl.int64) * window_stride
    matrix = matrices + tl.load(matrix_table + before).to(tl.int64) * matrix_stride
    window_block = tl.load(window_table + last).to(tl.int64)
    matrix_block = tl.load(matrix_table + last).to(tl.int64)
    window_end, block = end_of_block(window_table, start, first, window_block, SHAPE.block_size)
    end_window = windows + block * window_stride
    matrix_end, block = end_of_block(matrix_table, start, first, matrix_block, SHAPE.block_size)
    end_matrix = matrices + block * matrix_stride
    next_window = windows + window_block * window_stride
    next_matrix = matrices + matrix_block * matrix_stride

    rows = mixed + token * mixed_stride
    saved = saved_mixed + slot * (SAVED * CHANNELS)
    b_saved = saved_b + slot * (SAVED * HEADS)
    a_saved = saved_a + slot * (SAVED * HEADS * DECAYS)
    places = (head * SHAPE.key_size + i)[:, None] * SHAPE.value_size + j[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    state = tl.load(matrix + places, is_state & is_started, 0.0).to(tl.float32)
    # Places in the matrix, a number for each of its numbers, would take as many registers if they
    # were kept through the loop: they are computed where they are needed, from other terms.
    end_offset = head * (SHAPE.key_size * SHAPE.value_size)
    for t in tl.range(0, first + count, disable_licm=True):
        at = token + t - first  # the row's token, if it is not a replayed one
        q = silu(convolved_at(
            t, first, saved, rows, mixed_stride, window, is_started, conv, q_channels, is_key,
            WIDTH, CHANNELS,
        ))  # fmt: skip
        k = silu(convolved_at(
            t, first, saved, rows, mixed_stride, window, is_started, conv, k_channels, is_key,
            WIDTH, CHANNELS,
        ))  # fmt: skip
        v = silu(convolved_at(
            t, first, saved, rows, mixed_stride, window, is_started, conv, v_channels, is_value,
            WIDTH, CHANNELS,
        ))  # fmt: skip
        is_row = t >= first
        z_places = z + at * z_stride + head * SHAPE.value_size + j
        gate = tl.load(z_places, is_value & is_row, 0.0).to(tl.float32)
        b_place = tl.where(is_row, b + at * b_stride, b_saved + t * HEADS) + head
        beta = tl.sigmoid(tl.load(b_place).to(tl.float32))
        a_places = tl.where(is_row, a + at * a_stride, a_saved + t * (HEADS * DECAYS)) + d
        if SHAPE.by_channel:
            a_value = tl.load(a_places, is_key, 0.0).to(tl.float32)
        else:
            a_value = tl.load(a_places).to(tl.float32)
        decay = tl.exp(log_decay(a_value, decay_rate, bias))

        q, k, product = unit_vectors(q, k, SHAPE)
        state, o = advance_state(state, q, k, v, product, beta, decay, SHAPE)
        # rounded after each token, whatever the number of tokens in the step
        stored = state.to(matrices.dtype.element_ty)
        state = stored.to(tl.float32)
        if (t == first) | (t == matrix_end):
            target = tl.where(t == first, next_matrix, end_matrix) + end_offset
            tl.store(target + (i[:, None] * SHAPE.value_size + j[None, :]), stored, is_state)
        o = gated_output(o, gate, norm_weight, norm_eps, SHAPE)
        out_places = out + at * out_stride + head * SHAPE.value_size + j
        tl.store(out_places, o.to(out.dtype.element_ty), is_value & is_row)

    # Programs of one key head read the same windows and kept inputs of queries and keys: the last
    # of them to come here writes the next ones. Nothing that another program has written is read
    # after this, so the order may be relaxed.
    tl.debug_barrier()
    writes_keys = True
    if SHAPE.group > 1:
        ticket = tickets + row * SHAPE.key_heads + key_head
        writes_keys = tl.atomic_add(ticket, 1, sem="relaxed") == SHAPE.group - 1
    rows_ahead = rows + mixed_stride
    keep_windows(
        first, window_end, saved, rows, mixed_stride, window, is_started, next_window, end_window,
        v_channels, is_value, WIDTH, CHANNELS,
    )  # fmt: skip
    keep_inputs(saved, CHANNELS, rows_ahead, mixed_stride, count - 1, v_channels, is_value)
    b_ahead, a_ahead = b + (token + 1) * b_stride, a + (token + 1) * a_stride
    keep_inputs(b_saved, HEADS, b_ahead, b_stride, count - 1, head, True)
    keep_inputs(
        a_saved, HEADS * DECAYS, a_ahead, a_stride, count - 1, d,
        is_key if SHAPE.by_channel else True,
    )  # fmt: skip
    if writes_keys:
        keep_windows(
            first, window_end, saved, rows, mixed_stride, window, is_started, next_window,
            end_window, q_channels, is_key, WIDTH, CHANNELS,
        )  # fmt: skip
        keep_windows(
            first, window_end, saved, rows, mixed_stride, window, is_started, next_window,
            end_window, k_channels, is_key, WIDTH, CHANNELS,
        )  # fmt: skip
        keep_inputs(saved, CHANNELS, rows_ahead, mixed_stride, count - 1, q_channels, is_key)
        keep_inputs(saved, CHANNELS, rows_ahead, mixed_stride, count - 1, k_channels, is_key)
        if SHAPE.group > 1:
            tl.store(tickets + row * SHAPE.key_heads + key_head, 0)


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
        *inputs, out, *weights, windows.states, matrices.states, windows.tables, matrices.tables,
        seq_lens, seq_lens if query_starts is None else query_starts, *replays, *saved, tickets,
        *(x.stride(0) for x in (*inputs, out)), windows.states.stride(0),
        matrices.states.stride(0), windows.tables.stride(0), matrices.tables.stride(0),
        SHAPE=shape, SAVED=saved[0].shape[1], HAS_STARTS=query_starts is not None,
        PDL=pdl, num_warps=config.num_warps,
        maxnreg=config.max_registers, launch_pdl=pdl,
    )  # fmt: skip
