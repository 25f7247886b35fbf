"""Worker half of adapters: reads them into memory of the host, in threads, and puts them into the
slots of the device.

The host keeps what was used most recently, up to `LoraConfig.host_bytes`, each adapter in the form
of a slot: it enters one by a single copy, on a stream of its own, which begins when the steps
before are over and which later steps wait for. Memory of an adapter that is forgotten is used
again: pinned memory is hardly allocated beside steps, and not by torch, whose
allocator rounds an adapter up to a power of two.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from aioinfer.config import Config
from aioinfer.features.adapters.checkpoint import digest_adapter, read_weights
from aioinfer.features.adapters.layers.parts import AdapterWeights, rank_of
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.features.adapters.sections import (
    DROP,
    FAILED,
    READ,
    AdapterChanges,
    AdapterFiles,
    AdapterStates,
)
from aioinfer.ipc.plan import StepPlan
from aioinfer.layers.backend import Backend
from aioinfer.worker.features import PendingSection, Rank, WorkerFeature
from aioinfer.worker.pinned_memory import PinnedMemory

_log = logging.getLogger(__name__)

#: Threads that read adapters.
READERS = 4
#: A plan without rows waits so long for an adapter that is being read, and not longer: plans behind
#: it wait as well.
_MAX_WAIT_S = 0.02


@dataclass(slots=True)
class PackedAdapter:
    """An adapter in the form of a slot.

    Attributes:
        memory: of the host, [numbers of a slot].
        rank: of the adapter.
        entered: the end of the last copy into a slot that reads the memory.
    """

    memory: torch.Tensor
    rank: int = 0
    entered: torch.cuda.Event | None = None


class HostAdapters:
    """The adapters in memory of the host.

    Args:
        slots: whose form they have.
        max_bytes: of all that are not on their way into a slot; the least recently used go first.
    """

    def __init__(self, slots: AdapterSlots, max_bytes: int):
        self._slots, self._most = slots, max(1, max_bytes // slots.slot_bytes)
        # an adapter is many small matrices, for which more threads would only wait for each other
        self._threads = ThreadPoolExecutor(READERS, "adapters", torch.set_num_threads, (1,))
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
            return torch.empty(shape, dtype=dtype)
        return self._pinned.allocate(count * self._slots.slot_bytes).view(dtype).view(shape)

    def read(self, number: int, files: AdapterFiles) -> Future[PackedAdapter]:
        """Begins to read an adapter that is not there, and returns it."""
        if number not in self._kept:
            self._kept[number] = self._threads.submit(self._read, files)
            self._unreported[number] = self._kept[number]
        self._kept.move_to_end(number)
        self._shrink(number)
        return self._kept[number]

    def drop(self, number: int) -> None:
        """Forgets an adapter."""
        if (dropped := self._kept.pop(number, None)) is not None:
            dropped.add_done_callback(self._free_memory)
        self._unreported.pop(number, None)

    def _read(self, files: AdapterFiles) -> PackedAdapter:
        folder, slots = Path(files.folder), self._slots
        with torch.inference_mode():
            weights = read_weights(folder)
            _require_finite(weights, slots.backend.dtype, folder)
            if digest_adapter(folder, whole=False) != files.sample:
                raise ValueError(f"{folder} has changed since the adapter was loaded")
            packed = self._take_memory()
            packed.rank = rank_of(weights)
            try:
                slots.pack(weights, packed.memory)
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
                self.drop(number)
                self._dropped.append(number)

    def await_read(self, max_wait_s: float) -> None:
        """Waits so long for an adapter that is being read, if there are some."""
        if self._unreported:
            wait(self._unreported.values(), max_wait_s, "FIRST_COMPLETED")

    def report(self) -> list[tuple[int, int]]:
        """Returns what has become of adapters since the last call, as `AdapterStates` has it."""
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


def _require_finite(
    weights: Mapping[str, AdapterWeights], dtype: torch.dtype, folder: Path
) -> None:
    """Raises ValueError for an adapter with numbers that are NaN or infinite in a dtype: tokens
    without it are multiplied with its matrices, too, by zeros, and would be NaN. All ranks look at
    all numbers, so that they agree."""
    most = torch.finfo(dtype).max
    for module, each in weights.items():
        for given, scale in ((each.down, 1.0), (each.up, each.scale)):
            ends = [end.item() for end in given.aminmax()] if given.numel() else []
            if not all(abs(end * scale) <= most for end in ends):  # nor of NaN
                raise ValueError(f"{folder}: {module} has numbers that are not finite in {dtype}")


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
        self._copies.wait_stream(current)
        with torch.cuda.stream(self._copies):
            self._adapters.enter(slot, packed.memory, packed.rank)
            packed.entered = entered = self._copies.record_event()
        if waits:
            current.wait_event(entered)
        else:
            self._entering.append(entered)

    def read_step(self, step_id: int) -> PendingSection | None:
        """Returns what has become of adapters since the step before."""
        if not self._serves or not (found := self.host.report()):
            return None
        numbers, states = torch.tensor(found, dtype=torch.int32).unbind(1)
        return PendingSection(AdapterStates, (numbers.contiguous(), states.contiguous()))
