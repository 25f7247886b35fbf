"""The life of the server, without a model; `functional/test_lifecycle.py` has it with one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp import web

from aioinfer.api.event_stream import ERROR_HEADER, STREAM_HEADER
from aioinfer.api.server import create_app
from aioinfer.cli import server_process
from aioinfer.config import load_config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.model_control import ModelControl
from aioinfer.errors import ConfigError
from bench_loop import make_frontend
from tests.waiting import until

CONFIG = load_config(None, {"model.path": "nowhere", "server.port": 0})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_loading_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    ended = asyncio.Event()

    async def launch(*_: Any) -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(Frontend, "launch", launch)
    assert await asyncio.wait_for(server_process.serve([CONFIG]), 5) == 0
    assert ended.is_set()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def test_a_failure_to_load_is_raised_and_signals_are_by_default_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers, while_loading = (signal.SIGTERM, signal.SIGINT), []

    async def launch(*_: Any) -> None:
        while_loading.extend(map(signal.getsignal, numbers))
        raise ConfigError("there is no such model")

    monkeypatch.setattr(Frontend, "launch", launch)
    default = [signal.SIG_DFL, signal.default_int_handler]
    with pytest.raises(ConfigError, match="no such model"):
        await server_process.serve([CONFIG])
    assert not set(while_loading) & set(default)
    assert list(map(signal.getsignal, numbers)) == default


class Loading:
    """A model that is being loaded until the test says that it is ready."""

    def __init__(self, **settings: Any):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        changed = {f"server.{name}": value for name, value in settings.items()}
        self.config = load_config(
            None, {"model.path": "nowhere", "server.port": self.port} | changed
        )
        self.may_end = asyncio.Event()
        self.announced = asyncio.Event()
        self.closed = asyncio.Event()
        self.dead = asyncio.Event()

    async def launch(self, *_: Any) -> Any:
        await self.may_end.wait()
        return SimpleNamespace(
            config=self.config, tokenizer=None, engines=[], dead_reason=None,
            control=ModelControl([]),
            is_healthy=lambda: not self.dead.is_set(), is_ready=lambda: not self.dead.is_set(),
            max_model_len=8, wait_dead=self.dead.wait, close=self.close, generates=True,
            input_modalities=["text"],
        )  # fmt: skip

    async def close(self) -> None:
        self.closed.set()

    async def end(self) -> None:
        """Returns when the server has said that the model is ready."""
        self.may_end.set()
        await asyncio.wait_for(self.announced.wait(), 10)


@asynccontextmanager
async def serving(
    monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[Loading, aiohttp.ClientSession, asyncio.Task[int]]]:
    """A server whose model is being loaded, a client with one connection to it, and the task whose
    result is the exit status."""
    loading = Loading(**settings)
    monkeypatch.setattr(Frontend, "launch", loading.launch)
    monkeypatch.setattr(server_process, "settle_process", lambda: None)
    monkeypatch.setattr(server_process.StartupDisplay, "show", lambda *_: None)
    task = asyncio.ensure_future(
        server_process.serve([loading.config], lambda _: loading.announced.set())
    )
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{loading.port}", connector=connector
    ) as http:
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await status_of(http, "/health/live") == (200, None)
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.01)
        try:
            yield loading, http, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def status_of(http: aiohttp.ClientSession, path: str) -> tuple[int, str | None]:
    """Returns the status and the error's code."""
    async with http.get(path) as response:
        error = (await response.json()).get("error", {})
        assert (response.status == 503) == ("Retry-After" in response.headers)
        return response.status, error.get("code")


async def until_not_ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(10):
        while await status_of(http, "/health/ready") == (200, None):  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.01)


async def test_until_the_model_is_loaded_requests_are_answered_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch) as (loading, http, _):
        for path in ("/health", "/health/ready", "/v1/models", "/version", "/nowhere"):
            assert await status_of(http, path) == (503, "not_ready")
        async with http.get("/") as response:  # the page, which waits
            assert (response.status, response.content_type) == (200, "text/html")
        async with http.post("/v1/completions", json={"prompt": "x" * 100_000}) as response:
            assert response.status == 503
        gateways = {STREAM_HEADER: "token"}
        async with http.post("/v1/messages", json={}, headers=gateways) as response:
            assert (await response.json())["error"]["type"] == "overloaded_error"
            assert response.headers[ERROR_HEADER] == "not_ready"
        assert not loading.announced.is_set()
        await loading.end()
        for path in ("/health", "/health/ready", "/health/live", "/version"):
            assert await status_of(http, path) == (200, None)


