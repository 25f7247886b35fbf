"""What engine and workers tell each other of the store of KV."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
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
        saves: int32 [S, 8]: group, place, block, hash, and a bit for each connector that keeps the
            block.
        reads: int32 [R, 8]: group, place, ticket, hash and connector of blocks that are read into
            the host, behind the loads. A ticket's reads are adjacent and of one connector.
        deletes: int32 [D, 6]: connector, group and hash of blocks that it is to delete, behind the
            saves; of all blocks, before the reads, if the group is -1.
        awaited: int32 [W], tickets for the end of one of which the step's result waits, for a
            while.
        sources: int32 [N], JSON, padded with spaces: where the reads of some tickets come from.
    """

    loads: I32 = array(np.int32, ndim=2)
    saves: I32 = array(np.int32, ndim=2)
    reads: I32 = array(np.int32, ndim=2)
    deletes: I32 = array(np.int32, ndim=2)
    awaited: I32 = array(np.int32)
    sources: I32 = array(np.int32)

    @classmethod
    def of(
        cls,
        loads: Sequence[Move],
        reads: Sequence[Move],
        saves: Sequence[Move],
        deletes: Sequence[tuple[int, int, bytes]] = (),
        awaited: Sequence[int] = (),
        sources: Mapping[int, str] | None = None,
    ) -> KVMoves:
        """Returns the section of these moves."""
        return cls(
            _table([(move.group, move.place, move.block, move.ticket) for move in loads], 4),
            _table(
                [(m.group, m.place, m.block, *_words(m.block_hash), m.connectors) for m in saves], 8
            ),
            _table(
                [(m.group, m.place, m.ticket, *_words(m.block_hash), m.connectors) for m in reads],
                8,
            ),
            _table([(connector, group, *_words(name)) for connector, group, name in deletes], 6),
            np.array(list(awaited), np.int32),
            _pack_text(json.dumps(sources) if sources else ""),
        )

    def source_of(self, ticket: int) -> str:
        """Returns where the reads of a ticket come from, in words of the connector."""
        text = self.sources.tobytes().decode()
        found: str = json.loads(text).get(str(ticket), "") if text else ""
        return found


def _words(block_hash: bytes) -> tuple[int, ...]:
    return _WORDS.unpack(block_hash)


def _pack_text(text: str) -> I32:
    data = text.encode()
    return np.frombuffer(data.ljust(-(-len(data) // 4) * 4), np.int32)


def _table(rows: Sequence[tuple[int, ...]], width: int) -> I32:
    return np.array(rows, np.int32).reshape(-1, width)


@dataclass(frozen=True, slots=True)
class KVLoaded(Section):
    """Loads that have ended since the last report.

    Attributes:
        tickets: int32 [T], of loads and of reads.
        counts: int32 [T]: how many blocks of a read are there, from its first one on; -1 of a load.
        micros: int32 [T]: the microseconds that the copies of a load took on this rank; -1 of a
            read.
    """

    tickets: I32 = array(np.int32)
    counts: I32 = array(np.int32)
    micros: I32 = array(np.int32)
