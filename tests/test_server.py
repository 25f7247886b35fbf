"""The listening socket, without a model behind it: `/health` and `/version` need none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from yarl import URL

from aioinfer.api import context
from aioinfer.api import server as server_module
from aioinfer.api.http import connections, listener
from aioinfer.api.server import HttpServer
from aioinfer.config import load_config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.metrics import LoopLag
from aioinfer.engine.model_control import ModelControl
from aioinfer.errors import ConfigError
from aioinfer.features.serving import ServingFeatures
from tests.waiting import until


def make_server(**settings: Any) -> HttpServer:
    config = load_config(
        None,
        {"model.path": "none", "server.port": 0}
        | {f"server.{name}": value for name, value in settings.items()},
    )
    return HttpServer(
        config,
        cast(
            Frontend,
            SimpleNamespace(
                check_generates=lambda: None, config=config, engines=[], control=ModelControl([]),
                max_model_len=2**20, is_healthy=lambda: True, is_ready=lambda: True,
                variants=ServingFeatures(config, list),
                model_names=lambda: config.served_model_names,
                loop_lag=LoopLag(lambda: False),
            ),
        ),
    )  # fmt: skip


#: Bounds that tests set as if they were settings.
BOUNDS = {
    "max_connections": (listener, "MAX_CONNECTIONS"),
    "header_timeout_s": (connections, "HEAD_TIMEOUT_S"),
    "keepalive_timeout_s": (connections, "IDLE_TIMEOUT_S"),
    "send_timeout_s": (connections, "SEND_TIMEOUT_S"),
    "body_timeout_s": (context, "TIMEOUT_S"),
    "max_body_bytes": (context, "MAX_BYTES"),
    "max_held_bytes": (context, "MAX_HELD_BYTES"),
}


@asynccontextmanager
async def serve(**settings: Any) -> AsyncIterator[tuple[HttpServer, str]]:
    """A server that listens, and its URL."""
    with pytest.MonkeyPatch.context() as patch:
        for name in BOUNDS.keys() & settings.keys():
            patch.setattr(*BOUNDS[name], settings.pop(name))
        server = make_server(**settings)
        try:
            yield server, await server.start()
        finally:
            await server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_the_url_is_the_servers(host: str) -> None:
    server = make_server(host=host)
    url = await server.start()
    async with aiohttp.ClientSession(url) as http, http.get("/health") as response:
        assert response.status == 200
    await server.close()


async def test_a_taken_port_is_a_matter_of_configuration() -> None:
    first = make_server()
    port = URL(await first.start()).port
    second = make_server(port=port)
    with pytest.raises(ConfigError, match=f"server.port = {port}"):
        await second.start()
    await second.close()
    await first.close()


async def test_drain_refuses_connections_and_waits_for_handlers() -> None:
    leave = asyncio.Event()

    async def held_back() -> AsyncIterator[bytes]:
        yield b"{"
        await leave.wait()
        yield b"}"

    server = make_server()
    url = await server.start()
    async with (
        aiohttp.ClientSession(url) as busy,
        aiohttp.ClientSession(url) as kept,
        aiohttp.ClientSession(url) as kept_too,
        aiohttp.ClientSession(url) as late,
    ):
        for http in (kept, kept_too):
            async with http.get("/version") as response:
                assert response.status == 200
        posting = asyncio.ensure_future(
            busy.post("/tokenize", data=held_back(), headers={"Content-Type": "application/json"})
        )
        await until(lambda: server._handling.number)
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0)
        with pytest.raises(aiohttp.ClientConnectionError):
            await late.get("/version")
        assert not draining.done()
        async with kept.get("/health/live") as response:
            assert response.status == 200
            assert response.headers["Connection"] == "close"
        async with kept_too.get("/version") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "not_ready"
            assert response.headers["Connection"] == "close"
            assert response.headers["Retry-After"] == "1"
        assert not draining.done()
        leave.set()
        async with await posting as response:
            assert response.status == 400
            assert response.headers["Connection"] == "close"
        await draining
    await server.close()


async def test_requests_over_kept_connections_are_answered_while_an_idle_server_ends() -> None:
    async with serve() as (server, url), aiohttp.ClientSession(url) as kept:
        for _ in range(2):
            async with kept.get("/version") as response:
                assert response.status == 200
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0.05)  # the request is on its way
        assert not draining.done()
        async with kept.post("/api/chat", json={}) as response:
            assert response.status == 503
            assert await response.json() == {"error": "the server is shutting down"}
            assert response.headers["Connection"] == "close"
            assert response.headers["Retry-After"] == "1"
        async with asyncio.timeout(0.5):  # no connection is left to wait for
            await draining


async def test_an_idle_connection_holds_the_end_up_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "_LAST_REQUESTS_S", 0.2)
    async with serve() as (server, url), aiohttp.ClientSession(url) as kept:
        async with kept.get("/version") as response:
            assert response.status == 200
        began = asyncio.get_running_loop().time()
        await server.drain()
        assert asyncio.get_running_loop().time() - began >= 0.19


async def test_a_request_that_came_before_the_model_is_not_handed_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model becomes ready between the making of a request and its handling."""
    ready = make_server()
    await ready.start()
    starting = HttpServer(ready._frontend.config)  # type: ignore[union-attr]

    def become_ready(_: Any) -> None:
        starting._handler = ready._handler

    monkeypatch.setattr(starting, "_check_head", become_ready)
    async with aiohttp.ClientSession(await starting.start()) as http:
        for status in (503, 200):
            async with http.get("/version", headers={"X-Request-Id": "mine"}) as response:
                assert response.status == status
                assert response.headers["X-Request-Id"] == "mine"
    await starting.close()
    await ready.close()
