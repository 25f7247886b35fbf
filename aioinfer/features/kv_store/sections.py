"""What engine and workers tell each other of the store of KV."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array
from aioinfer.scheduler.stored_blocks import Move

_WORDS = struct.Struct("=4i")


@dataclass(frozen=True, slots=True)
class KVMoves(Section):
    """Blocks that go from one memory to another before a step is computed, loads before saves.

    Attributes:
        loads: int32 [L, 4]: group, place on the host, block of the device, ticket. A ticket's loads
            are adjacent.
        saves: int32 [S, 3]: group, place, block.
        reads: int32 [R, 7]: group, place, ticket and hash of blocks that are read from the disk
            into the host, behind the loads. A ticket's reads are adjacent.
        writes: int32 [V, 6]: group, place and hash of saved blocks that are written to the disk.
        deletes: int32 [D, 5]: group and hash of files.
        awaited: int32 [W], tickets for the end of one of which the step's result waits, for a
            while.
    """

    loads: I32 = array(np.int32, ndim=2)
    saves: I32 = array(np.int32, ndim=2)
    reads: I32 = array(np.int32, ndim=2)
    writes: I32 = array(np.int32, ndim=2)
    deletes: I32 = array(np.int32, ndim=2)
    awaited: I32 = array(np.int32)

    @classmethod
    def of(
        cls,
        loads: Sequence[Move],
        reads: Sequence[Move],
        saves: Sequence[Move],
        deletes: Sequence[tuple[int, bytes]] = (),
        awaited: Sequence[int] = (),
    ) -> KVMoves:
        """Returns the section of these moves."""
        return cls(
            _table([(move.group, move.place, move.block, move.ticket) for move in loads], 4),
            _table([(move.group, move.place, move.block) for move in saves], 3),
            _table([(m.group, m.place, m.ticket, *_words(m.block_hash)) for m in reads], 7),
            _table([(m.group, m.place, *_words(m.block_hash)) for m in saves if m.block_hash], 6),
            _table([(group, *_words(name)) for group, name in deletes], 5),
            np.array(list(awaited), np.int32),
        )


def _words(block_hash: bytes) -> tuple[int, ...]:
    return _WORDS.unpack(block_hash)


def _table(rows: Sequence[tuple[int, ...]], width: int) -> I32:
    return np.array(rows, np.int32).reshape(-1, width)


@dataclass(frozen=True, slots=True)
class KVLoaded(Section):
    """Loads that have ended since the last report.

    Attributes:
        tickets: int32 [T], of loads and of reads.
        failed: int32 [F, 2], ticket and number within the ticket of blocks that could not be read.
    """

    tickets: I32 = array(np.int32)
    failed: I32 = array(np.int32, ndim=2)
