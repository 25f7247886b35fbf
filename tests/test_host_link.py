"""The stream between hosts: what crosses it arrives as it was sent, and nobody without the secret
gets in."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aioinfer.errors import ConfigError, EngineDeadError, OverloadedError
from aioinfer.executor.host_messages import (
    decode_message,
    encode_message,
    failure_report,
    load_report,
    plain_failure,
    plain_report,
)
from aioinfer.ipc import host_link
from aioinfer.ipc.host_link import FrameKind, HostLink, HostListener, LinkError, connect_to_driver
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, LatentSpec, StateSpec
from aioinfer.worker.worker import LoadReport
from aioinfer.worker.worker_spec import FailureReport
from tests.waiting import until

SECRET = secrets.token_bytes(32)


class End:
    """One side, and what came to it."""

    def __init__(self, connection: socket.socket):
        self.frames: list[tuple[FrameKind, int, bytes]] = []
        self.lost: list[str] = []
        self.link = HostLink(connection, self._take, self.lost.append)

    def _take(self, kind: FrameKind, number: int, payload: memoryview) -> None:
        self.frames.append((kind, number, bytes(payload)))


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    listener = HostListener("127.0.0.1", SECRET, 1)
    coming = asyncio.create_task(listener.wait())
    there = await connect_to_driver(listener.address, SECRET, 0)
    (here,) = (await coming).values()
    pair = End(here), End(there)
    yield pair
    for end in pair:
        end.link.close()


async def test_frames_arrive_in_order_and_whole(ends: tuple[End, End]) -> None:
    """Long ones, too, which the kernel takes and gives in pieces."""
    here, there = ends
    bodies = [b"", b"plan", secrets.token_bytes(5_000_000), b"last"]
    for number, body in enumerate(bodies):
        here.link.send(FrameKind.PLAN, number, [memoryview(body[:1000]), memoryview(body[1000:])])
    there.link.send(FrameKind.RESULT, -7, [memoryview(b"result")])
    await until(lambda: len(there.frames) == len(bodies) and here.frames)
    assert there.frames == [(FrameKind.PLAN, n, body) for n, body in enumerate(bodies)]
    assert here.frames == [(FrameKind.RESULT, -7, b"result")]


async def test_the_end_of_the_other_side_is_reported_once(ends: tuple[End, End]) -> None:
    here, there = ends
    there.link.close()
    await until(lambda: here.lost)
    here.link.send(FrameKind.PLAN, 0, [memoryview(b"lost")])
    await asyncio.sleep(0.01)
    assert here.lost == ["the connection ended"]
    assert there.lost == []


async def test_what_is_no_frame_ends_the_stream(ends: tuple[End, End]) -> None:
    here, there = ends
    await asyncio.get_running_loop().sock_sendall(there.link._connection, b"GET / HTTP/1.1\r\n\r\n")
    await until(lambda: here.lost)
    assert here.lost == ["what it sent is no frame"]
    assert here.frames == []


async def test_strangers_are_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they guess, replay what the right host sent, stay silent, or are a second host of the
    same number; the right one still gets in."""
    monkeypatch.setattr(host_link, "HANDSHAKE_S", 0.5)
    listener = HostListener("127.0.0.1", SECRET, 2)
    coming = asyncio.create_task(listener.wait())
    with pytest.raises(LinkError, match="closed the connection"):
        await connect_to_driver(listener.address, b"a guess", 0)
    reader, writer = await asyncio.open_connection(*listener.address)
    assert (await reader.readexactly(48)).startswith(b"aioinfer host")
    assert await reader.read() == b"", "a silent one is cut off"
    writer.close()
    first = await connect_to_driver(listener.address, SECRET, 0)
    second = await connect_to_driver(listener.address, SECRET, 0)  # of the same number
    assert await asyncio.get_running_loop().sock_recv(second, 1) == b"", "it is cut off"
    assert not coming.done()
    third = await connect_to_driver(listener.address, SECRET, 1)
    connections = await coming
    assert sorted(connections) == [0, 1]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(listener.address)
    for connection in (first, second, third, *connections.values()):
        connection.close()


async def test_a_host_does_not_serve_a_false_driver() -> None:
    listener = HostListener("127.0.0.1", b"another secret", 1)
    false_driver = asyncio.create_task(listener.wait())
    with pytest.raises(LinkError, match=r"closed the connection|does not know"):
        await connect_to_driver(listener.address, SECRET, 0)
    false_driver.cancel()
    await asyncio.gather(false_driver, return_exceptions=True)


def test_what_ranks_report_survives_json() -> None:
    specs = [
        AttentionSpec(2, 64),
        AttentionSpec(2, 64, 128),
        LatentSpec(576),
        StateSpec((3, 4), "float32"),
    ]
    groups = tuple(KVGroup(spec, (n, n + 4)) for n, spec in enumerate(specs))
    report = LoadReport("cpu", "float32", 7, 16, groups, (1, 2, 3), (5, 6, 7), 2048, 512)
    message = decode_message(encode_message("loaded", report=plain_report(report))[0])
    assert load_report(message["report"]) == report


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (None, None),
        (ConfigError("model.path"), ConfigError),
        (OverloadedError("full"), OverloadedError),
        (EngineDeadError("dead"), EngineDeadError),
    ],
)
def test_failures_survive_json(error: Any, arrives: Any) -> None:
    report = FailureReport(3, error, "Traceback", 1000, in_collective=True)
    message = decode_message(encode_message("failed", report=plain_failure(report))[0])
    found = failure_report(message["report"], behind_ns=50)
    values = (found.rank, found.trace, found.at_ns, found.in_collective)
    assert values == (3, "Traceback", 1050, True)
    assert (type(found.error), str(found.error)) == (arrives or type(None), str(error))
