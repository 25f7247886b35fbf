"""What tests of hostile files have in common, pictures and sound."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.watching import children, costs_watched, open_files

BIG = 2**32 - 1
#: What a file may take: seconds of the event loop, and bytes.
_MAX_PAUSE_S, _MAX_BYTES = 0.05, 300 * 2**20
_TRIES = 3
Make = Callable[[], bytes]
T = TypeVar("T")


def riff(*chunks: bytes, kind: bytes = b"RIFF", form: bytes = b"WAVE", size: int = BIG) -> bytes:
    """Returns a RIFF file: a WAV or a WebP."""
    return kind + struct.pack("<I", size) + form + b"".join(chunks)


def riff_chunk(kind: bytes, data: bytes = b"", size: int | None = None) -> bytes:
    return kind + struct.pack("<I", len(data) if size is None else size) + data


def put(data: bytes, place: int, *others: int) -> bytes:
    """Returns a file with other bytes at a place."""
    return data[:place] + bytes(others) + data[place + len(others) :]


def noise(count: int) -> bytes:
    return np.random.default_rng(0).integers(0, 256, count, np.uint8).tobytes()


def cuts(makes: Mapping[str, Make], *percents: int) -> dict[str, Make]:
    """Returns what is left of files, in hundredths."""
    return {
        f"{name}: {kept} % of it": (
            lambda make=make, kept=kept: make()[: len(make()) * kept // 100]  # type: ignore[misc]
        )
        for name, make in makes.items()
        for kept in percents
    }


def params(cases: Mapping[str, str | None]) -> list[Any]:
    """Returns the names of files as parameters, given the messages with which they are refused. Of
    those that libraries may read or not (None), two of three are extended."""
    names = list(cases)
    doubtful = [name for name in names if cases[name] is None]
    extended = {name for number, name in enumerate(doubtful) if number % 3}
    return [
        pytest.param(name, marks=pytest.mark.extended if name in extended else ()) for name in names
    ]


async def at_bounded_cost(request: Callable[[], Awaitable[T]]) -> T:
    """Sends a request that may take neither memory nor the event loop beyond the bounds; returns
    its reply. A pause that is the request's comes again each time that it is sent, one of the
    machine does not: the least of three counts."""
    pauses = []
    while len(pauses) < _TRIES:
        async with costs_watched() as (memory, pause):
            reply = await request()
        assert memory.most < _MAX_BYTES, memory.most
        if pause.most < _MAX_PAUSE_S:
            return reply
        pauses.append(pause.most)
    raise AssertionError(f"the event loop was held up for {pauses} s")


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Context that leaves neither processes nor open files behind."""
    before = children(), open_files()
    yield
    assert set(children()) <= set(before[0])
    assert open_files() <= before[1] + 8  # connections of the client
