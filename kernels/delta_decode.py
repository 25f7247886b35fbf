"""The gated delta rule for rows of one token: one launch a layer, which reads and writes each state
once.

    delta_decode(inputs, weights, windows, matrices, seq_lens, tickets, out, block_size=...,
                 query_starts=...)

Convolution, norms, gates, update and gated norm are fused. A program computes one value head of one
row and keeps its matrix in registers, so one row has HV programs, and the norm of a head needs no
other program.
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import (
    L2_EPS,
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    gate_of,
    log_decay,
    silu,
)
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.states import StateTables, decode_row


class DeltaDecodeConfig(NamedTuple):
    """The compile-time configuration: warps of a program and the maximum of a thread's registers;
    None for as many as it takes."""

    num_warps: int
    max_registers: int | None


def delta_decode_config(shape: DeltaShape) -> DeltaDecodeConfig:
    """Returns the configuration for matrices of a shape. 4 warps hold one of 128 x 128 in 128
    registers a thread, with as many as the compiler takes: on an H200 256 rows of 32 heads take 303
    us (3.66 TB/s) against 375 us with 8 warps of 128 registers and 620 us with 16; fewer registers
    spill, and 4 warps are the fastest from one row on."""
    return DeltaDecodeConfig(max(1, min(4, shape.key_pad * shape.value_pad // 4096)), None)


@triton.jit
def channels_of(head, SHAPE: tl.constexpr):
    """Returns the mixed channels of a value head: of its query and of its key [key_pad], and of its
    values [value_pad]."""
    KEYS: tl.constexpr = SHAPE.key_heads * SHAPE.key_size
    query = head // SHAPE.group * SHAPE.key_size + tl.arange(0, SHAPE.key_pad)
    key = KEYS + query
    return query, key, 2 * KEYS + head * SHAPE.value_size + tl.arange(0, SHAPE.value_pad)


@triton.jit
def tile_of(head, SHAPE: tl.constexpr):
    """Returns the places of a value head's matrix in a block, and which of them it has: both
    [key_pad, value_pad]."""
    i, j = tl.arange(0, SHAPE.key_pad), tl.arange(0, SHAPE.value_pad)
    places = (head * SHAPE.key_size + i)[:, None] * SHAPE.value_size + j[None, :]
    return places, (i < SHAPE.key_size)[:, None] & (j < SHAPE.value_size)[None, :]


@triton.jit
def _load_decays(source, head, SHAPE: tl.constexpr):
    """Returns what `source` has for a value head's decays, in float32: one number, or by channel
    [key_pad]."""
    if SHAPE.by_channel:
        i = tl.arange(0, SHAPE.key_pad)
        loaded = tl.load(source + head * SHAPE.key_size + i, i < SHAPE.key_size, 0.0)
    else:
        loaded = tl.load(source + head)
    return loaded.to(tl.float32)


@triton.jit
def load_head(a_log, dt_bias, norm, head, SHAPE: tl.constexpr):
    """Returns the weights of a value head's gates in float32: rate and bias of its decays, and the
    norm's [value_pad]."""
    decay_rate = tl.load(a_log + head).to(tl.float32)
    bias = _load_decays(dt_bias, head, SHAPE)
    j = tl.arange(0, SHAPE.value_pad)
    return decay_rate, bias, tl.load(norm + j, j < SHAPE.value_size, 0.0).to(tl.float32)


@triton.jit
def load_decay(a, head, decay_rate, bias, SHAPE: tl.constexpr):
    """Returns a value head's decay by a token, whose inputs `a` points to; by channel [key_pad]."""
    return tl.exp(log_decay(_load_decays(a, head, SHAPE), decay_rate, bias))


@triton.jit
def _load_weights(conv, channels, masks, taps, WIDTH: tl.constexpr):
    """Returns the convolution's weights [P, taps] of a query, a key and values, 0 past them."""
    weights = ()
    for n in tl.static_range(3):
        own = masks[n][:, None] & (taps < WIDTH)[None, :]
        loaded = tl.load(conv + channels[n][:, None] * WIDTH + taps[None, :], own, 0.0)
        weights = weights + (loaded.to(tl.float32),)  # noqa: RUF005  (a list is no Triton value)
    return weights


@triton.jit
def _load_inputs(mixed, window, has_window, channels, masks, taps, WIDTH: tl.constexpr):
    """Returns the convolution's inputs [P, taps] of a query, a key and values: those of the window,
    then the token's; 0 past them."""
    is_kept, is_current = taps < WIDTH - 1, taps == WIDTH - 1
    inputs = ()
    for n in tl.static_range(3):
        # one load: of two, their values would be exchanged among threads to bring them together
        places = tl.where(
            is_current[None, :],
            mixed + channels[n][:, None],
            window + channels[n][:, None] * (WIDTH - 1) + taps[None, :],
        )
        own = masks[n][:, None] & (is_current | (is_kept & has_window))[None, :]
        inputs = inputs + (tl.load(places, own, 0.0).to(tl.float32),)  # noqa: RUF005
    return inputs


