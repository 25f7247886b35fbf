"""What each rank is doing, in anonymous shared memory, so that the parent can say where a worker hung."""

from __future__ import annotations

import mmap
import os
import time
from multiprocessing import reduction
from typing import Any

import numpy as np

PHASES = ("starting", "waiting for a plan", "executing")


class Heartbeat:
    """A line of int64 for each rank: step, phase, and when it began (`time.monotonic_ns`, one clock for all processes)."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._fd = os.memfd_create("aioinfer-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, mmap.PAGESIZE * (1 + num_ranks * 64 // mmap.PAGESIZE))
        self._map()

    def _map(self) -> None:
        memory = mmap.mmap(self._fd, 0)
        self._lines = np.frombuffer(memory, np.int64, self._num_ranks * 8).reshape(self._num_ranks, 8)

    def beat(self, rank: int, step_id: int, phase: int) -> None:
        """Says that `rank` begins phase `PHASES[phase]` of a step."""
        self._lines[rank, :3] = step_id, phase, time.monotonic_ns()

    def describe(self, rank: int) -> str:
        """Returns what `rank` said last, and how long ago."""
        step_id, phase, began = (int(x) for x in self._lines[rank, :3])
        if not began:
            return f"rank {rank} has not begun"
        return f"rank {rank} was {PHASES[phase]} (step {step_id}) since {(time.monotonic_ns() - began) / 1e9:.1f} s"

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._fd)

    def __getstate__(self) -> dict[str, Any]:
        return {"num_ranks": self._num_ranks, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._num_ranks, self._fd = state["num_ranks"], state["fd"].detach()
        self._map()
