"""Bodies of requests over a socket: their size, their time, and their memory together.

`/tokenize` of a server without a model answers 400 to a body that is whole and wrong.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from aioinfer.api.context import REQUEST_BODIES, RequestBodies
from aioinfer.api.server import HttpServer
from tests.test_listener import Connection, close, connect
from tests.test_server import serve
from tests.waiting import until

KIB = 1024


def head(length: int | None, *, expect: bool = False, **headers: str) -> bytes:
    """Returns the head of a request with a body of `length` bytes, or in chunks."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [framing, "Host: localhost", "Connection: close"]
    fields = {"Content_Type": "application/json"} | headers
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    lines += ["Expect: 100-continue"] if expect else []
    return "\r\n".join(["POST /tokenize HTTP/1.1", *lines, "", ""]).encode()


def bodies_of(server: HttpServer) -> RequestBodies:
    assert server._application is not None
    return server._application.app[REQUEST_BODIES]


async def read_reply(connection: Connection) -> tuple[int, str | None]:
    """Returns the status of the reply and the error's code."""
    reader = connection[0]
    reply = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    length = int(reply.lower().partition(b"content-length: ")[2].split()[0])
    body = await asyncio.wait_for(reader.readexactly(length), 20)
    return int(reply.split()[1]), json.loads(body)["error"]["code"]


async def until_held(server: HttpServer, number: int) -> None:
    await until(lambda: bodies_of(server).held_bytes == number)


async def dribble(connection: Connection, data: bytes, interval_s: float) -> None:
    try:
        while True:
            connection[1].write(data)
            await connection[1].drain()
            await asyncio.sleep(interval_s)
    except ConnectionError:
        pass


@pytest.mark.parametrize("length", [5000, None])
async def test_a_body_that_comes_byte_by_byte_is_ended_by_a_408(length: int | None) -> None:
    async with serve(body_timeout_s=0.5) as (_, url):
        connection = await connect(url)
        connection[1].write(head(length))
        data = b"1\r\n \r\n" if length is None else b" "
        sending = asyncio.ensure_future(dribble(connection, data, 0.02))
        assert await read_reply(connection) == (408, "timeout")
        sending.cancel()
        await close(connection)


async def test_a_slow_body_that_keeps_the_rate_is_read() -> None:
    async with serve(body_timeout_s=0.5) as (_, url):
        connection = await connect(url)
        connection[1].write(head(100 * KIB))
        for _ in range(20):  # 5 KiB in 0.1 s
            connection[1].write(b" " * 5 * KIB)
            await asyncio.sleep(0.1)
        assert (await read_reply(connection))[0] == 400
        await close(connection)


async def test_all_bodies_together_are_bounded() -> None:
    """Two large ones use all of the bound; a third is refused, and small ones are not."""
    async with serve(max_held_bytes=256 * KIB) as (server, url):
        large = [await connect(url) for _ in range(2)]
        for number, (_, writer) in enumerate(large, 1):
            writer.write(head(500 * KIB) + b" " * 192 * KIB)
            await until_held(server, number * 128 * KIB)
        third, small = await connect(url), await connect(url)
        third[1].write(head(100 * KIB) + b" " * 100 * KIB)
        assert await read_reply(third) == (503, "overloaded")
        small[1].write(head(64 * KIB) + b" " * 64 * KIB)
        assert (await read_reply(small))[0] == 400
        await close(*large, third, small)
        await until_held(server, 0)


async def test_one_body_alone_may_exceed_the_bound_of_all() -> None:
    async with serve(max_held_bytes=1) as (server, url):
        connection = await connect(url)
        connection[1].write(head(1000 * KIB) + b" " * 1000 * KIB)
        assert (await read_reply(connection))[0] == 400
        await close(connection)
        await until_held(server, 0)


async def test_a_body_is_asked_for_only_when_it_will_be_read() -> None:
    async with serve(max_body_bytes=1000, api_keys=["key"]) as (_, url):
        key = {"Authorization": "Bearer key"}
        refused = [
            (head(10, expect=True), 401),
            (head(1001, expect=True, **key), 413),
            (head(10, expect=True, **key | {"Content_Type": "multipart/form-data"}), 415),
            (head(10, **key | {"Expect": "200-ok"}), 417),
            (head(10, **key | {"Expect": "\xff"}), 417),
        ]
        for raw, status in refused:
            connection = await connect(url)
            connection[1].write(raw)
            assert (await read_reply(connection))[0] == status
            await close(connection)
        connection = await connect(url)
        connection[1].write(head(10, expect=True, **key))
        line = await asyncio.wait_for(connection[0].readuntil(b"\r\n\r\n"), 10)
        assert line == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection[1].write(b" " * 10)
        assert (await read_reply(connection))[0] == 400
        await close(connection)


async def test_an_unknown_expectation_is_refused_on_any_path() -> None:
    async with serve() as (_, url):
        for path in (b"/health", b"/nowhere", b"/v1/completions"):
            connection = await connect(url)
            connection[1].write(
                b"GET %s HTTP/1.1\r\nHost: localhost\r\nExpect: \xff\r\n\r\n" % path
            )
            assert await read_reply(connection) == (417, "unknown_expectation")
            await close(connection)


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
async def test_other_versions_of_http_are_refused(version: bytes) -> None:
    async with serve() as (_, url):
        connection = await connect(url)
        connection[1].write(b"GET /health HTTP/%s\r\nHost: localhost\r\n\r\n" % version)
        assert await read_reply(connection) == (505, "unsupported_http_version")
        await close(connection)
