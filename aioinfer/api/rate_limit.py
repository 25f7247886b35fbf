"""Rate limit on new requests: a few in each iteration of the event loop.

Parsing and submitting a request takes the event loop about 0.5 ms. Handlers that become ready
together run in the same iteration of the loop: without a limit, 256 clients that send at the same
moment would leave the workers without a plan, and running streams without a token, for 0.1 s.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import web

#: Requests that begin in one iteration of the event loop: some 4 ms of work.
MAX_REQUESTS = 8


class RateLimiter:
    """Handlers `enter` before they begin to work. At most `MAX_REQUESTS` do so in one iteration of
    the event loop, the others in later ones, in order."""

    def __init__(self) -> None:
        self._entered = 0  # in this iteration
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Returns at once, or when the handlers that came before have entered."""
        if self._waiting or self._entered >= MAX_REQUESTS:
            may_enter = asyncio.get_running_loop().create_future()
            self._waiting.append(may_enter)
            await may_enter
        else:
            self._count()

    def _count(self) -> None:
        if not self._entered:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        self._entered += 1

    def _begin_iteration(self) -> None:
        self._entered = 0
        while self._waiting and self._entered < MAX_REQUESTS:
            may_enter = self._waiting.popleft()
            if not may_enter.done():  # else its client has disconnected
                self._count()
                may_enter.set_result(None)


RATE_LIMITER = web.AppKey("rate_limiter", RateLimiter)
