"""`/v1/responses`: OpenAI's Responses API.

Background responses (`"background": true`) are generated without a connection until they end or are
cancelled. Clients poll them, or follow their events. `ResponseRuns` holds the responses that have
not ended; the `ObjectStore` has the others. Both are in memory: a server that ends cancels the
responses that are not complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from aiohttp import web
from msgspec import Struct

from aioinfer.api.admission import admit, bounded
from aioinfer.api.batch.objects import Deleted
from aioinfer.api.batch.store import (
    MAX_STORED,
    MAX_STORED_BYTES,
    OBJECT_STORE,
    ObjectStore,
    StoredObject,
    json_size,
    owner_of,
    page_of,
)
from aioinfer.api.context import FRONTEND, STREAM_HEADERS, read_body
from aioinfer.api.delivery import submitted
from aioinfer.api.errors import json_response, renamed
from aioinfer.api.generation import Generation
from aioinfer.api.http.limits import ACCOUNT
from aioinfer.api.http.request_log import RECORD, RequestRecord
from aioinfer.api.logprobs import formatted
from aioinfer.api.openai.response_events import Response, ResponseEvents
from aioinfer.api.openai.responses_body import ResponseRequest
from aioinfer.errors import FieldError, OverloadedError, RequestError
from aioinfer.scheduler.request import RequestStatus
from aioinfer.text.message_parser import ToolUse

if TYPE_CHECKING:
    from aioinfer.engine.output import RequestOutput


class InputTokens(Struct, kw_only=True):
    """The number of tokens that the prompt of a response would have."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDialect(ResponseEvents):
    """Answers a conversation, and stores it unless `store` is false.

    With `background` it is generated without a connection: the reply says that it is queued, or
    follows its events.
    """

    reply_type = Response

    async def prompt(self, use: ToolUse) -> list[int]:
        """See `Dialect.prompt`."""
        previous, runs = self.body.previous_response_id, self.request.app[RESPONSE_RUNS]
        if previous is not None and runs.find(owner_of(self.request), previous) is not None:
            raise RequestError(
                "the previous response has not ended yet", param="previous_response_id"
            )
        return await super().prompt(use)

    async def decode(self) -> Generation | web.StreamResponse:
        """See `Dialect.decode`. A response in the background is generated beyond its reply."""
        found = await super().decode()
        if isinstance(found, Generation) and self.body.background:
            return await self.request.app[RESPONSE_RUNS].begin(self, found)
        return found


class ResponseRun:
    """A response that is generated in the background.

    Attributes:
        dialect: has the response.
        items: the items before its output.
        num_bytes: the length of these as JSON.
        events: the events so far by their sequence numbers, if it was asked to be a stream.
        queued: becomes the response when it is in the queue, or the error that kept it out.
        task: generates it.
    """

    task: asyncio.Task[None]

    def __init__(self, dialect: ResponseDialect, generation: Generation):
        self.dialect, self.items = dialect, dialect.items
        self.events: list[bytes] = []
        self.queued: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.num_bytes = json_size(self.items)
        self._generation = generation
        self._output: RequestOutput | None = None
        self._news = asyncio.Event()

    @property
    def body(self) -> Response:
        """The response as it stands."""
        dialect, output = self.dialect, self._output
        if dialect.ended is not None:
            return dialect.ended
        running = RequestStatus.RUNNING, RequestStatus.FINISHED
        is_running = output is not None and output.sequences[0].request.status in running
        # one that was preempted is in progress
        waits = not dialect.blocks.all and not is_running
        return dialect.response("queued" if waits else "in_progress")

    async def cancel(self) -> None:
        """Has the generation end, and returns when it has; the response is cancelled unless it is
        complete."""
        if self._output is not None:
            self._output.abort()
        await asyncio.wait([self.task])

    async def generate(self) -> None:
        """Generates the response for its request, beyond the reply, and stores it."""
        dialect, request = self.dialect, self.dialect.request
        request[RECORD] = RequestRecord(request[RECORD].arrived)  # the other ends with the reply
        try:
            async with (
                bounded(request, dialect.body.timeout_s),
                submitted(request, self._generation) as outputs,
            ):
                self._output = outputs[0]
                writer = dialect.choice(outputs[0], 0, 0)
                self.queued.set_result(self.body)
                async for delta in outputs[0]:
                    make = partial(writer.events, delta)
                    self._note(await formatted(delta.logprobs or (), make))
        except Exception as error:
            if not self.queued.done():
                self.queued.set_exception(error)
                return
            dialect.ended = dialect.failed(error)
            self._note(dialect.failure(error))
        if dialect.ended is None:
            dialect.ended = dialect.response("cancelled")
        self._note(b"")
        dialect.keep(dialect.ended, self.events)

    def _note(self, events: bytes) -> None:
        """Stores events, and wakes the followers of the stream."""
        if self.dialect.body.stream:
            # JSON has no line ends of its own
            self.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Yields the events from this sequence number on as they come."""
        while True:
            if first < len(self.events):
                found = b"".join(self.events[first:])
                first = len(self.events)
                yield found
            elif self.dialect.ended is not None:
                return
            else:
                await self._news.wait()


class ResponseRuns:
    """The background responses of all API keys that have not ended. The limits of stored objects,
    in number and in bytes, bound them too."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._runs: dict[tuple[str | None, str], ResponseRun] = {}

    def find(self, owner: str | None, id: str) -> ResponseRun | None:
        """Returns a response of an API key that has not ended; None where there is none."""
        return self._runs.get((owner, id))

    async def begin(self, dialect: ResponseDialect, generation: Generation) -> web.StreamResponse:
        """Begins a response, and returns the reply when it is in the queue: the response, or its
        events.

        Raises `RequestError` if it could not be stored, `OverloadedError` if there are too many,
        and what `submitted` does.
        """
        run = ResponseRun(dialect, generation)
        self._store.check_room(run.num_bytes, "a response in the background", "background")
        num_bytes = sum(other.num_bytes for other in self._runs.values()) + run.num_bytes
        if len(self._runs) >= MAX_STORED or num_bytes > MAX_STORED_BYTES:
            raise OverloadedError(
                f"{len(self._runs)} responses are in the background, one more is too many; try "
                "again later"
            )
        place = owner_of(dialect.request), dialect.id
        self._runs[place] = run
        run.task = asyncio.create_task(self._run(run))
        run.task.add_done_callback(lambda _: self._runs.pop(place))
        try:
            queued = await run.queued
        except asyncio.CancelledError:  # the client is gone before it got the id
            run.task.cancel()
            raise
        if dialect.body.stream:
            return await send_events(dialect.request, run.follow(0))
        return json_response(queued)

    async def _run(self, run: ResponseRun) -> None:
        with run.dialect.request[ACCOUNT].occupied():
            await run.generate()

    async def stop(self, app: web.Application) -> None:
        """Ends all of them; a handler of `on_shutdown`."""
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


RESPONSE_RUNS = web.AppKey("response_runs", ResponseRuns)


async def send_events(request: web.Request, events: AsyncIterator[bytes]) -> web.StreamResponse:
    """Sends events as they come."""
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    async for data in events:
        if data:
            await response.write(data)
    return response


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
