"""Worker half of adapters: reads them into memory of the host, in a thread, and puts them into the
slots of the device.

The host keeps what was used most recently, up to `LoraConfig.host_bytes`, each adapter in the form
of a slot: it enters one by a single copy, on a stream of its own, which begins when the steps
before are over and which later steps wait for.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from aioinfer.features.adapters.checkpoint import read_weights
from aioinfer.features.adapters.sections import DROP, READ, AdapterChanges, AdapterStates
from aioinfer.ipc.plan import StepPlan
from aioinfer.layers.adapters.parts import rank_of
from aioinfer.layers.adapters.slots import AdapterSlots
from aioinfer.worker.features import PendingSection, Rank, WorkerFeature

_log = logging.getLogger(__name__)


class _Packed(NamedTuple):
    """An adapter in the form of a slot: its products, its other parts, and its rank."""

    memory: torch.Tensor
    parts: torch.Tensor
    rank: int


class HostAdapters:
    """The adapters in memory of the host.

    Args:
        slots: whose form they have.
        max_bytes: of all that are not on their way into a slot; the least recently used go first.
        pinned: whether the memory is pinned.
    """

    def __init__(self, slots: AdapterSlots, max_bytes: int, *, pinned: bool):
        self._slots, self._max_bytes, self._pinned = slots, max_bytes, pinned
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._kept: OrderedDict[int, Future[_Packed]] = OrderedDict()
        self._unreported: dict[int, Future[_Packed]] = {}

    def read(self, number: int, folder: str) -> Future[_Packed]:
        """Begins to read an adapter that is not there, and returns it."""
        if number not in self._kept:
            future = self._thread.submit(self._read, folder)
            self._kept[number] = self._unreported[number] = future
        self._kept.move_to_end(number)
        self._shrink(number)
        return self._kept[number]

    def drop(self, number: int) -> None:
        """Forgets an adapter."""
        self._kept.pop(number, None)

    def _read(self, folder: str) -> _Packed:
        with torch.inference_mode():
            slots, weights = self._slots, read_weights(Path(folder))
            rank, pinned = rank_of(weights), self._pinned
            products = slots.pack(weights, pinned=pinned)
            parts = slots.pack_parts(weights, pinned=pinned)
            for packed in (products, parts):
                _require_finite(packed, folder)
            return _Packed(products, parts, rank)

    def _shrink(self, used: int) -> None:
        """Forgets what is too much, but not `used`."""
        done = [n for n, future in self._kept.items() if future.done() and n != used]
        most = max(1, self._max_bytes // self._slots.slot_bytes)
        for number in done[: max(0, len(self._kept) - most)]:
            if number not in self._unreported:
                del self._kept[number]

    def report(self) -> list[tuple[int, bool]]:
        """Returns (number, whether it failed) of the adapters that were read since the last
        call."""
        found = [(n, future) for n, future in self._unreported.items() if future.done()]
        for number, future in found:
            del self._unreported[number]
            if (error := future.exception()) is not None:
                _log.error("an adapter cannot be read: %s", error)
                self._kept.pop(number, None)
        return [(number, future.exception() is not None) for number, future in found]


def _require_finite(packed: torch.Tensor, folder: str) -> None:
    """Raises ValueError for an adapter with NaN or infinite numbers: tokens without it are
    multiplied with its matrices, too, by zeros, and would be NaN."""
    if len(packed) and not torch.stack(packed.aminmax()).isfinite().all():
        raise ValueError(f"{folder} has numbers that are not finite in {packed.dtype}")


class Work(WorkerFeature):
    """See `WorkerFeature`.

    Attributes:
        host: the adapters in its memory.
    """

    def __init__(self, rank: Rank):
        super().__init__(rank)
        adapters = rank.model.backend.adapters
        self.is_needed = adapters is not None
        if adapters is None:
            return
        self._adapters = adapters
        rank.slots.has_adapters = True
        self._of_slots = np.zeros(len(rank.slots.tokens), np.int32)
        is_gpu = rank.device.type == "cuda"
        self.host = HostAdapters(adapters, rank.config.lora.host_bytes, pinned=is_gpu)
        self._copies = torch.cuda.Stream(rank.device) if is_gpu else None
        self._entering: list[torch.cuda.Event] = []
        self._serves = False

    def begin_service(self) -> None:
        """See `WorkerFeature.begin_service`."""
        self._serves = True

    def begin(self, plan: StepPlan) -> None:
        """See `WorkerFeature.begin`."""
        if not self._serves:
            return
        for entered in self._entering:  # with an earlier plan
            torch.cuda.current_stream().wait_event(entered)
        self._entering = []
        changes = plan.section(AdapterChanges)
        if changes is not None:
            self._take(changes)
        records = plan.admissions.records
        self._of_slots[records["slot"]] = records["adapter"]
        self._adapters.tokens.is_active = bool(self._of_slots[plan.slots].any())

    def _take(self, changes: AdapterChanges) -> None:
        folders = changes.folders_by_number()
        columns = (changes.numbers, changes.slots, changes.waits)
        for number, slot, waits in zip(*(each.tolist() for each in columns), strict=True):
            if slot == DROP:
                self.host.drop(number)
                continue
            reading = self.host.read(number, folders[number])
            if slot != READ:
                self._enter(slot, reading, waits=bool(waits))

    def _enter(self, slot: int, reading: Future[_Packed], *, waits: bool) -> None:
        """Puts an adapter into a slot, once it has been read; one that cannot be read leaves a slot
        that adds nothing."""
        try:
            packed = reading.result()
        except Exception:  # `report` tells of it
            self._adapters.tokens.ranks[slot] = 0
            return
        if self._copies is None:
            self._copy(slot, packed)
            return
        current = torch.cuda.current_stream()
        self._copies.wait_stream(current)
        with torch.cuda.stream(self._copies):
            self._copy(slot, packed)
            entered = self._copies.record_event()
        if waits:
            current.wait_event(entered)
        else:
            self._entering.append(entered)

    def _copy(self, slot: int, packed: _Packed) -> None:
        self._adapters.enter(slot, packed.memory, packed.rank)
        self._adapters.parts.enter(slot, packed.parts)

    def read_step(self, step_id: int) -> PendingSection | None:
        """Returns which adapters have been read since the step before."""
        if not self._serves or not (found := self.host.report()):
            return None
        numbers, failed = torch.tensor(found, dtype=torch.int32).unbind(1)
        return PendingSection(AdapterStates, (numbers.contiguous(), failed.contiguous()))
