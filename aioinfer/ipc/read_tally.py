"""The ends of reads of KV blocks on all ranks of an engine: a block counts as read once every rank
has its part of it.

Each rank reads at its own pace, and one of them reports to the engine. The ranks of a host share a
small table in anonymous memory: a rank records how many blocks of a read it has from the start on,
and the reporting rank takes the fewest, once all have recorded. Reads are numbered in the order of
the plans, which is the same on every rank. A record is one int64, so that it is never seen by
halves. `executor.host_ranks` makes the table; `features.kv_store` uses it.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing import reduction
from typing import Any

import numpy as np

from aioinfer.ipc.anonymous_file import anonymous_file

#: Reads that may be under way at a time in an engine.
MAX_READS = 64
_COUNT_BITS = 24


class ReadTally:
    """What each rank has of the reads under way. It can be pickled only for a process that is being
    spawned, which inherits the memory."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._fd = anonymous_file("aioinfer-reads", num_ranks * MAX_READS * 8)
        self._map()

    def _map(self) -> None:
        memory = mmap.mmap(self._fd, 0)
        self._records = np.frombuffer(memory, np.int64).reshape(self._num_ranks, MAX_READS)

    def record(self, rank: int, number: int, count: int) -> None:
        """Records that `rank` has the first `count` blocks of a read, and will not have more."""
        self._records[rank, number % MAX_READS] = (number + 1) << _COUNT_BITS | count

    def fewest(self, number: int) -> int | None:
        """Returns how many blocks of a read all ranks have, from the start on; None before the
        read has ended on every rank."""
        records = self._records[:, number % MAX_READS]
        if (records >> _COUNT_BITS != number + 1).any():
            return None
        return int((records & ((1 << _COUNT_BITS) - 1)).min())

    def close(self) -> None:
        """Closes the descriptor, and the one that the mapping has. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._records = np.empty((0, MAX_READS), np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {"num_ranks": self._num_ranks, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._num_ranks = state["num_ranks"]
        self._fd = state["fd"].detach()
        self._map()
