"""Worker half of adapters: reads them into memory of the host, in threads, and puts them into the
slots of the device.

The host keeps what was used most recently, up to `LoraConfig.host_bytes`, each adapter in the form
of a slot. It enters one on a stream of its own: by a copy to the device beside the steps before,
and then into its slot once they are over, for which later steps wait. Memory of an adapter that is
forgotten is used again: pinned memory is hardly allocated beside steps, and not by torch, whose
allocator rounds an adapter up to a power of two.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.config import Config
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.features.adapters.reading import AdapterReader, PackedAdapter
from aioinfer.features.adapters.sections import (
    DROP,
    FAILED,
    READ,
    AdapterChanges,
    AdapterFiles,
    AdapterStates,
)
from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.layers.backend import Backend
from aioinfer.worker.features import PendingSection, Rank, WorkerFeature
from aioinfer.worker.pinned_memory import PinnedMemory

_log = logging.getLogger(__name__)

#: Threads that read adapters; each needs Python's lock for a millisecond of a read.
READERS = 8
#: A plan without rows waits so long for an adapter that is being read, and not longer: plans behind
#: it wait as well.
_MAX_WAIT_S = 0.02


class HostAdapters:
    """The adapters in memory of the host.

    Args:
        slots: whose form they have.
        max_bytes: of all that are not on their way into a slot; the least recently used go first.
    """

    def __init__(self, slots: AdapterSlots, max_bytes: int):
        self._slots, self._most = slots, max(1, max_bytes // slots.slot_bytes)
        self._reader = AdapterReader(slots)
        # an adapter is many small matrices, for which threads of PyTorch would wait for each other
        self._threads = ThreadPoolExecutor(READERS, "adapters", torch.set_num_threads, (1,))
        self._lock = threading.Lock()  # of the next three: results of steps are read in a thread
        self._kept: OrderedDict[int, Future[PackedAdapter]] = OrderedDict()
        self._unreported: dict[int, Future[PackedAdapter]] = {}
        self._dropped: list[int] = []  # since the last report
        self._free: deque[PackedAdapter] = deque()
        device = slots.backend.device
        self._pinned = PinnedMemory(device) if device.type == "cuda" else None

    def reserve(self, count: int) -> None:
        """Allocates memory for so many adapters, as far as they may be kept."""
        memory = self._allocate(min(count, self._most))
        self._free.extend(PackedAdapter(each) for each in memory.unbind())

    def _allocate(self, count: int) -> torch.Tensor:
        """Returns memory for adapters [count, numbers of a slot]: pinned, if slots are on a GPU."""
        dtype, shape = self._slots.backend.dtype, (count, self._slots.slot_numbers)
        if self._pinned is None:
            return torch.zeros(shape, dtype=dtype)
        return self._pinned.allocate(count * self._slots.slot_bytes).view(dtype).view(shape)

    def read(self, number: int, files: AdapterFiles) -> Future[PackedAdapter]:
        """Begins to read an adapter that is not there, and returns it."""
        with self._lock:
            if number not in self._kept:
                self._kept[number] = self._threads.submit(self._read, files)
                self._unreported[number] = self._kept[number]
            self._kept.move_to_end(number)
            self._shrink(number)
            return self._kept[number]

    def drop(self, number: int) -> None:
        """Forgets an adapter."""
        with self._lock:
            self._drop(number)

    def _drop(self, number: int) -> None:
        if (dropped := self._kept.pop(number, None)) is not None:
            dropped.add_done_callback(self._free_memory)
        self._unreported.pop(number, None)

    def _read(self, files: AdapterFiles) -> PackedAdapter:
        packed = self._take_memory()
        try:
            self._reader.read(files, packed)
        except Exception:
            self._free.append(packed)
            raise
        return packed

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

    def _shrink(self, used: int) -> None:
        """Forgets what is too much, but not `used`."""
        done = [n for n, future in self._kept.items() if future.done() and n != used]
        for number in done[: max(0, len(self._kept) - self._most)]:
            if number not in self._unreported:
                self._drop(number)
                self._dropped.append(number)

    def await_read(self, max_wait_s: float) -> None:
        """Waits so long for an adapter that is being read, if there are some."""
        with self._lock:
            reading = [*self._unreported.values()]
        if reading:
            wait(reading, max_wait_s, "FIRST_COMPLETED")

    @property
    def may_report(self) -> bool:
        """Whether something becomes of an adapter that has not been reported."""
        return bool(self._unreported or self._dropped)

    def report(self) -> list[tuple[int, int]]:
        """Returns what has become of adapters since the last call, as `AdapterStates` has it."""
        with self._lock:
            found = [(number, DROP) for number in self._dropped]
            self._dropped = []
            ended = [(n, future) for n, future in self._unreported.items() if future.done()]
            for number, future in ended:
                del self._unreported[number]
                if (error := future.exception()) is not None:
                    _log.error("an adapter cannot be read: %s", error)
                    self._kept.pop(number, None)
                found.append((number, READ if error is None else FAILED))
            return found


@dataclass(frozen=True, slots=True)
class PendingStates(PendingSection):
    """What has become of adapters by the time at which a step is over, and not when it is launched:
    that is a step or two before.

    Attributes:
        report: `HostAdapters.report`.
    """

    report: Callable[[], Sequence[tuple[int, int]]]

    def fetch(self, stream: torch.cuda.Stream) -> PendingSection:
        """See `PendingSection.fetch`: nothing is on the device."""
        return self

    def to_section(self) -> Section:
        """See `PendingSection.to_section`."""
        return AdapterStates(*np.array(self.report(), np.int32).reshape(-1, 2).T.copy())


class Work(WorkerFeature):
    """See `WorkerFeature`.

    Attributes:
        host: the adapters in its memory.
    """

    def __init__(self, rank: Rank):
        super().__init__(rank)
        adapters = rank.model.backend.extension
        self.is_needed = isinstance(adapters, AdapterSlots)
        if not isinstance(adapters, AdapterSlots):
            return
        self._adapters = adapters
        self._of_slots = np.zeros(len(rank.slots.tokens), np.int32)
        self.host = HostAdapters(adapters, rank.config.lora.host_bytes)
        self._copies = torch.cuda.Stream(rank.device) if rank.device.type == "cuda" else None
        self._entering: list[torch.cuda.Event] = []
        self._serves = False
        self._reports = rank.links is None or rank.links.is_last

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
        if not self._reports:
            self.host.report()  # what has not been reported is never forgotten
        changes, adapters = plan.section(AdapterChanges), self._adapters
        admitted = plan.admissions.records["slot"]
        before = self._of_slots[admitted]
        self._of_slots[admitted] = 0
        if changes is not None:
            self._take(changes)
            self._of_slots[changes.rows] = changes.adapters + 1
            if not len(plan.slots):
                self.host.await_read(_MAX_WAIT_S)
        if (self._of_slots[admitted] != before).any():
            adapters.of_slots.copy_(self.rank.upload(self._of_slots))
        adapters.is_active = bool(self._of_slots[plan.slots].any())

    def _take(self, changes: AdapterChanges) -> None:
        files = changes.files_by_number()
        columns = (changes.numbers, changes.slots, changes.waits)
        for number, slot, waits in zip(*(each.tolist() for each in columns), strict=True):
            if slot == DROP:
                self.host.drop(number)
                continue
            reading = self.host.read(number, files[number])
            if slot != READ:
                self._enter(slot, reading, waits=bool(waits))

    def _enter(self, slot: int, reading: Future[PackedAdapter], *, waits: bool) -> None:
        """Puts an adapter into a slot, once it has been read; one that cannot be read leaves a slot
        that adds nothing."""
        try:
            packed = reading.result()
        except Exception:  # `report` tells of it
            self._adapters.ranks[slot] = 0
            return
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
        """Returns what has become of adapters since the step before."""
        if not self._serves or not self.host.may_report:
            return None
        return PendingStates(AdapterStates, (), self.host.report)
