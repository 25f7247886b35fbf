"""A client that goes away frees what its request held: in every state of the request, streamed or
not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from yarl import URL

from tests.functional.conftest import Served
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True}


@asynccontextmanager
async def client(
    served: Served, body: dict[str, Any], path: str = "/v1/completions"
) -> AsyncIterator[asyncio.StreamReader]:
    """Sends a request on a connection of its own; the end of the block is the client's going
    away."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(served.url).port)
    writer.write(head.encode() + raw)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


async def check_freed_at_once(served: Served, steps: int) -> None:
    """Checks that all is free, no later than two steps after `steps`: the one under way and the one
    planned ahead."""
    engine = served.engine
    await until(lambda: engine.scheduler.is_idle)
    assert served.frontend.stats()["steps"] - steps <= 2
    assert engine.scheduler.kv_cache.usage == 0
    assert not engine.requests.sequences


@pytest.mark.parametrize("stream", [True, False])
async def test_while_tokens_come(served: Served, stream: bool) -> None:
    engine = served.engine
    async with client(served, LONG | {"stream": stream}) as reader:
        await until(lambda: engine.scheduler.running and engine.scheduler.running[0].num_output > 5)
        if stream:
            assert b"200 OK" in await reader.readline()
        steps = served.frontend.stats()["steps"]
    await check_freed_at_once(served, steps)


@pytest.mark.parametrize("stream", [True, False])
async def test_all_choices_of_all_prompts(served: Served, stream: bool) -> None:
    engine = served.engine
    async with client(served, LONG | {"prompt": ["One", "Two", "Three"], "n": 2, "stream": stream}):
        await until(
            lambda: len(engine.scheduler.running) == 4 and engine.scheduler.num_waiting == 2
        )
        steps = served.frontend.stats()["steps"]
    await check_freed_at_once(served, steps)


@pytest.mark.parametrize("stream", [True, False])
async def test_while_queued(served: Served, stream: bool) -> None:
    engine = served.engine
    async with client(served, LONG | {"n": 4}):
        await until(lambda: len(engine.scheduler.running) == 4)
        async with client(served, LONG | {"stream": stream}):
            await until(lambda: engine.scheduler.num_waiting == 1)
            steps = served.frontend.stats()["steps"]
        await until(lambda: engine.scheduler.num_waiting == 0)
        assert served.frontend.stats()["steps"] - steps <= 2
        assert len(engine.scheduler.running) == 4
        steps = served.frontend.stats()["steps"]
    await check_freed_at_once(served, steps)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_while_the_prompt_is_encoded(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, release = asyncio.Event(), asyncio.Event(), threading.Event()
    run = served.frontend._threads.run

    async def run_held(work: Callable[[], Any], **options: Any) -> Any:
        """Encodes only when the test allows it."""
        begun.set()
        try:
            return await run(lambda: release.wait(10) and work(), **options)
        finally:
            ended.set()

    monkeypatch.setattr(served.frontend._threads, "run", run_held)
    steps = served.frontend.stats()["steps"]
    body = (
        {"prompt": "word"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "word"}]}
    )
    async with client(served, body, path):
        await asyncio.wait_for(begun.wait(), 10)
        assert not ended.is_set()
    await asyncio.wait_for(ended.wait(), 10)
    release.set()
    monkeypatch.undo()
    assert served.frontend.stats()["steps"] == steps
    await check_freed_at_once(served, steps)


async def test_others_go_on(served: Served) -> None:
    body = {
        "prompt": "The capital of France is",
        "temperature": 0,
        "max_tokens": 16,
        "ignore_eos": True,
    }
    alone = await served.complete(**body)
    going_on = asyncio.ensure_future(served.complete(**body))
    async with client(served, LONG | {"stream": True}) as reader:
        await reader.readuntil(b"data: {")
    assert await going_on == alone
    await until(lambda: served.engine.scheduler.is_idle)


async def test_a_stream_in_http_1_0_ends_with_its_connection(served: Served) -> None:
    """Though the client offers to keep it: nothing else would end the body."""
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(served.url).port)
    head = "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    reply = await asyncio.wait_for(reader.read(), 30)
    assert reply.endswith(b"data: [DONE]\n\n")
    writer.close()
