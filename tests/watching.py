"""What a hostile request costs: memory of the process and its children, and time of an event
loop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

#: Seconds between looks.
_PAUSE = 0.002


class _Watch:
    """A thread that looks at a number again and again.

    Attributes:
        most: the largest number that it saw, 0 at least.
    """

    def __init__(self, look: Callable[[], float]):
        self.most, self._look, self._ended = 0.0, look, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(_PAUSE):
            self.most = max(self.most, self._look())

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def children() -> list[int]:
    """Returns the processes that this one has started, and has not waited for."""
    found = ""
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += file.read_text()
    return [int(each) for each in found.split()]


def open_files() -> int:
    """Returns the number of the process's open file descriptors."""
    return len(os.listdir("/proc/self/fd"))


def _memory_watch() -> _Watch:
    """Watches by how many bytes the process and those that it starts grow, beyond what tests before
    have freed."""
    ctypes.CDLL(None).malloc_trim(0)
    old = children()

    def used() -> int:
        total = 0
        own = Path("/proc/self/cmdline").read_bytes()
        for process in ["self", *(each for each in children() if each not in old)]:
            folder = Path(f"/proc/{process}")
            with suppress(OSError, IndexError):  # it has ended
                # a new process has its parent's memory, until it executes a program
                if process == "self" or (folder / "cmdline").read_bytes() != own:
                    total += int((folder / "statm").read_text().split()[1]) * 4096
        return total

    first = used()
    return _Watch(lambda: used() - first)


@contextmanager
def memory_watched() -> Iterator[_Watch]:
    """Context that yields a watch of the bytes by which the process, with those that it starts,
    grows."""
    watch = _memory_watch()
    try:
        yield watch
    finally:
        watch.end()


def _pause_watch(loop: asyncio.AbstractEventLoop, thread: int) -> _Watch:
    """Watches for how many seconds the loop of a thread does not come to what is due. The time in
    which the thread waits for a core is not counted, nor is more than the process computed
    meanwhile: other processes of the machine are left out."""
    schedule = Path(f"/proc/self/task/{thread}/schedstat")

    def waited() -> float:
        return int(schedule.read_text().split()[1]) * 1e-9

    def look() -> float:
        done, ended = threading.Event(), [0.0]

        def answer() -> None:
            ended[0] = time.perf_counter()
            done.set()

        delay, computed, began = waited(), time.process_time(), time.perf_counter()
        loop.call_soon_threadsafe(answer)
        done.wait()
        took = ended[0] - began - (waited() - delay)
        return min(took, time.process_time() - computed)

    return _Watch(look)


@asynccontextmanager
async def pauses_watched() -> AsyncIterator[_Watch]:
    """Context that yields a watch of the seconds for which this event loop is held up. Garbage is
    not collected meanwhile: that of the tests may take longer than what is measured."""
    loop, thread = asyncio.get_running_loop(), threading.get_native_id()
    gc.disable()
    watch = await asyncio.to_thread(_pause_watch, loop, thread)
    try:
        yield watch
    finally:
        gc.enable()
        await asyncio.to_thread(watch.end)


@asynccontextmanager
async def costs_watched() -> AsyncIterator[tuple[_Watch, _Watch]]:
    """Context that yields both watches: of memory, and of the loop."""
    memory = await asyncio.to_thread(_memory_watch)
    try:
        async with pauses_watched() as pauses:
            yield memory, pauses
    finally:
        await asyncio.to_thread(memory.end)
