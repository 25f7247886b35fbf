"""The ends of reads on all ranks of an engine: of KV blocks, which count once every rank has its
part of them, and of adapters.

Each rank reads at its own pace, and one of them reports to the engine. A rank records how much of a
read it has, and the reporting rank takes the least, once all have recorded. Reads of a kind are
numbered in the order of the plans, which is the same on every rank. The records of the ranks of one
host are a small table in anonymous memory, made by `executor.host_ranks`; ranks of several hosts
record in the store through which they have found each other. `features.kv_store` and
`features.adapters` use it.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing import reduction
from typing import Any, Protocol

import numpy as np

from aioinfer.ipc.anonymous_file import anonymous_file

#: Kinds of reads.
KV_BLOCKS, ADAPTERS = range(2)
#: Reads of a kind that may be under way at a time in an engine.
MAX_READS = 64
_COUNT_BITS = 24


class Tally(Protocol):
    """What each rank has of the reads under way."""

    def record(self, kind: int, rank: int, number: int, count: int) -> None:
        """Records that `rank` has `count` of a read, such as its first blocks, and will not have
        more."""

    def fewest(self, kind: int, number: int) -> int | None:
        """Returns how much of a read all ranks have; None before it has ended on every rank."""


class ReadTally:
    """Implements `Tally` in memory that processes share. It can be pickled only for a process that
    is being spawned, which inherits the memory; a record is one int64, so that it is never seen by
    halves."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._fd = anonymous_file("aioinfer-reads", 2 * num_ranks * MAX_READS * 8)
        self._map()

    def _map(self) -> None:
        memory = mmap.mmap(self._fd, 0)
        self._records = np.frombuffer(memory, np.int64).reshape(2, self._num_ranks, MAX_READS)

    def record(self, kind: int, rank: int, number: int, count: int) -> None:
        """See `Tally.record`."""
        self._records[kind, rank, number % MAX_READS] = (number + 1) << _COUNT_BITS | count

    def fewest(self, kind: int, number: int) -> int | None:
        """See `Tally.fewest`."""
        records = self._records[kind, :, number % MAX_READS]
        if (records >> _COUNT_BITS != number + 1).any():
            return None
        return int((records & ((1 << _COUNT_BITS) - 1)).min())

    def close(self) -> None:
        """Closes the descriptor, and the one that the mapping has. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._records = np.empty((2, 0, MAX_READS), np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {"num_ranks": self._num_ranks, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._num_ranks = state["num_ranks"]
        self._fd = state["fd"].detach()
        self._map()


class StoreTally:
    """Implements `Tally` in a store of torch, which the ranks of several hosts have in common.

    Args:
        store: a `torch.distributed.Store`.
        engine: the number of the engine.
        num_ranks: of it.
    """

    def __init__(self, store: Any, engine: int, num_ranks: int):
        self._store, self._engine, self._num_ranks = store, engine, num_ranks

    def _key(self, kind: int, rank: int, number: int) -> str:
        return f"aioinfer-reads/{self._engine}/{kind}/{rank}/{number % MAX_READS}"

    def record(self, kind: int, rank: int, number: int, count: int) -> None:
        """See `Tally.record`."""
        self._store.set(self._key(kind, rank, number), f"{number} {count}")

    def fewest(self, kind: int, number: int) -> int | None:
        """See `Tally.fewest`."""
        keys = [self._key(kind, rank, number) for rank in range(self._num_ranks)]
        if not self._store.check(keys):  # else it would be waited for
            return None
        records = [tuple(map(int, each.split())) for each in self._store.multi_get(keys)]
        return None if any(r != number for r, _ in records) else min(c for _, c in records)
