"""The listening sockets: addresses, TLS, Unix sockets, and what happens when there are too many
connections."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from yarl import URL

from aioinfer.api.http import connections, listener
from aioinfer.api.http.listener import tls_context
from aioinfer.api.server import HttpServer
from aioinfer.config import load_config
from aioinfer.errors import ConfigError
from tests.test_server import make_server, serve
from tests.waiting import until

TLS = Path(__file__).parent / "tls"
CERTIFIED = {"tls_files": [str(TLS / "certificate.pem"), str(TLS / "key.pem")]}
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def no_room_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps connections that wait for a request open; `test_connections.py` has what closes
    them."""
    monkeypatch.setattr(connections, "MIN_WAIT_S", float("inf"))
    monkeypatch.setattr(connections, "CROWDED_WAIT_S", float("inf"))


async def connect(url: str) -> Connection:
    return await asyncio.open_connection("127.0.0.1", URL(url).port)


async def status_of(connection: Connection) -> int:
    """Requests `/health` and returns the status; the connection is kept."""
    reader, writer = connection
    writer.write(GET)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    return int(head.split()[1])


async def until_served(url: str) -> Connection:
    """Returns a connection that is served, once the server has noticed that others are gone."""
    async with asyncio.timeout(5):
        while True:
            connection = await connect(url)
            try:
                if await status_of(connection) == 200:
                    return connection
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            await close(connection)


async def num_descriptors() -> int:
    return await asyncio.to_thread(lambda: psutil.Process().num_fds())


async def close(*connections: Connection) -> None:
    for _, writer in connections:
        writer.close()
    await asyncio.gather(
        *(writer.wait_closed() for _, writer in connections), return_exceptions=True
    )


# ---------------------------------------------------------------- the bound


async def test_connections_beyond_the_bound_are_answered_503() -> None:
    async with serve(max_connections=3) as (_, url):
        held = [await connect(url) for _ in range(3)]
        for connection in held:
            assert await status_of(connection) == 200
        refused = await connect(url)
        refused[1].write(GET)
        head, _, body = (await asyncio.wait_for(refused[0].read(), 5)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in head + b"\r\n"
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        await close(held.pop())
        held.append(await until_served(url))
        await close(refused, *held)


async def test_a_burst_is_counted_exactly() -> None:
    async with serve(max_connections=5) as (_, url):
        connections = await asyncio.gather(*(connect(url) for _ in range(20)))
        statuses = await asyncio.gather(*map(status_of, connections))
        assert sorted(statuses) == [200] * 5 + [503] * 15
        await close(*connections)


async def test_descriptors_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 4)
    server = make_server()
    url = await server.start()
    before = await num_descriptors()
    clients = await asyncio.gather(*(connect(url) for _ in range(300)))
    assert server._listener is not None
    await until(lambda: server._listener._num_rejected >= listener._MAX_REJECTED)
    # the loop takes some for itself
    assert await num_descriptors() - before <= len(clients) + 4 + listener._MAX_REJECTED + 8
    await close(*clients)
    await server.close()
    assert await num_descriptors() <= before


async def send_without_end(sock: socket.socket) -> None:
    while True:
        await asyncio.get_running_loop().sock_sendall(sock, b"x")
        await asyncio.sleep(0.01)


async def test_rejected_clients_that_do_not_read_the_reply_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "_REJECTION_TIMEOUT_S", 0.05)
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 1)
    server = make_server()
    url, loop = await server.start(), asyncio.get_running_loop()
    served = await connect(url)
    with socket.socket() as rejected:
        rejected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's minimum
        rejected.setblocking(False)
        await loop.sock_connect(rejected, ("127.0.0.1", URL(url).port))
        assert server._listener is not None
        async with asyncio.timeout(5):
            for expected in (1, 0):
                while server._listener._num_rejected != expected:  # noqa: ASYNC110  # no event
                    await asyncio.sleep(0)
            # what is sent to a closed socket is answered with a reset
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                await send_without_end(rejected)
    await close(served)
    await server.close()


