"""What each rank is doing, in anonymous shared memory, so that the parent can say where a worker hung."""

from __future__ import annotations

import mmap
import os
import time
from multiprocessing import reduction
from typing import Any

import numpy as np

_LINE = 8  # int64 of a rank: a cache line. In it: step begun, when, step finished, when


class Heartbeat:
    """The last step that each rank began and the last that it finished; on a GPU the next begins before one is finished.

    Times are of `time.monotonic_ns`, one clock for all processes of a machine. It can be pickled only for a process
    that is being spawned, which inherits the memory.
    """

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._fd = os.memfd_create("aioinfer-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_ranks * _LINE * 8)
        self._map()

    def _map(self) -> None:
        self._lines = np.frombuffer(mmap.mmap(self._fd, 0), np.int64).reshape(self._num_ranks, _LINE)

    def begin(self, rank: int, step_id: int) -> None:
        """Says that `rank` begins a step."""
        self._lines[rank, :2] = step_id, time.monotonic_ns()

    def finish(self, rank: int, step_id: int) -> None:
        """Says that `rank` has finished a step."""
        self._lines[rank, 2:4] = step_id, time.monotonic_ns()

    def describe(self, rank: int) -> str:
        """Returns what `rank` said last, and how long ago."""
        begun, begun_ns, finished, finished_ns = (int(x) for x in self._lines[rank, :4])
        if not begun_ns:
            return f"rank {rank} has begun no step"
        doing = f"waiting for a plan after step {finished}" if finished_ns and finished == begun else f"executing step {begun}"
        return f"rank {rank} was {doing}, last heartbeat {(time.monotonic_ns() - max(begun_ns, finished_ns)) / 1e9:.1f} s ago"

    def close(self) -> None:
        """Closes the descriptor. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __getstate__(self) -> dict[str, Any]:
        return {"num_ranks": self._num_ranks, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._num_ranks, self._fd = state["num_ranks"], state["fd"].detach()
        self._map()
