"""A ring buffer in anonymous shared memory: one writer, N readers, wake-ups by eventfd.

The engine's plans go to the workers through one ring; rank 0's results come back through another.
Memory and wake-ups are file descriptors without a name (`memfd_create`, `eventfd`): two servers
cannot collide, and nothing stays behind, whichever process is killed. A ring can be pickled only
for a process that is being spawned, which inherits the descriptors.

Layout: int64 counters, each on a cache line of its own, then `num_slots` slots of `slot_bytes`.
Counter 0 is how many slots were ever used; counter 1 + r how many reader r has released. A
message is its length (int64) and its bytes, in as many consecutive slots as it needs; if those
would run over the end, the rest of the lap is skipped.

Order: the writer fills the slots, advances its counter, and then adds one to each reader's eventfd.
Python has no memory fences, but the kernel's lock on an eventfd is one: bytes stored before the
`write` are visible after the `read` that takes its count. So a reader reads exactly as many
messages as its eventfd has announced, and never looks at the writer's counter, which could be seen
before the message itself on CPUs that reorder stores.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import numpy as np

from aioinfer.ipc.anonymous_file import anonymous_file

_COUNTERS_TO_A_LINE = 8
_LENGTH_BYTES = 8
_SKIP = -1  # in place of a length: the rest of this lap is unused


class RingFullError(RuntimeError):
    """A message is longer than the ring allows, or a reader has not released enough slots for
    it."""


class Ring:
    """One writer's messages for each of `num_readers` readers."""

    def __init__(self, num_readers: int, *, slot_bytes: int = 128 * 1024, num_slots: int = 512):
        """Makes a ring.

        Memory is taken only where it is touched, so a generous ring costs nothing.
        """
        self.num_readers = num_readers
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._memory_fd = anonymous_file(
            "aioinfer-ring", self._header_bytes + num_slots * slot_bytes
        )
        self._event_fds = [
            os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(num_readers)
        ]
        self._map()

    @property
    def _header_bytes(self) -> int:
        needed = (1 + self.num_readers) * _COUNTERS_TO_A_LINE * 8
        return -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def max_message_bytes(self) -> int:
        """The longest message: a quarter of the ring.

        Wherever the lap ends, one can be written while a reader has not released two others, which
        is as far as the step loop gets ahead of its workers.
        """
        return self.num_slots // 4 * self.slot_bytes - _LENGTH_BYTES

    def _map(self) -> None:
        self._memory = mmap.mmap(
            self._memory_fd, self._header_bytes + self.num_slots * self.slot_bytes
        )
        self._view = memoryview(self._memory)
        counters = np.frombuffer(
            self._memory, np.int64, (1 + self.num_readers) * _COUNTERS_TO_A_LINE
        )
        self._counters = counters[::_COUNTERS_TO_A_LINE]

    # ---------------------------------------------------------------- the writer

    def write(self, parts: Sequence[memoryview]) -> None:
        """Writes a message and wakes every reader. Never waits.

        Args:
            parts: views of bytes (format "B"), which follow each other in the message.

        Raises:
            RingFullError: it is longer than `max_message_bytes`, or a reader lags by most of the
                ring. Nothing was written.
        """
        length = sum(map(len, parts))
        if length > self.max_message_bytes:
            raise RingFullError(
                f"a message of {length} bytes is too long: the limit is {self.max_message_bytes}"
            )
        slots = self._slots_for(length)
        used = int(self._counters[0])
        lap_left = self.num_slots - used % self.num_slots
        skipped = lap_left if slots > lap_left else 0
        free = self.num_slots - (used - int(self._counters[1:].min()))
        if skipped + slots > free:
            lagging = int(self._counters[1:].argmin())
            raise RingFullError(
                f"a message of {length} bytes does not fit: reader {lagging} has released all "
                f"but {self.num_slots - free} "
                f"of {self.num_slots} slots, and {skipped + slots} are needed"
            )
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
        """Returns the descriptor that is readable while messages for `reader` are not yet
        `announced`."""
        return self._event_fds[reader]

    def announced(self, reader: int) -> int:
        """Returns how many messages have come for `reader` since the last call; it must `read` that
        many. Never waits."""
        try:
            return os.eventfd_read(self._event_fds[reader])
        except BlockingIOError:
            return 0

    def read(self, reader: int) -> memoryview:
        """Returns the next announced message, a view that holds until `release`."""
        taken = int(self._counters[1 + reader])
        length = self._load_length(taken)
        if length == _SKIP:
            taken += self.num_slots - taken % self.num_slots
            self._counters[1 + reader] = taken
            length = self._load_length(taken)
        offset = self._offset(taken) + _LENGTH_BYTES
        return self._view[offset : offset + length]

    def release(self, reader: int) -> None:
        """Gives the slots of the message that `read` returned back to the writer; then the next one
        can be read."""
        taken = int(self._counters[1 + reader])
        self._counters[1 + reader] = taken + self._slots_for(self._load_length(taken))

    # ---------------------------------------------------------------- both

    def _slots_for(self, length: int) -> int:
        return -(-(length + _LENGTH_BYTES) // self.slot_bytes)

    def _offset(self, slot: int) -> int:
        return self._header_bytes + slot % self.num_slots * self.slot_bytes

    def _store_length(self, slot: int, length: int) -> None:
        offset = self._offset(slot)
        self._view[offset : offset + _LENGTH_BYTES] = length.to_bytes(
            _LENGTH_BYTES, "little", signed=True
        )

    def _load_length(self, slot: int) -> int:
        offset = self._offset(slot)
        return int.from_bytes(self._view[offset : offset + _LENGTH_BYTES], "little", signed=True)

    def close(self) -> None:
        """Closes the descriptors.

        The memory itself goes when the last view of it does. Safe to call twice.
        """
        if self._memory_fd < 0:
            return
        for fd in [self._memory_fd, *self._event_fds]:
            os.close(fd)
        self._memory_fd, self._event_fds = -1, []

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
