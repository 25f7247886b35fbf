"""The gated delta rule for rows of several tokens, in chunks.

    delta_prefill(inputs, weights, windows, matrices, query_starts, seq_lens, blocks, chunks,
                  workspace, out, block_size=..., first_row=...)

Within a chunk of up to 64 tokens the updates are condensed into products (the WY form: Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule", 2024; with decay: "Gated Delta Networks",
2025). With G the cumulative g of a chunk, and A[i, j] = beta_i exp(G_i - G_j) k_i k_j for j < i:

    T = (I + A)^-1;   W = T (beta exp(G) k);   U = T (beta v)
    V = U - W S;   o = exp(G) q S + (exp(G_i - G_j) q_i k_j)[j <= i] V
    S = exp(G_last) S + (exp(G_last - G) k)^T V

Four launches a layer: convolution, SiLU and l2 norms, and the windows (`delta_inputs`); W, U and
the products of queries and keys, of all chunks at once (`delta_chunks`, which has decays by
channel, too); the scan over a row's chunks, which keeps S in registers and gives o; the gated norm.
Chunks begin at multiples of their length, which divides the block size, so the scan comes by every
boundary at which a snapshot may be wanted. No exponent is positive, G and S are float32, and the
products' operands have the dtype of the inputs.
"""
# ruff: noqa: N803, N806  (compile-time constants and matrices are written in capitals)

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import (
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    gate_of,
)
from aioinfer.kernels.delta_chunks import (
    MAX_PART,
    _channel_chunk_kernel,
    _chunk_kernel,
    slot_of,
)
from aioinfer.kernels.delta_inputs import delta_inputs
from aioinfer.kernels.launch import is_hopper, wait_for_kernel
from aioinfer.kernels.short_convolution import block_of, check_windows
from aioinfer.kernels.states import ChunkPlan, StateTables, programs_for

MAX_CHUNK = 64


class DeltaPrefillConfig(NamedTuple):
    """The compile-time configuration: value channels, warps and pipeline stages of a program of the
    scan; warps of a program that computes a chunk, and the most registers of its threads."""

    values: int
    scan_warps: int
    scan_stages: int
    chunk_warps: int
    chunk_registers: int | None = None


