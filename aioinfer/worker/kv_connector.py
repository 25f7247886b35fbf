"""Places beyond memory of the host that have KV blocks, such as files: the worker half.

`features.kv_store.worker` has the connectors of a rank and calls them in the order of the plans. A
connector has threads of its own; no step waits for them. The planning half is
`scheduler.kv_connector`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Protocol

from aioinfer.worker.host_blocks import Wait

#: Returns 16 bytes that stand for all that a KV block depends on beside its tokens.
Identify = Callable[[], bytes]
#: (group, place, hash) of a block on its way between a connector and a place of the host.
HostBlock = tuple[int, int, bytes]
#: A read, by its ticket, and how many of its blocks are there, from the first one on.
Ended = tuple[int, int]


class KVConnector(Protocol):
    """Reads blocks into places of the host, and keeps saved ones."""

    def read(self, ticket: int, blocks: Sequence[HostBlock], free: Wait, source: str) -> None:
        """Begins to read blocks, in the order of their prefix, into places that nothing else uses
        before the end of the read is reported, once `free` returns. `source` is what the planning
        half says of the read."""

    @property
    def has_reads(self) -> bool:
        """Whether any read has not been returned by `take_read`."""

    def take_read(self, max_wait_s: float = 0.0) -> list[Ended]:
        """Returns the reads that have ended since the last call; waits so long for the first."""

    def save(self, group: int, place: int, block_hash: bytes, saved: Wait) -> None:
        """Keeps a block that the host gets, once `saved` returns."""

    def delete(self, group: int, block_hash: bytes) -> None:
        """Forgets a block; all blocks if the group is -1, after which weights may be others."""

    def close(self) -> None:
        """Ends the threads when what they have begun is done."""


class PendingReads:
    """The reads of a connector on their way in its threads."""

    def __init__(self) -> None:
        self._reads: deque[tuple[int, Sequence[tuple[int, Future[int]]]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._reads)

    def add(self, ticket: int, parts: Sequence[tuple[int, Future[int]]]) -> None:
        """Adds a read of several parts, one behind the other: the number of blocks of each, and
        what returns how many of them are there, from its first one on."""
        self._reads.append((ticket, parts))

    def take(self, max_wait_s: float = 0.0) -> list[Ended]:
        """See `KVConnector.take_read`."""
        if self._reads and max_wait_s:
            wait([future for _, future in self._reads[0][1]], max_wait_s)
        ended, kept = [], deque[tuple[int, Sequence[tuple[int, Future[int]]]]]()
        for ticket, parts in self._reads:
            if all(future.done() for _, future in parts):
                ended.append((ticket, _count(parts)))
            else:
                kept.append((ticket, parts))
        self._reads = kept
        return ended


def _count(parts: Sequence[tuple[int, Future[int]]]) -> int:
    """Returns how many blocks of a read that has ended are there, from the first one on."""
    count = 0
    for size, future in parts:
        count += future.result()
        if future.result() < size:
            break
    return count
