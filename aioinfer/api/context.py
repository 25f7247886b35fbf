"""Shared parts of the handlers: the application's keys, and reading and validating a request
body."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from aioinfer.api.decoding import Body, decode, decode_large
from aioinfer.api.errors import shorten
from aioinfer.api.http.limits import RATE_LIMITER
from aioinfer.api.http.logs import RECORD
from aioinfer.api.http.request_body import HEAP, REQUEST_BODIES
from aioinfer.config import Config
from aioinfer.errors import RequestError

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend

FRONTEND: web.AppKey[Frontend] = web.AppKey("frontend")
#: Makes JSON of anything that a reply holds. `orjson` does so for texts, which it escapes faster.
encode = msgspec.json.Encoder().encode
#: Headers of every reply that is a stream of events.
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}
#: When the server became ready, in Unix seconds.
STARTED = web.AppKey("started", int)
#: The `system_fingerprint` of OpenAI's replies.
FINGERPRINT = web.AppKey("fingerprint", str)
#: Larger bodies are decoded and checked in a thread. The decoder itself does not let other threads
#: run meanwhile: it takes 1.5 ms for a MiB of text; see `decoding` for many small values.
_SMALL_BODY = 64 * 1024
#: Some editors and languages begin UTF-8 with it; JSON (RFC 8259, 8.1) lets a reader ignore it.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

B = TypeVar("B", bound=Body)

#: The parts of a body that was received before `read_body` is called.
RECEIVED: web.RequestKey[list[bytes]] = web.RequestKey("received")


async def read_body(request: web.Request, kind: type[B]) -> B:
    """Reads, decodes and checks a request's JSON body.

    Raises:
        RequestError: 415 for another content type or a compressed body, 404 for a model that is not
            served, 400 for anything else that is wrong with it.
        web.HTTPRequestEntityTooLarge, OverloadedError: see `HeldBody.receive`.
    """
    await request.app[RATE_LIMITER].enter()
    config = request.app[FRONTEND].config
    _check_content_type(request)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError(
            "compressed bodies are not understood", status=415, code="unsupported_media_type"
        )
    with request.app[REQUEST_BODIES].hold() as held:
        parts = request.get(RECEIVED) or await held.receive(request)
        size = sum(map(len, parts))
        request.app[HEAP].note_body(size)
        parts[0] = parts[0].removeprefix(_BYTE_ORDER_MARK)
        ignores = config.server.unknown_fields == "ignore"
        body = (
            decode(b"".join(parts), kind, ignores_unknown=ignores)
            if size <= _SMALL_BODY
            else await asyncio.to_thread(_join_and_decode, parts, kind, ignores)
        )
    check_model(config, body.model)
    if (record := request.get(RECORD)) is not None:
        record.decoded, record.model = time.perf_counter(), body.model
    return body


def _join_and_decode(parts: list[bytes], kind: type[B], ignores_unknown: bool) -> B:
    raw = b"".join(parts)  # lets other threads run while it copies
    parts.clear()
    return decode_large(raw, kind, ignores_unknown=ignores_unknown)


def _check_content_type(request: web.Request) -> None:
    """Raises `RequestError` (415) for a request of a web page that is not declared as JSON, and for
    any that is declared as parts.

    A browser lets any page post plain text or a form to a local server, and asks the server before
    it sends JSON. It adds `Origin` or `Sec-Fetch-Site` to what a page sends, which no page can
    prevent. Other clients may say what they like of their JSON, or nothing, as with other servers.
    """
    if request.content_type == "application/json":
        return
    is_page = "Origin" in request.headers or "Sec-Fetch-Site" in request.headers
    if is_page or request.content_type.startswith("multipart/"):
        raise RequestError(
            "the Content-Type must be application/json", status=415, code="unsupported_media_type"
        )


def check_model(config: Config, model: str | None) -> None:
    """Raises `RequestError` (404) unless `model` is missing or one of the served names."""
    served = config.served_model_names
    if model is not None and model not in served:
        names = ", ".join(repr(name) for name in served)
        raise RequestError(
            f"the model {shorten(model)!r} does not exist; this server serves {names}",
            param="model",
            status=404,
            code="model_not_found",
        )
