"""The chunks of the gated delta rule, all at once: what the scan of `delta_prefill` takes of each,
with one decay a head, or one for each of its key channels (Kimi delta attention, Moonshot AI, "Kimi
Linear", 2025). For notation see `delta_prefill`.

By channel the products of a chunk's tokens are no products of matrices: A[i, j] = beta_i sum_c
k_ic k_jc exp(G_ic - G_jc). Of two tokens in different sub-chunks of 16 the exponent is taken apart
at the first token r of the later one, exp(G_i - G_r) exp(G_r - G_j), neither of which overflows
(Yang et al., "Gated Linear Attention Transformers", 2024); within a sub-chunk products are summed
channel by channel.
"""
# ruff: noqa: N803, N806  (compile-time constants and matrices are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import log_decay
from aioinfer.kernels.launch import wait_for_kernel

#: Tokens of a sub-chunk.
SUB = tl.constexpr(16)
#: Channels of a key that a program computes at a time, where they decay apart.
MAX_PART = 64


@triton.jit
def _inverse(A, LENGTH: tl.constexpr, PRECISION: tl.constexpr):
    """Returns (I + A)^-1 of a strictly lower triangular A [LENGTH, LENGTH] in float32.

    Blocks of 16 x 16 on the diagonal are inverted row by row. With D, their inverses, and N = D
    times the rest of A, the whole is (I + N)^-1 D, and N to the power of the number of blocks is 0.
    """
    BLOCKS: tl.constexpr = LENGTH // 16
    block, r = tl.arange(0, BLOCKS), tl.arange(0, 16)
    tiles = tl.reshape(A, [BLOCKS, 16, BLOCKS, 16])
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    X = -tl.sum(tl.where(on_diagonal, tiles, 0.0), 2)  # [BLOCKS, 16, 16]
    for i in range(2, 16):
        own = (r == i)[None, :, None]
        line = tl.sum(tl.where(own, X, 0.0), 1)
        line += tl.sum(line[:, :, None] * X, 1)
        X = tl.where(own, line[:, None, :], X)
    X += (r[:, None] == r[None, :]).to(tl.float32)[None, :, :]
    if BLOCKS == 1:
        return tl.reshape(X, [LENGTH, LENGTH])
    D = tl.reshape(tl.where(on_diagonal, X[:, :, None, :], 0.0), [LENGTH, LENGTH])
    rest = tl.reshape(tl.where(on_diagonal, 0.0, tiles), [LENGTH, LENGTH])
    N = tl.dot(D, rest, input_precision=PRECISION)
    if BLOCKS == 4:
        square = tl.dot(N, N, input_precision=PRECISION)
        D += tl.dot(square, D, input_precision=PRECISION)
    return D - tl.dot(N, D, input_precision=PRECISION)


@triton.jit
def _store_scores(scores, P, line, is_token, head, HEADS: tl.constexpr, LENGTH: tl.constexpr):
    """Stores the products P [LENGTH, LENGTH] of a chunk's queries and keys, 0 for later keys."""
    t = tl.arange(0, LENGTH)
    places = scores + line[:, None] * (HEADS * LENGTH) + head * LENGTH + t[None, :]
    P = tl.where(t[:, None] >= t[None, :], P, 0.0)
    tl.store(places, P.to(scores.dtype.element_ty), is_token[:, None])


