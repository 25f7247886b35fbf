"""A full queue refuses at once, deadlines free what they end, and ids go through: with a real
model."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.functional.conftest import Served
from tests.functional.test_disconnect import check_freed_at_once
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True}
SHORT: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "ignore_eos": True},
}

Settings = Callable[..., None]


@pytest.fixture
def settings(served: Served, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Changes the server's configuration for a test: `settings("scheduler",
    max_waiting_requests=1)`."""

    def change(section: str, **values: Any) -> None:
        config = served.frontend.config
        changed = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **values)}
        )
        monkeypatch.setattr(served.frontend, "config", changed)

    return change


@asynccontextmanager
async def all_slots_taken(served: Served) -> AsyncIterator[None]:
    posting = asyncio.ensure_future(served.post(COMPLETIONS, **LONG, n=4))
    await until(lambda: len(served.engine.scheduler.running) == 4)
    try:
        yield
    finally:
        posting.cancel()
        await until(lambda: served.engine.scheduler.is_idle)
        served.engine.scheduler.check_integrity()


async def check_refused(served: Served, path: str, body: dict[str, Any]) -> None:
    waiting = served.engine.scheduler.num_waiting
    async with served.http.post(path, json=body) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert response.headers["X-Request-Id"]
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("server_error", "overloaded")
    assert served.engine.scheduler.num_waiting == waiting


# ---------------------------------------------------------------- the queue


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_is_beyond_the_queue_is_refused(
    served: Served, settings: Settings, path: str, stream: bool
) -> None:
    settings("scheduler", max_waiting_requests=2)
    async with all_slots_taken(served):
        waiting = asyncio.ensure_future(served.post(path, **SHORT[path]))
        await until(lambda: served.engine.scheduler.num_waiting == 1)
        await check_refused(served, path, SHORT[path] | {"n": 2, "stream": stream})
        last = asyncio.ensure_future(served.post(path, **SHORT[path]))
        await until(lambda: served.engine.scheduler.num_waiting == 2)
        await check_refused(served, path, SHORT[path] | {"stream": stream})
    for posting in (waiting, last):
        assert (await posting)["usage"]["completion_tokens"] == 2


async def test_all_prompts_of_a_request_are_taken_or_none(
    served: Served, settings: Settings
) -> None:
    settings("scheduler", max_waiting_requests=3)
    async with all_slots_taken(served):
        await check_refused(
            served, COMPLETIONS, SHORT[COMPLETIONS] | {"prompt": ["One", "Two"], "n": 2}
        )
        await check_refused(
            served, COMPLETIONS, SHORT[COMPLETIONS] | {"prompt": ["One", "Two", "Three", "Four"]}
        )
        posting = asyncio.ensure_future(
            served.post(COMPLETIONS, **SHORT[COMPLETIONS] | {"prompt": ["One", "Two", "Three"]})
        )
        await until(lambda: served.engine.scheduler.num_waiting == 3)
    assert len((await posting)["choices"]) == 3


async def test_a_full_queue_costs_no_encoding(
    served: Served, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings("scheduler", max_waiting_requests=0)
    async with all_slots_taken(served):
        monkeypatch.setattr(served.frontend._threads, "run", None)
        for path, body in SHORT.items():
            await check_refused(served, path, body)


async def test_a_burst_fills_the_free_slots(served: Served, settings: Settings) -> None:
    settings("scheduler", max_waiting_requests=1)

    async def post() -> int:
        async with served.http.post(
            COMPLETIONS, json=LONG | {"prompt": [1, 2, 3], "max_tokens": 100}
        ) as response:
            return response.status

    assert sorted(await asyncio.gather(*(post() for _ in range(12)))) == [200] * 5 + [503] * 7


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize("n", [1, 6])
async def test_a_stream_ends_with_an_error_event(served: Served, n: int) -> None:
    began = time.perf_counter()
    async with served.http.post(
        COMPLETIONS, json=LONG | {"n": n, "stream": True, "timeout_s": 1.5}
    ) as response:
        assert response.status == 200
        *_, before, last, done, rest = (await response.text()).split("\n\n")
        steps = served.frontend.stats()["steps"]
    assert 1.45 < time.perf_counter() - began < 5
    assert '"choices"' in before
    assert '"code":"timeout"' in last
    assert (done, rest) == ("data: [DONE]", "")
    await check_freed_at_once(served, steps)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_reply_is_answered_504(served: Served, settings: Settings, path: str) -> None:
    settings("server", request_timeout_s=0.3)
    reply = await served.post(path, 504, **SHORT[path] | {"max_tokens": 400, "timeout_s": 60})
    assert (reply["error"]["type"], reply["error"]["code"]) == ("server_error", "timeout")
    await check_freed_at_once(served, served.frontend.stats()["steps"])


async def test_deadlines_hold_in_the_queue(served: Served) -> None:
    async with all_slots_taken(served):
        reply = await served.post(COMPLETIONS, 504, **LONG | {"timeout_s": 0.1})
        assert reply["error"]["code"] == "timeout"
        assert served.engine.scheduler.num_waiting == 0
        assert len(served.engine.scheduler.running) == 4, "the others go on"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_deadlines_hold_while_the_prompt_is_encoded(served: Served, path: str) -> None:
    frontend, release = served.frontend, threading.Event()
    held = [asyncio.ensure_future(frontend._threads.run(release.wait)) for _ in range(2)]
    steps = frontend.stats()["steps"]
    reply = await served.post(path, 504, **SHORT[path] | {"timeout_s": 0.1})
    assert reply["error"]["code"] == "timeout"
    release.set()
    await asyncio.gather(*held)
    assert frontend.stats()["steps"] == steps


async def test_a_reader_that_stalls_holds_nothing_past_its_deadline(served: Served) -> None:
    async with served.http.post(
        COMPLETIONS, json=LONG | {"stream": True, "timeout_s": 0.3}
    ) as response:
        assert response.status == 200
        await until(lambda: served.engine.scheduler.is_idle)
        assert served.engine.scheduler.kv_cache.usage == 0


# ---------------------------------------------------------------- request ids


@pytest.mark.parametrize(("path", "prefix"), [(COMPLETIONS, "cmpl"), (CHAT, "chatcmpl")])
async def test_an_id_goes_through(served: Served, path: str, prefix: str) -> None:
    body = SHORT[path] | {"max_tokens": 100, "stream": True}
    async with served.http.post(path, json=body, headers={"X-Request-Id": "my id"}) as response:
        assert response.headers["X-Request-Id"] == "my id"
        await response.content.readuntil(b"\n\n")
        assert [request.request_id for request in served.engine.scheduler.running] == [
            f"{prefix}-my id-0"
        ]
        assert f'"id":"{prefix}-my id"' in (await response.content.read()).decode()
