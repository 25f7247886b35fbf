"""Lets the requests of a burst in a few at a time, so that steps are planned and tokens sent
between them.

To take on a request costs the event loop about 0.5 ms. Handlers that became ready together run in
one turn of the loop: 256 clients that send at the same moment would keep the workers without a
plan, and running streams without a token, for 0.1 s.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import web

#: Requests that are let in in one turn of the event loop: some 4 ms of work.
REQUESTS_A_TURN = 8


class RateLimiter:
    """Handlers `enter` before they begin to work; those beyond `REQUESTS_A_TURN` do so in later
    turns of the loop, in order."""

    def __init__(self) -> None:
        self._entered = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Returns at once, or when those who came before have been let in."""
        if self._waiting or self._entered >= REQUESTS_A_TURN:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._let_in()

    def _let_in(self) -> None:
        if not self._entered:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._entered += 1

    def _begin_turn(self) -> None:
        self._entered = 0
        while self._waiting and self._entered < REQUESTS_A_TURN:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client has gone away
                self._let_in()
                turn.set_result(None)


TURNSTILE = web.AppKey("rate_limiter", RateLimiter)