@triton.jit
def _chunk_kernel(
    mixed, keys, scores, decays, b, a, a_log, dt_bias, chunks, mixed_stride, b_stride, a_stride,
    decay_stride, SHAPE: tl.constexpr, LENGTH: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """W, U, G and the products of queries and keys of a chunk, for one value head."""
    HEADS: tl.constexpr = SHAPE.key_heads * SHAPE.group
    KEYS: tl.constexpr = SHAPE.key_heads * SHAPE.key_size
    wait_for_kernel(PDL)
    items = tl.load(chunks) * HEADS
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        head = item % HEADS
        decay_rate = tl.load(a_log + head).to(tl.float32)
        bias = tl.load(dt_bias + head).to(tl.float32)
        record = chunks + (1 + item // HEADS) * 4
        token, count = tl.load(record + 1), tl.load(record + 3)
        t = tl.arange(0, LENGTH)
        i = tl.arange(0, SHAPE.key_pad)
        j = tl.arange(0, SHAPE.value_pad)
        is_token = t < count
        line = (token + t).to(tl.int64)
        is_key = is_token[:, None] & (i < SHAPE.key_size)[None, :]
        is_value = is_token[:, None] & (j < SHAPE.value_size)[None, :]
        q_places = mixed + line[:, None] * mixed_stride + head // SHAPE.group * SHAPE.key_size + i
        k = tl.load(q_places + KEYS, is_key, 0.0)
        beta = tl.sigmoid(tl.load(b + line * b_stride + head, is_token, 0.0).to(tl.float32))
        a_value = tl.load(a + line * a_stride + head, is_token, 0.0).to(tl.float32)
        g = tl.where(is_token, log_decay(a_value, decay_rate, bias), 0.0)
        G = tl.cumsum(g, 0)
        tl.store(decays + head * decay_stride + line, G, is_token)
        decay = tl.exp(tl.minimum(G[:, None] - G[None, :], 0.0))

        q = tl.load(q_places, is_key, 0.0)
        P = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
        _store_scores(scores, P, line, is_token, head, HEADS, LENGTH)

        products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        A = tl.where(t[:, None] > t[None, :], products * decay * beta[:, None], 0.0)
        # factors of keys and values go into the columns of T: then the products take both as they
        # were loaded, without registers for a scaled copy
        T = _inverse(A, LENGTH, PRECISION) * beta[None, :]
        v_places = mixed + line[:, None] * mixed_stride + 2 * KEYS + head * SHAPE.value_size + j
        v = tl.load(v_places, is_value, 0.0)
        U = tl.dot(T.to(v.dtype), v, input_precision=PRECISION)
        tl.store(v_places, U.to(v.dtype), is_value)
        decayed = (T * tl.exp(G)[None, :]).to(k.dtype)
        W = tl.dot(decayed, k, input_precision=PRECISION)
        places = keys + line[:, None] * (HEADS * SHAPE.key_size) + head * SHAPE.key_size + i
        tl.store(places, W.to(k.dtype), is_key)


@triton.jit
def slot_of(row, row_token, number, LENGTH: tl.constexpr):
    """Returns where what a chunk leaves is kept, given its row, the row's first token in the step
    and its number in the row: a row of n tokens has at most n // LENGTH + 2 aligned chunks."""
    return row_token // LENGTH + 2 * row + number


@triton.jit
def _keys_of(mixed, mixed_stride, line, count, head, i, SHAPE: tl.constexpr):
    """Returns the places of channels i of the queries and keys of a chunk of `count` tokens, and
    which of them there are: [LENGTH, PART] each."""
    q_places = mixed + line[:, None] * mixed_stride + head * SHAPE.key_size + i[None, :]
    k_places = q_places + SHAPE.key_heads * SHAPE.key_size
    is_token = tl.arange(0, line.shape[0]) < count
    return q_places, k_places, is_token[:, None] & (i < SHAPE.key_size)[None, :]


@triton.jit
def _add_within(
    A, P, q, k, G, k_places, G_places, mixed_stride, count, has_channel, first,
    LENGTH: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Returns A and P with the products of q and k [LENGTH, PART] of tokens in one sub-chunk added,
    channel by channel; `first` is the first token of each token's sub-chunk, and G_places are those
    of the chunk's first token."""
    t = tl.arange(0, LENGTH)
    for index in range(SUB):
        other = first + index
        is_key = (other < count)[:, None] & has_channel[None, :]
        left = tl.load(k_places + (other - t)[:, None] * mixed_stride, is_key, 0.0)
        G_other = tl.load(G_places + other[:, None] * PAD)
        left = left.to(tl.float32) * tl.exp(tl.minimum(G - G_other, 0.0))
        is_other = t[None, :] == other[:, None]
        A += tl.where(is_other, tl.sum(k * left, 1)[:, None], 0.0)
        P += tl.where(is_other, tl.sum(q * left, 1)[:, None], 0.0)
    return A, P


@triton.jit
def _add_across(
    A, P, q, k, G, G_places, first, LENGTH: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_add_within`, with the products of tokens in different sub-chunks, of operands in
    KIND."""
    t = tl.arange(0, LENGTH)
    since = tl.exp(tl.minimum(G - tl.load(G_places + first[:, None] * PAD), 0.0))
    k_since, q_since = (k * since).to(KIND), (q * since).to(KIND)
    for start in range(SUB, LENGTH, SUB):
        left = k * tl.exp(tl.minimum(tl.load(G_places + start * PAD) - G, 0.0))
        left = tl.trans(left.to(KIND))
        is_part = (first[:, None] == start) & (t[None, :] < start)
        A += tl.where(is_part, tl.dot(k_since, left, input_precision=PRECISION), 0.0)
        P += tl.where(is_part, tl.dot(q_since, left, input_precision=PRECISION), 0.0)
    return A, P


@triton.jit
def _store_values(
    mixed, mixed_stride, T, beta, line, is_token, head, SHAPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Replaces the values of a chunk by U."""
    j = tl.arange(0, SHAPE.value_pad)
    is_value = is_token[:, None] & (j < SHAPE.value_size)[None, :]
    places = mixed + line[:, None] * mixed_stride + 2 * SHAPE.key_heads * SHAPE.key_size
    places += head * SHAPE.value_size + j[None, :]
    v = tl.load(places, is_value, 0.0).to(tl.float32) * beta[:, None]
    U = tl.dot(T, v.to(T.dtype), input_precision=PRECISION)
    tl.store(places, U.to(T.dtype), is_value)


@triton.jit
def _store_decayed(q_places, k_places, mask, G, last):
    """Replaces queries and keys by exp(G) q and exp(last - G) k, and returns the old keys."""
    q = tl.load(q_places, mask, 0.0).to(tl.float32)
    k = tl.load(k_places, mask, 0.0).to(tl.float32)
    tl.store(q_places, (q * tl.exp(G)).to(q_places.dtype.element_ty), mask)
    left = tl.exp(tl.minimum(last[None, :] - G, 0.0))
    tl.store(k_places, (k * left).to(k_places.dtype.element_ty), mask)
    return k


@triton.jit(do_not_specialize_on_alignment=["query_starts"])
def _channel_chunk_kernel(
    mixed, keys, scores, decays, sums, b, a, a_log, dt_bias, chunks, query_starts, mixed_stride,
    b_stride, a_stride, SHAPE: tl.constexpr, LENGTH: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_chunk_kernel`, with decays by channel, of which PART are computed at a time. Queries
    become exp(G) q, keys exp(G_last - G) k, and exp(G_last) is kept in `decays`; each program keeps
    G in a part of `sums`, of which any line can be read."""
    HEADS: tl.constexpr = SHAPE.key_heads
    SIZE: tl.constexpr = SHAPE.key_size
    PAD: tl.constexpr = SHAPE.key_pad
    KIND: tl.constexpr = keys.dtype.element_ty
    t = tl.arange(0, LENGTH)
    first = t // SUB * SUB  # of the sub-chunk
    own_sums = sums + tl.program_id(0).to(tl.int64) * (LENGTH * PAD)
    wait_for_kernel(PDL)
    items = tl.load(chunks) * HEADS
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        head = item % HEADS
        record = chunks + (1 + item // HEADS) * 4
        row, token = tl.load(record), tl.load(record + 1)
        position, count = tl.load(record + 2), tl.load(record + 3)
        line = (token + t).to(tl.int64)
        is_token = t < count
        beta = tl.sigmoid(tl.load(b + line * b_stride + head, is_token, 0.0).to(tl.float32))
        rate = tl.load(a_log + head).to(tl.float32)
        A = tl.zeros([LENGTH, LENGTH], tl.float32)
        P = tl.zeros([LENGTH, LENGTH], tl.float32)
        for part in range(0, PAD, PART):
            i = part + tl.arange(0, PART)
            q_places, k_places, is_key = _keys_of(mixed, mixed_stride, line, count, head, i, SHAPE)
            bias = tl.load(dt_bias + head * SIZE + i, i < SIZE, 0.0).to(tl.float32)
            a_places = a + line[:, None] * a_stride + head * SIZE + i[None, :]
            a_value = tl.load(a_places, is_key, 0.0).to(tl.float32)
            G = tl.cumsum(tl.where(is_key, log_decay(a_value, rate, bias[None, :]), 0.0), 0)
            tl.debug_barrier()  # every thread has read what the last item left there
            G_places = own_sums + i[None, :]
            tl.store(G_places + t[:, None] * PAD, G)
            tl.debug_barrier()
            q = tl.load(q_places, is_key, 0.0).to(tl.float32)
            k = tl.load(k_places, is_key, 0.0).to(tl.float32)
            A, P = _add_within(
                A, P, q, k, G, k_places, G_places, mixed_stride, count, i < SIZE, first, LENGTH, PAD
            )
            A, P = _add_across(A, P, q, k, G, G_places, first, LENGTH, PAD, KIND, PRECISION)

        A = tl.where(t[:, None] > t[None, :], A * beta[:, None], 0.0)
        T = _inverse(A, LENGTH, PRECISION).to(KIND)
        _store_scores(scores, P, line, is_token, head, HEADS, LENGTH)
        _store_values(mixed, mixed_stride, T, beta, line, is_token, head, SHAPE, PRECISION)
        row_token = tl.load(query_starts + row)
        start = position - token + row_token
        slot = slot_of(row, row_token, position // LENGTH - start // LENGTH, LENGTH).to(tl.int64)
        tl.debug_barrier()  # every thread has read the keys
        for part in range(0, PAD, PART):
            i = part + tl.arange(0, PART)
            q_places, k_places, is_key = _keys_of(mixed, mixed_stride, line, count, head, i, SHAPE)
            G = tl.load(own_sums + t[:, None] * PAD + i[None, :])
            last = tl.load(own_sums + (LENGTH - 1) * PAD + i)
            k = _store_decayed(q_places, k_places, is_key, G, last)
            tl.store(decays + (slot * HEADS + head) * SIZE + i, tl.exp(last), i < SIZE)
            W = tl.dot(T, (k * tl.exp(G) * beta[:, None]).to(KIND), input_precision=PRECISION)
            W_places = keys + line[:, None] * (HEADS * SIZE) + head * SIZE + i[None, :]
            tl.store(W_places, W.to(KIND), is_key)
