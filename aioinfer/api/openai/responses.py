"""`/v1/responses`: OpenAI's Responses API. Stored responses are in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal

from aiohttp import web
from msgspec import Struct

from aioinfer.api.admission import admit
from aioinfer.api.batch.objects import Deleted
from aioinfer.api.batch.store import OBJECT_STORE, StoredObject, owner_of, page_of
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.errors import json_response, renamed
from aioinfer.api.openai.response_events import (
    RESPONSE_RUNS,
    ResponseDialect,
    ResponseRun,
    send_events,
)
from aioinfer.api.openai.responses_body import ResponseRequest
from aioinfer.errors import FieldError, RequestError


class InputTokens(Struct, kw_only=True):
    """The number of tokens that the prompt of a response would have."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


async def get_response(request: web.Request) -> web.StreamResponse:
    """Returns a stored response, or one in the background as it stands.

    With `stream`, its events behind number `starting_after`, where it was a stream in the
    background.
    """
    found, first = _find(request), _first_event(request)
    if first is None:
        return json_response(found.body)
    if isinstance(found, ResponseRun):
        has_events, events = bool(found.dialect.body.stream), found.follow(first)
    else:
        has_events, events = bool(found.events), _whole(found.events[first:])
    if not has_events:
        raise RequestError(
            "only a response that was made with background and stream has events", param="stream"
        )
    return await send_events(request, events)


def _find(request: web.Request) -> ResponseRun | StoredObject:
    """Returns the response that a request names: one in the background, or a stored one."""
    id, owner = request.match_info["id"], owner_of(request)
    run = request.app[RESPONSE_RUNS].find(owner, id)
    return request.app[OBJECT_STORE].find(owner, "response", id) if run is None else run


def _first_event(request: web.Request) -> int | None:
    """Returns the number of the first event that a request asks for, None if it wants none."""
    if request.query.get("stream", "false").lower() not in ("true", "1"):
        return None
    after = request.query.get("starting_after", "")
    if after and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise FieldError("starting_after", f"must be the number of an event, not {after[:40]!r}")
    return int(after) + 1 if after else 0


async def _whole(events: Sequence[bytes]) -> AsyncIterator[bytes]:
    yield b"".join(events)


async def cancel_response(request: web.Request) -> web.Response:
    """Ends a response in the background; one that is complete stays as it is."""
    found = _find(request)
    if isinstance(found, ResponseRun):
        await found.cancel()
    elif not found.body.background:
        raise RequestError(
            "Cannot cancel a synchronous response: it was not made with background", param="id"
        )
    return json_response(found.body)


async def delete_response(request: web.Request) -> web.Response:
    """Drops a stored response; one in the background is cancelled."""
    id, owner = request.match_info["id"], owner_of(request)
    runs, store = request.app[RESPONSE_RUNS], request.app[OBJECT_STORE]
    if (run := runs.find(owner, id)) is not None:
        await run.cancel()
    if run is None or (owner, id) in store:
        store.remove(owner, "response", id)
    return json_response(Deleted(id=id, object="response"))


async def list_input_items(request: web.Request) -> web.Response:
    """Lists the input items of a response, newest first, including the items of earlier responses
    and of its conversation; `limit`, `after`, `order`."""
    items = list(reversed(_find(request).items))
    return json_response(page_of(items, request.query, max_limit=100, default_limit=20))


async def count_input_tokens(request: web.Request) -> web.Response:
    """Returns how many tokens the prompt of a response would have. Nothing is generated."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("input")
    body = await read_body(request, ResponseRequest)
    admit(request, body.timeout_s)
    dialect = ResponseDialect(request, body)
    with renamed(dialect.field_names):
        prompt = await dialect.prompt(body.tool_use())
    return json_response(InputTokens(input_tokens=len(prompt)))
