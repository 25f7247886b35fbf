"""Places beyond memory of the host that have KV blocks, such as files: the worker half.

`features.kv_store.worker` has the connectors of a rank and calls them in the order of the plans. A
connector has threads of its own; no step waits for them. `DiskConnector` has files; other servers
are in `kv_peers`. The planning half is `scheduler.kv_connector`.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from aioinfer.ipc.kv_files import BrokenFileError, KVFiles
from aioinfer.worker.host_blocks import HostBlocks, Wait

#: Returns 16 bytes that stand for all that a KV block depends on beside its tokens.
Identify = Callable[[], bytes]
#: (group, place, hash) of a block on its way between a connector and a place of the host.
HostBlock = tuple[int, int, bytes]
#: A read, by its ticket, and how many of its blocks are there, from the first one on.
Ended = tuple[int, int]
#: Of a `DiskConnector`.
_THREADS = 4
#: So many writes may wait; others are left out, and their blocks are not found on the disk.
_MAX_WRITES = 256
_log = logging.getLogger(__name__)


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


class KVConnector(ABC):
    """Reads blocks into places of the host, and keeps saved ones."""

    def __init__(self) -> None:
        self._reads = PendingReads()

    @property
    def has_reads(self) -> bool:
        """Whether any read has not been returned by `take_read`."""
        return bool(self._reads)

    def take_read(self, max_wait_s: float = 0.0) -> list[Ended]:
        """Returns the reads that have ended since the last call; waits so long for the first."""
        return self._reads.take(max_wait_s)

    @abstractmethod
    def read(self, ticket: int, blocks: Sequence[HostBlock], free: Wait, source: str) -> None:
        """Begins to read blocks, in the order of their prefix, into places that nothing else uses
        before the end of the read is reported, once `free` returns. `source` is what the planning
        half says of the read."""

    @abstractmethod
    def save(self, group: int, place: int, block_hash: bytes, saved: Wait) -> None:
        """Keeps a block that the host gets, once `saved` returns."""

    @abstractmethod
    def delete(self, group: int, block_hash: bytes) -> None:
        """Forgets a block; all blocks if the group is -1, after which weights may be others."""

    @abstractmethod
    def close(self) -> None:
        """Ends the threads when what they have begun is done. Safe to call twice."""


class DiskConnector(KVConnector):
    """Files as a connector of KV blocks: threads write saved blocks to files, and read them back
    into places of the host's memory.

    A write reads its place when the copy from the device has ended, and counts only if nothing else
    has been put there meanwhile (`HostBlocks.version`). A read writes to a place that the engine
    gives to nothing else until the read is reported. All work on one file has one thread, in the
    order in which it was asked for. After a write that fails (a full disk) nothing is written any
    more, and the log has one line.

    Attributes:
        is_full: whether a write has failed.
    """

    def __init__(self, folder: KVFiles, host: HostBlocks, identify: Identify):
        """Prepares the folder. Raises `OSError`."""
        super().__init__()
        self._files, self._host, self._identify = folder.of_model(identify()), host, identify
        self._files.prepare()
        self.is_full = False
        self._threads = [ThreadPoolExecutor(1, f"kv-disk-{number}") for number in range(_THREADS)]
        self._waiting_writes = threading.Semaphore(_MAX_WRITES)

    def save(self, group: int, place: int, block_hash: bytes, saved: Wait) -> None:
        """See `KVConnector.save`: begins to write the block."""
        if self.is_full or not self._waiting_writes.acquire(blocking=False):
            return
        version = self._host.version(group, place)
        block = group, place, version, block_hash
        self._thread_of(block_hash).submit(self._write, self._files, *block, saved)

    def _write(
        self, files: KVFiles, group: int, place: int, version: int, block_hash: bytes, saved: Wait
    ) -> None:
        try:
            saved()
            block = self._host.bytes_of(group, place).tobytes()
            if self._host.version(group, place) == version and not self.is_full:
                files.write(group, block_hash, block)
        except OSError as error:
            if not self.is_full:
                self.is_full = True
                _log.warning("no further KV blocks are written to the disk: %s", error)
        finally:
            self._waiting_writes.release()

    def read(self, ticket: int, blocks: Sequence[HostBlock], free: Wait, source: str = "") -> None:
        """See `KVConnector.read`."""
        parts = [(1, self._thread_of(each[2]).submit(self._read, *each, free)) for each in blocks]
        self._reads.add(ticket, parts)

    def _read(self, group: int, place: int, block_hash: bytes, free: Wait) -> int:
        free()
        try:
            self._files.read(group, block_hash, self._host.bytes_of(group, place))
        except (OSError, BrokenFileError) as error:
            _log.info("a KV block is computed again: %s", error)
            self._files.delete(group, block_hash)
            return 0
        return 1

    def delete(self, group: int, block_hash: bytes) -> None:
        """See `KVConnector.delete`. All files are deleted by their hashes as well."""
        if group < 0:
            self._files = self._files.of_model(self._identify())
            self._threads[0].submit(self._files.mark)
            return
        self._thread_of(block_hash).submit(self._files.delete, group, block_hash)

    def _thread_of(self, block_hash: bytes) -> ThreadPoolExecutor:
        return self._threads[block_hash[0] % _THREADS]

    def close(self) -> None:
        """See `KVConnector.close`."""
        for thread in self._threads:
            thread.shutdown(wait=True)
