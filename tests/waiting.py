"""Waiting for what sets no event."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Returns once a condition holds, such as one of a process or of an engine's inner state; looks
    after each turn of the event loop, and raises `TimeoutError` if it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def shared_files() -> set[str]:
    """Returns the names of files in shared memory, of all processes of the machine."""
    return set(os.listdir("/dev/shm"))


def new_shared_files(before: Collection[str]) -> set[str]:
    """Returns the names of files in shared memory that were not there before, and stay: a browser
    or another test's process that runs meanwhile has some for a moment."""
    left, deadline = shared_files().difference(before), time.monotonic() + 10
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left &= shared_files()
    return left
