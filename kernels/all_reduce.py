"""Summing the partial products of tensor-parallel ranks through peer memory, with the residual add
and the norm that follow.

Called after every row-parallel product on GPUs, and after the embedding; captured in the step's
graph. Two kernels, of which each call takes one, and no copy or launch beside it:

- Few rows: `_push_kernel`, one program a row. Each rank writes its row into the memory of all
  others, as 8-byte words that hold 4 bytes of data and a number that says of which exchange they
  are; the reader polls the data itself, so one way over the link is all the latency (the "LL"
  protocol of NCCL).
- Many rows: `_two_shot_kernel`. Of every `size` rows each rank sums one, reading the others'
  partial products, and writes the sum to all of them (the two-shot all-reduce of TensorRT-LLM and
  vLLM). Two flags a program order it.

Every rank gets the same bits: a row is summed in the order of the ranks, in float32, with the
residual, and rounded once. Nothing multicasts. What a rank may overwrite, and when, is argued at
the kernels.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.symmetric_memory import SymmetricBuffer
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Up to so many rows are pushed to one other rank, and fewer to more: twice the bytes, half the
#: latency (docs/kernels-notes.md).
PUSHED_ROWS = 64
#: Programs of the two-shot kernel: enough rows in flight to fill the link, few enough that all run
#: at a time.
MAX_PROGRAMS = 528
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class AllReduceLayout:
    """Where what lies in a rank's peer memory, in bytes from its beginning. The same on every rank.

    Attributes:
        max_rows, pushed_rows, programs: the most rows of an exchange, of one that is pushed, and
            the most programs of the others.
        words: [pushed_rows, 2, size] rows of 8-byte words. flags: int32 [programs, 2, size].
        partial, sums: [max_rows, hidden] of the model's dtype. nbytes: of all.
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
    """The sums of one model's ranks: its peer memory, and what counts the exchanges. Used by one
    stream at a time.

    Attributes:
        partial: [max_rows, hidden], where a product is to be written whose sum is wanted.
    """

    def __init__(
        self, peers: SymmetricBuffer, layout: AllReduceLayout, hidden: int, dtype: torch.dtype
    ):
        """Takes peer memory of `layout`, zeroed on every rank."""
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
            norm_weight: [hidden]; without it nothing is normed or returned.
            eps: added to the mean square.
            is_first: `residual` becomes the sum alone; what it held is not read.
            pdl: launch as a programmatic dependent of the kernel before (Hopper and later).
        """
        rows = len(partial)
        normed = None if norm_weight is None else torch.empty_like(residual)
        if rows == 0:
            return normed
        if (
            partial.data_ptr() != self.partial.data_ptr()
            or partial.shape != residual.shape
            or not residual.is_contiguous()
        ):
            raise ValueError(
                "partial must be the beginning of the exchange's own, and residual "
                "contiguous and like it"
            )
        peers, layout, size = self._peers, self._layout, self._peers.size
        # A tensor of 2-byte numbers is read as pairs of them: the words that are pushed hold as
        # much.
        words = [partial.view(torch.int32), residual.view(torch.int32)]
        words += [words[0] if t is None else t.view(torch.int32) for t in (norm_weight, normed)]
        width = words[0].shape[1]
        flags = {
            "RANK": peers.rank, "SIZE": size, "WIDTH": width,
            "BLOCK": triton.next_power_of_2(width),
            "PAIRS": partial.element_size() == 2,
            "ELEMENT": {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[partial.dtype],
            "HAS_RESIDUAL": not is_first, "HAS_NORM": norm_weight is not None, "PDL": pdl,
        }  # fmt: skip
        warps = min(16, max(1, flags["BLOCK"] // 128))
        if rows <= layout.pushed_rows:
            _push_kernel[(rows,)](
                *words, peers.addresses, self._row_epochs, layout.words, eps, **flags,
                num_warps=warps, launch_pdl=pdl,
            )  # fmt: skip
        else:
            groups = triton.cdiv(rows, size)
            _two_shot_kernel[(min(groups, layout.programs),)](
                *words, peers.addresses, self._program_epochs, layout.flags, layout.partial,
                layout.sums, rows, groups, eps, **flags,
                num_warps=min(8, warps), launch_pdl=pdl,
            )  # fmt: skip
        return normed


@triton.jit
def _halves(words, PAIRS: tl.constexpr, ELEMENT: tl.constexpr):
    """Returns the two float32 that each int32 word holds (of float32 the one, twice)."""
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
def _norm(
    low, high, weight_words, eps, WIDTH: tl.constexpr, PAIRS: tl.constexpr, ELEMENT: tl.constexpr
):
    """Returns the words of the RMS norm of a row, given in float32 as it was rounded."""
    weight_low, weight_high = _halves(weight_words, PAIRS, ELEMENT)
    square = tl.sum(low * low + high * high) / 2 if PAIRS else tl.sum(low * low)
    scale = tl.rsqrt(square / WIDTH + eps)
    return _as_words(low * scale * weight_low, high * scale * weight_high, PAIRS, ELEMENT)


@triton.jit
def _begin(
    weight, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr
):
    """Returns the columns, which of them there are, and the norm's weight, which is read before the
    kernel before is waited for."""
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    weight_words = tl.zeros([BLOCK], tl.int32)
    if HAS_NORM:
        weight_words = tl.load(weight + columns, mask, 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    return columns, mask, weight_words


@triton.jit
def _push_kernel(
    partial, residual, weight, normed, addresses, epochs, words_at, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, ELEMENT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: a word is (epoch << 32) | data. A row has two places, used in turn, and an epoch of
    its own that counts its exchanges.

    Two places suffice: a rank pushes exchange e + 2 of a row only after it has got all of e + 1,
    which every other rank pushed after its program of exchange e was done reading; so nobody reads
    what e + 2 overwrites.
    """
    row = tl.program_id(0)
    columns, mask, weight_words = _begin(weight, WIDTH, BLOCK, HAS_NORM, PDL)
    epoch = tl.load(epochs + row) + 1
    places = words_at + ((row * 2 + (epoch & 1)) * SIZE).to(tl.int64) * WIDTH * 8
    own = tl.load(partial + row * WIDTH + columns, mask, 0)
    words = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            there = (tl.load(addresses + peer) + places + RANK * WIDTH * 8).to(
                tl.pointer_type(tl.int64)
            )
            tl.store(there + columns, words, mask)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    if HAS_RESIDUAL:
        low, high = _halves(tl.load(residual + row * WIDTH + columns, mask, 0), PAIRS, ELEMENT)
    tl.debug_barrier()  # no store may be put off until after the waiting
    for sender in tl.static_range(SIZE):
        got = own
        if sender != RANK:
            here = (tl.load(addresses + RANK) + places + sender * WIDTH * 8).to(
                tl.pointer_type(tl.int64)
            )
            words = tl.load(here + columns, mask, 0, volatile=True)
            while tl.max((mask & ((words >> 32).to(tl.int32) != epoch)).to(tl.int32)) > 0:
                words = tl.load(here + columns, mask, 0, volatile=True)
            got = words.to(tl.int32)
        got_low, got_high = _halves(got, PAIRS, ELEMENT)
        low += got_low
        high += got_high
    total = _as_words(low, high, PAIRS, ELEMENT)
    tl.store(residual + row * WIDTH + columns, total, mask)
    if HAS_NORM:
        low, high = _halves(total, PAIRS, ELEMENT)
        tl.store(
            normed + row * WIDTH + columns,
            _norm(low, high, weight_words, eps, WIDTH, PAIRS, ELEMENT),
            mask,
        )
    tl.store(epochs + row, epoch)


