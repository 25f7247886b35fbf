"""Worker processes that are held up at random: so that ranks, which wait for each other, are out of
step."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def worker_pids(besides: Sequence[int] = ()) -> list[int]:
    """Returns the process ids of this process's workers, in the order of engines and ranks (ten at
    most), without those given."""
    workers = [
        process
        for process in multiprocessing.active_children()
        if process.name.startswith("aioinfer-worker-")
    ]
    pids = [process.pid or 0 for process in sorted(workers, key=lambda process: process.name)]
    return [pid for pid in pids if pid not in besides]


@contextmanager
def disturbed(pids: Sequence[int], *, seed: int, longest_s: float) -> Iterator[list[int]]:
    """Stops one process after the other, for up to `longest_s` seconds.

    The list holds those that have been stopped so far.
    """
    over, rng = threading.Event(), random.Random(seed)
    stopped: list[int] = []

    def disturb() -> None:
        while not over.is_set():
            pid = rng.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            over.wait(rng.uniform(0.001, longest_s))
            os.kill(pid, signal.SIGCONT)
            stopped.append(pid)
            over.wait(rng.uniform(0, longest_s / 2))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield stopped
    finally:
        over.set()
        thread.join()
