"""What each rank is doing, and whether its process runs at all: so that the parent can name the one
that hung.

A rank says what it is doing in anonymous shared memory (`Heartbeat`). Whether it runs is known to
the kernel (`Pulse`), which also knows it of a process that cannot speak: one that was stopped, or
that is held by a long call into a library. So no rank is woken only to show that it lives, and
`MultiprocessExecutor` looks only while it waits for an answer.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import numpy as np

_LINE = 8  # int64 of a rank: a cache line. In it: step begun, when, step finished, when
_STATUS = re.compile(
    rb"^State:\t(\w).*^voluntary_ctxt_switches:\t(\d+)\nnonvoluntary_ctxt_switches:\t(\d+)$",
    re.DOTALL | re.MULTILINE,
)
_STATUS_BYTES = 1 << 14  # far more than it has, also on a machine whose list of cores is long
_WHAT_HOLDS = {
    "T": "it is stopped, as by SIGSTOP",
    "D": "it hangs in a system call that cannot be interrupted",
}


class Heartbeat:
    """The last step that each rank began and the last that it finished; on a GPU the next begins
    before one is finished.

    Times are of `time.monotonic_ns`, one clock for all processes of a machine. It can be pickled
    only for a process that is being spawned, which inherits the memory.
    """

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._fd = os.memfd_create("aioinfer-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_ranks * _LINE * 8)
        self._map()

    def _map(self) -> None:
        self._lines = np.frombuffer(mmap.mmap(self._fd, 0), np.int64).reshape(
            self._num_ranks, _LINE
        )

    def begin(self, rank: int, step_id: int) -> None:
        """Says that `rank` begins a step."""
        self._lines[rank, :2] = step_id, time.monotonic_ns()

    def finish(self, rank: int, step_id: int) -> None:
        """Says that `rank` has finished a step."""
        self._lines[rank, 2:4] = step_id, time.monotonic_ns()

    def laggards(self, step_id: int) -> list[int]:
        """Returns the ranks that keep a step from its end.

        Those that have not begun it, since the others wait for them in an exchange; if all have,
        those that have not finished it; if all have finished, every one, since the result is lost.
        """
        begun, begun_ns, finished, finished_ns = self._lines[:, :4].T
        for waiting in (
            ~((begun_ns > 0) & (begun >= step_id)),
            ~((finished_ns > 0) & (finished >= step_id)),
        ):
            if waiting.any():
                return [int(rank) for rank in np.flatnonzero(waiting)]
        return list(range(self._num_ranks))

    def describe(self, rank: int) -> str:
        """Returns what `rank` said last, and how long ago."""
        begun, begun_ns, finished, finished_ns = (int(x) for x in self._lines[rank, :4])
        if not begun_ns:
            return f"rank {rank} has begun no step"
        doing = (
            f"waiting for a plan after step {finished}"
            if finished_ns and finished == begun
            else f"executing step {begun}"
        )
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


@dataclass(slots=True)
class _Vitals:
    """Of one process: its status file; the state of its main thread and how often that has been
    switched; since when both are so."""

    fd: int
    seen: tuple[str, int] = ("", 0)
    since: float = 0.0


class Pulse:
    """Whether processes run at all, by what the kernel says of each one's main thread
    (proc_pid_status(5)).

    A process that is stopped, or held in an uninterruptible call, and whose thread has not been
    switched once from look to look, did not run for a moment in between. Nothing else looks like
    that: on a busy machine it would be runnable, in a long computation running, and one that is
    stopped and continued again and again is switched each time. A debugger's stop is none of these.

    Args:
        look_every_s: how often `look` is going to be called.
        lost_after_s: a process that did not run for so long counts as lost.

    Attributes:
        resumed_at: the look before which this process did not look for long: it was itself stopped,
            or had nothing to wait for. A stopped terminal job continues one process after the
            other, so what was seen earlier says nothing.
    """

    def __init__(self, look_every_s: float = 1.0, lost_after_s: float = 6.0):
        self.look_every_s = look_every_s
        self.lost_after_s = lost_after_s
        self.resumed_at = 0.0
        self._looked_at = 0.0
        self._vitals: list[_Vitals] = []

    def watch(self, pid: int) -> None:
        """Adds the process of the next rank."""
        self._vitals.append(_Vitals(os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)))

    def look(self) -> None:
        """Notes the state of every process: some 20 microseconds each."""
        now = time.monotonic()
        is_late = now - self._looked_at > 3 * self.look_every_s
        self._looked_at = now
        if is_late:
            self.resumed_at = now
        for vitals in self._vitals:
            seen = _read_status(vitals.fd)
            if is_late or seen != vitals.seen:
                vitals.seen, vitals.since = seen, now

    def find_lost(self, states: str) -> dict[int, str]:
        """Returns what holds each rank that is lost, by rank.

        Args:
            states: letters of the states that count: "T" for stopped, "D" for an uninterruptible
                call.
        """
        found = {}
        for rank, vitals in enumerate(self._vitals):
            state, still_s = vitals.seen[0], self._looked_at - vitals.since
            if state and state in states and still_s >= self.lost_after_s:
                found[rank] = f"has not run for {still_s:.0f} s: {_WHAT_HOLDS[state]}"
        return found

    def close(self) -> None:
        """Closes the descriptors. Safe to call twice."""
        for vitals in self._vitals:
            os.close(vitals.fd)
        self._vitals.clear()


def _read_status(fd: int) -> tuple[str, int]:
    """Returns the state's letter and the context switches of a process; ("", 0) if it is gone."""
    try:
        status = _STATUS.search(os.pread(fd, _STATUS_BYTES, 0))
    except ProcessLookupError:
        status = None
    return ("", 0) if status is None else (status[1].decode(), int(status[2]) + int(status[3]))