class Starved:
    """A listening socket of a process that has no descriptor left, once."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self.num_calls = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> Any:
        self.num_calls += 1
        if self.num_calls == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()


async def test_accepting_goes_on_when_descriptors_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "_PAUSE_S", 0.05)
    async with serve() as (server, url):
        assert server._listener is not None
        (sock,) = server._listener._sockets
        starved = Starved(sock)
        asyncio.get_running_loop().remove_reader(sock.fileno())
        server._listener._listen(starved)  # type: ignore[arg-type]
        connection = await connect(url)
        assert await status_of(connection) == 200
        assert starved.num_calls >= 2
        await close(connection)


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "expected"),
    [
        (1024, 20_000, 8448, 8192), (1024, 4096, 4096, 3840), (1024, -1, 8448, 8192),
        (-1, -1, None, 8192), (65536, 65536, None, 8192), (100, 100, 100, 1),
    ],
)  # fmt: skip
def test_the_limit_of_descriptors_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, expected: int
) -> None:
    requested: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: requested.append(limits))
    assert listener._allow_descriptors(8192) == expected
    assert requested == ([] if raised is None else [(raised, hard)])


# ---------------------------------------------------------------- TLS


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=CERTIFIED["tls_files"][0])


async def test_https() -> None:
    async with serve(**CERTIFIED) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting())) as http:
            async with http.get(f"{url}/health") as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"http://127.0.0.1:{URL(url).port}/health")


async def test_handshakes_under_way_count() -> None:
    async with serve(max_connections=2, **CERTIFIED) as (_, url):
        silent = [await connect(url) for _ in range(2)]
        port, tls = URL(url).port, trusting()
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname="localhost")
        silent[0][1].write(b"this is no handshake")
        await asyncio.wait_for(silent[0][0].read(), 5)
        assert silent[0][0].at_eof(), "the server ends a connection without a handshake"
        await close(*silent)
        async with asyncio.timeout(5):
            while True:
                try:
                    connection = await asyncio.open_connection(
                        "127.0.0.1", port, ssl=tls, server_hostname="localhost"
                    )
                    break
                except (ConnectionError, ssl.SSLError):
                    await asyncio.sleep(0.01)
        assert await status_of(connection) == 200
        await close(connection)


@pytest.mark.parametrize(
    ("certificate", "key"),
    [
        ("none.pem", "key.pem"),
        ("key.pem", "key.pem"),
        ("certificate.pem", None),
        ("certificate.pem", "encrypted.pem"),
    ],
)
def test_a_certificate_that_cannot_be_used(certificate: str, key: str | None) -> None:
    settings = {
        "server.tls_files": [str(TLS / name) for name in (certificate, key) if name is not None],
    }
    with pytest.raises(ConfigError, match=r"server\.tls_files = .* without a passphrase"):
        tls_context(load_config(None, {"model.path": "x"} | settings).server)


# ---------------------------------------------------------------- Unix sockets


async def get_health(path: Path) -> int:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http,
        http.get("http://localhost/health") as response,
    ):
        return response.status


async def test_a_unix_socket_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    server = make_server(host=f"unix:{path}")
    assert await server.start() == f"unix:{path}"
    assert await get_health(path) == 200
    second = make_server(host=f"unix:{path}")
    with pytest.raises(ConfigError, match=r"server\.host = 'unix:.*another server listens there"):
        await second.start()
    await second.close()
    assert await get_health(path) == 200
    await server.close()
    assert await asyncio.to_thread(os.listdir, tmp_path) == []


async def test_what_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        await asyncio.to_thread(left.bind, str(path))
    server = make_server(host=f"unix:{path}")
    await server.start()
    assert await get_health(path) == 200
    await server.close()


async def test_the_socket_of_a_successor_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first, second = (make_server(host=f"unix:{path}") for _ in range(2))
    await first.start()
    await asyncio.to_thread(os.rename, path, tmp_path / "old")
    await second.start()
    await first.close()
    assert await get_health(path) == 200
    await second.close()


async def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    await asyncio.to_thread(path.touch)
    server = make_server(host=f"unix:{path}")
    with pytest.raises(ConfigError, match="no socket"):
        await server.start()
    await server.close()
    assert await asyncio.to_thread(path.is_file)
    for wrong in (tmp_path / "missing" / "socket", tmp_path / ("x" * 200)):
        server = make_server(host=f"unix:{wrong}")
        with pytest.raises(ConfigError, match=r"server\.host = 'unix:"):
            await server.start()
        await server.close()


async def test_tls_over_a_unix_socket(tmp_path: Path) -> None:
    server: HttpServer = make_server(host=f"unix:{tmp_path}/socket", **CERTIFIED)
    await server.start()
    connection = await asyncio.open_unix_connection(
        tmp_path / "socket", ssl=trusting(), server_hostname="localhost"
    )
    assert await status_of(connection) == 200
    await close(connection)
    await server.close()
