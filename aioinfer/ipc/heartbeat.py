"""Heartbeats: what each rank is doing, and whether its process runs at all, so that an error names
the rank that hung.

Each rank writes the steps that it begins and finishes into anonymous shared memory (`Heartbeat`).
Whether its process runs is read from the kernel (`ProcessMonitor`), which knows it even of a
process that is stopped or in a long call into a library. So no rank is woken only to show that it
lives, and `MultiprocessExecutor` checks only while it waits for an answer.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import numpy as np

from aioinfer.ipc.anonymous_file import anonymous_file

# int64 of a rank: a cache line. In it: step begun, when, step finished, when, step launched, when
# the last even one was launched, when the last odd one was, nanoseconds spent on steps
_LINE = 8
_TIMES = (1, 3, 5, 6)  # the indices of times
_STATUS = re.compile(
    rb"^State:\t(\w).*^voluntary_ctxt_switches:\t(\d+)\nnonvoluntary_ctxt_switches:\t(\d+)$",
    re.DOTALL | re.MULTILINE,
)
_STATUS_BYTES = 1 << 14  # far more than the file has, also on a machine with a long list of cores
_REASONS = {
    "T": "it is stopped, as by SIGSTOP",
    "D": "it hangs in a system call that cannot be interrupted",
}


class Heartbeat:
    """The last step that each rank began and the last that it finished; on a GPU the next begins
    before one is finished. There a rank also records that it has launched a step: from then on only
    the device works on it, and an error tells a device that hangs from a host that does.

    Times are of `time.monotonic_ns`, one clock for all processes of a machine. It can be pickled
    only for a process that is being spawned, which inherits the memory.
    """

    def __init__(self, num_ranks: int, names: Sequence[str] = ()):
        """`names` are the ranks' names in messages; their numbers by default."""
        self._num_ranks = num_ranks
        self._names = names or [str(rank) for rank in range(num_ranks)]
        self._fd = anonymous_file("aioinfer-heartbeat", num_ranks * _LINE * 8)
        self._map()

    def _map(self) -> None:
        self._lines = np.frombuffer(mmap.mmap(self._fd, 0), np.int64).reshape(
            self._num_ranks, _LINE
        )

    def begin(self, rank: int, step_id: int) -> None:
        """Records that `rank` begins a step."""
        self._lines[rank, :2] = step_id, time.monotonic_ns()

    def launch(self, rank: int, step_id: int) -> None:
        """Records that `rank` has given all of a step to its device, which computes it while the
        host does something else."""
        self._lines[rank, 5 + step_id % 2] = time.monotonic_ns()
        self._lines[rank, 4] = step_id

    def finish(self, rank: int, step_id: int) -> None:
        """Records that `rank` has finished a step."""
        self._lines[rank, 2:4] = step_id, time.monotonic_ns()

    def has_finished(self, rank: int, step_id: int) -> bool:
        """Whether `rank` has finished a step, or a later one."""
        finished, finished_ns = self._lines[rank, 2:4]
        return bool(finished_ns > 0 and finished >= step_id)

    def read(self, ranks: Sequence[int]) -> bytes:
        """Returns the records of some ranks, for `mirror` on another host."""
        return self._lines[ranks].tobytes()

    def mirror(self, ranks: Sequence[int], records: bytes | memoryview, behind_ns: int) -> None:
        """Takes over the records of ranks on another host, whose clock is `behind_ns` behind this
        one's. Raises ValueError if they are not of so many ranks."""
        lines = np.frombuffer(records, np.int64).reshape(len(ranks), _LINE).copy()
        times = lines[:, _TIMES]
        lines[:, _TIMES] = np.where(times > 0, times + behind_ns, 0)
        self._lines[ranks] = lines

    def add_busy(self, rank: int, nanoseconds: int) -> None:
        """Records that `rank` has spent so long on a step."""
        self._lines[rank, 7] += nanoseconds

    def busy_ns(self, rank: int) -> int:
        """Returns how many nanoseconds `rank` has recorded with `add_busy`."""
        return int(self._lines[rank, 7])

    def laggards(self, step_id: int) -> list[int]:
        """Returns the ranks for which a step is not finished.

        These are the ranks that have not begun it, since the others wait for them in a collective;
        if all have begun it, the ranks that have not finished it; if all have finished it, every
        rank, since the result is lost.
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
        """Returns a text about the last record of `rank`, and how long ago it was."""
        begun, begun_ns, finished, finished_ns, _, *launched_ns = self._lines[rank, :7].tolist()
        if not begun_ns:
            return f"rank {self._names[rank]} has begun no step"
        doing = (
            f"waiting for a plan after step {finished}"
            if finished_ns and finished == begun
            else f"executing step {begun}{self._describe_device(rank)}"
        )
        age_s = (time.monotonic_ns() - max(begun_ns, finished_ns, *launched_ns)) / 1e9
        return f"rank {self._names[rank]} was {doing}, last heartbeat {age_s:.1f} s ago"

    def _describe_device(self, rank: int) -> str:
        """Returns how far the host and the device of `rank` are with its steps; an empty text
        where they are one, as on a CPU."""
        begun, _, finished, finished_ns, launched, *launched_ns = self._lines[rank, :7].tolist()
        if not any(launched_ns):
            return ""
        if launched < begun:
            return " (the host has not launched it)"
        oldest = finished + 1 if finished_ns else launched - all(launched_ns)
        # the device was free for it once it was launched and the one before was finished
        still_s = (time.monotonic_ns() - max(launched_ns[oldest % 2], finished_ns)) / 1e9
        return f" (the device has not finished step {oldest} for {still_s:.1f} s)"

    def close(self) -> None:
        """Closes the descriptor. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __getstate__(self) -> dict[str, Any]:
        return {"num_ranks": self._num_ranks, "names": self._names, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._num_ranks, self._names = state["num_ranks"], state["names"]
        self._fd = state["fd"].detach()
        self._map()


@dataclass(slots=True)
class _Process:
    """A monitored process.

    Attributes:
        fd: of its status file.
        seen: the state of its main thread, and how often that has been switched.
        since: when both were first seen, of `time.monotonic`.
    """

    fd: int
    seen: tuple[str, int] = ("", 0)
    since: float = 0.0


class ProcessMonitor:
    """Whether processes run at all, by the kernel's record of each one's main thread
    (proc_pid_status(5)).

    A process that is stopped or in an uninterruptible call did not run between two checks if its
    thread was not switched in between. Other states cannot be mistaken for this one: on a busy
    machine the thread is runnable, in a long computation it is running, and one that is stopped and
    continued repeatedly is switched each time. A debugger's stop has another letter.

    Args:
        check_every_s: how often `check` is going to be called.
        stopped_after_s: a process that did not run for so long counts as stopped.

    Attributes:
        resumed_at: when `check` was last called after a long break: this process was itself
            stopped, or had nothing to wait for. A terminal continues the processes of a stopped job
            one after the other, so states seen before the break do not count.
    """

    def __init__(self, check_every_s: float = 1.0, stopped_after_s: float = 6.0):
        self.check_every_s = check_every_s
        self.stopped_after_s = stopped_after_s
        self.resumed_at = 0.0
        self._checked_at = 0.0
        self._processes: list[_Process] = []

    def watch(self, pid: int) -> None:
        """Adds the process of the next rank."""
        self._processes.append(_Process(os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)))

    def check(self) -> None:
        """Reads the state of every process: some 20 microseconds each."""
        now = time.monotonic()
        has_paused = now - self._checked_at > 3 * self.check_every_s
        self._checked_at = now
        if has_paused:
            self.resumed_at = now
        for process in self._processes:
            seen = _read_status(process.fd)
            if has_paused or seen != process.seen:
                process.seen, process.since = seen, now

    def find_stopped(self, states: str) -> dict[int, str]:
        """Returns the reason for each rank that has stopped running, by rank.

        Args:
            states: letters of the states that count: "T" for stopped, "D" for an uninterruptible
                call.
        """
        found = {}
        for rank, process in enumerate(self._processes):
            state, still_s = process.seen[0], self._checked_at - process.since
            if state and state in states and still_s >= self.stopped_after_s:
                found[rank] = f"has not run for {still_s:.0f} s: {_REASONS[state]}"
        return found

    def close(self) -> None:
        """Closes the descriptors. Safe to call twice."""
        for process in self._processes:
            os.close(process.fd)
        self._processes.clear()


def _read_status(fd: int) -> tuple[str, int]:
    """Returns the state's letter and the context switches of a process; ("", 0) if it is gone."""
    try:
        status = _STATUS.search(os.pread(fd, _STATUS_BYTES, 0))
    except ProcessLookupError:
        status = None
    return ("", 0) if status is None else (status[1].decode(), int(status[2]) + int(status[3]))