@triton.jit
def _signal(
    addresses, flags_at, stage: tl.constexpr, epoch, RANK: tl.constexpr, SIZE: tl.constexpr
):
    """Tells every other rank's program of this number that this one has come to `stage`, with all
    that it wrote before.

    A thread for each of them: a release waits until what was written has arrived, and they need not
    do so one after the other.
    """
    tl.debug_barrier()
    place = flags_at + ((tl.program_id(0) * 2 + stage) * SIZE + RANK) * 4
    peer = tl.arange(0, triton.next_power_of_2(SIZE))
    other = (peer < SIZE) & (peer != RANK)
    flags = (tl.load(addresses + peer, peer < SIZE, 0) + place).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags, tl.zeros_like(peer) + epoch, other, sem="release", scope="sys")


@triton.jit
def _await(addresses, flags_at, stage: tl.constexpr, epoch, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Waits until the other ranks' programs of this number have come to `stage`, and sees what they
    wrote before."""
    place = flags_at + (tl.program_id(0) * 2 + stage) * SIZE * 4
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag = (tl.load(addresses + RANK) + place + peer * 4).to(tl.pointer_type(tl.int32))
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != epoch:
                pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rows", "groups"])
def _two_shot_kernel(
    partial, residual, weight, normed, addresses, epochs, flags_at, partial_at, sums_at, rows,
    groups, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, ELEMENT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs take groups of SIZE rows in turn; rank i sums the group's row i.

    The first flag says that a rank's partial products are there, and that it is done with the sums
    of the exchange before (its kernel has ended); the second one that the sums are there, and that
    it is done reading partial products. So a partial product may be overwritten when this kernel
    has ended, and a sum after the next exchange's first flag.
    """
    columns, mask, weight_words = _begin(weight, WIDTH, BLOCK, HAS_NORM, PDL)
    epoch = tl.load(epochs + tl.program_id(0)) + 1
    _signal(addresses, flags_at, 0, epoch, RANK, SIZE)
    _await(addresses, flags_at, 0, epoch, RANK, SIZE)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        row = group * SIZE + RANK
        if row < rows:
            place = row.to(tl.int64) * WIDTH + columns
            low = tl.zeros([BLOCK], tl.float32)
            high = tl.zeros([BLOCK], tl.float32)
            if HAS_RESIDUAL:
                low, high = _halves(tl.load(residual + place, mask, 0), PAIRS, ELEMENT)
            for sender in tl.static_range(SIZE):
                there = (tl.load(addresses + sender) + partial_at).to(tl.pointer_type(tl.int32))
                got_low, got_high = _halves(tl.load(there + place, mask, 0), PAIRS, ELEMENT)
                low += got_low
                high += got_high
            total = _as_words(low, high, PAIRS, ELEMENT)
            tl.store(residual + place, total, mask)
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    tl.store(
                        (tl.load(addresses + peer) + sums_at).to(tl.pointer_type(tl.int32)) + place,
                        total,
                        mask,
                    )
            if HAS_NORM:
                low, high = _halves(total, PAIRS, ELEMENT)
                tl.store(
                    normed + place, _norm(low, high, weight_words, eps, WIDTH, PAIRS, ELEMENT), mask
                )
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
                    low, high = _halves(total, PAIRS, ELEMENT)
                    tl.store(
                        normed + place,
                        _norm(low, high, weight_words, eps, WIDTH, PAIRS, ELEMENT),
                        mask,
                    )
    tl.store(epochs + tl.program_id(0), epoch)


def all_reduce_reference(
    partials: list[torch.Tensor], residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the new residual and its norm, in plain torch and the inputs' dtype (pass float64 for
    a reference)."""
    total = residual + sum(partials)
    return total, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * norm_weight