@triton.jit
def add_3(a, b, c, d, e, f):
    """Returns the sums of two triples."""
    return a + d, b + e, c + f


@triton.jit
def unit_vectors(q, k, SHAPE: tl.constexpr):
    """Returns a query and a key of length 1, the query over the root of its size, and their
    product."""
    q_square, k_square, product = tl.reduce((q * q, k * k, q * k), 0, add_3)
    q_scale = tl.rsqrt(q_square + L2_EPS) * SHAPE.key_size**-0.5
    k_scale = tl.rsqrt(k_square + L2_EPS)
    return q * q_scale, k * k_scale, product * q_scale * k_scale


@triton.jit
def advance_state(state, q, k, v, product, beta, decay, SHAPE: tl.constexpr):
    """Returns the state behind a token, and its output: by the gated delta rule, for `unit_vectors`
    and values. Both products are taken of the state before its update, which is read once."""
    if SHAPE.by_channel:
        known = tl.sum(state * (k * decay)[:, None], 0)
        seen = tl.sum(state * (q * decay)[:, None], 0)
        decays = decay[:, None]
    else:
        known = tl.sum(state * k[:, None], 0) * decay
        seen = tl.sum(state * q[:, None], 0) * decay
        decays = decay
    delta = beta * (v - known)
    o = seen + delta * product
    return state * decays + k[:, None] * delta[None, :], o


@triton.jit
def gated_output(o, gate, norm_weight, norm_eps, SHAPE: tl.constexpr):
    """Returns the output of a head, normed and gated."""
    scale = tl.rsqrt(tl.sum(o * o) / SHAPE.value_size + norm_eps)
    return o * scale * norm_weight * gate_of(gate, SHAPE)


@triton.jit
def _store_window(window, x, channels, mask, taps, WIDTH: tl.constexpr):
    """Stores all inputs but the oldest as the next token's window."""
    own = mask[:, None] & ((taps > 0) & (taps < WIDTH))[None, :]
    places = window + channels[:, None] * (WIDTH - 1) + taps[None, :] - 1
    tl.store(places, x.to(window.dtype.element_ty), own)


@triton.jit
def is_last_of_key_head(tickets, row, head, SHAPE: tl.constexpr):
    """Returns whether this is the last program of a row's key head to come here.

    These programs read the same windows of queries and keys, and the same kept inputs in a
    lookahead: the last of them writes the next ones, since the others have read what they need, and
    sets the ticket to 0. Nothing that another program has written is read after this, so the order
    may be relaxed.
    """
    tl.debug_barrier()
    is_last = True
    if SHAPE.group > 1:
        ticket = tickets + row * SHAPE.key_heads + head // SHAPE.group
        is_last = tl.atomic_add(ticket, 1, sem="relaxed") == SHAPE.group - 1
    return is_last


