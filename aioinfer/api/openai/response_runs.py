"""Background responses (`"background": true`): they are generated without a connection until they
end or are cancelled. Clients poll them, or follow their events.

`responses` starts them. `ResponseRuns` holds the responses that have not ended; the `ObjectStore`
has the others. Both are in memory: a server that ends cancels the responses that are not complete.

A response's context, which `responses` finds: the items before its input, its input, and the store
that keeps it when it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from aioinfer.api.batch.store import OBJECT_STORE, owner_of
from aioinfer.api.openai.responses_body import ResponseRequest, input_items, to_messages
from aioinfer.engine.chat_turn import encode_turn

if TYPE_CHECKING:
    from aioinfer.api.openai.response_events import Response
    from aioinfer.engine.frontend import Frontend


import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

from aioinfer.api.admission import bounded
from aioinfer.api.batch.store import MAX_STORED, MAX_STORED_BYTES, ObjectStore, json_size
from aioinfer.api.delivery import submitted
from aioinfer.api.event_stream import StreamState
from aioinfer.api.generation import Generation
from aioinfer.api.http.limits import ACCOUNT
from aioinfer.api.http.record import RECORD, RequestRecord
from aioinfer.api.logprobs import formatted
from aioinfer.api.openai.response_events import Response, ResponseDialect
from aioinfer.engine.chat_turn import Turn
from aioinfer.errors import OverloadedError
from aioinfer.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import RequestOutput


class ResponseRun:
    """A response that is generated in the background.

    Attributes:
        num_bytes: the length of its items as JSON.
        events: the events so far by their sequence numbers, if it was asked to be a stream.
        ended: the response, once it has ended.
    """

    def __init__(
        self,
        frontend: Frontend,
        body: ResponseRequest,
        turn: Turn,
        context: ResponseContext,
        state: StreamState,
    ):
        """`state` has the key of its ids."""
        self.context = context
        self.events: list[bytes] = []
        self.ended: Response | None = None
        self._body, self._turn = body, turn
        self._dialect = ResponseDialect(frontend, body, turn, state, self._end)
        self._output: RequestOutput | None = None
        self._news = asyncio.Event()
        self.num_bytes = json_size(context.items)

    @property
    def id(self) -> str:
        """The id of the response."""
        return self._dialect.id

    @property
    def is_stream(self) -> bool:
        """Whether its events are kept."""
        return bool(self._body.stream)

    def body(self) -> Response:
        """Returns the response as it stands."""
        if self.ended is not None:
            return self.ended
        is_running = self._output is not None and self._output.sequences[0].request.status in (
            RequestStatus.RUNNING,
            RequestStatus.FINISHED,
        )
        # one that was preempted is in progress
        waits = not self._dialect.blocks.all and not is_running
        return self._dialect.response(unfinished="queued" if waits else "in_progress")

    def keep(self, request: web.Request) -> None:
        """Stores the response, if it has ended."""
        if self.ended is not None:
            self.context.keep(request, self._body, self.ended, self.events)

    def cancel(self) -> None:
        """Has the generation end; the response is cancelled unless it is complete."""
        if self._output is not None:
            self._output.abort()

    async def generate(self, request: web.Request, queued: asyncio.Future[Response]) -> None:
        """Generates the response for a request, beyond its reply. `queued` becomes the response
        when it is in the queue, or the error that kept it out."""
        request[RECORD] = RequestRecord(request[RECORD].arrived)  # the other ends with the reply
        generation = Generation(
            self.id,
            [self._turn.prompt],
            self._turn.params,
            priority=self._body.priority,
            cache_salt=self._body.cache_salt,
        )
        try:
            async with (
                bounded(request, self._body.timeout_s),
                submitted(request, generation) as outputs,
            ):
                self._output = outputs[0]
                writer = self._dialect.choice(outputs[0], 0, 0)
                queued.set_result(self.body())
                async for delta in outputs[0]:
                    make = partial(writer.events, delta)
                    self._note(await formatted(delta.logprobs or (), make))
        except Exception as error:
            if not queued.done():
                queued.set_exception(error)
                return
            self._end(self._dialect.failed(error))
            self._note(self._dialect.failure(error))
        if self.ended is None:
            self.ended = self._dialect.response(unfinished="cancelled")
        self._note(b"")

    def _end(self, ended: Response) -> None:
        self.ended = ended

    def _note(self, events: bytes) -> None:
        """Stores events, and wakes the followers of the stream."""
        if self.is_stream:
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
            elif self.ended is not None:
                return
            else:
                await self._news.wait()


class ResponseRuns:
    """The background responses of all API keys that have not ended. The limits of stored objects,
    in number and in bytes, bound them too."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._runs: dict[tuple[str | None, str], ResponseRun] = {}
        self._tasks: dict[ResponseRun, asyncio.Task[None]] = {}

    def find(self, owner: str | None, id: str) -> ResponseRun | None:
        """Returns a response of an API key that has not ended; None where there is none."""
        return self._runs.get((owner, id))

    async def begin(self, request: web.Request, run: ResponseRun) -> Response:
        """Begins a response for a request, and returns it when it is in the queue.

        Raises `RequestError` if it could not be stored, `OverloadedError` if there are too many,
        and what `submitted` does.
        """
        self._store.check_room(run.num_bytes, "a response in the background", "background")
        num_bytes = sum(other.num_bytes for other in self._tasks) + run.num_bytes
        if len(self._tasks) >= MAX_STORED or num_bytes > MAX_STORED_BYTES:
            raise OverloadedError(
                f"{len(self._tasks)} responses are in the background, one more is too many; try "
                "again later"
            )
        queued: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(request, run, queued))
        self._tasks[run] = task
        task.add_done_callback(partial(self._forget, run))
        try:
            return await queued
        except asyncio.CancelledError:  # the client is gone before it got the id
            task.cancel()
            raise

    async def cancel(self, run: ResponseRun) -> None:
        """Cancels a response, and returns when it has ended."""
        run.cancel()
        await asyncio.wait([self._tasks[run]])

    async def stop(self, app: web.Application) -> None:
        """Ends all of them; a handler of `on_shutdown`."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, request: web.Request, run: ResponseRun, queued: asyncio.Future[Response]
    ) -> None:
        account = request[ACCOUNT]
        place = (account.key.name, run.id)
        self._runs[place] = run
        try:
            with account.occupied():
                await run.generate(request, queued)
            run.keep(request)
        finally:
            del self._runs[place]

    def _forget(self, run: ResponseRun, task: asyncio.Task[None]) -> None:
        del self._tasks[run]


RESPONSE_RUNS = web.AppKey("response_runs", ResponseRuns)


#: Tokens of a prompt before `truncation` drops items of it.
_MAX_UNCUT_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """The context that a response is generated from.

    Attributes:
        before: the items of the conversation, or of the previous response and its output.
        new: the items of the input.
        conversation: the id of the conversation that gets the input and the output when the
            response is complete.
    """

    before: Sequence[dict[str, Any]]
    new: Sequence[dict[str, Any]]
    conversation: str | None = None

    @classmethod
    def find(cls, request: web.Request, body: ResponseRequest) -> ResponseContext:
        """Returns the context of a request. Raises `RequestError` naming the id of an object that
        is not stored."""
        store, owner = request.app[OBJECT_STORE], owner_of(request)
        before: Sequence[dict[str, Any]] = ()
        conversation = body.conversation_id
        if conversation is not None:
            before = store.find(owner, "conversation", conversation, "conversation").items
        elif (id := body.previous_response_id) is not None:
            previous = store.find(owner, "response", id, "previous_response_id")
            before = [*previous.items, *_output(previous.body)]
        return cls(before, input_items(body.input, {item["id"] for item in before}), conversation)

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items before the output."""
        return [*self.before, *self.new]

    async def encode(self, frontend: Frontend, body: ResponseRequest) -> list[int]:
        """Returns the prompt: the instructions, which are of one response alone, and the items.
        With `truncation` as many of the first ones are left out as do not fit.

        Raises `RequestError` if the rest does not fit.
        """
        items, middle = self.items, 0
        if body.truncation != "auto":
            return await _encode(frontend, body, items)
        room = frontend.max_model_len - (body.max_output_tokens or 1)
        low, high = 0, len(items) - 1  # the last one stays
        while low < high:
            ids = await _encode(frontend, body, items[middle:], max_tokens=_MAX_UNCUT_TOKENS)
            low, high = (low, middle) if len(ids) <= room else (middle + 1, high)
            middle = (low + high) // 2  # at first all items are tried
        while low < len(items) - 1 and items[low]["type"] == "function_call_output":
            low += 1  # its call is left out
        return await _encode(frontend, body, items[low:])

    def keep(
        self,
        request: web.Request,
        body: ResponseRequest,
        response: Response,
        events: Sequence[bytes] = (),
    ) -> None:
        """Stores a response that has ended, unless `store` is false, and adds it to its
        conversation if it is complete and that is still stored."""
        store, owner = request.app[OBJECT_STORE], owner_of(request)
        ended = msgspec.structs.asdict(response)
        if body.store is not False:
            store.add(owner, ended, self.items, events)
        if self.conversation is None or ended["status"] not in ("completed", "incomplete"):
            return
        if (owner, self.conversation) in store:
            conversation = store.find(owner, "conversation", self.conversation)  # as it is by now
            taken = {item["id"] for item in conversation.items}
            new = [item for item in self.new if item["id"] not in taken]
            items = [*conversation.items, *new, *_output(ended)]
            store.change_items(owner, conversation, items)


async def _encode(
    frontend: Frontend,
    body: ResponseRequest,
    items: Sequence[dict[str, Any]],
    *,
    max_tokens: int | None = None,
) -> list[int]:
    messages = to_messages(items)
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    return await encode_turn(
        frontend,
        messages,
        body.tool_use(),
        template_kwargs=body.template_kwargs(),
        max_tokens=max_tokens,
    )


def _output(ended: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """Returns the items of a response's output; an empty message where it has none, since chat
    templates want the roles to alternate."""
    if ended["output"]:
        return ended["output"]
    id = f"msg_{ended['id'].removeprefix('resp_')}"
    head = {"id": id, "type": "message", "status": ended["status"]}
    return [head | {"role": "assistant", "content": []}]
