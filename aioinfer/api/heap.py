"""Gives memory back to the system after large bodies.

The memory of a large body is free once its request has ended, but the C library keeps most of it: a
heap shrinks only from its end, and after the first large block was freed glibc takes such blocks
from its heaps. `malloc_trim` gives free pages inside of heaps back as well. It is called in a
thread, some seconds after a large body, and no more often than that. Another C library than glibc
has no such function, and then nothing is done. `read_body` uses this.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from aiohttp import web

#: Bodies of this size leave something behind that is worth the call, in bytes.
LARGE_BODY = 2**17
#: Seconds from a large body to the call; most requests with one have ended by then.
DELAY_S = 5.0


class Heap:
    """Calls `malloc_trim` after large bodies; used on the event loop."""

    def __init__(self) -> None:
        self._trim = _find_malloc_trim()
        self._timer: asyncio.TimerHandle | None = None

    def note_body(self, size: int) -> None:
        """Records that a body of `size` bytes has come."""
        if size >= LARGE_BODY and self._trim is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._start, self._trim)

    def _start(self, trim: Callable[[int], int]) -> None:
        self._timer = None
        # ctypes lets other threads run meanwhile
        asyncio.get_running_loop().run_in_executor(None, trim, 0)


def _find_malloc_trim() -> Callable[[int], int] | None:
    """Returns glibc's function, or None where there is none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


HEAP = web.AppKey("heap", Heap)