@dataclass(frozen=True, slots=True)
class DeltaWorkspace:
    """What the launches of a layer hand on, for up to T tokens. All layers of a model share it.

    Attributes:
        mixed: [T, C], queries and keys after convolution and norm, and values, which U replaces.
        keys: [T, HV, K], W.
        scores: [T, HV, L], products of queries and keys of a chunk of L tokens, with decay.
        decays: float32 [HV, T], G; by channel [chunks, HV, K], exp(G_last).
        sums: float32 [programs, L, power of two from K on], G of the chunk that a program computes;
            of decays by channel alone.
    """

    mixed: torch.Tensor
    keys: torch.Tensor
    scores: torch.Tensor
    decays: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(
        cls, tokens: int, rows: int, channels: int, heads: int, key_size: int, block_size: int,
        dtype: torch.dtype, device: torch.device, *, by_channel: bool = False,
    ) -> DeltaWorkspace:  # fmt: skip
        """Returns a workspace for up to `rows` rows of inputs of `dtype`: C `channels`, HV
        `heads`."""
        length = chunk_length(block_size)
        decays: tuple[int, ...] = (heads, tokens)
        sums = (0,)
        if by_channel:
            decays = tokens // length + 2 * rows, heads, key_size
            programs = programs_for(heads * decays[0], device)
            sums = programs, length, max(16, triton.next_power_of_2(key_size))
        return cls(
            torch.empty(tokens, channels, dtype=dtype, device=device),
            torch.empty(tokens, heads, key_size, dtype=dtype, device=device),
            torch.empty(tokens, heads, length, dtype=dtype, device=device),
            torch.empty(decays, dtype=torch.float32, device=device),
            torch.empty(sums, dtype=torch.float32, device=device),
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


@triton.jit
def _load_chunk(
    mixed, keys, scores, mixed_stride, line, is_token, has_key, has_value, head, j,
    SHAPE: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Returns of a chunk's tokens at `line` [LENGTH]: queries, keys, W, P, and the value channels j
    of U in float32; 0 where there are no tokens, keys or values."""
    HEADS: tl.constexpr = SHAPE.key_heads * SHAPE.group
    KEYS: tl.constexpr = SHAPE.key_heads * SHAPE.key_size
    t, i = tl.arange(0, LENGTH), tl.arange(0, SHAPE.key_pad)
    q_places = mixed + line[:, None] * mixed_stride + head // SHAPE.group * SHAPE.key_size + i
    q = tl.load(q_places, is_token & has_key, 0.0)
    k = tl.load(q_places + KEYS, is_token & has_key, 0.0)
    places = keys + line[:, None] * (HEADS * SHAPE.key_size) + head * SHAPE.key_size + i
    W = tl.load(places, is_token & has_key, 0.0)
    places = scores + line[:, None] * (HEADS * LENGTH) + head * LENGTH + t[None, :]
    P = tl.load(places, is_token, 0.0)
    places = mixed + line[:, None] * mixed_stride + 2 * KEYS + head * SHAPE.value_size + j
    U = tl.load(places, is_token & has_value, 0.0).to(tl.float32)
    return q, k, W, P, U


@triton.jit
def _scan_chunk(
    S, q, k, W, P, U, decays, line, token, count, SHAPE: tl.constexpr, PRECISION: tl.constexpr
):
    """Returns the state behind a chunk of `count` tokens from `token` on, and its outputs before
    the norm; `decays` points to a head's G of all tokens, or by channel to exp(G_last)."""
    rounded = S.to(q.dtype)
    V = U - tl.dot(W, rounded, input_precision=PRECISION)
    o = tl.dot(q, rounded, input_precision=PRECISION)
    if SHAPE.by_channel:  # queries and keys have their decays already
        i = tl.arange(0, SHAPE.key_pad)
        S = S * tl.load(decays + i, i < SHAPE.key_size, 0.0)[:, None]
        o = tl.dot(P, V.to(q.dtype), o, input_precision=PRECISION)
    else:
        G = tl.load(decays + line, tl.arange(0, line.shape[0]) < count, 0.0)
        last = tl.load(decays + token + count - 1)
        S = S * tl.exp(last)
        o = tl.dot(P, V.to(q.dtype), o * tl.exp(G)[:, None], input_precision=PRECISION)
        V = V * tl.exp(tl.minimum(last - G, 0.0))[:, None]
    return tl.dot(tl.trans(k), V.to(q.dtype), S, input_precision=PRECISION), o


@triton.jit(do_not_specialize_on_alignment=["tables", "query_starts", "seq_lens"])
def _scan_kernel(
    mixed, keys, scores, decays, z, norm, norm_eps, out, matrices, tables, rows, query_starts,
    seq_lens, mixed_stride, decay_stride, z_stride, out_stride, matrix_stride, table_stride,
    SHAPE: tl.constexpr, LENGTH: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The outputs of a row's tokens for VALUES channels of one value head, and its states."""
    HEADS: tl.constexpr = SHAPE.key_heads * SHAPE.group
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
        before = block_of(table, tl.maximum(start - 1, 0) // SHAPE.block_size)
        before = matrices + before * matrix_stride
        S = tl.load(before + state_places, is_state & (start > 0), 0.0).to(tl.float32)
        base = start // LENGTH * LENGTH
        for chunk in range(base, seq_len, LENGTH):
            position = tl.maximum(chunk, start)
            end = tl.minimum(chunk + LENGTH, seq_len)
            count = end - position
            is_last = (end == seq_len) | (end % SHAPE.block_size == 0)
            block = tl.load(table + (end - 1) // SHAPE.block_size, is_last, -1).to(tl.int64)
            token = row_token + position - start
            line = (token + t).to(tl.int64)
            is_token = (t < count)[:, None]
            q, k, W, P, U = _load_chunk(
                mixed, keys, scores, mixed_stride, line, is_token, has_key, has_value, head, j,
                SHAPE, LENGTH,
            )  # fmt: skip
            if SHAPE.by_channel:
                slot = slot_of(row, row_token, (chunk - base) // LENGTH, LENGTH).to(tl.int64)
                of_head = decays + (slot * HEADS + head) * SHAPE.key_size
            else:
                of_head = decays + head * decay_stride
            S, o = _scan_chunk(S, q, k, W, P, U, of_head, line, token, count, SHAPE, PRECISION)

            places = out + line[:, None] * out_stride + head * SHAPE.value_size + j
            if SHAPE.value_size <= VALUES:
                z_places = z + line[:, None] * z_stride + head * SHAPE.value_size + j
                gate = tl.load(z_places, is_token & has_value, 0.0).to(tl.float32)
                weight = tl.load(norm + j, j < SHAPE.value_size, 0.0).to(tl.float32)
                o = _gated_norm(o, weight, gate, SHAPE, norm_eps)
            tl.store(places, o.to(out.dtype.element_ty), is_token & has_value)
            if block >= 0:
                target = matrices + block * matrix_stride + state_places
                tl.store(target, S.to(matrices.dtype.element_ty), is_state)


@triton.jit
def _gated_norm(o, weight, gate, SHAPE: tl.constexpr, eps):
    scale = tl.rsqrt(tl.sum(o * o, 1) / SHAPE.value_size + eps)
    return o * scale[:, None] * weight[None, :] * gate_of(gate, SHAPE)


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
        o = _gated_norm(o, weight, gate.to(tl.float32), SHAPE, norm_eps)
        tl.store(places, o.to(out.dtype.element_ty), own)


def delta_prefill_config(
    shape: DeltaShape, element_size: int, *, on_hopper: bool = True
) -> DeltaPrefillConfig:
    """Returns the configuration for inputs of `element_size` bytes, measured on an H200
    (notes/states.md). It does not depend on the rows, so that no kernel is compiled while serving;
    a program with half of the values would load as many keys. Other GPUs have less shared memory
    than the 200 KiB of three stages."""
    if element_size == 4:
        return DeltaPrefillConfig(min(32, shape.value_pad), 4, 1, 8 if shape.by_channel else 4)
    values, stages = min(64, shape.value_pad), 3 if on_hopper else 2
    if shape.by_channel:
        return DeltaPrefillConfig(values, 4, stages, 8)
    # with 168 registers three programs of a chunk fit a multiprocessor
    return DeltaPrefillConfig(values, 4, stages, 4, 168)


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
        delta_inputs(
            self.inputs.mixed, self.weights.conv, self.windows, self.tiles, self.query_starts,
            self.workspace.mixed, self.shape, rows=self.rows, pdl=self.pdl,
        )  # fmt: skip

    def launch_chunks(self) -> None:
        """W, U, G, and the products of queries and keys."""
        work, weights, (_, _, b, a) = self.workspace, self.weights, self.inputs
        options = {
            "SHAPE": self.shape, "LENGTH": self.chunks.length, "PRECISION": self.precision,
            "PDL": self.pdl, "num_warps": self.config.chunk_warps, "num_stages": 1,
            "maxnreg": self.config.chunk_registers, "launch_pdl": self.pdl,
        }  # fmt: skip
        if self.shape.by_channel:
            programs = min(self._programs(), len(work.sums))
            _channel_chunk_kernel[(programs,)](
                work.mixed, work.keys, work.scores, work.decays, work.sums, b, a, weights.a_log,
                weights.dt_bias, self.chunks.chunks, self.query_starts, work.mixed.stride(0),
                b.stride(0), a.stride(0), PART=min(MAX_PART, self.shape.key_pad), **options,
            )  # fmt: skip
        else:
            _chunk_kernel[(self._programs(),)](
                work.mixed, work.keys, work.scores, work.decays, b, a, weights.a_log,
                weights.dt_bias, self.chunks.chunks, work.mixed.stride(0), b.stride(0), a.stride(0),
                work.decays.stride(0), **options,
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
        """Of a launch over the heads of chunks, of which three at a time fit a multiprocessor."""
        mixed = self.inputs.mixed
        items = self.chunks.max_chunks(self.rows, len(mixed)) * self.heads
        return programs_for(items, mixed.device, 6)

    @property
    def scan_parts(self) -> int:
        """Programs of the scan for one head."""
        return triton.cdiv(self.shape.value_size, self.config.values)


def _check_workspace(
    workspace: DeltaWorkspace, shape: DeltaShape, chunks: ChunkPlan, tokens: int, rows: int
) -> None:
    """Raises ValueError unless workspace and chunks fit a step of so many tokens and rows."""
    room, length = len(workspace.mixed), chunk_length(shape.block_size)
    needed = tokens // length + 2 * rows
    has_decays = not shape.by_channel or (
        len(workspace.decays) >= needed and workspace.sums.shape[1:] == (length, shape.key_pad)
    )
    if chunks.length != length or room < tokens or not has_decays:
        raise ValueError(
            f"chunks of {chunks.length} tokens and a workspace of {room} do not fit blocks of "
            f"{shape.block_size}, {tokens} tokens and {rows} rows"
        )


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
    _check_workspace(workspace, shape, chunks, tokens, len(seq_lens))
    if config is None:
        on_hopper = is_hopper(work.device)
        config = delta_prefill_config(shape, work.element_size(), on_hopper=on_hopper)
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
