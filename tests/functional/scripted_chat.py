"""The chat page against a script: a test sends the events of an answer one by one, so that it can
look at the page between two of them.

The pages come from the application of `create_app`, mounted below `/llm`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from aioinfer.api.server import create_app
from bench_loop import make_frontend
from tests.functional import chat_page
from tests.functional.chat_page import IDLE
from tests.functional.chromium import Page, open_page
from tests.scripted_server import sse

INFO = {"chat": True, "tokenizer": True, "max_model_len": 100, "defaults": {"temperature": 1}}
USAGE = {
    "prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def call(index: int, name: str | None, arguments: str) -> dict[str, Any]:
    """Returns the first event of a call, which has a name, or a further one."""
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    head = {"id": f"call_{index}", "type": "function"} if name else {}
    return delta(tool_calls=[{"index": index, **head, "function": function}])


def token(text: str, logprob: float, *others: tuple[str, float]) -> dict[str, Any]:
    """Returns an event with a token and its alternatives."""

    def entry(word: str, value: float) -> dict[str, Any]:
        return {"token": word, "logprob": value, "bytes": list(word.encode())}

    top = [entry(text, logprob), *(entry(*other) for other in others)]
    event = delta(content=text)
    event["choices"][0]["logprobs"] = {"content": [entry(text, logprob) | {"top_logprobs": top}]}
    return event


def end(reason: str) -> tuple[dict[str, Any] | str, ...]:
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    return last, {"choices": [], "usage": USAGE}, "[DONE]"


class Script:
    """The chat's answers: the events that a test sends, as they are sent."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets what another test has sent."""
        self._events: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.refusal: dict[str, Any] | None = None

    def send(self, *events: Any) -> None:
        self._events.put_nowait(events)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.refusal is not None:
            return web.json_response({"error": self.refusal}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sse(delta(role="assistant", content="")))
        while True:
            events = await self._events.get()
            await response.write(sse(*events))
            if events[-1] == "[DONE]":
                return response


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mounted() -> AsyncIterator[tuple[Script, str]]:
    """The script, and where the page is."""
    frontend = await make_frontend(4, 0.005, {})
    script, outer = Script(), web.Application()

    async def info(request: web.Request) -> web.Response:
        return web.json_response(INFO)

    outer.router.add_post("/llm/v1/chat/completions", script.answer)
    outer.router.add_get("/llm/page/info", info)
    outer.add_subapp("/llm", await create_app(frontend.config, frontend))
    runner = web.AppRunner(outer, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield script, f"http://127.0.0.1:{runner.addresses[0][1]}/llm"
    await runner.cleanup()
    await frontend.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with open_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Page, mounted: tuple[Script, str]) -> AsyncIterator[Page]:
    """The chat, ready; it may complain of nothing but what the test expects."""
    script, url = mounted
    script.begin()
    await browser.open(f"{url}/")
    await browser.until("$('#status')?.dataset.state === 'live'")
    yield browser
    assert browser.errors.empty(), browser.errors


@pytest.fixture
def script(mounted: tuple[Script, str]) -> Script:
    return mounted[0]


def posted(page: Page) -> list[dict[str, Any]]:
    return chat_page.posted(page, "/llm/v1/chat/completions")


async def until_idle(page: Page, num_answers: int = 1) -> None:
    await page.until(f"{IDLE} && $$('.turn').length === {num_answers}")
