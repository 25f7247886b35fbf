"""Planning half of adapters: which adapter is in which slot of the workers.

A request waits in the queue until its adapter is in a slot, and others go before it. The adapter is
read into memory of the host first, beside the steps of others; then it takes a free slot, or that
of an adapter that no running request has, the one that was used least recently. Where nothing else
runs, the request's own step waits for it.

If running requests have all slots, the adapter with the fewest of them gets no further ones until
the request that waits has had its turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.errors import GenerationError
from aioinfer.features.adapters.registry import Adapter
from aioinfer.features.adapters.sections import DROP, READ, AdapterChanges, AdapterStates
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Request, RequestStatus, Use


@dataclass(slots=True)
class AdapterUse(Use):
    """The adapter of a request."""

    feature: ClassVar[str] = "adapters"

    adapter: Adapter

    def covers(self, start: int, end: int, samples: bool) -> bool:
        """No row: workers find the adapter of a row by its slot."""
        return False


@dataclass(slots=True)
class _Slot:
    """A slot of the workers.

    Attributes:
        number: of its adapter; -1 for none.
        used: the last plan that admitted a request of it, or that it entered with.
        ready: the first plan whose rows may use it.
    """

    number: int = -1
    used: int = -1
    ready: int = 0


class Planning(StepFeature):
    """See `StepFeature`."""

    name = "adapters"
    reports = AdapterStates

    def __init__(self, host: Any):
        super().__init__(host)
        count = host.config.lora.num_slots
        self.announces = self.holds_back = count > 0
        self._slots = [_Slot() for _ in range(count)]
        self._plan = 0  # the number of the plan that is being made
        self._changes: list[tuple[int, int, bool]] = []
        self._folders: dict[int, str] = {}
        self._reading: set[int] = set()
        self._read: set[int] = set()
        self._failed: set[int] = set()
        #: the request that waits for a slot though all are used, and the slot
        self._turn: tuple[Request, int] | None = None

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`."""
        return None if submitted.adapter is None else AdapterUse(submitted.adapter)

    def holds(self, request: Request, use: Any) -> bool:
        """See `StepFeature.holds`."""
        adapter: Adapter = use.adapter
        number = adapter.number
        if number in self._failed:
            self._fail(request, adapter)
            return True
        place = self._place_of(number)
        if place is None:
            place = self._find_place(request, adapter)
            if place is None:
                return True
        slot = self._slots[place]
        if slot.ready > self._plan and self._is_alone:
            self._wait_for(slot)
        if slot.ready > self._plan or self._yields(request, place):
            return True
        slot.used = self._plan
        request.adapter = place
        if self._turn is not None and self._turn[0] is request:
            self._turn = None
        return False

    @property
    def _is_alone(self) -> bool:
        """Whether nothing runs: there is no step without the request that is next in the queue."""
        return not self.host.scheduler().num_running

    def _wait_for(self, slot: _Slot) -> None:
        """Lets the rows of this plan wait for an adapter that enters its slot with it."""
        slot.ready = self._plan
        self._changes = [
            (number, place, waits or number == slot.number)
            for number, place, waits in self._changes
        ]

    def _place_of(self, number: int) -> int | None:
        return next((p for p, slot in enumerate(self._slots) if slot.number == number), None)

    def _find_place(self, request: Request, adapter: Adapter) -> int | None:
        """Returns the slot that an adapter takes, if it can now; else has it read."""
        number, is_alone = adapter.number, self._is_alone
        if number not in self._read and not is_alone:
            if number not in self._reading:
                self._reading.add(number)
                self._add(adapter, READ, waits=False)
            return None
        place = self._free_place(request)
        if place is None:
            return None
        self._slots[place] = _Slot(number, self._plan, self._plan + (not is_alone))
        self._add(adapter, place, waits=is_alone)
        return place

    def _free_place(self, request: Request) -> int | None:
        """Returns the slot whose adapter was used least recently, of those that no running request
        has; None if there is none: then the one with the fewest is to become free."""
        running = Counter(r.adapter for r in self.host.scheduler().running if r.adapter >= 0)
        free = [
            place
            for place, slot in enumerate(self._slots)
            if not running[place] and slot.ready <= self._plan
        ]
        if free:
            return min(free, key=lambda place: self._slots[place].used)
        if self._turn is None or self._turn[0].status is not RequestStatus.WAITING:
            fewest = min(range(len(self._slots)), key=lambda place: running[place])
            self._turn = request, fewest
        return None

    def _yields(self, request: Request, place: int) -> bool:
        """Whether a request of the adapter in a slot has to wait for another adapter's turn."""
        if self._turn is None:
            return False
        waiting, needed = self._turn
        if waiting.status is not RequestStatus.WAITING:
            self._turn = None
            return False
        return needed == place and waiting is not request

    def _add(self, adapter: Adapter, slot: int, *, waits: bool) -> None:
        self._changes.append((adapter.number, slot, waits))
        self._folders[adapter.number] = adapter.folder

    def _fail(self, request: Request, adapter: Adapter) -> None:
        """Ends a request outside the planning of a step."""
        error = GenerationError(f"the adapter {adapter.name!r} cannot be read; the log says why")
        asyncio.get_running_loop().call_soon(self.host.fail, request, error)

    def announce(self) -> Section | None:
        """See `StepFeature.announce`."""
        self._plan += 1
        if not self._changes:
            return None
        section = AdapterChanges.of(self._changes, self._folders)
        self._changes, self._folders = [], {}
        return section

    def take_report(self, section: Section) -> None:
        """See `StepFeature.take_report`. Requests whose step has waited for an adapter that cannot
        be read run by now."""
        assert isinstance(section, AdapterStates)
        for number, failed in zip(section.numbers.tolist(), section.failed.tolist(), strict=True):
            self._reading.discard(number)
            if failed:
                self._failed.add(number)
                for request in self.host.scheduler().running:
                    for use in request.uses:
                        if isinstance(use, AdapterUse) and use.adapter.number == number:
                            self._fail(request, use.adapter)
                self._empty(number)
            else:
                self._read.add(number)

    def _empty(self, number: int) -> None:
        """Lets the slot of an adapter hold none."""
        place = self._place_of(number)
        if place is not None:
            self._slots[place].number = -1

    def forget(self, adapter: Adapter) -> None:
        """Lets the workers free what they have of an adapter that was removed. A request that still
        has it has it read again."""
        number = adapter.number
        self._read.discard(number)
        self._reading.discard(number)
        self._failed.discard(number)
        place = self._place_of(number)
        if place not in {r.adapter for r in self.host.scheduler().running}:
            self._empty(number)
        self._changes.append((number, DROP, False))

    def restart(self) -> None:
        """See `StepFeature.restart`: new workers have no adapters."""
        self._slots = [_Slot(ready=self._plan) for _ in self._slots]
        self._changes, self._folders, self._turn = [], {}, None
        for numbers in (self._reading, self._read, self._failed):
            numbers.clear()
