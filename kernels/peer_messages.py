"""Messages from one GPU of a host to another, over symmetric memory: hidden states and tokens
between the stages of a pipeline.

A channel has a few slots in the receiver's memory, which messages fill in turn. `_send_kernel`
waits until a slot is free, writes a message over NVLink or PCIe and then the message's number, its
epoch, at the receiver; `_receive_kernel` waits for the epoch, copies the message, and writes the
epoch at the sender, whose slot is free again. Both wait in the order of their stream, and so on
the GPU alone: the host never does. A receive that is launched only where its step begins holds no
multiprocessor while the step before computes, which one of NCCL does once it is posted: beside
these, steps took up to a third longer (notes/distributed.md).

Epochs are counted on the device, so a launch that was only compiled counts on neither side.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.symmetric_memory import SymmetricBuffer, is_last_program

#: Bytes that a thread moves at a time; messages take whole ones.
CHUNK_BYTES = 16
#: Chunks of a step of a program, and the most programs: enough for the bandwidth of NVLink.
_CHUNKS, _MAX_PROGRAMS = 512, 64
#: Where a channel's words and slots lie: the epoch of the last message that came, that of the last
#: one that the receiver has read, the slots.
_ARRIVED, _READ, _SLOTS_AT = 0, 128, 256
_ARRIVED_AT, _READ_AT, _FIRST_SLOT_AT = (tl.constexpr(at) for at in (_ARRIVED, _READ, _SLOTS_AT))


@dataclass(frozen=True, slots=True)
class ChannelLayout:
    """Where a channel lies in the symmetric memory of each rank.

    Attributes:
        at: its first byte, a multiple of 256.
        slots: messages that may be on their way, a power of two.
        slot_bytes: of the largest message, a multiple of 256.
    """

    at: int
    slots: int
    slot_bytes: int

    @classmethod
    def of(cls, at: int, slots: int, max_bytes: int) -> ChannelLayout:
        """Returns the layout of a channel with at least `slots` slots for messages of up to
        `max_bytes` bytes, behind `at` bytes."""
        return cls(-(-at // 256) * 256, triton.next_power_of_2(slots), -(-max_bytes // 256) * 256)

    @property
    def end(self) -> int:
        """The first byte behind the channel."""
        return self.at + _SLOTS_AT + self.slots * self.slot_bytes


class PeerChannel:
    """One end of a channel: a rank sends to the peer, or receives from it.

    Args:
        memory: zeroed on every rank; each rank may send to one other, and receive from one.
        layout: the channel's, the same on both ends.
        peer: the rank at the other end.
    """

    def __init__(self, memory: SymmetricBuffer, layout: ChannelLayout, peer: int):
        self._memory, self._layout, self._peer = memory, layout, peer
        # the epoch, and the ticket of a launch's programs
        self._state = torch.zeros(2, dtype=torch.int32, device=memory.local.device)

    def send(self, values: torch.Tensor) -> None:
        """Sends a tensor of any shape and dtype; it may be written to behind this on the stream.

        Raises ValueError if it is larger than a slot.
        """
        words = self._words(values.nbytes)
        source = values.contiguous().view(-1).view(torch.uint8)
        if values.nbytes % CHUNK_BYTES or source.data_ptr() % CHUNK_BYTES:
            padded = torch.empty(words * 4, dtype=torch.uint8, device=values.device)
            padded[: values.nbytes] = source
            source = padded
        self._launch(_send_kernel, source.view(torch.int32), words)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the next message, of the shape and dtype that were sent. Kernels launched behind
        this on the stream wait for it."""
        values = torch.empty(shape, dtype=dtype, device="meta")
        words = self._words(values.nbytes)
        target = torch.empty(words, dtype=torch.int32, device=self._state.device)
        self._launch(_receive_kernel, target, words)
        return target.view(torch.uint8)[: values.nbytes].view(dtype).view(shape)

    def _words(self, nbytes: int) -> int:
        if nbytes > self._layout.slot_bytes:
            raise ValueError(f"{nbytes} bytes do not fit into {self._layout.slot_bytes}")
        return -(-nbytes // CHUNK_BYTES) * (CHUNK_BYTES // 4)

    def _launch(self, kernel: triton.JITFunction, values: torch.Tensor, words: int) -> None:
        layout, memory = self._layout, self._memory
        chunks = words * 4 // CHUNK_BYTES
        programs = max(1, min(_MAX_PROGRAMS, triton.cdiv(chunks, _CHUNKS)))
        kernel[(programs,)](
            values, chunks, memory.addresses, self._state, memory.rank, self._peer, layout.at,
            layout.slot_bytes, SLOTS=layout.slots, CHUNKS=_CHUNKS,
        )  # fmt: skip


@triton.jit
def _wait_for(base, at, epoch):
    """Waits until the word at `base` + `at` is an epoch or a later one. Epochs may wrap around."""
    word = (base + at).to(tl.pointer_type(tl.int32))
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while seen - epoch < 0:
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def _write_epoch(base, at, epoch):
    """Writes the word at `base` + `at`, on any GPU, after all writes that this program has seen."""
    tl.atomic_xchg((base + at).to(tl.pointer_type(tl.int32)), epoch, sem="release", scope="sys")


@triton.jit
def _copy(to, source, chunks, CHUNKS: tl.constexpr):
    """Copies 16 bytes `chunks` times; all programs of the launch together."""
    word = tl.arange(0, 4)[None, :]
    for first in range(tl.program_id(0) * CHUNKS, chunks, tl.num_programs(0) * CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        is_inside = (chunk < chunks)[:, None] & (word >= 0)
        at = chunk[:, None].to(tl.int64) * 4 + word
        tl.store(to + at, tl.load(source + at, is_inside), is_inside)


@triton.jit
def _slot(base, at, epoch, slot_bytes, SLOTS: tl.constexpr):
    """Returns int32 pointer to the slot of an epoch in the memory at `base`."""
    slot = base + at + _FIRST_SLOT_AT + (epoch & (SLOTS - 1)).to(tl.int64) * slot_bytes
    return tl.multiple_of(slot.to(tl.pointer_type(tl.int32)), 16)


@triton.jit(do_not_specialize=["chunks", "rank", "peer", "at", "slot_bytes"])
def _send_kernel(
    source, chunks, addresses, state, rank, peer, at, slot_bytes, SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sends a message, by any number of programs. `state` int32 [2]: the last epoch that was sent,
    and a ticket."""
    own, there = tl.load(addresses + rank), tl.load(addresses + peer)
    epoch = tl.load(state) + 1
    _wait_for(own, at + _READ_AT, epoch - SLOTS)
    _copy(_slot(there, at, epoch, slot_bytes, SLOTS), source, chunks, CHUNKS)
    if is_last_program(state + 1):
        tl.store(state, epoch)
        _write_epoch(there, at + _ARRIVED_AT, epoch)


@triton.jit(do_not_specialize=["chunks", "rank", "peer", "at", "slot_bytes"])
def _receive_kernel(
    target, chunks, addresses, state, rank, peer, at, slot_bytes, SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Receives a message, as `_send_kernel` sends it; `state` has the last epoch that was
    received."""
    own, there = tl.load(addresses + rank), tl.load(addresses + peer)
    epoch = tl.load(state) + 1
    _wait_for(own, at + _ARRIVED_AT, epoch)
    _copy(target, _slot(own, at, epoch, slot_bytes, SLOTS), chunks, CHUNKS)
    if is_last_program(state + 1):
        tl.store(state, epoch)
        _write_epoch(there, at + _READ_AT, epoch)
