"""Worker half of the store of KV: moves blocks between the device, memory of the host
and files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from aioinfer.errors import ConfigError
from aioinfer.features.kv_store.sections import KVLoaded, KVMoves
from aioinfer.ipc.kv_files import KVFiles
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.worker.features import PendingSection, Rank, WorkerFeature
from aioinfer.worker.host_blocks import BlockCopies, make_copies, make_host_blocks
from aioinfer.worker.kv_disk import DiskTier, Ended

#: A plan that has nothing but reads waits so long for the first of them, and not longer: plans
#: behind it wait as well.
_MAX_WAIT_S = 0.02
#: Tickets, and (ticket, number) of files that could not be read.
EndedMoves = tuple[list[int], list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class PendingLoads(PendingSection):
    """The loads that have ended by the time at which a result is read.

    Attributes:
        take_ended: returns their tickets, and (ticket, number) of files that could not be read.
    """

    take_ended: Callable[[], EndedMoves]

    def fetch(self, stream: torch.cuda.Stream) -> PendingSection:
        """See `PendingSection.fetch`: nothing is on the device."""
        return self

    def to_section(self) -> Section:
        """See `PendingSection.to_section`."""
        tickets, failed = self.take_ended()
        return KVLoaded(np.array(tickets, np.int32), np.array(failed, np.int32).reshape(-1, 2))


class Work(WorkerFeature):
    """See `WorkerFeature`.

    Attributes:
        copies: of blocks; None before the service begins.
        disk: behind the host's memory, if there is one.
    """

    def __init__(self, rank: Rank):
        super().__init__(rank)
        self.is_needed = rank.config.cache.host_bytes > 0 and rank.kv is not None
        self.copies: BlockCopies | None = None
        self.disk: DiskTier | None = None
        self._read: deque[Ended] = deque()  # from the disk; of two threads
        self._is_awaited = False

    def begin_service(self) -> None:
        """See `WorkerFeature.begin_service`. Allocates the memory of the host. Raises
        `ConfigError`."""
        rank, cache = self.rank, self.rank.config.cache
        assert rank.kv is not None
        host = make_host_blocks(rank.kv, cache.host_bytes)
        self.copies = make_copies(rank.kv, host)
        if cache.disk_path:
            files = KVFiles.of(cache.disk_path, rank.engine, rank.identify_kv())
            try:
                self.disk = DiskTier(files, host)
            except OSError as error:
                raise ConfigError(f"cache.disk_path cannot be used: {error}") from error

    def begin(self, plan: StepPlan) -> None:
        """See `WorkerFeature.begin`."""
        copies, moves = self.copies, plan.section(KVMoves)
        if copies is None:
            return
        copies.keep_order(plan, len(self.rank.slots.tokens))
        self._is_awaited = False
        if moves is not None:
            self._is_awaited = len(moves.awaited) > 0
            copies.load(moves.loads)
            self._begin_reads(moves.reads, copies)
            self._save(moves, copies)
        if self.disk is not None and self.disk.has_reads:
            awaits_read = self._is_awaited and not copies.has_loads
            self._read.extend(self.disk.take_read(_MAX_WAIT_S if awaits_read else 0.0))

    def _begin_reads(self, reads: I32, copies: BlockCopies) -> None:
        """Has the disk tier read the files of each ticket: `KVMoves.reads`."""
        if self.disk is None or not len(reads):
            return
        for ticket in dict.fromkeys(reads[:, 2].tolist()):
            own = reads[reads[:, 2] == ticket]
            blocks = [(int(row[0]), int(row[1]), row[3:].tobytes()) for row in own]
            self.disk.read(ticket, blocks, copies.until_free(own))

    def _save(self, moves: KVMoves, copies: BlockCopies) -> None:
        """Saves blocks, and has the disk tier write files of them, and delete files."""
        if self.disk is None:
            copies.save(moves.saves)
            return
        for group, place, _ in moves.saves.tolist():
            self.disk.overwrite(group, place)  # before the first byte changes
        saved = copies.save(moves.saves)
        for row in moves.writes:
            self.disk.write(int(row[0]), int(row[1]), row[2:].tobytes(), saved)
        for row in moves.deletes:
            self.disk.delete(int(row[0]), row[1:].tobytes())

    def read_step(self, step_id: int) -> PendingSection | None:
        """See `WorkerFeature.read_step`."""
        copies = self.copies
        if copies is None or not (copies.has_loads or self._read):
            return None
        ended = copies.await_ended if self._is_awaited else copies.take_ended
        return PendingLoads(KVLoaded, (), partial(self._take_ended, ended))

    def _take_ended(self, loads: Callable[[], list[int]]) -> EndedMoves:
        """Returns the tickets that have ended since the last call, and (ticket, number) of what
        could not be read."""
        tickets = [] if self._read else loads()
        failed: list[tuple[int, int]] = []
        while self._read:
            ticket, numbers = self._read.popleft()
            tickets.append(ticket)
            failed += [(ticket, number) for number in numbers]
        return tickets, failed
