"""Symmetric memory, which all ranks of a host can read and write, and LL buffers in it, with which
running kernels of several ranks send each other numbers.

With an LL buffer the programs of one row, one on each rank, all-gather a few numbers in the middle
of a kernel: see `all_gather`. `sampling` uses it; `all_reduce` has buffers of its own, for whole
rows. A number is sent as one 8-byte word with the epoch, the number of the all-gather, in its upper
half (the "LL" protocol of NCCL): a reader polls until it finds the epoch, so that no flag and no
fence is needed.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Numbers of 32 bits that an all-gather sends from each rank.
NUMBERS = 4
_NUMBERS = tl.constexpr(NUMBERS)


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """Memory of the same size on every rank, which all ranks can read and write.

    Attributes:
        local: uint8 [nbytes], this rank's part.
        addresses: int64 [size] on the device, the base address of each rank's part as this rank
            sees it.
        rank, size: this rank, and the number of ranks.
    """

    local: torch.Tensor
    addresses: torch.Tensor
    rank: int
    size: int


class LLBuffers:
    """An LL buffer for each row, on every rank. Used by one stream at a time, in the same order on
    every rank.

    Attributes:
        addresses: int64 [size], as in `SymmetricBuffer`, of int64 words [rows, 2, size, NUMBERS],
            indexed by the rank that sends them.
        epochs: int32 [rows], the number of all-gathers of each row. It may wrap around: no word is
            older than two all-gathers.
        rank, size: this rank, and the number of ranks.
    """

    def __init__(self, peers: SymmetricBuffer):
        """Takes symmetric memory of `nbytes(rows, size)`, zeroed on every rank."""
        self._peers = peers  # keeps the memory alive
        self.addresses = peers.addresses
        self.rank = peers.rank
        self.size = peers.size
        rows = peers.local.nbytes // self.nbytes(1, peers.size)
        self.epochs = torch.zeros(rows, dtype=torch.int32, device=peers.local.device)

    @staticmethod
    def nbytes(rows: int, size: int) -> int:
        """Returns the bytes of symmetric memory that LL buffers for `rows` rows take on each of
        `size` ranks."""
        return rows * 2 * size * NUMBERS * 8


@triton.jit
def is_last_program(ticket):
    """Returns whether this is the last program of the launch to come here, and sets the ticket to 0
    then: all earlier writes of the other programs, on any GPU, are visible to it and to the ranks
    that it releases a word for."""
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    is_last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="sys") == programs - 1
    if is_last:
        tl.store(ticket, 0)
    return is_last


@triton.jit
def is_rank(SIZE: tl.constexpr):
    """Returns which of P entries belong to a rank and are no padding: bool [P]."""
    return tl.arange(0, triton.next_power_of_2(SIZE)) < SIZE


@triton.jit
def open_ll_buffer(addresses, epochs, row, rank, SIZE: tl.constexpr):
    """Returns the arguments of `all_gather`: pointers to this rank's words in every rank's memory,
    pointers to every rank's words in this rank's memory, and the row's epoch.

    Both are [P, NUMBERS], by rank; P is the next power of two, and the padding repeats the last
    rank. The program stores the epoch in `epochs` when it is done.
    """
    sender = tl.minimum(tl.arange(0, triton.next_power_of_2(SIZE)), SIZE - 1)[:, None]
    number = tl.arange(0, _NUMBERS)[None, :]
    row_offset = row * (2 * SIZE * _NUMBERS)
    to = tl.load(addresses + sender).to(tl.pointer_type(tl.int64)) + (
        row_offset + rank * _NUMBERS + number
    )
    here = tl.load(addresses + rank).to(tl.pointer_type(tl.int64)) + (
        row_offset + sender * _NUMBERS + number
    )
    return to, here, tl.load(epochs + row)


@triton.jit
def all_gather(to, here, epoch, first, second, third, fourth, SIZE: tl.constexpr):
    """All-gathers four numbers: sends this rank's numbers to all ranks, and returns the numbers of
    all ranks, int32 [P] four times, and the new epoch.

    Args:
        to, here, epoch: from `open_ll_buffer`; the epoch from the previous `all_gather`, if any.
        first, second, third, fourth: int32 scalars.

    An LL buffer has two words for each number, used alternately. Two suffice: all-gather e + 2
    overwrites the words of e, and a rank begins it only when it has every rank's words of e + 1,
    each of which was sent after that rank's program had read all of e.

    All programs of a row have to run at the same time. They do: a GPU starts the programs of a
    launch in order, so the first unfinished row runs on every rank.
    """
    epoch += 1
    number = tl.arange(0, _NUMBERS)[None, :]
    bits = tl.where(
        number == 0, first, tl.where(number == 1, second, tl.where(number == 2, third, fourth))
    )
    words = (epoch.to(tl.int64) << 32) | (bits.to(tl.int64) & 0xFFFFFFFF)
    buffer_offset = (epoch & 1) * (SIZE * _NUMBERS)
    # A warp may be behind, still reading the words of the previous all-gather; the other warps wait
    # for it here.
    tl.debug_barrier()
    once = is_rank(SIZE)[:, None] & (number >= 0)
    tl.atomic_xchg(
        to + buffer_offset, tl.broadcast_to(words, once.shape), once, sem="relaxed", scope="sys"
    )
    received = tl.load(here + buffer_offset, volatile=True)
    while tl.max(((received >> 32).to(tl.int32) != epoch).to(tl.int32)) > 0:
        received = tl.load(here + buffer_offset, volatile=True)
    # Several warps poll the same few words, and not every warp has seen the values that ended the
    # loop; after the barrier every warp reads them.
    tl.debug_barrier()
    received = tl.load(here + buffer_offset, volatile=True).to(tl.int32)
    return (
        _column(received, 0),
        _column(received, 1),
        _column(received, 2),
        _column(received, 3),
        epoch,
    )


@triton.jit
def _column(numbers, index: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, _NUMBERS)[None, :] == index, numbers, 0), axis=1)


@triton.jit
def as_bits(x):
    """Returns a float32 as the int32 with the same bits."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_floats(bits):
    """The inverse of `as_bits`."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def sum_of_ranks(to, here, epoch, x, SIZE: tl.constexpr):
    """Returns the sum of all ranks' x (a float32 scalar), the same bits on every rank, and the new
    epoch."""
    bits, _, _, _, epoch = all_gather(to, here, epoch, as_bits(x), 0, 0, 0, SIZE)
    return tl.sum(tl.where(is_rank(SIZE), as_floats(bits), 0.0)), epoch


@triton.jit
def max_of_ranks(to, here, epoch, x, SIZE: tl.constexpr):
    """Returns the largest of all ranks' x (a float32 scalar), and the new epoch."""
    bits, _, _, _, epoch = all_gather(to, here, epoch, as_bits(x), 0, 0, 0, SIZE)
    return tl.max(as_floats(bits)), epoch