async def test_a_taken_port_is_found_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch) as (loading, _, _):
        monkeypatch.setattr(Frontend, "launch", None)
        with pytest.raises(ConfigError, match=f"server.port = {loading.port}"):
            await server_process.serve([loading.config])


async def test_after_a_signal_requests_are_answered_for_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch, shutdown_delay_s=1000) as (loading, http, task):
        await loading.end()
        os.kill(os.getpid(), signal.SIGTERM)
        await until_not_ready(http)
        assert await status_of(http, "/health/ready") == (503, "not_ready")
        for path in ("/health/live", "/health", "/version"):
            assert await status_of(http, path) == (200, None)
        assert not loading.closed.is_set()
        assert not task.done()


async def test_the_delay_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, shutdown_delay_s=0.2) as (loading, _, task):
        await loading.end()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, 10) == 0
        assert loading.closed.is_set()


async def test_behind_the_delay_kept_connections_are_answered_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch, shutdown_delay_s=0.3) as (loading, http, task):
        await loading.end()
        assert await status_of(http, "/version") == (200, None)
        os.kill(os.getpid(), signal.SIGTERM)
        while (status := await status_of(http, "/version")) == (200, None):  # noqa: ASYNC110  # its own pace
            await asyncio.sleep(0.1)
        assert status == (503, "not_ready")
        assert await asyncio.wait_for(task, 10) == 0


async def test_a_second_signal_ends_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, shutdown_delay_s=1000) as (loading, http, task):
        await loading.end()
        os.kill(os.getpid(), signal.SIGTERM)
        await until_not_ready(http)
        assert not task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, 10) == 0


async def test_a_signal_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that runs and one that waits, both paused, are answered before the server ends."""
    settings = {"server.port": 0, "server.admin_key": "admin"}
    frontend = await make_frontend(1, 0.005, settings)
    monkeypatch.setattr(Frontend, "launch", AsyncMock(return_value=frontend))
    monkeypatch.setattr(server_process, "settle_process", lambda: None)
    monkeypatch.setattr(server_process.StartupDisplay, "show", lambda *_: None)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(server_process.serve([frontend.config], ready.set_result))
    text = await asyncio.wait_for(ready, 10)
    (url,) = re.findall(r"ready at (\S+)", text)
    assert f"\nChat in a browser: {url}/\n" in text
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(url) as http, asyncio.timeout(20):
        async with (
            http.post("/v1/completions", json=body) as first,
            http.post("/v1/completions", json=body) as second,
        ):
            await first.content.readline()
            admin = {"Authorization": "Bearer admin"}
            async with http.post("/pause", headers=admin) as response:
                assert response.status == 200
            scheduler = frontend.engines[0].scheduler
            await until(lambda: not scheduler.num_in_flight)
            assert (len(scheduler.running), scheduler.num_waiting) == (1, 1)
            os.kill(os.getpid(), signal.SIGTERM)
            for response in (first, second):
                text = await response.text()
                assert '"finish_reason":"length"' in text
                assert text.endswith("data: [DONE]\n\n")
        assert await task == 0


async def test_the_end_of_an_outer_application_ends_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frontend = await make_frontend(1, 0.005, {"server.admin_key": "admin"})
    monkeypatch.setattr(Frontend, "launch", AsyncMock(return_value=frontend))
    outer = web.Application()
    outer.add_subapp("/llm", await create_app(frontend.config))
    runner = web.AppRunner(outer, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/llm/"
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(url) as http, asyncio.timeout(20):
        async with http.post("v1/completions", json=body) as stream:
            await stream.content.readline()
            admin = {"Authorization": "Bearer admin"}
            async with http.post("pause", headers=admin) as response:
                assert response.status == 200
            ending = asyncio.ensure_future(runner.cleanup())
            assert '"finish_reason":"length"' in await stream.text()
        await ending


async def test_death_during_the_delay_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "_DEATH_NOTICE_S", 0.0)
    async with serving(monkeypatch, shutdown_delay_s=1000) as (loading, _, task):
        await loading.end()
        os.kill(os.getpid(), signal.SIGTERM)
        loading.dead.set()
        assert await asyncio.wait_for(task, 10) == 1


async def test_a_hangup_reads_the_keys_again_and_ends_nothing() -> None:
    reloaded = asyncio.Event()

    async def reload() -> None:
        reloaded.set()

    stop = server_process.StopSignals()
    try:
        stop.on_hangup(reload)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(reloaded.wait(), 5)
            reloaded.clear()
        assert not stop.first.is_set()
    finally:
        stop.close()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
