"""A server on a real socket with scripted replies, and the load generator as a process of its
own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

BENCH = Path(__file__).parent.parent / "scripts" / "bench.py"
USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serves completions and chat by `handler` on a free port, and yields the base URL."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "known-model"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def text_event(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


USAGE_EVENT: dict[str, Any] = {"choices": [], "usage": USAGE}


def sse(*events: dict[str, Any] | str) -> bytes:
    return b"".join(
        b"data: " + (e if isinstance(e, str) else json.dumps(e)).encode() + b"\n\n" for e in events
    )


async def stream(request: web.Request, *blocks: bytes, delay_s: float = 0.0) -> web.StreamResponse:
    """Sends blocks of a stream, `delay_s` before each."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for block in blocks:
        await asyncio.sleep(delay_s)
        await response.write(block)
    return response


async def good_reply(request: web.Request) -> web.StreamResponse:
    return await stream(
        request,
        sse(text_event("a"), text_event("b"), text_event("", "length"), USAGE_EVENT, "[DONE]"),
    )


async def run_bench(arguments: str) -> tuple[int, str, str]:
    """Runs the script as a process of its own, with arguments as a shell reads them. Returns its
    exit status, output and error output."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, BENCH, *shlex.split(arguments), stdout=pipe, stderr=pipe
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()
