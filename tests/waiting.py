"""Waiting for what sets no event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Returns once a condition holds, such as one of a process or of an engine's inner state; looks
    after each turn of the event loop, and raises `TimeoutError` if it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
