"""Connections that wait for a request: their time-outs, which are closed to make room, and what is
logged of malformed requests."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import struct
from collections import Counter
from typing import Any

import aiohttp
import pytest
import uvloop
from yarl import URL

from aioinfer.api.http import connections
from aioinfer.api.http.connections import ConnectionServer
from aioinfer.api.server import HttpServer
from aioinfer.config import load_config
from tests.test_listener import CERTIFIED, Connection, close, connect, status_of
from tests.test_server import serve
from tests.waiting import until

SECRET = b"sk-very-secret"
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: 100000\r\n\r\n"
)


def connections_of(server: HttpServer) -> ConnectionServer:
    assert server._connections is not None
    return server._connections


async def read_reply(connection: Connection) -> tuple[int, dict[str, Any]]:
    """Returns status and body of the last reply of a connection, which the server must close."""
    data = await asyncio.wait_for(connection[0].read(), 10)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 ")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


async def dribble(connection: Connection, data: bytes) -> None:
    """Sends byte by byte, and the last one again and again, until the server ends it."""
    try:
        for byte in (*data, *[data[-1]] * 2000):
            connection[1].write(bytes([byte]))
            await connection[1].drain()
            await asyncio.sleep(0.01)
    except (ConnectionError, RuntimeError):  # uvloop's, of a transport that is closed
        pass


async def until_there_are(server: HttpServer, **numbers: int) -> None:
    """Waits until so many connections are `open`, `idle`, `receiving` or `stalled`."""
    kinds = connections_of(server)
    await until(lambda: {kind: len(getattr(kinds, kind)) for kind in numbers} == numbers)


async def begin_request(server: HttpServer, url: str) -> Connection:
    """Returns a connection whose request is being handled: its body is awaited."""
    before = server._handling.number
    connection = await connect(url)
    connection[1].write(POST)
    await until(lambda: server._handling.number != before)
    return connection


# ---------------------------------------------------------------- time-outs


async def test_a_head_that_comes_byte_by_byte_is_ended_by_a_408() -> None:
    async with serve(header_timeout_s=0.3, keepalive_timeout_s=60) as (server, url):
        for _ in range(5):
            connection = await connect(url)
            sending = asyncio.ensure_future(dribble(connection, HEAD + b"X: yyy"))
            try:
                status, error = await read_reply(connection)
            except ConnectionResetError:  # a byte came between the reply and the end
                status, error = 0, {}
            await asyncio.wait_for(sending, 30)
            await close(connection)
            await until_there_are(server, open=0, receiving=0, idle=0)
            if status:
                break
        assert (status, error["code"]) == (408, "timeout")


async def test_a_new_connection_without_a_request_is_closed_without_a_reply() -> None:
    async with serve(header_timeout_s=0.2) as (server, url):
        connection = await connect(url)
        assert await asyncio.wait_for(connection[0].read(), 10) == b""
        await close(connection)
        await until_there_are(server, open=0)


async def test_an_idle_connection_is_closed() -> None:
    async with serve(header_timeout_s=60, keepalive_timeout_s=0.5) as (server, url):
        reader, _ = connection = await connect(url)
        for _ in range(2):
            assert await status_of(connection) == 200
        await until_there_are(server, idle=1, receiving=0)
        assert await asyncio.wait_for(reader.read(), 10) == b'{"status":"ok"}'
        await close(connection)
        await until_there_are(server, open=0, idle=0)


async def test_a_second_head_has_its_own_time() -> None:
    async with serve(header_timeout_s=0.3, keepalive_timeout_s=60) as (server, url):
        reader, writer = connection = await connect(url)
        assert await status_of(connection) == 200
        await reader.readexactly(len(b'{"status":"ok"}'))
        await asyncio.sleep(0.5)  # the time-out of heads does not end an idle connection
        assert await status_of(connection) == 200
        await reader.readexactly(len(b'{"status":"ok"}'))
        writer.write(HEAD)
        await until_there_are(server, receiving=1, idle=0)
        assert (await read_reply(connection))[0] == 408
        await close(connection)


async def test_a_running_request_is_not_ended() -> None:
    async with serve(header_timeout_s=0.1, keepalive_timeout_s=0.1) as (server, url):
        connection = await begin_request(server, url)
        await asyncio.sleep(0.5)
        connection[1].write(b" " * 100_000)
        assert (await read_reply(connection))[0] == 400
        await close(connection)


def test_a_client_that_does_not_read_is_dropped() -> None:
    """Under the server's kind of event loop, whose transports send files through their buffers."""

    async def stall() -> None:
        async with serve(send_timeout_s=0.3, keepalive_timeout_s=60) as (server, url):
            assert server._listener is not None
            for listening in server._listener._sockets:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
            plain = socket.socket()
            plain.setblocking(False)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", URL(url).port))
            connection = await asyncio.open_connection(sock=plain, limit=4096)
            get = b"GET /page/vendor/markdown-it.esm.min.mjs HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection[1].write(get * 10)
            await until_there_are(server, stalled=1)
            await until_there_are(server, open=0, stalled=0)
            await until(lambda: not server._handling.number)
            assert connections_of(server).counts.timeouts["send"] == 1
            await close(connection)

    uvloop.run(asyncio.wait_for(stall(), 20))


