"""A ring buffer in anonymous shared memory: one writer, N readers, wake-ups by eventfd.

The engine's plans go to the workers through one ring; rank 0's results come back through another. Memory and
wake-ups are file descriptors without a name (`memfd_create`, `eventfd`): two servers cannot collide, and
nothing stays behind, whatever kills whom. A ring can be pickled only for a process that is being spawned,
which inherits the descriptors.

Layout: int64 counters, each on a cache line of its own, then `num_slots` slots of `slot_bytes`. Counter 0 is how many
slots were ever used; counter 1 + r how many reader r has given back. A message is its length (int64) and its
bytes, in as many consecutive slots as it needs; if those would run over the end, the rest of the lap is skipped.

Order: the writer fills the slots, then moves its counter, then writes to the readers' eventfds. Python has no
memory fences, but entering the kernel is one: what was stored before the `write` is there after the `read`
that it wakes. So a reader looks only after its eventfd has woken it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import numpy as np

_COUNTERS_TO_A_LINE = 8
_LENGTH_BYTES = 8
_SKIP = -1  # in place of a length: the rest of this lap is unused


class RingFullError(RuntimeError):
    """A reader has not given back enough slots for the message."""


class Ring:
    """One writer's messages for each of `num_readers` readers."""

    def __init__(self, num_readers: int, *, slot_bytes: int = 128 * 1024, num_slots: int = 512):
        """Makes a ring. Memory is taken only where it is touched, so a generous ring costs nothing."""
        self.num_readers = num_readers
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._memory_fd = os.memfd_create("aioinfer-ring", os.MFD_CLOEXEC)
        self._event_fds = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(num_readers)]
        os.ftruncate(self._memory_fd, self._header_bytes + num_slots * slot_bytes)
        self._map()

    @property
    def _header_bytes(self) -> int:
        needed = (1 + self.num_readers) * _COUNTERS_TO_A_LINE * 8
        return -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def max_message_bytes(self) -> int:
        """The longest message: a third of the ring, so that two fit wherever the lap ends."""
        return self.num_slots // 3 * self.slot_bytes - _LENGTH_BYTES

    def _map(self) -> None:
        self._memory = mmap.mmap(self._memory_fd, self._header_bytes + self.num_slots * self.slot_bytes)
        self._view = memoryview(self._memory)
        counters = np.frombuffer(self._memory, np.int64, (1 + self.num_readers) * _COUNTERS_TO_A_LINE)
        self._counters = counters[::_COUNTERS_TO_A_LINE]

    # ---------------------------------------------------------------- the writer

    def write(self, parts: Sequence[memoryview]) -> None:
        """Writes a message, given in parts, and wakes every reader. Never waits.

        Raises:
            RingFullError: it is longer than `max_message_bytes`, or a reader lags by most of the ring.
        """
        length = sum(map(len, parts))
        slots = self._slots_for(length)
        used = int(self._counters[0])
        lap_left = self.num_slots - used % self.num_slots
        skipped = lap_left if slots > lap_left else 0
        free = self.num_slots - (used - int(self._counters[1:].min()))
        if length > self.max_message_bytes or skipped + slots > free:
            raise RingFullError(f"a message of {length} bytes does not fit: {free} of {self.num_slots} slots are free")
        if skipped:
            self._store_length(used, _SKIP)
            used += skipped
        self._store_length(used, length)
        offset = self._offset(used) + _LENGTH_BYTES
        for part in parts:
            self._view[offset : offset + len(part)] = part
            offset += len(part)
        self._counters[0] = used + slots
        for fd in self._event_fds:
            os.eventfd_write(fd, 1)

    # ---------------------------------------------------------------- a reader

    def event_fd(self, reader: int) -> int:
        """The descriptor that becomes readable when there are messages for `reader`."""
        return self._event_fds[reader]

    def read(self, reader: int) -> memoryview | None:
        """Returns the next message, a view that holds until `release`, or None if there is none. Never waits."""
        taken = int(self._counters[1 + reader])
        if taken == int(self._counters[0]):
            return None
        length = self._load_length(taken)
        if length == _SKIP:
            taken += self.num_slots - taken % self.num_slots
            self._counters[1 + reader] = taken
            length = self._load_length(taken)
        offset = self._offset(taken) + _LENGTH_BYTES
        return self._view[offset : offset + length]

    def release(self, reader: int) -> None:
        """Gives the slots of the message that `read` returned back to the writer."""
        taken = int(self._counters[1 + reader])
        self._counters[1 + reader] = taken + self._slots_for(self._load_length(taken))

    def clear_event(self, reader: int) -> None:
        """Takes back the wake-ups so far; call it before reading, so that none is lost."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fds[reader])

    # ---------------------------------------------------------------- both

    def _slots_for(self, length: int) -> int:
        return -(-(length + _LENGTH_BYTES) // self.slot_bytes)

    def _offset(self, slot: int) -> int:
        return self._header_bytes + slot % self.num_slots * self.slot_bytes

    def _store_length(self, slot: int, length: int) -> None:
        offset = self._offset(slot)
        self._view[offset : offset + _LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "little", signed=True)

    def _load_length(self, slot: int) -> int:
        offset = self._offset(slot)
        return int.from_bytes(self._view[offset : offset + _LENGTH_BYTES], "little", signed=True)

    def close(self) -> None:
        """Closes the descriptors. The memory itself goes when the last view of it does."""
        for fd in [self._memory_fd, *self._event_fds]:
            os.close(fd)
        self._event_fds = []
        self._memory_fd = -1

    def __getstate__(self) -> dict[str, Any]:
        return {
            "sizes": (self.num_readers, self.slot_bytes, self.num_slots),
            "memory": reduction.DupFd(self._memory_fd),
            "events": [reduction.DupFd(fd) for fd in self._event_fds],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.num_readers, self.slot_bytes, self.num_slots = state["sizes"]
        self._memory_fd = state["memory"].detach()
        self._event_fds = [fd.detach() for fd in state["events"]]
        self._map()
