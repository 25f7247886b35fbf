"""All-reduce of the partial products of tensor-parallel ranks over symmetric memory, fused with the
residual add and the RMSNorm that follow, and with the quantization of its result to one byte.

Called after every row-parallel product on GPUs, and after the embedding; captured in the step's
CUDA graph. A call is one launch of one of two kernels, without any copy beside it:

- Few rows: the one-shot `_push_kernel`, one program a row. Each rank writes its row into the memory
  of all others, as 8-byte words of 4 bytes of data and the epoch, the number of the all-reduce that
  they belong to. The reader polls the data itself, so the latency is one way over the link (the
  "LL" protocol of NCCL).
- Many rows: `_two_shot_kernel`. Of every `size` rows each rank sums one, reading the others'
  partial products, and writes the sum to all of them (the two-shot all-reduce of TensorRT-LLM and
  vLLM). Two flags for each program order these reads and writes.

Every rank gets the same bits: a row is summed in the order of the ranks, in float32, with the
residual, and rounded once. No multicast is used. The kernels' docstrings argue why no rank
overwrites data that another still reads.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.quantize import (
    GROUP,
    MAXIMA,
    ROUNDER,
    SMALLEST,
    InputFormat,
    ScaledInputs,
    empty_inputs,
)
from aioinfer.kernels.symmetric_memory import SymmetricBuffer

#: The maximum number of rows that two ranks all-reduce with `_push_kernel`, which moves twice
#: the bytes of `_two_shot_kernel` at half its latency; more ranks take proportionally fewer rows.
PUSHED_ROWS = 64
#: Programs of the two-shot kernel: enough rows in flight to fill the link, few enough to be
#: resident on the GPU together.
MAX_PROGRAMS = 528
_ALIGNMENT = 256
_ELEMENTS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}


@dataclass(frozen=True, slots=True)
class AllReduceLayout:
    """Offsets into a rank's symmetric memory, in bytes. The same on every rank.

    Attributes:
        max_rows: the maximum number of rows of an all-reduce.
        pushed_rows: the maximum number of rows of an all-reduce by `_push_kernel`.
        programs: the maximum number of programs of `_two_shot_kernel`.
        words: offset of `_push_kernel`'s LL buffers, [pushed_rows, 2, size] rows of 8-byte words.
        flags: offset of `_two_shot_kernel`'s flags, int32 [programs, 2, size].
        partial, sums: offsets of the partial products and of the sums, [max_rows, hidden] each, of
            the model's dtype.
        nbytes: size of the whole.
    """

    max_rows: int
    pushed_rows: int
    programs: int
    words: int
    flags: int
    partial: int
    sums: int
    nbytes: int

    @classmethod
    def of(
        cls, size: int, max_rows: int, hidden: int, dtype: torch.dtype, *,
        pushed_rows: int | None = None, programs: int = MAX_PROGRAMS,
    ) -> AllReduceLayout:  # fmt: skip
        """Returns the layout for steps of up to `max_rows` tokens."""
        row = hidden * dtype.itemsize
        pushed_rows = 2 * PUSHED_ROWS // size if pushed_rows is None else pushed_rows
        parts = [
            pushed_rows * 2 * size * (row // 4) * 8,
            programs * 2 * size * 4,
            max_rows * row,
            max_rows * row,
        ]
        starts = [0]
        for nbytes in parts:
            starts.append(-(-(starts[-1] + nbytes) // _ALIGNMENT) * _ALIGNMENT)
        return cls(max_rows, pushed_rows, programs, *starts)


class AllReduce:
    """All-reduce among the ranks of one model: its symmetric memory and the epochs, which count the
    calls. Used by one stream at a time.

    Attributes:
        partial: [max_rows, hidden]: this rank writes its partial product here before `add`.
    """

    def __init__(
        self, peers: SymmetricBuffer, layout: AllReduceLayout, hidden: int, dtype: torch.dtype
    ):
        """Takes symmetric memory of `layout`, zeroed on every rank."""
        nbytes = layout.max_rows * hidden * dtype.itemsize
        self.partial = (
            peers.local[layout.partial : layout.partial + nbytes]
            .view(dtype)
            .view(layout.max_rows, hidden)
        )
        self._peers = peers
        self._layout = layout
        counts = (layout.pushed_rows, layout.programs)
        self._row_epochs, self._program_epochs = (
            torch.zeros(n, dtype=torch.int32, device=peers.local.device) for n in counts
        )

    def add(
        self, partial: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor | None,
        eps: float, *, is_first: bool = False,
        pdl: bool = False,
    ) -> torch.Tensor | None:  # fmt: skip
        """Adds the ranks' partial products to `residual`, in place, and returns the norm of the
        sum.

        Args:
            partial: [T, hidden], the beginning of `self.partial`.
            residual: [T, hidden], the same on every rank, before and after.
            norm_weight: [hidden]; None: no norm is computed, and None returned.
            eps: added to the mean square.
            is_first: `residual` is set to the sum of the partial products instead of added to; its
                old values are not read.
            pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

        Raises:
            ValueError: `partial` lies elsewhere, or `residual` differs in shape or is strided.
        """
        if norm_weight is None:
            self._launch(partial, residual, None, eps, None, is_first, pdl)
            return None
        normed = torch.empty_like(residual)
        written = _Written(normed.view(torch.int32))
        self._launch(partial, residual, norm_weight, eps, written, is_first, pdl)
        return normed

    def add_quantized(
        self, partial: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float,
        format: InputFormat, *, is_first: bool = False, pdl: bool = False,
    ) -> ScaledInputs:  # fmt: skip
        """Adds as `add` does, and returns the norm quantized, as `quantize` does with a norm: the
        same bits on every rank."""
        inputs, stride = empty_inputs(*partial.shape, format, partial.device)
        written = _Written.quantized(inputs, stride, format, partial)
        self._launch(partial, residual, norm_weight, eps, written, is_first, pdl)
        return inputs

    def _launch(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        written: _Written | None,
        is_first: bool,
        pdl: bool,
    ) -> None:
        """Launches the kernel for so many rows; arguments as of `add`. `written`: the output for
        the norm."""
        rows = len(partial)
        if rows == 0:
            return
        if (
            partial.data_ptr() != self.partial.data_ptr()
            or partial.shape != residual.shape
            or not residual.is_contiguous()
        ):
            raise ValueError(
                "partial must be the first rows of AllReduce.partial, and residual contiguous and "
                "of the same shape"
            )
        peers, layout, size = self._peers, self._layout, self._peers.size
        # The kernels read 4-byte words, the payload of an LL word: pairs of 2-byte numbers, or one
        # float32.
        words, sums = partial.view(torch.int32), residual.view(torch.int32)
        weight = words if norm_weight is None else norm_weight.view(torch.int32)
        written = written or _Written(words)
        width = words.shape[1]
        flags = written.constants | {
            "RANK": peers.rank, "SIZE": size, "WIDTH": width,
            "BLOCK": max(triton.next_power_of_2(width), written.constants["SCALED"]),
            "PAIRS": partial.element_size() == 2,
            "ELEMENT": _ELEMENTS[partial.dtype],
            "HAS_RESIDUAL": not is_first, "HAS_NORM": norm_weight is not None, "PDL": pdl,
        }  # fmt: skip
        operands = (
            words, sums, weight, written.values, written.scales, written.static_scale,
            written.scale_stride, peers.addresses,
        )  # fmt: skip
        warps = min(16, max(1, flags["BLOCK"] // 128))
        if rows <= layout.pushed_rows:
            _push_kernel[(rows,)](
                *operands, self._row_epochs, layout.words, eps, **flags, num_warps=warps,
                launch_pdl=pdl,
            )  # fmt: skip
        else:
            groups = triton.cdiv(rows, size)
            _two_shot_kernel[(min(groups, layout.programs),)](
                *operands, self._program_epochs, layout.flags, layout.partial, layout.sums, rows,
                groups, eps, **flags, num_warps=min(8, warps), launch_pdl=pdl,
            )  # fmt: skip


class _Written:
    """The output of the kernels for a norm.

    Attributes:
        values: of the norm: its int32 words, or of one byte, and then int16 pairs of 2-byte
            numbers.
        scales, static_scale: as in `ScaledInputs` and `InputFormat`; `values` where there is none.
        scale_stride: elements between the scales of two groups.
        constants: of the kernels.
    """

    def __init__(self, values: torch.Tensor):
        """Makes the output for a norm that is not quantized."""
        self.values = self.scales = self.static_scale = values
        self.scale_stride = 0
        self.constants: dict[str, Any] = {
            "SCALED": 0, "IS_STATIC": False, "MAXIMUM": 0.0, "TINY": SMALLEST, "VALUE": tl.int8,
        }  # fmt: skip

    @classmethod
    def quantized(
        cls, inputs: ScaledInputs, stride: int, format: InputFormat, partial: torch.Tensor
    ) -> _Written:
        """Returns the output for quantized activations. `stride`: the elements between two groups
        of scales; `partial`: the partial products to be summed."""
        numbers = 4 // partial.element_size()
        written = cls(inputs.values.view(torch.int16) if numbers == 2 else inputs.values)
        written.scales, written.scale_stride = inputs.scales, stride
        if format.static_scale is not None:
            written.static_scale = format.static_scale
        width = triton.next_power_of_2(partial.shape[1] // numbers)
        written.constants |= {
            "SCALED": GROUP // numbers if format.is_grouped else width,
            "IS_STATIC": format.static_scale is not None,
            "MAXIMUM": MAXIMA[format.dtype],
            "VALUE": _ELEMENTS[format.dtype],
        }
        return written


@triton.jit
def _halves(words, PAIRS: tl.constexpr, ELEMENT: tl.constexpr):
    """Returns the two numbers of each int32 word as float32 (of float32 the one, twice)."""
    if PAIRS:
        low = (words & 0xFFFF).to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
        high = ((words >> 16) & 0xFFFF).to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
    else:
        low = words.to(tl.float32, bitcast=True)
        high = low
    return low, high


@triton.jit
def _as_words(low, high, PAIRS: tl.constexpr, ELEMENT: tl.constexpr):
    """The inverse of `_halves`: rounds to ELEMENT."""
    if PAIRS:
        words = low.to(ELEMENT).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words |= high.to(ELEMENT).to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        words = low.to(tl.int32, bitcast=True)
    return words


@triton.jit
def _write_norm(
    total, weight_words, normed, scales, static_scale, scale_stride, row, columns, mask, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, ELEMENT: tl.constexpr,
    SCALED: tl.constexpr, IS_STATIC: tl.constexpr, MAXIMUM: tl.constexpr, TINY: tl.constexpr,
    VALUE: tl.constexpr,
):  # fmt: skip
    """Writes the RMSNorm of a row, given as words: as words, or quantized to VALUE with a scale for
    each SCALED words."""
    low, high = _halves(total, PAIRS, ELEMENT)
    weight_low, weight_high = _halves(weight_words, PAIRS, ELEMENT)
    square = tl.sum(low * low + high * high) / 2 if PAIRS else tl.sum(low * low)
    factor = tl.rsqrt(square / WIDTH + eps)
    low, high = low * factor * weight_low, high * factor * weight_high
    place = row.to(tl.int64) * WIDTH + columns
    if SCALED == 0:
        tl.store(normed + place, _as_words(low, high, PAIRS, ELEMENT), mask)
    else:
        groups: tl.constexpr = BLOCK // SCALED
        if IS_STATIC:
            scale = tl.zeros([groups], tl.float32) + tl.load(static_scale)
        else:
            largest = tl.reshape(tl.maximum(tl.abs(low), tl.abs(high)), [groups, SCALED])
            scale = tl.maximum(tl.max(largest, axis=1), TINY) / MAXIMUM
        wide = tl.reshape(tl.broadcast_to(scale[:, None], [groups, SCALED]), [BLOCK])
        if PAIRS:
            # Joined, so that the numbers of a pair are converted by one instruction. Of the pairs
            # (low, low) and (high, high) of two words, whose bytes a shift then separates, ptxas
            # 12.8 shifts the register before the conversion has written it.
            low, high = tl.split(_one_byte(tl.join(low / wide, high / wide), MAXIMUM, VALUE))
            pair = (low.to(tl.int16) & 0xFF) | (high.to(tl.int16) << 8)
            tl.store(normed + place, pair, mask)
        else:
            value = _one_byte(low / wide, MAXIMUM, VALUE)
            tl.store(normed + place, value.to(VALUE, bitcast=True), mask)
        group = tl.arange(0, groups)
        tl.store(scales + row + group * scale_stride, scale, group * SCALED < WIDTH)


@triton.jit
def _one_byte(x, MAXIMUM: tl.constexpr, VALUE: tl.constexpr):
    """Returns the bits of x rounded to VALUE, int8."""
    x = tl.minimum(tl.maximum(x, -MAXIMUM), MAXIMUM)
    if VALUE == tl.int8:  # noqa: SIM300  (it is no constant to the linter)
        x = (x + ROUNDER) - ROUNDER
    return x.to(VALUE).to(tl.int8, bitcast=True)


@triton.jit
def _begin(
    weight, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr
):
    """Returns the columns, their mask, and the words of the norm's weight, which are loaded before
    waiting for the preceding kernel."""
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    weight_words = tl.zeros([BLOCK], tl.int32)
    if HAS_NORM:
        weight_words = tl.load(weight + columns, mask, 0)
    wait_for_kernel(PDL)
    return columns, mask, weight_words


@triton.jit(do_not_specialize=["scale_stride"])
def _push_kernel(
    partial, residual, weight, normed, scales, static_scale, scale_stride, addresses, epochs,
    words_at, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, ELEMENT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
    SCALED: tl.constexpr, IS_STATIC: tl.constexpr, MAXIMUM: tl.constexpr, TINY: tl.constexpr,
    VALUE: tl.constexpr,
):  # fmt: skip
    """Sums one row. A word is (epoch << 32) | data. A row has two LL buffers, used alternately, and
    an epoch of its own that counts its all-reduces.

    Two buffers suffice: a rank pushes all-reduce e + 2 of a row only after it has received all of
    e + 1, which every other rank pushed after its program of all-reduce e was done reading; so no
    rank still reads the data that e + 2 overwrites.
    """
    row = tl.program_id(0)
    columns, mask, weight_words = _begin(weight, WIDTH, BLOCK, HAS_NORM, PDL)
    epoch = tl.load(epochs + row) + 1
    buffer = words_at + ((row * 2 + (epoch & 1)) * SIZE).to(tl.int64) * WIDTH * 8
    own = tl.load(partial + row * WIDTH + columns, mask, 0)
    words = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            remote = (tl.load(addresses + peer) + buffer + RANK * WIDTH * 8).to(
                tl.pointer_type(tl.int64)
            )
            tl.store(remote + columns, words, mask)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    if HAS_RESIDUAL:
        low, high = _halves(tl.load(residual + row * WIDTH + columns, mask, 0), PAIRS, ELEMENT)
    tl.debug_barrier()  # no store may be delayed until after the polling
    for sender in tl.static_range(SIZE):
        received = own
        if sender != RANK:
            mine = (tl.load(addresses + RANK) + buffer + sender * WIDTH * 8).to(
                tl.pointer_type(tl.int64)
            )
            words = tl.load(mine + columns, mask, 0, volatile=True)
            while tl.max((mask & ((words >> 32).to(tl.int32) != epoch)).to(tl.int32)) > 0:
                words = tl.load(mine + columns, mask, 0, volatile=True)
            received = words.to(tl.int32)
        received_low, received_high = _halves(received, PAIRS, ELEMENT)
        low += received_low
        high += received_high
    total = _as_words(low, high, PAIRS, ELEMENT)
    tl.store(residual + row * WIDTH + columns, total, mask)
    if HAS_NORM:
        _write_norm(
            total, weight_words, normed, scales, static_scale, scale_stride, row, columns, mask,
            eps, WIDTH, BLOCK, PAIRS, ELEMENT, SCALED, IS_STATIC, MAXIMUM, TINY, VALUE,
        )  # fmt: skip
    tl.store(epochs + row, epoch)


@triton.jit
def _signal(
    addresses, flags_at, stage: tl.constexpr, epoch, RANK: tl.constexpr, SIZE: tl.constexpr
):
    """Signals to the programs of the same number on all other ranks that this one has reached
    `stage`; its earlier writes are visible to them then.

    One thread for each rank: a release waits until the writes have arrived, and these waits overlap
    that way.
    """
    tl.debug_barrier()
    place = flags_at + ((tl.program_id(0) * 2 + stage) * SIZE + RANK) * 4
    peer = tl.arange(0, triton.next_power_of_2(SIZE))
    other = (peer < SIZE) & (peer != RANK)
    flags = (tl.load(addresses + peer, peer < SIZE, 0) + place).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags, tl.zeros_like(peer) + epoch, other, sem="release", scope="sys")


@triton.jit
def _await(addresses, flags_at, stage: tl.constexpr, epoch, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Waits until the programs of the same number on all other ranks have reached `stage`; their
    earlier writes are visible then."""
    place = flags_at + (tl.program_id(0) * 2 + stage) * SIZE * 4
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag = (tl.load(addresses + RANK) + place + peer * 4).to(tl.pointer_type(tl.int32))
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != epoch:
                pass
    tl.debug_barrier()