# ---------------------------------------------------------------- counts


async def figures(url: str, name: str, label: str) -> dict[str, int]:
    """Returns the samples of a counter of `/metrics` that are not 0, by a label's value."""
    connection = await connect(url)
    connection[1].write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await asyncio.wait_for(connection[0].read(), 10)).decode()
    await close(connection)
    found = re.findall(rf'^{name}_total{{.*{label}="(\w+)".*}} (\S+)$', text, re.MULTILINE)
    assert found
    return {value: int(float(number)) for value, number in found if float(number)}


async def test_a_client_that_ends_its_side_amid_a_request_is_gone() -> None:
    async with serve() as (server, url):
        connection = await begin_request(server, url)
        connection[1].write_eof()
        assert await asyncio.wait_for(connection[0].read(), 10) == b""
        await close(connection)
        await until_there_are(server, open=0)
        await until(lambda: server._handling.number == 0)


async def test_time_outs_are_counted_by_kind() -> None:
    async with serve(header_timeout_s=0.2, keepalive_timeout_s=0.2) as (server, url):
        silent, idle, dribbling = [await connect(url) for _ in range(3)]
        assert await status_of(idle) == 200
        dribbling[1].write(HEAD)
        assert (await read_reply(dribbling))[0] == 408
        await until_there_are(server, open=0)
        kinds = await figures(url, "aioinfer:client_timeouts", "kind")
        assert kinds == {"head": 2, "idle": 1}
        reasons = await figures(url, "aioinfer:http_errors", "reason")
        assert reasons == {"client_timeout": 1}
        await close(silent, idle, dribbling)
    async with serve(body_timeout_s=0.2) as (_, url):
        slow = await connect(url)
        slow[1].write(POST)
        assert (await slow[0].readline()).split()[1] == b"408"
        kinds = await figures(url, "aioinfer:client_timeouts", "kind")
        assert kinds == {"body": 1}
        await close(slow)


async def test_error_replies_are_counted_by_reason() -> None:
    sent = {
        b"nonsense\r\n\r\n": "malformed",
        HEAD.replace(b"1.1", b"2.0") + b"\r\n": "failure",
        HEAD + b"Host: b\r\n\r\n": "malformed",
        HEAD.replace(b"localhost", b"evil.example") + b"\r\n": "host",
        HEAD + b"Expect: x\r\n\r\n": "bad_request",
        HEAD.replace(b"/health", b"/version") + b"\r\n": "api_key",
        HEAD.replace(b"/health", b"/none") + b"Authorization: Bearer k\r\n\r\n": "not_found",
        HEAD + b"X: " + b"y" * 20_000 + b"\r\n\r\n": "too_large",
        POST.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer k\r\n\r\n"): "too_large",
    }
    async with serve(api_keys=["k"], max_body_bytes=1000) as (_, url):
        for raw in sent:
            connection = await connect(url)
            connection[1].write(raw)
            head = await asyncio.wait_for(connection[0].readuntil(b"\r\n\r\n"), 10)
            assert int(head.split()[1]) >= 400
            assert re.findall(rb"(?im)^server: (.*?)\r?$", head) == [b"aioinfer"]
            await close(connection)
        found = await figures(url, "aioinfer:http_errors", "reason")
        assert found == Counter(sent.values())


