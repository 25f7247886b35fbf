"""What engine and workers tell each other of the store of KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array
from aioinfer.scheduler.stored_blocks import Move


@dataclass(frozen=True, slots=True)
class KVMoves(Section):
    """Blocks that go from one memory to another before a step is computed, loads before saves.

    Attributes:
        loads: int32 [L, 4]: group, place on the host, block of the device, ticket. A ticket's loads
            are adjacent.
        saves: int32 [S, 3]: group, place, block.
        awaited: int32 [W], tickets for the end of one of which the step's result waits, for a
            while.
    """

    loads: I32 = array(np.int32, ndim=2)
    saves: I32 = array(np.int32, ndim=2)
    awaited: I32 = array(np.int32)

    @classmethod
    def of(
        cls, loads: Sequence[Move], saves: Sequence[Move], awaited: Sequence[int] = ()
    ) -> KVMoves:
        """Returns the section of these moves."""
        rows = [(move.group, move.place, move.block, move.ticket) for move in (*loads, *saves)]
        columns = np.array(rows, np.int32).reshape(-1, 4)
        return cls(
            columns[: len(loads)], columns[len(loads) :, :3], np.array(list(awaited), np.int32)
        )


@dataclass(frozen=True, slots=True)
class KVLoaded(Section):
    """Loads that have ended since the last report.

    Attributes:
        tickets: int32 [T].
    """

    tickets: I32 = array(np.int32)
