"""The gated delta rule for rows of several tokens, in chunks.

    delta_prefill(inputs, weights, windows, matrices, query_starts, seq_lens, blocks, chunks,
                  workspace, out, block_size=..., first_row=...)

Within a chunk of up to 64 tokens the updates are condensed into products (the WY form: Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule", 2024; with decay: "Gated Delta Networks",
2025). With G the cumulative g of a chunk, and A[i, j] = beta_i exp(G_i - G_j) k_i k_j for j < i:

    T = (I + A)^-1;   W = T (beta exp(G) k);   U = T (beta v)
    V = U - W S;   o = exp(G) q S + (exp(G_i - G_j) q_i k_j)[j <= i] V
    S = exp(G_last) S + (exp(G_last - G) k)^T V

Four launches a layer: convolution, SiLU and l2 norms, and the windows; W, U and the products of
queries and keys, of all chunks at once; the scan over a row's chunks, which keeps S in registers
and gives o; the gated norm. Chunks begin at multiples of their length, which divides the block
size, so the scan comes by every boundary at which a snapshot may be wanted. No exponent is
positive, G and S are float32, and the products' operands have the dtype of the inputs.
"""
# ruff: noqa: N803, N806  (compile-time constants and matrices are written in capitals)

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import (
    L2_EPS,
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    log_decay,
    silu,
)
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.short_convolution import (
    TILE_TOKENS,
    block_of,
    check_windows,
    convolved,
    store_windows,
)
from aioinfer.kernels.states import ChunkPlan, StateTables, programs_for

MAX_CHUNK = 64


class DeltaPrefillConfig(NamedTuple):
    """The compile-time configuration: value channels, warps and pipeline stages of a program of the
    scan; warps of a program that computes a chunk."""

    values: int
    scan_warps: int
    scan_stages: int
    chunk_warps: int


@dataclass(frozen=True, slots=True)
class DeltaWorkspace:
    """What the launches of a layer hand on, for up to T tokens. All layers of a model share it.

    Attributes:
        mixed: [T, C], queries and keys after convolution and norm, and values, which U replaces.
        keys: [T, HV, K], W.
        scores: [T, HV, L], products of queries and keys of a chunk of L tokens, with decay.
        decays: float32 [HV, T], G.
    """

    mixed: torch.Tensor
    keys: torch.Tensor
    scores: torch.Tensor
    decays: torch.Tensor

    @classmethod
    def empty(
        cls, tokens: int, channels: int, heads: int, key_size: int, block_size: int,
        dtype: torch.dtype, device: torch.device,
    ) -> DeltaWorkspace:  # fmt: skip
        """Returns a workspace for inputs of `dtype`: C `channels`, HV `heads`."""
        length = chunk_length(block_size)
        return cls(
            torch.empty(tokens, channels, dtype=dtype, device=device),
            torch.empty(tokens, heads, key_size, dtype=dtype, device=device),
            torch.empty(tokens, heads, length, dtype=dtype, device=device),
            torch.empty(heads, tokens, dtype=torch.float32, device=device),
        )


def chunk_length(block_size: int) -> int:
    """Returns the tokens of a chunk."""
    return min(MAX_CHUNK, block_size)


def plans_of(
    rows: int, tokens: int, block_size: int, device: torch.device
) -> tuple[ChunkPlan, ChunkPlan]:
    """Returns the plans that `delta_prefill` takes, of the convolution and of the chunks, for up to
    `rows` rows of `tokens` tokens in total."""
    return (
        ChunkPlan.empty(rows, tokens, block_size, device, min_tokens=2, is_aligned=False),
        ChunkPlan.empty(
            rows, tokens, chunk_length(block_size), device, min_tokens=2, is_aligned=True
        ),
    )