async def test_no_reply_names_a_version() -> None:
    """Those of handlers, files, unknown paths and a server that has no model yet."""
    config = load_config(None, {"model.path": "none", "server.port": 0})
    starting = HttpServer(config)
    async with serve(cors_origins=["*"]) as (_, url):
        paths = ("/health", "/metrics", "/", "/none", "/health/live", "/v1/completions")
        urls = [*(url + path for path in paths), await starting.start() + "/health"]
        async with aiohttp.ClientSession() as http:
            for place in urls:
                for method in ("GET", "POST", "OPTIONS"):
                    async with http.request(method, place) as response:
                        assert response.headers.getall("Server") == ["aioinfer"], (method, place)
    await starting.close()


# ---------------------------------------------------------------- room


async def test_connections_without_a_request_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MIN_WAIT_S", 0.0)
    async with serve(max_connections=40) as (server, url):
        slow = [await connect(url) for _ in range(40)]
        for _, writer in slow:
            writer.write(HEAD)
        await until_there_are(server, receiving=40)
        served = [await connect(url) for _ in range(10)]
        for connection in served:
            assert await status_of(connection) == 200
        assert len(connections_of(server).open) == 40
        assert await asyncio.wait_for(slow[0][0].read(), 10) == b""
        assert not slow[-1][0].at_eof()
        await close(*slow, *served)


async def test_a_flood_of_young_connections_gives_way_to_new_clients() -> None:
    """With the real bounds: those of a tenth of a second go, before their second is over."""
    async with serve(max_connections=40) as (server, url):
        silent = [await connect(url) for _ in range(40)]
        await until_there_are(server, receiving=40)
        await asyncio.sleep(connections.CROWDED_WAIT_S * 2)
        served = [await connect(url) for _ in range(10)]
        for connection in served:
            assert await status_of(connection) == 200
        assert connections_of(server).counts.closed_for_room == 10
        await close(*silent, *served)


async def test_a_client_amid_its_head_outlives_half_as_many_new_ones_as_there_are_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "CROWDED_WAIT_S", 0.0)
    async with serve(max_connections=40) as (server, url):
        busy = [await begin_request(server, url) for _ in range(20)]
        honest = await connect(url)
        honest[1].write(HEAD)
        await until_there_are(server, receiving=1)
        flood = [await connect(url) for _ in range(19)]
        await until_there_are(server, open=40, receiving=20)
        another = await connect(url)  # the honest one has waited for longest now
        await until_there_are(server, receiving=20)
        assert await asyncio.wait_for(honest[0].read(), 10) == b""
        late = await connect(url)
        late[1].write(HEAD)
        flood += [await connect(url) for _ in range(18)]
        await until_there_are(server, open=40, receiving=20)
        late[1].write(b"\r\n")
        assert (await asyncio.wait_for(late[0].readline(), 10)).split()[1] == b"200"
        await close(honest, another, late, *busy, *flood)


async def test_where_few_wait_a_head_has_its_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MIN_WAIT_S", float("inf"))
    monkeypatch.setattr(connections, "CROWDED_WAIT_S", 0.0)
    async with serve(max_connections=5) as (server, url):
        busy = [await begin_request(server, url) for _ in range(3)]
        young = [await connect(url) for _ in range(2)]
        await until_there_are(server, receiving=2)
        refused = await connect(url)
        assert (await read_reply(refused))[1]["code"] == "too_many_connections"
        for connection in young:
            assert await status_of(connection) == 200
        counts = connections_of(server).counts
        assert (counts.no_room, counts.closed_for_room) == (1, 0)
        await close(refused, *young, *busy)


async def test_the_longest_idle_connection_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MIN_WAIT_S", 0.0)
    async with serve(max_connections=3) as (server, url):
        receiving = await connect(url)
        receiving[1].write(HEAD)
        older, newer = await connect(url), await connect(url)
        for connection in (newer, older, newer):
            assert await status_of(connection) == 200
            await connection[0].readexactly(len(b'{"status":"ok"}'))
        await until_there_are(server, idle=2, receiving=1)
        fourth = await connect(url)
        assert await status_of(fourth) == 200
        assert await asyncio.wait_for(older[0].read(), 10) == b""
        assert await status_of(newer) == 200
        receiving[1].write(b"\r\n")
        assert (await asyncio.wait_for(receiving[0].readline(), 10)).split()[1] == b"200"
        await close(receiving, older, newer, fourth)


