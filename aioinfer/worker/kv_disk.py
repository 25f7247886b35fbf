"""Disk tier of a worker: threads that write saved blocks to files and read them back into places of
the host's memory.

No step waits for a thread. A write reads its place when the copy from the device has ended, and
counts only if nothing else has been put there meanwhile (`_versions`). A read writes to a place
that the engine gives to nothing else until the read is reported. All work on one file has one
thread, in the order in which it was asked for. After a write that fails (a full disk) nothing is
written any more, and the log has one line.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from aioinfer.ipc.kv_files import BrokenFileError, KVFiles
from aioinfer.worker.host_blocks import HostBlocks, Wait

_THREADS = 4
#: So many writes may wait; others are left out, and their blocks are not found on the disk.
_MAX_WRITES = 256
_log = logging.getLogger(__name__)
#: A ticket, and the numbers of its blocks that could not be read.
Ended = tuple[int, list[int]]


class DiskTier:
    """Writes and reads the files of a worker.

    Attributes:
        is_full: whether a write has failed.
    """

    def __init__(self, files: KVFiles, host: HostBlocks):
        """Prepares the folder. Raises `OSError`."""
        files.prepare()
        self.is_full = False
        self._files, self._host = files, host
        self._threads = [ThreadPoolExecutor(1, f"kv-disk-{number}") for number in range(_THREADS)]
        self._versions = [[0] * len(memory) for memory in host.groups]
        self._waiting_writes = threading.Semaphore(_MAX_WRITES)
        self._reads: deque[tuple[int, Sequence[Future[bool]]]] = deque()

    def overwrite(self, group: int, place: int) -> None:
        """Notes that a place gets another block. Called before its bytes change."""
        self._versions[group][place] += 1

    def write(self, group: int, place: int, block_hash: bytes, saved: Wait) -> None:
        """Begins to write the block in a place, once `saved` returns."""
        if self.is_full or not self._waiting_writes.acquire(blocking=False):
            return
        version = self._versions[group][place]
        self._thread_of(block_hash).submit(self._write, group, place, version, block_hash, saved)

    def _write(self, group: int, place: int, version: int, block_hash: bytes, saved: Wait) -> None:
        try:
            saved()
            block = self._host.bytes_of(group, place).tobytes()
            if self._versions[group][place] == version and not self.is_full:
                self._files.write(group, block_hash, block)
        except OSError as error:
            if not self.is_full:
                self.is_full = True
                _log.warning("no further KV blocks are written to the disk: %s", error)
        finally:
            self._waiting_writes.release()

    def read(self, ticket: int, blocks: Sequence[tuple[int, int, bytes]], free: Wait) -> None:
        """Begins to read the files of (group, place, hash), once `free` returns: nothing reads the
        places any more then."""
        for group, place, _ in blocks:
            self.overwrite(group, place)
        futures = [self._thread_of(block[2]).submit(self._read, *block, free) for block in blocks]
        self._reads.append((ticket, futures))

    def _read(self, group: int, place: int, block_hash: bytes, free: Wait) -> bool:
        free()
        try:
            self._files.read(group, block_hash, self._host.bytes_of(group, place))
        except (OSError, BrokenFileError) as error:
            _log.info("a KV block is computed again: %s", error)
            self._files.delete(group, block_hash)
            return False
        return True

    def delete(self, group: int, block_hash: bytes) -> None:
        """Begins to delete a file."""
        self._thread_of(block_hash).submit(self._files.delete, group, block_hash)

    def _thread_of(self, block_hash: bytes) -> ThreadPoolExecutor:
        return self._threads[block_hash[0] % _THREADS]

    @property
    def has_reads(self) -> bool:
        """Whether any read has not been returned by `take_read`."""
        return bool(self._reads)

    def take_read(self, max_wait_s: float = 0.0) -> list[Ended]:
        """Returns the tickets that have been read since the last call, and which blocks of each
        could not be; waits so long for the first."""
        if self._reads and max_wait_s:
            wait(self._reads[0][1], max_wait_s)
        ended = []
        for ticket, futures in list(self._reads):
            if all(future.done() for future in futures):
                failed = [number for number, future in enumerate(futures) if not future.result()]
                ended.append((ticket, failed))
        gone = {ticket for ticket, _ in ended}
        self._reads = deque(read for read in self._reads if read[0] not in gone)
        return ended

    def close(self) -> None:
        """Ends the threads when what they have begun is done."""
        for thread in self._threads:
            thread.shutdown(wait=True)