@triton.jit(do_not_specialize_on_alignment=["tables", "query_starts"])
def _inputs_kernel(
    mixed, out, conv, windows, tables, tiles, query_starts, mixed_stride, out_stride,
    window_stride, table_stride, SHAPE: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
    TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolution, SiLU and norms of a chunk's queries, keys or values of one head."""
    KEYS: tl.constexpr = 2 * SHAPE.key_heads
    HEADS: tl.constexpr = KEYS + SHAPE.key_heads * SHAPE.group
    wait_for_kernel(PDL)
    items = tl.load(tiles) * HEADS
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        head = item % HEADS
        record = tiles + (1 + item // HEADS) * 4
        row, token = tl.load(record), tl.load(record + 1)
        position, count = tl.load(record + 2), tl.load(record + 3)
        row_token = tl.load(query_starts + row)
        tokens = tl.load(query_starts + row + 1) - row_token
        offset = token - row_token
        start = position - offset
        i = tl.arange(0, CHANNELS)
        value_first = KEYS * SHAPE.key_size + (head - KEYS) * SHAPE.value_size
        channels = tl.where(head < KEYS, head * SHAPE.key_size, value_first) + i
        mask = i < tl.where(head < KEYS, SHAPE.key_size, SHAPE.value_size)
        table = tables + row.to(tl.int64) * table_stride
        before = tl.maximum(start - 1, 0) // SHAPE.block_size
        window = windows + block_of(table, before) * window_stride
        x = mixed + token.to(tl.int64) * mixed_stride
        t = tl.arange(0, TOKENS)
        for first in range(0, count, TOKENS):
            acc = convolved(
                x + first * mixed_stride, mixed_stride, window, start > 0, conv, offset + first,
                count - first, channels, mask, TOKENS, SHAPE.width,
            )  # fmt: skip
            acc = silu(acc)
            if head < KEYS:
                acc *= tl.rsqrt(tl.sum(acc * acc, 1) + L2_EPS)[:, None]
            if head < SHAPE.key_heads:
                acc *= SHAPE.key_size**-0.5
            line = (token + first + t).to(tl.int64)
            own = (first + t < count)[:, None] & mask[None, :]
            target = out + line[:, None] * out_stride + channels[None, :]
            tl.store(target, acc.to(out.dtype.element_ty), own)
        store_windows(
            x, mixed_stride, windows, window_stride, table, window, start, offset, count, tokens,
            channels, mask, SHAPE.width, TAPS, SHAPE.block_size,
        )  # fmt: skip


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
        q = tl.load(q_places, is_key, 0.0)
        k = tl.load(q_places + KEYS, is_key, 0.0)
        v_places = mixed + line[:, None] * mixed_stride + 2 * KEYS + head * SHAPE.value_size + j
        v = tl.load(v_places, is_value, 0.0)
        beta = tl.sigmoid(tl.load(b + line * b_stride + head, is_token, 0.0).to(tl.float32))
        a_value = tl.load(a + line * a_stride + head, is_token, 0.0).to(tl.float32)
        g = tl.where(is_token, log_decay(a_value, decay_rate, bias), 0.0)
        G = tl.cumsum(g, 0)
        tl.store(decays + head * decay_stride + line, G, is_token)

        decay = tl.exp(tl.minimum(G[:, None] - G[None, :], 0.0))
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        A = tl.where(t[:, None] > t[None, :], products * decay * beta[:, None], 0.0)
        T = _inverse(A, LENGTH, PRECISION).to(k.dtype)
        decayed = (k.to(tl.float32) * (beta * tl.exp(G))[:, None]).to(k.dtype)
        W = tl.dot(T, decayed, input_precision=PRECISION)
        places = keys + line[:, None] * (HEADS * SHAPE.key_size) + head * SHAPE.key_size + i
        tl.store(places, W.to(k.dtype), is_key)
        U = tl.dot(T, (v.to(tl.float32) * beta[:, None]).to(k.dtype), input_precision=PRECISION)
        tl.store(v_places, U.to(k.dtype), is_value)
        P = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
        P = tl.where(t[:, None] >= t[None, :], P, 0.0)
        places = scores + line[:, None] * (HEADS * LENGTH) + head * LENGTH + t[None, :]
        tl.store(places, P.to(k.dtype), is_token[:, None])


@triton.jit(do_not_specialize_on_alignment=["tables", "query_starts", "seq_lens"])
def _scan_kernel(
    mixed, keys, scores, decays, z, norm, norm_eps, out, matrices, tables, rows, query_starts,
    seq_lens, mixed_stride, decay_stride, z_stride, out_stride, matrix_stride, table_stride,
    SHAPE: tl.constexpr, LENGTH: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The outputs of a row's tokens for VALUES channels of one value head, and its states."""
    HEADS: tl.constexpr = SHAPE.key_heads * SHAPE.group
    KEYS: tl.constexpr = SHAPE.key_heads * SHAPE.key_size
    PARTS: tl.constexpr = (SHAPE.value_size + VALUES - 1) // VALUES
    wait_for_kernel(PDL)
    items = tl.load(rows) * (HEADS * PARTS)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        row = tl.load(rows + 1 + item // (HEADS * PARTS))
        head = item // PARTS % HEADS
        part = item % PARTS
        row_token = tl.load(query_starts + row)
        tokens = tl.load(query_starts + row + 1) - row_token
        seq_len = tl.load(seq_lens + row)
        start = seq_len - tokens
        t = tl.arange(0, LENGTH)
        i = tl.arange(0, SHAPE.key_pad)
        j = part * VALUES + tl.arange(0, VALUES)
        has_key, has_value = (i < SHAPE.key_size)[None, :], (j < SHAPE.value_size)[None, :]
        is_state = (i < SHAPE.key_size)[:, None] & has_value
        state_places = (head * SHAPE.key_size + i)[:, None] * SHAPE.value_size + j[None, :]
        table = tables + row.to(tl.int64) * table_stride
        before = (
            matrices + block_of(table, tl.maximum(start - 1, 0) // SHAPE.block_size) * matrix_stride
        )
        S = tl.load(before + state_places, is_state & (start > 0), 0.0).to(tl.float32)
        base = start // LENGTH * LENGTH
        for chunk in range(base, seq_len, LENGTH):
            position = tl.maximum(chunk, start)
            end = tl.minimum(chunk + LENGTH, seq_len)
            count = end - position
            token = row_token + position - start
            line = (token + t).to(tl.int64)
            is_token = (t < count)[:, None]
            q_places = (
                mixed + line[:, None] * mixed_stride + head // SHAPE.group * SHAPE.key_size + i
            )
            q = tl.load(q_places, is_token & has_key, 0.0)
            k = tl.load(q_places + KEYS, is_token & has_key, 0.0)
            places = keys + line[:, None] * (HEADS * SHAPE.key_size) + head * SHAPE.key_size + i
            W = tl.load(places, is_token & has_key, 0.0)
            places = scores + line[:, None] * (HEADS * LENGTH) + head * LENGTH + t[None, :]
            P = tl.load(places, is_token, 0.0)
            places = mixed + line[:, None] * mixed_stride + 2 * KEYS + head * SHAPE.value_size + j
            U = tl.load(places, is_token & has_value, 0.0).to(tl.float32)
            G = tl.load(decays + head * decay_stride + line, t < count, 0.0)
            last = tl.load(decays + head * decay_stride + token + count - 1)

            rounded = S.to(q.dtype)
            V = U - tl.dot(W, rounded, input_precision=PRECISION)
            o = tl.dot(q, rounded, input_precision=PRECISION) * tl.exp(G)[:, None]
            o = tl.dot(P, V.to(q.dtype), o, input_precision=PRECISION)
            V = V * tl.exp(tl.minimum(last - G, 0.0))[:, None]
            S = tl.dot(tl.trans(k), V.to(q.dtype), S * tl.exp(last), input_precision=PRECISION)

            places = out + line[:, None] * out_stride + head * SHAPE.value_size + j
            if SHAPE.value_size <= VALUES:
                z_places = z + line[:, None] * z_stride + head * SHAPE.value_size + j
                gate = tl.load(z_places, is_token & has_value, 0.0).to(tl.float32)
                weight = tl.load(norm + j, j < SHAPE.value_size, 0.0).to(tl.float32)
                o = _gated_norm(o, weight, gate, SHAPE.value_size, norm_eps)
            tl.store(places, o.to(out.dtype.element_ty), is_token & has_value)
            is_last = (end == seq_len) | (end % SHAPE.block_size == 0)
            block = tl.load(table + (end - 1) // SHAPE.block_size, is_last, -1).to(tl.int64)
            target = matrices + block * matrix_stride + state_places
            tl.store(target, S.to(matrices.dtype.element_ty), is_state & (block >= 0))


@triton.jit
def _gated_norm(o, weight, gate, VALUE_SIZE: tl.constexpr, eps):
    scale = tl.rsqrt(tl.sum(o * o, 1) / VALUE_SIZE + eps)
    return o * scale[:, None] * weight[None, :] * silu(gate)


@triton.jit
def _norm_kernel(
    out, z, norm, norm_eps, chunks, out_stride, z_stride, SHAPE: tl.constexpr, LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The gated norm of a chunk's outputs of one value head, in place."""
    HEADS: tl.constexpr = SHAPE.key_heads * SHAPE.group
    t = tl.arange(0, LENGTH)
    j = tl.arange(0, SHAPE.value_pad)
    has_value = j < SHAPE.value_size
    weight = tl.load(norm + j, has_value, 0.0).to(tl.float32)
    wait_for_kernel(PDL)
    items = tl.load(chunks) * HEADS
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        head = item % HEADS
        record = chunks + (1 + item // HEADS) * 4
        token, count = tl.load(record + 1), tl.load(record + 3)
        line = (token + t).to(tl.int64)
        own = (t < count)[:, None] & has_value[None, :]
        places = out + line[:, None] * out_stride + head * SHAPE.value_size + j
        o = tl.load(places, own, 0.0).to(tl.float32)
        gate = tl.load(z + line[:, None] * z_stride + head * SHAPE.value_size + j, own, 0.0)
        o = _gated_norm(o, weight, gate.to(tl.float32), SHAPE.value_size, norm_eps)
        tl.store(places, o.to(out.dtype.element_ty), own)


def delta_prefill_config(shape: DeltaShape, element_size: int) -> DeltaPrefillConfig:
    """Returns the configuration for inputs of `element_size` bytes. It does not depend on the rows,
    so that no kernel is compiled while serving; a program with half of the values would load as
    many keys."""
    if element_size == 4:
        return DeltaPrefillConfig(min(32, shape.value_pad), 4, 1, 4)
    return DeltaPrefillConfig(min(64, shape.value_pad), 4, 2, 4)


class DeltaPrefill(NamedTuple):
    """A layer and a step's rows, for the launches of `delta_prefill`, whose arguments these are."""

    inputs: DeltaInputs
    weights: DeltaWeights
    windows: StateTables
    matrices: StateTables
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    first_row: int
    tiles: ChunkPlan
    chunks: ChunkPlan
    workspace: DeltaWorkspace
    out: torch.Tensor
    shape: DeltaShape
    config: DeltaPrefillConfig
    pdl: bool

    @property
    def heads(self) -> int:
        """Value heads."""
        return self.shape.key_heads * self.shape.group

    @property
    def rows(self) -> int:
        """Rows that may have several tokens."""
        return len(self.seq_lens) - self.first_row

    @property
    def precision(self) -> str:
        """Of products of float32 operands: with inputs in 16 bits these are within a chunk, and
        their result is rounded to 16 bits."""
        return "ieee" if self.workspace.mixed.dtype == torch.float32 else "tf32"

    def launch_convolution(self) -> None:
        """Convolution, SiLU, norms of queries and keys; windows."""
        mixed, work, shape = self.inputs.mixed, self.workspace.mixed, self.shape
        states, tables = self.windows
        tiles = self.tiles.max_chunks(self.rows, len(mixed))
        programs = programs_for(tiles * (2 * shape.key_heads + self.heads), mixed.device)
        _inputs_kernel[(programs,)](
            mixed, work, self.weights.conv, states, tables, self.tiles.chunks, self.query_starts,
            mixed.stride(0), work.stride(0), states.stride(0), tables.stride(0), SHAPE=shape,
            CHANNELS=max(shape.key_pad, shape.value_pad), TOKENS=TILE_TOKENS,
            TAPS=triton.next_power_of_2(shape.width), PDL=self.pdl, num_warps=4, num_stages=1,
            launch_pdl=self.pdl,
        )  # fmt: skip

    def launch_chunks(self) -> None:
        """W, U, G, and the products of queries and keys."""
        work, weights, (_, _, b, a) = self.workspace, self.weights, self.inputs
        _chunk_kernel[(self._programs(),)](
            work.mixed, work.keys, work.scores, work.decays, b, a, weights.a_log, weights.dt_bias,
            self.chunks.chunks, work.mixed.stride(0), b.stride(0), a.stride(0),
            work.decays.stride(0), SHAPE=self.shape, LENGTH=self.chunks.length,
            PRECISION=self.precision, PDL=self.pdl, num_warps=self.config.chunk_warps,
            num_stages=1, launch_pdl=self.pdl,
        )  # fmt: skip

    def launch_scan(self) -> None:
        """Outputs and states; the gated norm, where a program has all values of a head."""
        work, z, config, (states, tables) = (
            self.workspace,
            self.inputs.z,
            self.config,
            self.matrices,
        )
        items = self.scan_parts * self.heads * self.rows
        _scan_kernel[(programs_for(items, z.device),)](
            work.mixed, work.keys, work.scores, work.decays, z, self.weights.norm,
            self.weights.norm_eps, self.out, states, tables, self.chunks.rows,
            self.query_starts, self.seq_lens, work.mixed.stride(0), work.decays.stride(0),
            z.stride(0), self.out.stride(0), states.stride(0), tables.stride(0), SHAPE=self.shape,
            LENGTH=self.chunks.length, VALUES=config.values, PRECISION=self.precision,
            PDL=self.pdl, num_warps=config.scan_warps, num_stages=config.scan_stages,
            launch_pdl=self.pdl,
        )  # fmt: skip

    def launch_norm(self) -> None:
        """The gated norm, after a scan whose programs have a part of a head's values."""
        out, z, weights = self.out, self.inputs.z, self.weights
        _norm_kernel[(self._programs(),)](
            out, z, weights.norm, weights.norm_eps, self.chunks.chunks, out.stride(0), z.stride(0),
            SHAPE=self.shape, LENGTH=self.chunks.length, PDL=self.pdl, num_warps=4,
            num_stages=1, launch_pdl=self.pdl,
        )  # fmt: skip

    def _programs(self) -> int:
        """Of a launch over the heads of chunks."""
        mixed = self.inputs.mixed
        items = self.chunks.max_chunks(self.rows, len(mixed)) * self.heads
        return programs_for(items, mixed.device)

    @property
    def scan_parts(self) -> int:
        """Programs of the scan for one head."""
        return triton.cdiv(self.shape.value_size, self.config.values)


def delta_prefill(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    windows: StateTables,
    matrices: StateTables,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: ChunkPlan,
    chunks: ChunkPlan,
    workspace: DeltaWorkspace,
    out: torch.Tensor,
    *,
    block_size: int,
    first_row: int = 0,
    config: DeltaPrefillConfig | None = None,
    pdl: bool = False,
) -> None:
    """Computes a layer for the rows of two or more tokens and writes their states into the cache.

    Args:
        inputs: for T tokens.
        weights: see `DeltaWeights`.
        windows, matrices: see `StateTables`: what a row starts from is read from the entry of the
            token before its first, and the state is written into each entry of the row's tokens
            that is not negative.
        query_starts: int32 [R + 1], the first token of each row.
        seq_lens: int32 [R], tokens of each row, this step's included; 0 for padding rows.
        tiles, chunks: from `plans_of`, filled by `plan_chunks` for this step.
        workspace: for T tokens or more; is overwritten.
        out: [T, HV * V], rows may be strided. Other rows' tokens are not touched.
        block_size: tokens a block, a multiple of 16.
        first_row: rows before this one have one token each.
        config: instead of `delta_prefill_config` (to tune it).
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes do not fit together.
    """
    shape = DeltaShape.of(inputs, weights, matrices.states, block_size)
    check_windows(weights.conv, windows, tiles, block_size)
    tokens, work = len(inputs.mixed), workspace.mixed
    if chunks.length != chunk_length(block_size) or len(work) < tokens:
        raise ValueError(
            f"chunks of {chunks.length} tokens and a workspace of {len(work)} do not fit blocks of "
            f"{block_size} and {tokens} tokens"
        )
    if config is None:
        config = delta_prefill_config(shape, work.element_size())
    launches = DeltaPrefill(
        inputs, weights, windows, matrices, query_starts, seq_lens, first_row, tiles, chunks,
        workspace, out, shape, config, pdl,
    )  # fmt: skip
    if chunks.max_chunks(launches.rows, tokens) == 0:
        return
    launches.launch_convolution()
    launches.launch_chunks()
    launches.launch_scan()
    if launches.scan_parts > 1:
        launches.launch_norm()