@triton.jit(
    do_not_specialize_on_alignment=["window_tables", "matrix_tables", "seq_lens", "query_starts"]
)
def _delta_decode_kernel(
    mixed, z, b, a, out, conv, a_log, dt_bias, norm, norm_eps, windows, matrices, window_tables,
    matrix_tables, seq_lens, query_starts, tickets, mixed_stride, z_stride, b_stride, a_stride,
    out_stride, window_stride, matrix_stride, window_table_stride, matrix_table_stride,
    SHAPE: tl.constexpr, HAS_STARTS: tl.constexpr, TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    i, j, taps = tl.arange(0, SHAPE.key_pad), tl.arange(0, SHAPE.value_pad), tl.arange(0, TAPS)
    is_key, is_value = i < SHAPE.key_size, j < SHAPE.value_size
    if HAS_STARTS:  # most rows may be others: their programs end before they load weights
        wait_for_kernel(PDL)
        token, is_started, before, last = decode_row(
            seq_lens, query_starts, row, HAS_STARTS, SHAPE.block_size
        )
        if token < 0:
            return
    channels, masks = channels_of(head, SHAPE), (is_key, is_key, is_value)
    q_conv, k_conv, v_conv = _load_weights(conv, channels, masks, taps, SHAPE.width)
    decay_rate, bias, norm_weight = load_head(a_log, dt_bias, norm, head, SHAPE)
    if not HAS_STARTS:
        wait_for_kernel(PDL)
        token, is_started, before, last = decode_row(
            seq_lens, query_starts, row, HAS_STARTS, SHAPE.block_size
        )
        if token < 0:
            return
    window_table = window_tables + row.to(tl.int64) * window_table_stride
    matrix_table = matrix_tables + row.to(tl.int64) * matrix_table_stride
    window = windows + tl.load(window_table + before).to(tl.int64) * window_stride
    matrix = matrices + tl.load(matrix_table + before).to(tl.int64) * matrix_stride
    next_window = windows + tl.load(window_table + last).to(tl.int64) * window_stride
    next_matrix = matrices + tl.load(matrix_table + last).to(tl.int64) * matrix_stride

    # No load waits for the value of another from here on. (With the state's before the inputs',
    # Triton would move the state through shared memory into the layout of its products.)
    q_inputs, k_inputs, v_inputs = _load_inputs(
        mixed + token * mixed_stride, window, is_started, channels, masks, taps, SHAPE.width
    )
    places, is_state = tile_of(head, SHAPE)
    state = tl.load(matrix + places, is_state & is_started, 0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + head * SHAPE.value_size + j, is_value, 0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
    decay = load_decay(a + token * a_stride, head, decay_rate, bias, SHAPE)

    q = silu(tl.sum(q_inputs * q_conv, 1))
    k = silu(tl.sum(k_inputs * k_conv, 1))
    v = silu(tl.sum(v_inputs * v_conv, 1))
    q, k, product = unit_vectors(q, k, SHAPE)
    writes_keys = is_last_of_key_head(tickets, row, head, SHAPE)
    state, o = advance_state(state, q, k, v, product, beta, decay, SHAPE)
    tl.store(next_matrix + places, state.to(matrices.dtype.element_ty), is_state)
    o = gated_output(o, gate, norm_weight, norm_eps, SHAPE)
    out_places = out + token * out_stride + head * SHAPE.value_size + j
    tl.store(out_places, o.to(out.dtype.element_ty), is_value)
    _store_window(next_window, v_inputs, channels[2], is_value, taps, SHAPE.width)
    if writes_keys:
        _store_window(next_window, q_inputs, channels[0], is_key, taps, SHAPE.width)
        _store_window(next_window, k_inputs, channels[1], is_key, taps, SHAPE.width)
        if SHAPE.group > 1:
            tl.store(tickets + row * SHAPE.key_heads + head // SHAPE.group, 0)


def make_tickets(rows: int, key_heads: int, device: torch.device) -> torch.Tensor:
    """Returns counters for `delta_decode` of up to `rows` rows, which all layers may share."""
    return torch.zeros(rows * key_heads, dtype=torch.int32, device=device)


def check_decode(
    shape: DeltaShape, inputs: DeltaInputs, windows: StateTables, tickets: torch.Tensor, rows: int
) -> None:
    """Raises ValueError unless windows and tickets fit a layer and `rows` rows."""
    channels, kept = inputs.mixed.shape[1], shape.width - 1
    if (
        windows.states.dtype != inputs.mixed.dtype
        or windows.states.shape[1:] != (channels, kept)
        or windows.states.stride()[1:] != (kept, 1)
        or len(tickets) < rows * shape.key_heads
    ):
        raise ValueError(
            f"{windows.states.dtype} windows {tuple(windows.states.shape)} or {len(tickets)} "
            f"tickets do not fit {shape} and {rows} rows"
        )


def delta_decode(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    windows: StateTables,
    matrices: StateTables,
    seq_lens: torch.Tensor,
    tickets: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    query_starts: torch.Tensor | None = None,
    config: DeltaDecodeConfig | None = None,
    pdl: bool = False,
) -> None:
    """Computes a layer for the rows of one token and updates their states in the cache.

    A row reads its states from entry (seq_len - 2) // block_size of its tables and writes those
    after its token into entry (seq_len - 1) // block_size.

    Args:
        inputs: for T tokens.
        weights: see `DeltaWeights`.
        windows, matrices: see `StateTables`; the blocks of both entries must be there. Windows have
            the dtype of `mixed`.
        seq_lens: int32 [R], tokens of each row, this step's included; 0 for padding rows, for which
            nothing is read or written. A row of 1 starts from zero.
        tickets: from `make_tickets`.
        out: [T, HV * V], rows may be strided.
        block_size: tokens a block.
        query_starts: int32 [R + 1], the first token of each row: rows of another number of tokens
            than one are left alone, and rows from the T-th on are padding. None: row r is token r.
        config: instead of `delta_decode_config` (to tune it).
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes do not fit together.
    """
    shape = DeltaShape.of(inputs, weights, matrices.states, block_size)
    heads, rows = shape.key_heads * shape.group, len(seq_lens)
    check_decode(shape, inputs, windows, tickets, rows)
    if query_starts is not None:
        rows = min(rows, len(inputs.mixed))
    if rows == 0:
        return
    config = delta_decode_config(shape) if config is None else config
    _delta_decode_kernel[(heads, rows)](
        *inputs, out, *weights, windows.states, matrices.states, windows.tables, matrices.tables,
        seq_lens, seq_lens if query_starts is None else query_starts, tickets,
        *(x.stride(0) for x in (*inputs, out)), windows.states.stride(0),
        matrices.states.stride(0), windows.tables.stride(0), matrices.tables.stride(0),
        SHAPE=shape, HAS_STARTS=query_starts is not None,
        TAPS=triton.next_power_of_2(shape.width), PDL=pdl, num_warps=config.num_warps,
        maxnreg=config.max_registers, launch_pdl=pdl,
    )  # fmt: skip
