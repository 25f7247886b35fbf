"""Worker half of the store of KV: moves blocks between the device, memory of the host
and connectors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aioinfer.config_keys import parse_address
from aioinfer.errors import ConfigError
from aioinfer.features.kv_store.sections import KVLoaded, KVMoves
from aioinfer.ipc.kv_files import KVFiles
from aioinfer.ipc.nixl_link import is_available
from aioinfer.ipc.peer_link import read_key
from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.read_tally import KV_BLOCKS
from aioinfer.scheduler.kv_connector import DiskConnector as DiskPlanning
from aioinfer.scheduler.peer_connector import PeerConnector as PeerPlanning
from aioinfer.worker.features import LateSection, PendingSection, Rank, WorkerFeature
from aioinfer.worker.host_blocks import (
    BlockCopies,
    EndedLoad,
    HostBlocks,
    make_copies,
    make_host_blocks,
)
from aioinfer.worker.kv_connector import DiskConnector, Ended, HostBlock, KVConnector
from aioinfer.worker.kv_peers import PeerConnector

#: A plan that has nothing but reads waits so long for the first of them, and not longer: plans
#: behind it wait as well.
_MAX_WAIT_S = 0.02
#: How often a rank looks meanwhile whether the others have read.
_LOOK_S = 0.001


@dataclass(frozen=True, slots=True)
class _Read:
    """A read that has not ended on every rank.

    Attributes:
        number: among all reads.
        blocks: in the order of their prefix.
    """

    number: int
    blocks: Sequence[HostBlock]


class Work(WorkerFeature):
    """See `WorkerFeature`.

    Attributes:
        copies: of blocks; None before the service begins.
        host: memory for blocks; none before the service begins.
        connectors: places beyond that memory, by their numbers.
    """

    host: HostBlocks

    def __init__(self, rank: Rank):
        super().__init__(rank)
        self.is_needed = rank.config.cache.host_bytes > 0 and rank.kv is not None
        self.copies: BlockCopies | None = None
        self.connectors: dict[int, KVConnector] = {}
        self._num_reads = 0
        self._reading: dict[int, _Read] = {}  # by ticket, on this rank
        self._tallied: dict[int, _Read] = {}  # by ticket: ended on this rank
        self._read: deque[Ended] = deque()  # on every rank; of two threads
        self._is_awaited = False

    def begin_service(self) -> None:
        """See `WorkerFeature.begin_service`. Allocates the memory of the host. Raises
        `ConfigError`."""
        rank, cache = self.rank, self.rank.config.cache
        assert rank.kv is not None
        shared = cache.peer_address is not None  # other servers map it, or NIXL's process
        shared |= cache.peer_key_file is not None and is_available()
        self.host = make_host_blocks(rank.kv, cache.host_bytes, shared=shared)
        self.copies = make_copies(rank.kv, self.host)
        is_divided = rank.place.world_size > 1 and not rank.place.is_local
        if (cache.disk_path or cache.peer_key_file) and is_divided:
            raise ConfigError(
                "cache.disk_path and cache.peer_key_file are for engines whose workers are on one "
                "host"
            )
        if cache.disk_path:
            files = KVFiles.of(cache.disk_path, rank.engine, rank.place.engine_rank)
            try:
                disk = DiskConnector(files, self.host, rank.identify_kv)
                self.connectors[DiskPlanning.number] = disk
            except OSError as error:
                raise ConfigError(f"cache.disk_path cannot be used: {error}") from error
        if cache.peer_key_file:
            self.connectors[PeerPlanning.number] = self._make_peers(cache.peer_key_file)

    def _make_peers(self, key_file: str) -> PeerConnector:
        """Returns the connector to other servers. Raises `ConfigError`."""
        rank, address = self.rank, self.rank.config.cache.peer_address
        here = None
        if address is not None:
            host, port = parse_address(address)
            ranks = rank.config.parallel.world_size
            here = host, port + rank.engine * ranks + rank.place.engine_rank
        try:
            return PeerConnector(
                self.host, read_key(key_file), rank.identify_kv, here, rank.place.engine_rank
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cache.peer_address cannot be used: {error}") from error

    def close(self) -> None:
        """See `WorkerFeature.close`."""
        for connector in self.connectors.values():
            connector.close()

    def begin(self, plan: StepPlan) -> None:
        """See `WorkerFeature.begin`."""
        copies, moves = self.copies, plan.section(KVMoves)
        if copies is None:
            return
        copies.keep_order(plan, len(self.rank.slots.tokens))
        self._is_awaited = False
        if moves is not None:
            self._is_awaited = len(moves.awaited) > 0
            self._forget_all(moves)
            copies.load(moves.loads)
            self._begin_reads(moves, copies)
            self._save(moves, copies)
        if self._reading or self._tallied:
            awaits_read = self._is_awaited and not copies.has_loads
            self._take_reads(_MAX_WAIT_S if awaits_read else 0.0)

    def _forget_all(self, moves: KVMoves) -> None:
        """Has connectors forget all blocks, where the plan says so, before they read any: those of
        other weights have another identity."""
        for number, group in moves.deletes[:, :2].tolist():
            if group < 0:
                self.connectors[number].delete(group, b"")

    def _begin_reads(self, moves: KVMoves, copies: BlockCopies) -> None:
        """Has connectors read the blocks of each ticket."""
        reads = moves.reads
        for ticket in dict.fromkeys(reads[:, 2].tolist()):
            own = reads[reads[:, 2] == ticket]
            blocks = [(int(row[0]), int(row[1]), row[3:7].tobytes()) for row in own]
            for group, place, _ in blocks:
                self.host.overwrite(group, place)
            self._reading[ticket] = _Read(self._num_reads, blocks)
            self._num_reads += 1
            connector = self.connectors[int(own[0, 7])]
            connector.read(ticket, blocks, copies.until_free(own), moves.source_of(ticket))

    def _save(self, moves: KVMoves, copies: BlockCopies) -> None:
        """Saves blocks, and has connectors keep and delete blocks."""
        for group, place, _ in moves.saves[:, :3].tolist():
            self.host.overwrite(group, place)  # before the first byte changes
        saved = copies.save(moves.saves[:, :3])
        for number, connector in self.connectors.items():
            for row in moves.saves:
                if row[7] >> number & 1:
                    connector.save(int(row[0]), int(row[1]), row[3:7].tobytes(), saved)
            for row in moves.deletes:
                if row[0] == number and row[1] >= 0:
                    connector.delete(int(row[1]), row[2:].tobytes())

    def _take_reads(self, max_wait_s: float) -> None:
        """Notes the reads that have ended, and waits so long for the first that has ended on every
        rank."""
        until = time.monotonic() + max_wait_s
        while True:
            for connector in self.connectors.values():
                left = max(0.0, until - time.monotonic()) if connector.has_reads else 0.0
                for ticket, count in connector.take_read(left):
                    self._end_read(ticket, count)
            tally, ended = self.rank.tally, []
            for ticket, read in self._tallied.items():
                fewest = None if tally is None else tally.fewest(KV_BLOCKS, read.number)
                if fewest is not None:
                    ended.append((ticket, fewest))
            for ticket, _ in ended:
                del self._tallied[ticket]
            self._read.extend(ended)
            if self._read or time.monotonic() >= until or not self.rank.place.sends_results:
                return
            time.sleep(_LOOK_S)

    def _end_read(self, ticket: int, count: int) -> None:
        """Notes that a read has brought its first `count` blocks to this rank."""
        read = self._reading.pop(ticket)
        peers = self.connectors.get(PeerPlanning.number)
        if peers is not None:
            for group, place, block_hash in read.blocks[:count]:
                peers.save(group, place, block_hash, _no_wait)
        if self.rank.tally is None:
            self._read.append((ticket, count))
            return
        self.rank.tally.record(KV_BLOCKS, self.rank.place.engine_rank, read.number, count)
        if self.rank.place.sends_results:
            self._tallied[ticket] = read

    def read_step(self, step_id: int) -> PendingSection | None:
        """See `WorkerFeature.read_step`."""
        copies = self.copies
        if copies is None or not (copies.has_loads or self._read):
            return None
        ended = copies.await_ended if self._is_awaited else copies.take_ended
        return LateSection(KVLoaded, (), partial(self._take_ended, ended))

    def _take_ended(self, loads: Callable[[], list[EndedLoad]]) -> Sequence[tuple[int, int, int]]:
        """Returns what has ended since the last call, as `KVLoaded` has it."""
        ended = [] if self._read else [(ticket, -1, micros) for ticket, micros in loads()]
        while self._read:
            ended.append((*self._read.popleft(), -1))
        return ended


def _no_wait() -> None:
    """Waits for nothing: the block is there."""
