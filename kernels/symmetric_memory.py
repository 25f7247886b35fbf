"""Peer memory, what every rank of a host can read and write in every other's; and ll_buffers in it,
for programs that talk.

Through a ll_buffer the programs of one row, one on each rank, tell each other a few numbers in the
midst of a kernel: see `all_gather`. `sampling` calls it; `all_reduce` has exchanges of its own, for
whole rows. A number travels as one 8-byte word with the number of its all_gather, the epoch, in the
upper half (the "LL" protocol of NCCL): a reader polls until it finds the epoch, so a word needs no
flag and no fence.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Numbers of 32 bits that an all_gather carries from each rank.
NUMBERS = 4
_NUMBERS = tl.constexpr(NUMBERS)


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """Memory of the same size on every rank, open to all of them.

    Attributes:
        local: uint8 [nbytes], this rank's part.
        addresses: int64 [size] on the device, the base address of each rank's part as this rank
            sees it.
        rank, size: this rank, and how many there are.
    """

    local: torch.Tensor
    addresses: torch.Tensor
    rank: int
    size: int


class LLBuffers:
    """A ll_buffer for each row, on every rank. Used by one stream at a time, in the same order on
    every rank.

    Attributes:
        addresses: int64 [size], as in `SymmetricBuffer`; there lie int64 words [rows, 2, size,
            NUMBERS], by sender.
        epochs: int32 [rows], how many exchanges each row has had. They wrap around harmlessly: no
            word is older than two exchanges.
        rank, size: this rank, and how many there are.
    """

    def __init__(self, peers: SymmetricBuffer):
        """Takes peer memory of `nbytes(rows, size)`, zeroed on every rank."""
        self._peers = peers  # keeps the memory
        self.addresses = peers.addresses
        self.rank = peers.rank
        self.size = peers.size
        rows = peers.local.nbytes // self.nbytes(1, peers.size)
        self.epochs = torch.zeros(rows, dtype=torch.int32, device=peers.local.device)

    @staticmethod
    def nbytes(rows: int, size: int) -> int:
        """Returns how much peer memory the ll_buffers of `rows` rows take on each of `size`
        ranks."""
        return rows * 2 * size * NUMBERS * 8


@triton.jit
def is_rank(SIZE: tl.constexpr):
    """Returns which of P entries, by rank, are no repetitions: bool [P]."""
    return tl.arange(0, triton.next_power_of_2(SIZE)) < SIZE


@triton.jit
def open_ll_buffer(addresses, epochs, row, rank, SIZE: tl.constexpr):
    """Returns what `all_gather` needs: pointers to where this rank's words go and to where the
    others' arrive, and the row's epoch.

    Both are [P, NUMBERS], of the ranks in order; P is the next power of two, and what is beyond the
    ranks repeats the last. The program stores the epoch in `epochs` again when it is done.
    """
    sender = tl.minimum(tl.arange(0, triton.next_power_of_2(SIZE)), SIZE - 1)[:, None]
    number = tl.arange(0, _NUMBERS)[None, :]
    box = row * (2 * SIZE * _NUMBERS)
    to = tl.load(addresses + sender).to(tl.pointer_type(tl.int64)) + (
        box + rank * _NUMBERS + number
    )
    here = tl.load(addresses + rank).to(tl.pointer_type(tl.int64)) + (
        box + sender * _NUMBERS + number
    )
    return to, here, tl.load(epochs + row)


@triton.jit
def all_gather(to, here, epoch, first, second, third, fourth, SIZE: tl.constexpr):
    """Tells all ranks four numbers of this one, and returns theirs: int32 [P] four times, and the
    new epoch.

    Args:
        to, here, epoch: of `open_ll_buffer`, or the epoch that the all_gather before returned.
        first, second, third, fourth: int32 scalars.

    A ll_buffer has two places for each word, used in turn. They suffice: all_gather e + 2
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
    turn = (epoch & 1) * (SIZE * _NUMBERS)
    # A warp may be behind, and still read what the all_gather before has brought; the others wait
    # for it here.
    tl.debug_barrier()
    once = is_rank(SIZE)[:, None] & (number >= 0)
    tl.atomic_xchg(to + turn, tl.broadcast_to(words, once.shape), once, sem="relaxed", scope="sys")
    got = tl.load(here + turn, volatile=True)
    while tl.max(((got >> 32).to(tl.int32) != epoch).to(tl.int32)) > 0:
        got = tl.load(here + turn, volatile=True)
    # So few words are polled by several warps, and not each of them need have seen what ended the
    # loop; after the barrier each does.
    tl.debug_barrier()
    got = tl.load(here + turn, volatile=True).to(tl.int32)
    return _column(got, 0), _column(got, 1), _column(got, 2), _column(got, 3), epoch


@triton.jit
def _column(numbers, index: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, _NUMBERS)[None, :] == index, numbers, 0), axis=1)


@triton.jit
def as_bits(x):
    """Returns a float32 as the int32 of the same bits."""
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
