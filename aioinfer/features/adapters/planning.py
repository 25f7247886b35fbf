"""Planning half of adapters: which adapters are in memory of the workers' hosts, and in which slot.

A request waits in the queue until its adapter is in a slot, and others go before it. The adapter is
read into memory of the host as soon as the request waits, in a thread of the workers; once all of
them have read it, it takes a free slot, or that of an adapter that no running request has, the one
that was used least recently. Memory of the host is bounded: where there is no room, the adapter
goes that was used least recently, of those that no request waits for. Where nothing runs, plans
without rows begin to read and ask for the end.

If running requests have all slots, the adapter with the fewest of them gets no request that comes
from then on until the request that waits has had its turn: its slot is for that request. Requests
of that adapter that wait already go first, whatever their order in the queue, as many as run at a
time: else two adapters with one slot would change places with each request. So do requests that
have begun, of whatever adapter.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakSet

from aioinfer.errors import GenerationError
from aioinfer.features.adapters.sections import (
    DROP,
    MAX_READING,
    READ,
    AdapterChanges,
    AdapterFiles,
    AdapterReads,
    Change,
)
from aioinfer.ipc.sections import Section
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import StepFeature, SubmittedRequest, Variant
from aioinfer.scheduler.request import Request, RequestStatus, Use


@dataclass(frozen=True, slots=True)
class Adapter(Variant):
    """An adapter; its root is the folder with its files.

    Attributes:
        number: of all that there have been, no two have the same.
        sample: a digest of parts of its files, by which workers find out that they have changed.
    """

    number: int
    sample: str

    @property
    def files(self) -> AdapterFiles:
        """The files as workers find them."""
        return AdapterFiles(self.root, self.sample)

    def asked_by(self, params: SamplingParams) -> SamplingParams:
        """See `Variant.asked_by`."""
        return replace(params, adapter=self.name)


@dataclass(slots=True)
class AdapterUse(Use):
    """The adapter of a request.

    Attributes:
        adapter: the adapter.
        order: how many requests had begun to wait when the request did.
        place: the slot of the workers that has its adapter, while the request runs.
    """

    feature: ClassVar[str] = "adapters"

    adapter: Adapter
    order: int = 0
    place: int = -1

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


@dataclass(slots=True)
class _Turn:
    """A request that waits for a slot though all are used.

    Attributes:
        request: the request.
        place: the slot that becomes its own.
        order: of the last request that waited when the turn was decided; later ones of the slot's
            adapter wait until the turn is over.
        num_before: how many earlier ones of the slot's adapter may still be admitted.
    """

    request: Request
    place: int
    order: int
    num_before: int


class Planning(StepFeature):
    """See `StepFeature`."""

    name = "adapters"
    reports = AdapterReads

    def __init__(self, host: Any):
        super().__init__(host)
        count = host.config.lora.num_slots
        self.announces = self.holds_back = count > 0
        self._slots = [_Slot() for _ in range(count)]
        self._plan = 0  # the number of the plan that is being made
        self._changes: list[Change] = []
        self._admitted: list[tuple[int, int]] = []  # by the plan, as `AdapterChanges` has them
        self._awaits = False  # whether the plan is posted to hear what has been read
        self._removed: WeakSet[Adapter] = WeakSet()
        self._wanted: dict[int, Adapter] = {}  # adapters that are to be read
        self._reading: set[int] = set()
        self._read = dict[int, None]()  # in the order of their last use
        self._failed: set[int] = set()  # of which a rank has found that it cannot read them
        self._room = 1  # for adapters in memory of the host beside those that are being read
        self._num_expected = 0  # requests that have begun to wait
        self._turn: _Turn | None = None

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`."""
        adapter = submitted.variant
        return AdapterUse(adapter) if isinstance(adapter, Adapter) else None

    def expect(self, request: Request, use: Any) -> None:
        """See `StepFeature.expect`."""
        self._num_expected += 1
        use.order = self._num_expected
        number = use.adapter.number
        known = (self._read, self._reading, self._failed)
        if self._place_of(number) is None and not any(number in each for each in known):
            self._wanted[number] = use.adapter
            self._begin_reading()
            if self._changes:  # now: the next plan may be made a whole step later
                self.host.tell(AdapterChanges.of(self._changes, ()))
                self._changes = []

    def needs_step(self, *, is_idle: bool) -> bool:
        """See `StepFeature.needs_step`."""
        self._awaits = is_idle and bool(self._reading)
        return self._awaits or bool(self._changes)

    def holds(self, request: Request, use: Any) -> bool:
        """See `StepFeature.holds`."""
        adapter: Adapter = use.adapter
        number = adapter.number
        if number in self._failed:
            self._fail(request, adapter)
            return True
        place = self._place_of(number)
        if place is None:
            place = self._find_place(request, use)
            if place is None:
                return True
        slot = self._slots[place]
        if slot.ready > self._plan or self._yields(request, use, place):
            return True
        slot.used = self._plan
        use.place = place
        if self._turn is not None and self._turn.request is request:
            self._turn = None
        elif self._turn is not None and self._turn.place == place:
            self._turn.num_before -= 1
        return False

    def admit(self, request: Request, use: Any) -> None:
        """See `StepFeature.admit`."""
        self._admitted.append((request.slot, use.place))

    def _numbers_of(self, *, with_running: bool) -> set[int]:
        """Returns the adapters of the requests that wait, or of all that have not ended."""
        requests = self.host.scheduler().requests()
        statuses = (RequestStatus.FINISHED, *([] if with_running else [RequestStatus.RUNNING]))
        found = (each.use(AdapterUse) for each in requests if each.status not in statuses)
        return {use.adapter.number for use in found if use is not None}

    @property
    def _may_wait(self) -> bool:
        """Whether this plan's step may wait for an adapter that enters with it. It may for the
        first one, which gets to the device beside the step before, but not for one of experts,
        which takes longer than a step; and for any where nothing runs."""
        if not self.host.scheduler().num_running:
            return True
        is_first = all(change.slot < 0 for change in self._changes)
        return is_first and "experts" not in self.host.config.lora.targets

    def _place_of(self, number: int) -> int | None:
        return next((p for p, slot in enumerate(self._slots) if slot.number == number), None)

    def _find_place(self, request: Request, use: AdapterUse) -> int | None:
        """Returns the slot that a request's adapter takes, if there is one and it has been read;
        else has it read before others, whatever has to go for it."""
        adapter, number = use.adapter, use.adapter.number
        place = self._free_place(request, use)
        if place is None:
            return None
        if number not in self._read:
            if number not in self._reading and len(self._reading) < MAX_READING:
                if self._is_full:
                    self._drop(next(iter(self._read)))
                self._begin_to_read(adapter)
            return None
        self._read[number] = self._read.pop(number)
        waits = self._may_wait
        self._slots[place] = _Slot(number, self._plan, self._plan + (not waits))
        self._changes.append(Change(number, place, waits))
        return place

    def _begin_reading(self) -> None:
        """Has wanted adapters read, in the order of their requests, a few at a time."""
        unused: deque[int] | None = None  # adapters that no request waits for
        while self._wanted and len(self._reading) < MAX_READING:
            if self._is_full:
                if unused is None:
                    waiting = self._numbers_of(with_running=False)
                    unused = deque(each for each in self._read if each not in waiting)
                if not unused:
                    return
                self._drop(unused.popleft())
            self._begin_to_read(next(iter(self._wanted.values())))

    def _begin_to_read(self, adapter: Adapter) -> None:
        self._wanted.pop(adapter.number, None)
        self._reading.add(adapter.number)
        self._changes.append(Change(adapter.number, READ, files=adapter.files))

    @property
    def _is_full(self) -> bool:
        """Whether an adapter has to go from memory of the host before another one is read."""
        return len(self._read) + len(self._reading) >= self._room + MAX_READING

    def _drop(self, number: int) -> None:
        """Lets memory of the host forget an adapter."""
        self._read.pop(number, None)
        self._reading.discard(number)
        self._changes.append(Change(number, DROP))

    def _free_place(self, request: Request, use: AdapterUse) -> int | None:
        """Returns the slot whose adapter was used least recently, of those that no running request
        has and that are not for another one's turn; None if there is none: then the one with the
        fewest is to become free."""
        uses = (each.use(AdapterUse) for each in self.host.scheduler().running)
        running = Counter(use.place for use in uses if use is not None)
        free = [
            place
            for place, slot in enumerate(self._slots)
            if not running[place]
            and slot.ready <= self._plan
            and not self._yields(request, use, place)
        ]
        if free:
            return min(free, key=lambda place: self._slots[place].used)
        if self._turn is None or self._turn.request.status is not RequestStatus.WAITING:
            fewest = min(range(len(self._slots)), key=lambda place: running[place])
            num_before = self.host.config.scheduler.max_num_seqs - running[fewest]
            self._turn = _Turn(request, fewest, self._num_expected, num_before)
        return None

    def _yields(self, request: Request, use: AdapterUse, place: int) -> bool:
        """Whether a request that would have a slot has to wait for another adapter's turn."""
        turn = self._turn
        if turn is None:
            return False
        if turn.request.status is not RequestStatus.WAITING:
            self._turn = None
            return False
        if turn.place != place or turn.request is request or request.has_begun:
            return False  # siblings may wait for one that has begun, and a pause admits no other
        is_before = use.adapter.number == self._slots[place].number and use.order <= turn.order
        return not is_before or turn.num_before <= 0

    def _fail(self, request: Request, adapter: Adapter) -> None:
        """Ends a request outside the planning of a step."""
        error = GenerationError(f"the adapter {adapter.name!r} cannot be read; the log says why")
        asyncio.get_running_loop().call_soon(self.host.fail, request, error)

    def announce(self) -> Section | None:
        """See `StepFeature.announce`."""
        self._plan += 1
        if not self._changes and not self._admitted and not self._awaits:
            return None
        self._awaits = False
        section = AdapterChanges.of(self._changes, self._admitted)
        self._changes, self._admitted = [], []
        return section

    def take_report(self, section: Section) -> None:
        """See `StepFeature.take_report`."""
        assert isinstance(section, AdapterReads)
        for number, room in zip(section.numbers.tolist(), section.rooms.tolist(), strict=True):
            if number not in self._reading:  # it was forgotten meanwhile
                continue
            self._reading.remove(number)
            if room:
                self._read[number], self._room = None, room
            else:
                self._failed.add(number)
                self._drop(number)
        self._begin_reading()

    def drop(self, request: Request) -> None:
        """See `StepFeature.drop`."""
        if self._turn is not None and self._turn.request is request:
            self._turn = None
        use = request.use(AdapterUse)
        if use is not None and use.adapter in self._removed:
            self.forget(use.adapter)

    def forget(self, adapter: Adapter) -> None:
        """Lets the workers free what they have of an adapter that was removed, once no request has
        it."""
        self._removed.add(adapter)
        number = adapter.number
        if number in self._numbers_of(with_running=True):
            return
        self._wanted.pop(number, None)
        self._failed.discard(number)
        if (place := self._place_of(number)) is not None:
            self._slots[place].number = -1
        self._drop(number)

    def restart(self) -> None:
        """See `StepFeature.restart`: new workers have no adapters."""
        self._slots = [_Slot(ready=self._plan) for _ in self._slots]
        self._changes, self._admitted, self._turn = [], [], None
        for each in (self._wanted, self._reading, self._read, self._failed):
            each.clear()