@triton.jit
def _sum_row(
    addresses, partial_at, residual, place, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, ELEMENT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Returns the words [BLOCK] of the sum of the residual, if there is one, and of the ranks'
    partial products, in the order of the ranks."""
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    if HAS_RESIDUAL:
        low, high = _halves(tl.load(residual + place, mask, 0), PAIRS, ELEMENT)
    for sender in tl.static_range(SIZE):
        remote = (tl.load(addresses + sender) + partial_at).to(tl.pointer_type(tl.int32))
        received_low, received_high = _halves(tl.load(remote + place, mask, 0), PAIRS, ELEMENT)
        low += received_low
        high += received_high
    return _as_words(low, high, PAIRS, ELEMENT)


@triton.jit(do_not_specialize=["scale_stride", "rows", "groups"])
def _two_shot_kernel(
    partial, residual, weight, normed, scales, static_scale, scale_stride, addresses, epochs,
    flags_at, partial_at, sums_at, rows, groups, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, ELEMENT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
    SCALED: tl.constexpr, IS_STATIC: tl.constexpr, MAXIMUM: tl.constexpr, TINY: tl.constexpr,
    VALUE: tl.constexpr,
):  # fmt: skip
    """Sums groups of SIZE rows, distributed round-robin over the programs; rank i sums row i of a
    group.

    The first flag states that a rank's partial products are written, and that it has read the sums
    of the all-reduce before (whose kernel has ended). The second flag states that this rank's sums
    are written, and that it has read the partial products. So a partial product may be overwritten
    once this kernel has ended, and a sum after the first flag of the next all-reduce.
    """
    columns, mask, weight_words = _begin(weight, WIDTH, BLOCK, HAS_NORM, PDL)
    epoch = tl.load(epochs + tl.program_id(0)) + 1
    _signal(addresses, flags_at, 0, epoch, RANK, SIZE)
    _await(addresses, flags_at, 0, epoch, RANK, SIZE)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        row = group * SIZE + RANK
        if row < rows:
            place = row.to(tl.int64) * WIDTH + columns
            total = _sum_row(
                addresses, partial_at, residual, place, mask, SIZE, BLOCK, PAIRS, ELEMENT,
                HAS_RESIDUAL,
            )  # fmt: skip
            tl.store(residual + place, total, mask)
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    tl.store(
                        (tl.load(addresses + peer) + sums_at).to(tl.pointer_type(tl.int32)) + place,
                        total,
                        mask,
                    )
            if HAS_NORM:
                _write_norm(
                    total, weight_words, normed, scales, static_scale, scale_stride, row, columns,
                    mask, eps, WIDTH, BLOCK, PAIRS, ELEMENT, SCALED, IS_STATIC, MAXIMUM, TINY,
                    VALUE,
                )  # fmt: skip
    _signal(addresses, flags_at, 1, epoch, RANK, SIZE)
    _await(addresses, flags_at, 1, epoch, RANK, SIZE)
    sums = (tl.load(addresses + RANK) + sums_at).to(tl.pointer_type(tl.int32))
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        for owner in tl.static_range(SIZE):
            row = group * SIZE + owner
            if (owner != RANK) & (row < rows):
                place = row.to(tl.int64) * WIDTH + columns
                total = tl.load(sums + place, mask, 0)
                tl.store(residual + place, total, mask)
                if HAS_NORM:
                    _write_norm(
                        total, weight_words, normed, scales, static_scale, scale_stride, row,
                        columns, mask, eps, WIDTH, BLOCK, PAIRS, ELEMENT, SCALED, IS_STATIC,
                        MAXIMUM, TINY, VALUE,
                    )  # fmt: skip
    tl.store(epochs + tl.program_id(0), epoch)
