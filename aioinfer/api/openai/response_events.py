"""The words of `/v1/responses`: the response while it is generated, and the events of its stream.

Background responses (`"background": true`) are generated without a connection until they end or are
cancelled. Clients poll them, or follow their events. `ResponseRuns` holds the responses that have
not ended; the `ObjectStore` has the others. Both are in memory: a server that ends cancels the
responses that are not complete.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import orjson
from aiohttp import web
from msgspec import Struct

from aioinfer.api.admission import bounded
from aioinfer.api.batch.store import MAX_STORED, MAX_STORED_BYTES, ObjectStore, json_size, owner_of
from aioinfer.api.context import STREAM_HEADERS
from aioinfer.api.delivery import submitted
from aioinfer.api.errors import describe, json_response
from aioinfer.api.event_stream import stream_state
from aioinfer.api.generation import Generation, named_event
from aioinfer.api.http.limits import ACCOUNT
from aioinfer.api.http.request_log import RECORD, RequestRecord
from aioinfer.api.logprobs import formatted
from aioinfer.api.message_events import Block, BlockKind, MessageDialect
from aioinfer.api.openai.responses_body import ResponseContext, ResponseRequest
from aioinfer.engine.chat_turn import new_call_id, num_thought_tokens
from aioinfer.errors import OverloadedError, RequestError
from aioinfer.scheduler.request import RequestStatus
from aioinfer.text.message_parser import ToolUse

if TYPE_CHECKING:
    from aioinfer.engine.output import RequestOutput


class ResponseUsage(Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(Struct, kw_only=True):
    """The reply of `/v1/responses`, which repeats what was asked for. The first and the last event
    of a stream hold one."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    background: bool
    conversation: dict[str, str] | None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    presence_penalty: float
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: Any
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    output: list[dict[str, Any]]
    usage: ResponseUsage | None = None


class ResponseDialect(MessageDialect[ResponseRequest]):
    """The words of a response.

    Attributes:
        context: that it is generated from, once it is decoded.
        ended: the response, once it has ended.
    """

    body_type = ResponseRequest
    text_field = "input"
    id_prefix = "resp_"
    context: ResponseContext

    def __init__(self, request: web.Request, body: ResponseRequest):
        super().__init__(request, body)
        # all ids are made of the stream's key
        state = stream_state(request)
        self.id = f"resp_{state.key}"
        self.ended: Response | None = None
        self._created = state.created
        self._number = 0  # of the next event
        self._num_logprobs = 0  # of the block's, that have been sent
        self._ids = random.Random(state.key)

    @property
    def field_names(self) -> Mapping[str, str]:
        """See `Dialect.field_names`."""
        names = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        return names | {"prompt": "input", "messages": "input"}

    async def prompt(self, use: ToolUse) -> list[int]:
        """See `Dialect.prompt`. Raises `RequestError` also if an object is not stored that the
        body names."""
        previous, request = self.body.previous_response_id, self.request
        runs = request.app[RESPONSE_RUNS]
        if previous is not None and runs.find(owner_of(request), previous) is not None:
            raise RequestError(
                "the previous response has not ended yet", param="previous_response_id"
            )
        self.context = ResponseContext.find(request, self.body)
        return await self.context.encode(self.frontend, self.body, use)

    async def decode(self) -> Generation | web.StreamResponse:
        """See `Dialect.decode`. A response in the background is generated beyond its reply."""
        found = await super().decode()
        self._fields = self._repeated()
        if isinstance(found, Generation) and self.body.background:
            return await self.request.app[RESPONSE_RUNS].begin(self, found)
        return found

    def _repeated(self) -> dict[str, Any]:
        """Returns the fields of the response that repeat the request."""
        body, conversation = self.body, self.body.conversation_id
        format = body.text.format if body.text is not None else None
        params = ("frequency_penalty", "presence_penalty", "temperature", "top_p")
        given = ("instructions", "max_output_tokens", "previous_response_id", "user")
        fields = {
            "id": self.id,
            "created_at": self._created,
            "model": self.frontend.config.served_model_names[0],
            "background": bool(body.background),
            "conversation": None if conversation is None else {"id": conversation},
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": body.store is not False,
            "text": {
                "format": {"type": "text"} if format is None else _plain(format),
                "verbosity": (body.text and body.text.verbosity) or "medium",
            },
            "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
            "tools": [{"strict": None} | _plain(tool) for tool in body.tools or ()],
            "top_logprobs": body.num_logprobs or 0,
            "truncation": body.truncation or "disabled",
            **{name: getattr(self.turn.params, name) for name in params},
            **{name: getattr(body, name) for name in given},
        }
        try:
            orjson.dumps(fields)
        except orjson.JSONEncodeError as error:
            raise RequestError("the body is nested too deeply to be repeated") from error
        return fields

    def new_id(self, kind: BlockKind) -> str:
        """See `MessageDialect.new_id`; for a tool call, the id that its result names."""
        if kind == "call":
            return new_call_id(self.frontend, random_bytes=self._ids.randbytes)
        return f"{'msg' if kind == 'text' else 'rs'}_{self._ids.randbytes(16).hex()}"

    def response(
        self,
        reason: str | None = None,
        num_tokens: int = 0,
        error: dict[str, Any] | None = None,
        *,
        unfinished: Literal["queued", "in_progress", "cancelled"] = "in_progress",
    ) -> Response:
        """Returns the response with its blocks so far; without a reason for its end or an error its
        status is `unfinished`."""
        blocks = self.blocks.all
        reply = Response(
            **self._fields,
            status=unfinished if reason is None else "completed",
            error=error,
            output=[],
            usage=None if reason is None else self._usage(num_tokens),
        )
        if reason == "length":
            reply.status, reply.incomplete_details = "incomplete", {"reason": "max_output_tokens"}
        if error is not None:
            reply.status = "failed"
        if reply.status == "completed":
            reply.completed_at = int(time.time())
        last = reply.status if reply.status in ("completed", "in_progress") else "incomplete"
        reply.output = [
            _item(block, last if block is blocks[-1] else "completed") for block in blocks
        ]
        return reply

    def _usage(self, num_tokens: int) -> ResponseUsage:
        prompt = len(self.output.prompt_token_ids)
        (tokens,) = self.output.generated()
        thoughts = num_thought_tokens(self.frontend, self.turn, tokens)
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details={"cached_tokens": self.output.num_cached_tokens},
            output_tokens=num_tokens,
            output_tokens_details={"reasoning_tokens": min(thoughts, num_tokens)},
            total_tokens=prompt + num_tokens,
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": f"response.{kind}", "sequence_number": number, **fields})

    def opening(self) -> bytes:
        """See `MessageDialect.opening`."""
        body = self.response()
        return self._event("created", response=body) + self._event("in_progress", response=body)

    def change(self, kind: str, block: Block, text: str) -> bytes:
        """See `MessageDialect.change`."""
        index = block.index
        place = {"item_id": _item_id(block), "output_index": index}
        if block.kind != "call":
            place["content_index"] = 0
        if kind == "start":
            self._num_logprobs = 0
            data = self._event(
                "output_item.added", output_index=index, item=_item(block, "in_progress")
            )
            return (
                data
                if block.kind == "call"
                else data + self._event("content_part.added", **place, part=_part(block))
            )
        name = {"call": "function_call_arguments", "text": "output_text"}.get(
            block.kind, "reasoning_text"
        )
        if kind == "delta":
            extra = {"logprobs": block.logprobs[self._num_logprobs :]}
            self._num_logprobs = len(block.logprobs)
            extra = extra if block.kind == "text" else {}
            return self._event(f"{name}.delta", **place, delta=text, **extra)
        if block.kind == "call":
            data = self._event(f"{name}.done", **place, name=block.name, arguments=block.text)
        else:
            extra = {"logprobs": block.logprobs} if block.kind == "text" else {}
            data = self._event(f"{name}.done", **place, text=block.text, **extra)
            data += self._event("content_part.done", **place, part=_part(block))
        return data + self._event(
            "output_item.done", output_index=index, item=_item(block, "completed")
        )

    def closing(self, reason: str, stop_reason: int | str | None, num_tokens: int) -> bytes:
        """See `MessageDialect.closing`."""
        body = self.message(reason, stop_reason, num_tokens)
        return self._event(body.status, response=body)

    def message(self, reason: str, stop_reason: int | str | None, num_tokens: int) -> Response:
        """See `MessageDialect.message`."""
        self.ended = ended = self.response(reason, num_tokens)
        if not self.body.background:
            self.keep(ended)
        return ended

    def keep(self, ended: Response, events: Sequence[bytes] = ()) -> None:
        """Stores the response, which has ended, as the body asks for it."""
        self.context.keep(self.request, self.body, msgspec.structs.asdict(ended), events)

    def failed(self, error: Exception) -> Response:
        """Returns the response that an error has ended."""
        described = describe(error)[1].error
        cause = {"code": described.code or "server_error", "message": described.message}
        return self.response(error=cause)

    def failure(self, error: Exception) -> bytes:
        """See `Dialect.failure`."""
        return self._event("failed", response=self.failed(error))


