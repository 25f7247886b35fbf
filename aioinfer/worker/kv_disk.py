"""Files as a connector of KV blocks: threads that write saved blocks to files, and read them back
into places of the host's memory.

No step waits for a thread. A write reads its place when the copy from the device has ended, and
counts only if nothing else has been put there meanwhile (`HostBlocks.version`). A read writes to a
place that the engine gives to nothing else until the read is reported. All work on one file has one
thread, in the order in which it was asked for. After a write that fails (a full disk) nothing is
written any more, and the log has one line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from aioinfer.ipc.kv_files import BrokenFileError, KVFiles
from aioinfer.worker.host_blocks import HostBlocks, Wait
from aioinfer.worker.kv_connector import Ended, HostBlock, Identify, PendingReads

_THREADS = 4
#: So many writes may wait; others are left out, and their blocks are not found on the disk.
_MAX_WRITES = 256
_log = logging.getLogger(__name__)


class DiskConnector:
    """Writes and reads the files of a worker. Implements `KVConnector`.

    Attributes:
        is_full: whether a write has failed.
    """

    def __init__(self, folder: KVFiles, host: HostBlocks, identify: Identify):
        """Prepares the folder. Raises `OSError`."""
        self._files, self._host, self._identify = folder.of_model(identify()), host, identify
        self._files.prepare()
        self.is_full = False
        self._threads = [ThreadPoolExecutor(1, f"kv-disk-{number}") for number in range(_THREADS)]
        self._waiting_writes = threading.Semaphore(_MAX_WRITES)
        self._reads = PendingReads()

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

    @property
    def has_reads(self) -> bool:
        """See `KVConnector.has_reads`."""
        return bool(self._reads)

    def take_read(self, max_wait_s: float = 0.0) -> list[Ended]:
        """See `KVConnector.take_read`."""
        return self._reads.take(max_wait_s)

    def close(self) -> None:
        """See `KVConnector.close`."""
        for thread in self._threads:
            thread.shutdown(wait=True)