async def test_running_requests_are_not_closed_to_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MIN_WAIT_S", 0.0)
    async with serve(max_connections=2) as (server, url):
        busy = [await begin_request(server, url) for _ in range(2)]
        refused = await connect(url)
        status, error = await read_reply(refused)
        assert (status, error["code"]) == (503, "too_many_connections")
        for _, writer in busy:
            writer.write(b" " * 100_000)
        assert [(await read_reply(connection))[0] for connection in busy] == [400, 400]
        await close(refused, *busy)


async def test_handshakes_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MIN_WAIT_S", 0.0)
    async with serve(max_connections=2, **CERTIFIED) as (server, url):
        silent = [await connect(url) for _ in range(2)]
        await until_there_are(server, open=2)
        another = await connect(url)
        assert await asyncio.wait_for(silent[0][0].read(), 10) == b""
        await until_there_are(server, open=2, receiving=2)
        await close(*silent, another)
        await until_there_are(server, open=0, receiving=0)


# ---------------------------------------------------------------- malformed requests


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: %s\x01\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer\n%s\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nAuthorization: %s\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nAuthorization: %s\r\n\r\n", 400),
        (b"GET http://[%s HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"%s\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n%s", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Key: %s" + b"y" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /%s" + b"y" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-Key: %s\r\n" * 200 + b"\r\n", 431),
        (b"GET /health\r\nAuthorization: %s\r\n\r\n", 505),
        (b"GET /health\r\n\r\n", 505),
        (b"GET /health HTTP/0.9\r\nAuthorization: %s\r\n\r\n", 505),
        (b"GET /health HTTP/2.0\r\nAuthorization: %s\r\n\r\n", 505),
    ],
)
async def test_malformed_requests_are_answered_in_json_and_not_logged(
    raw: bytes, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serve() as (_, url):
        connection = await connect(url)
        connection[1].write(raw.replace(b"%s", SECRET))
        status, error = await read_reply(connection)
        assert status == expected
        assert "secret" not in str(error)
        await close(connection)
    assert "secret" not in caplog.text
    assert [record.exc_info for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("earlier", [0, 1])
async def test_a_head_of_many_headers_is_cut_off(earlier: int) -> None:
    async with serve() as (server, url):
        connection = await connect(url)
        for _ in range(earlier):
            assert await status_of(connection) == 200
            await connection[0].readexactly(len(b'{"status":"ok"}'))
        connection[1].write(HEAD)
        for _ in range(100):
            connection[1].write(b"X: " + b"y" * 1000 + b"\r\n")
        head = await asyncio.wait_for(connection[0].readline(), 10)
        assert head.split()[1] == b"431"
        await close(connection)
        await until_there_are(server, open=0, receiving=0)


async def test_the_rest_of_a_refused_body_is_not_taken_for_a_head() -> None:
    """The client has the whole reply, however much it sends before it reads."""
    async with serve(max_body_bytes=1000, header_timeout_s=0.2) as (_, url):
        connection = await connect(url)
        connection[1].write(POST)
        reply = await asyncio.wait_for(connection[0].readuntil(b"}}"), 10)
        assert reply.split()[1] == b"413"
        for _ in range(8):
            connection[1].write(b" " * 12_500)
            await asyncio.sleep(0.1)
        assert await asyncio.wait_for(connection[0].read(), 10) == b""
        await close(connection)


async def test_many_malformed_requests_leave_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serve() as (_, url):
        for _ in range(50):
            connection = await connect(url)
            connection[1].write(b"nonsense\r\n\r\n")
            assert (await read_reply(connection))[0] == 400
            await close(connection)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("malformed requests: 1, ")
    assert messages[-1].startswith("malformed requests: 49, ")


async def test_a_body_whose_chunks_are_malformed_is_answered() -> None:
    async with serve() as (server, url):
        connection = await connect(url)
        connection[1].write(
            POST.replace(b"Content-Length: 100000", b"Transfer-Encoding: chunked") + b"2\r\n{}\r\n"
        )
        await until(lambda: server._handling.number)
        connection[1].write(b"nonsense\r\n")
        assert (await read_reply(connection))[0] == 400
        await close(connection)


async def test_clients_that_reset_leave_the_line_of_their_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with serve() as (server, url):
        for sent in (b"", HEAD, HEAD + b"\r\n", POST, POST + b"{"):
            with socket.socket() as client:
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", URL(url).port))
                await asyncio.get_running_loop().sock_sendall(client, sent)
                await asyncio.sleep(0.05)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until_there_are(server, open=0)
    assert [record.name for record in caplog.records] == ["aioinfer.requests"] * 2  # POST