class ResponseRun:
    """A response that is generated in the background.

    Attributes:
        dialect: has the response.
        num_bytes: the length of its items as JSON.
        events: the events so far by their sequence numbers, if it was asked to be a stream.
        queued: becomes the response when it is in the queue, or the error that kept it out.
        task: generates it.
    """

    task: asyncio.Task[None]

    def __init__(self, dialect: ResponseDialect, generation: Generation):
        self.dialect = dialect
        self.events: list[bytes] = []
        self.queued: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.num_bytes = json_size(self.items)
        self._generation = generation
        self._output: RequestOutput | None = None
        self._news = asyncio.Event()

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items before its output."""
        return self.dialect.context.items

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
        return dialect.response(unfinished="queued" if waits else "in_progress")

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
            dialect.ended = dialect.response(unfinished="cancelled")
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


def _plain(struct: Any) -> dict[str, Any]:
    return {
        name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None
    }


def _part(block: Block) -> dict[str, Any]:
    """Returns the part of content that a block is."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {
        "type": "output_text",
        "text": block.text,
        "annotations": [],
        "logprobs": block.logprobs,
    }


def _item(block: Block, status: str) -> dict[str, Any]:
    """Returns the item of a block, with its content so far."""
    if block.kind == "call":
        return {
            "id": _item_id(block),
            "type": "function_call",
            "status": status,
            "call_id": block.id,
            "name": block.name,
            "arguments": block.text,
        }
    content = [_part(block)] if block.parts else []
    if block.kind == "reasoning":
        head: dict[str, Any] = {"type": "reasoning", "summary": []}
    else:
        head = {"type": "message", "role": "assistant"}
    return {"id": block.id, **head, "status": status, "content": content}


def _item_id(block: Block) -> str:
    return f"fc_{block.id.removeprefix('call_')}" if block.kind == "call" else block.id
