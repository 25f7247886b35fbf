"""Worker half of adapters: reads them into memory of the host, in threads, and puts them into the
slots of the device.

The host has each adapter in the form of a slot. All ranks have the same ones, as the engine says:
an adapter enters a slot once all have read it, so that none computes without it what others compute
with it. It enters on a stream of its own: by a copy to the device beside the steps before, and then
into its slot once they are over, for which later steps wait. Memory of an adapter that is dropped
is used again: pinned memory is hardly allocated beside steps, and not by torch, whose allocator
rounds an adapter up to a power of two.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch
from torch.distributed import HashStore

from aioinfer.config import Config
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.features.adapters.reading import AdapterReader, PackedAdapter
from aioinfer.features.adapters.sections import (
    DROP,
    MAX_READING,
    AdapterChanges,
    AdapterFiles,
    AdapterReads,
)
from aioinfer.ipc.placement import RankSpec
from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.read_tally import ADAPTERS, StoreTally, Tally
from aioinfer.layers.backend import Backend
from aioinfer.worker.features import LateSection, PendingSection, Rank, WorkerFeature
from aioinfer.worker.pinned_memory import PinnedMemory

_log = logging.getLogger(__name__)

#: A plan without rows waits so long for an adapter that is being read, and not longer: plans behind
#: it wait as well.
_MAX_WAIT_S = 0.02
#: How often the rank that reports looks meanwhile whether all have read.
_LOOK_S = 0.001


class HostAdapters:
    """The adapters in memory of the host: those that the engine says, the same on all ranks.

    Args:
        slots: whose form they have.
        max_bytes: for adapters beside those that are being read.
        place: of the rank.
        tally: of the reads of the engine's ranks, if there may be several.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        max_bytes: int,
        place: RankSpec | None = None,
        tally: Tally | None = None,
    ):
        self._slots, self._room = slots, max(1, max_bytes // slots.slot_bytes)
        self._place = place or RankSpec()
        self._tally = tally or StoreTally(HashStore(), 0, 1)
        self._reader = AdapterReader(slots)
        self._lock = threading.Lock()  # of the next two: results of steps are read in a thread
        self._kept: dict[int, Future[PackedAdapter]] = {}
        self._unreported: dict[int, int] = {}  # the number of each read, where one reports
        self._num_reads = 0
        self._free: deque[PackedAdapter] = deque()
        device = slots.backend.device
        self._pinned = PinnedMemory(device) if device.type == "cuda" else None

    def reserve(self, count: int) -> None:
        """Allocates memory for so many adapters, as far as there is room, those that are being read
        included: memory is pinned in tens of milliseconds, in which no kernel is launched."""
        memory = self._allocate(min(count, self._room + MAX_READING))
        self._free.extend(PackedAdapter(each) for each in memory.unbind())

    def _allocate(self, count: int) -> torch.Tensor:
        """Returns memory for adapters [count, numbers of a slot]: pinned, if slots are on a GPU."""
        dtype, shape = self._slots.backend.dtype, (count, self._slots.slot_numbers)
        if self._pinned is None:
            return torch.zeros(shape, dtype=dtype)
        return self._pinned.allocate(count * self._slots.slot_bytes).view(dtype).view(shape)

    def read(self, number: int, files: AdapterFiles) -> None:
        """Begins to read an adapter; `report` tells what becomes of it."""
        read, self._num_reads = self._num_reads, self._num_reads + 1
        reading = self._reader.threads.submit(self._read, files)
        with self._lock:
            self._kept[number] = reading
            if self._place.sends_results:
                self._unreported[number] = read
        reading.add_done_callback(partial(self._record, number, read))

    def __getitem__(self, number: int) -> PackedAdapter:
        """An adapter whose read was reported."""
        return self._kept[number].result()

    def drop(self, number: int) -> None:
        """Forgets an adapter, if it is there."""
        with self._lock:
            dropped = self._kept.pop(number, None)
            self._unreported.pop(number, None)
        if dropped is not None:
            dropped.add_done_callback(self._free_memory)

    def _read(self, files: AdapterFiles) -> PackedAdapter:
        packed = self._take_memory()
        try:
            self._reader.read(files, packed)
        except Exception:
            self._free.append(packed)
            raise
        return packed

    def _record(self, number: int, read: int, reading: Future[PackedAdapter]) -> None:
        """Records what has become of a read on this rank, unless it was dropped meanwhile: other
        reads may have its place among the records by now."""
        if (error := reading.exception()) is not None:
            _log.error("an adapter cannot be read: %s", error)
        with self._lock:
            if self._kept.get(number) is reading:
                room = 0 if error is not None else self._room
                self._tally.record(ADAPTERS, self._place.engine_rank, read, room)

    def _take_memory(self) -> PackedAdapter:
        """Returns memory for an adapter that no copy reads any more."""
        try:
            packed = self._free.popleft()
        except IndexError:
            return PackedAdapter(self._allocate(1)[0])
        if packed.entered is not None:
            packed.entered.synchronize()
        return packed

    def _free_memory(self, ended: Future[PackedAdapter]) -> None:
        """Lets the memory of an adapter that has been read be used again."""
        if ended.exception() is None:
            self._free.append(ended.result())

    def report(self, max_wait_s: float = 0.0) -> list[tuple[int, int]]:
        """Returns the reads that have ended on all ranks since the last call, as `AdapterReads` has
        them. Waits so long for one."""
        until = time.monotonic() + max_wait_s
        while True:
            with self._lock:
                rooms = {n: self._tally.fewest(ADAPTERS, r) for n, r in self._unreported.items()}
                ended = [(number, room) for number, room in rooms.items() if room is not None]
                for number, _ in ended:
                    del self._unreported[number]
            if ended or not self._unreported or time.monotonic() >= until:
                return ended
            time.sleep(_LOOK_S)


class Work(WorkerFeature):
    """See `WorkerFeature`.

    Attributes:
        host: the adapters in its memory.
    """

    takes = (AdapterChanges,)

    def __init__(self, rank: Rank):
        super().__init__(rank)
        adapters = rank.model.backend.extension
        self.is_needed = isinstance(adapters, AdapterSlots)
        if not isinstance(adapters, AdapterSlots):
            return
        self._adapters = adapters
        self._of_slots = np.zeros(len(rank.slots.tokens), np.int32)
        self.host = HostAdapters(adapters, rank.config.lora.host_bytes, rank.place, rank.tally)
        self._copies = torch.cuda.Stream(rank.device) if rank.device.type == "cuda" else None
        self._entering: list[torch.cuda.Event] = []
        self._serves = self._awaits = False

    @classmethod
    def extend_layers(cls, config: Config, backend: Backend) -> AdapterSlots | None:
        """See `WorkerFeature.extend_layers`."""
        return AdapterSlots(config.lora, backend) if config.lora.num_slots else None

    def begin_service(self) -> None:
        """See `WorkerFeature.begin_service`."""
        self._serves = True
        self.host.reserve(len(self.rank.config.lora.adapters))

    def begin(self, plan: StepPlan) -> None:
        """See `WorkerFeature.begin`."""
        if not self._serves:
            return
        for entered in self._entering:  # with an earlier plan
            torch.cuda.current_stream().wait_event(entered)
        self._entering = []
        changes, adapters = plan.section(AdapterChanges), self._adapters
        admitted = plan.admissions.records["slot"]
        before = self._of_slots[admitted]
        self._of_slots[admitted] = 0
        if changes is not None:
            self.take(changes)
            self._of_slots[changes.rows] = changes.adapters + 1
        self._awaits = changes is not None and not len(plan.slots)
        if (self._of_slots[admitted] != before).any():
            adapters.of_slots.copy_(self.rank.upload(self._of_slots))
        adapters.is_active = bool(self._of_slots[plan.slots].any())

    def take(self, section: AdapterChanges) -> None:
        """See `WorkerFeature.take`; adapters enter slots with plans alone."""
        for change in section.changes():
            if change.slot == DROP:
                self.host.drop(change.number)
            elif change.files is not None:
                self.host.read(change.number, change.files)
            else:
                self._enter(change.slot, self.host[change.number], waits=change.waits)

    def _enter(self, slot: int, packed: PackedAdapter, *, waits: bool) -> None:
        """Puts an adapter into a slot."""
        if self._copies is None:
            self._adapters.enter(slot, packed.memory, packed.rank)
            return
        current = torch.cuda.current_stream()
        with torch.cuda.stream(self._copies):
            self._adapters.enter(slot, packed.memory, packed.rank, after=current)
            packed.entered = entered = self._copies.record_event()
        if waits:
            current.wait_event(entered)
        else:
            self._entering.append(entered)

    def read_step(self, step_id: int) -> PendingSection | None:
        """See `WorkerFeature.read_step`."""
        if not self._serves:
            return None  # else the read of an adapter may have begun when the step is over
        max_wait_s = _MAX_WAIT_S if self._awaits else 0.0
        return LateSection(AdapterReads, (), partial(self.host.report, max_wait_s))
