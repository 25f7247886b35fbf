"""Freed memory goes back to the system some time after a large body, once. Apart from the other
tests of bodies: reading the process's memory blocks the event loop."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

import psutil
import pytest

from aioinfer.api import context
from aioinfer.api.context import LARGE_BODY, HeldBody, RequestBodies
from aioinfer.api.http.connections import HttpCounts
from tests.waiting import until

BLOCK = 60_000  # below what glibc maps apart from its heaps
COUNT = 2000


def fill_and_free() -> Callable[[], None]:
    """Leaves 120 MB of free memory in front of the end of a heap; returns what frees the last."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:
        libc.free(block)
    return lambda: libc.free(blocks[-1])


def hold(bodies: RequestBodies, size: int) -> None:
    """Receives and forgets a body."""
    with HeldBody(bodies) as held:
        held.add(bytes(size), size)


async def test_memory_is_given_back_after_a_large_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "TRIM_DELAY_S", 0.05)
    bodies = RequestBodies(HttpCounts(), LARGE_BODY)
    if bodies._trim is None:
        pytest.skip("this C library cannot give memory back")
    free_last = fill_and_free()
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        hold(bodies, LARGE_BODY)
    timer = bodies._timer
    assert timer is not None
    async with asyncio.timeout(10):
        enough = before - BLOCK * COUNT // 2
        await until(lambda: psutil.Process().memory_info().rss <= enough)
    assert bodies._timer is None, "three bodies are one call"
    free_last()


async def test_small_bodies_and_other_libraries_cause_nothing() -> None:
    bodies = RequestBodies(HttpCounts(), LARGE_BODY)
    hold(bodies, LARGE_BODY - 1)
    assert bodies._timer is None
    bodies._trim = None
    hold(bodies, LARGE_BODY)
    assert bodies._timer is None
