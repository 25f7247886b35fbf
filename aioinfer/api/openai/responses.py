"""`/v1/responses`: OpenAI's Responses API. Stored responses are in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web
from msgspec import Struct

from aioinfer.api.admission import admit
from aioinfer.api.batch.store import OBJECT_STORE, owner_of, page_of
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.delivery import deliver
from aioinfer.api.errors import json_response, renamed
from aioinfer.api.event_stream import stream_state
from aioinfer.api.generation import STREAM_HEADERS, Generation
from aioinfer.api.openai.response_events import ResponseDialect
from aioinfer.api.openai.response_runs import RESPONSE_RUNS, ResponseContext, ResponseRun
from aioinfer.api.openai.responses_body import ResponseRequest
from aioinfer.api.prompts import with_token_ids
from aioinfer.engine.chat_turn import Turn, make_turn
from aioinfer.errors import RequestError

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend

_PARAMS = {
    "max_tokens": "max_output_tokens",
    "prompt": "input",
    "messages": "input",
    "logprobs": "top_logprobs",
}


class InputTokens(Struct, kw_only=True):
    """The number of tokens that the prompt of a response would have."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answers a conversation, and stores it unless `store` is false.

    With `background` it is generated without a connection: the reply says that it is queued, or
    follows its events.
    """
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("input")
    body = await read_body(request, ResponseRequest)
    admit(request, body.timeout_s)
    context = _context(request, body)
    with renamed(_PARAMS):
        turn = await _turn(frontend, body, context)
        if body.background:
            run = ResponseRun(frontend, body, turn, context, stream_state(request))
            queued = await request.app[RESPONSE_RUNS].begin(request, run)
            return await _send(request, run.follow(0)) if body.stream else json_response(queued)
        keep = partial(context.keep, request, body)
        dialect = ResponseDialect(frontend, body, turn, stream_state(request), keep)
        generation = Generation(
            dialect.id,
            [turn.prompt],
            turn.params,
            streams=bool(body.stream),
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        return await deliver(request, generation, dialect)


async def get_response(request: web.Request) -> web.StreamResponse:
    """Returns a stored response, or one in the background as it stands.

    With `stream`, its events behind number `starting_after`, where it was a stream in the
    background.
    """
    id, owner = request.match_info["id"], owner_of(request)
    first = _first_event(request)
    events: AsyncIterator[bytes] | None
    if (run := request.app[RESPONSE_RUNS].find(owner, id)) is not None:
        if first is None:
            return json_response(run.body())
        events = run.follow(first) if run.is_stream else None
    else:
        stored = request.app[OBJECT_STORE].find(owner, "response", id)
        if first is None:
            return json_response(stored.body)
        events = _whole(stored.events[first:]) if stored.events else None
    if events is None:
        raise RequestError(
            "only a response that was made with background and stream has events", param="stream"
        )
    return await _send(request, events)


def _first_event(request: web.Request) -> int | None:
    """Returns the number of the first event that a request asks for, None if it wants none."""
    if request.query.get("stream", "false").lower() not in ("true", "1"):
        return None
    after = request.query.get("starting_after", "")
    if after and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise RequestError(
            f"starting_after must be the number of an event, not {after[:40]!r}",
            param="starting_after",
        )
    return int(after) + 1 if after else 0


async def _whole(events: Sequence[bytes]) -> AsyncIterator[bytes]:
    yield b"".join(events)


async def _send(request: web.Request, events: AsyncIterator[bytes]) -> web.StreamResponse:
    """Sends events as they come."""
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    async for data in events:
        if data:
            await response.write(data)
    return response


async def cancel_response(request: web.Request) -> web.Response:
    """Ends a response in the background; one that is complete stays as it is."""
    id, owner = request.match_info["id"], owner_of(request)
    runs = request.app[RESPONSE_RUNS]
    if (run := runs.find(owner, id)) is not None:
        await runs.cancel(run)
        return json_response(run.body())
    body = request.app[OBJECT_STORE].find(owner, "response", id).body
    if not body["background"]:
        raise RequestError(
            "Cannot cancel a synchronous response: it was not made with background", param="id"
        )
    return json_response(body)


async def delete_response(request: web.Request) -> web.Response:
    """Drops a stored response; one in the background is cancelled."""
    id, owner = request.match_info["id"], owner_of(request)
    runs, store = request.app[RESPONSE_RUNS], request.app[OBJECT_STORE]
    if (run := runs.find(owner, id)) is not None:
        await runs.cancel(run)
    if run is None or (owner, id) in store:
        store.remove(owner, "response", id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def list_input_items(request: web.Request) -> web.Response:
    """Lists the input items of a response, newest first, including the items of earlier responses
    and of its conversation; `limit`, `after`, `order`."""
    id, owner = request.match_info["id"], owner_of(request)
    if (run := request.app[RESPONSE_RUNS].find(owner, id)) is not None:
        items: Sequence[dict[str, Any]] = run.context.items
    else:
        items = request.app[OBJECT_STORE].find(owner, "response", id).items
    page = page_of(list(reversed(items)), request.query, max_limit=100, default_limit=20)
    return json_response(page)


async def count_input_tokens(request: web.Request) -> web.Response:
    """Returns how many tokens the prompt of a response would have. Nothing is generated."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("input")
    body = await read_body(request, ResponseRequest)
    admit(request, body.timeout_s)
    with renamed(_PARAMS):
        prompt = await _context(request, body).encode(frontend, body)
    return json_response(InputTokens(input_tokens=len(prompt)))


def _context(request: web.Request, body: ResponseRequest) -> ResponseContext:
    """Returns the context that a response is generated from. Raises `RequestError`."""
    previous = body.previous_response_id
    if previous is not None and request.app[RESPONSE_RUNS].find(owner_of(request), previous):
        raise RequestError("the previous response has not ended yet", param="previous_response_id")
    return ResponseContext.find(request, body)


async def _turn(frontend: Frontend, body: ResponseRequest, context: ResponseContext) -> Turn:
    prompt = await context.encode(frontend, body)
    fields = await with_token_ids(frontend, body.sampling_fields())
    return await make_turn(frontend, prompt, fields, body.tool_use())
