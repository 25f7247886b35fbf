"""`/v1/responses`: OpenAI's Responses API.

A `ResponseDialect` is a response while it is generated: for a connection, or in the background
(`"background": true`) until it ends or is cancelled. Clients poll what is in the background, or
follow its events. `RUNNING` holds the background responses that have not ended; the `ObjectStore`
has the others. Both are in memory: a server that ends cancels the responses that are not complete.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from aioinfer.api.admission import bounded
from aioinfer.api.batch.objects import Deleted
from aioinfer.api.batch.store import (
    MAX_STORED,
    MAX_STORED_BYTES,
    OBJECT_STORE,
    Page,
    PageQuery,
    Stored,
    json_size,
    owner_of,
    page_of,
)
from aioinfer.api.context import STREAM_HEADERS
from aioinfer.api.decoding import MAX_VALUES
from aioinfer.api.delivery import count_prompt, submitted
from aioinfer.api.errors import describe, json_response
from aioinfer.api.event_stream import stream_state
from aioinfer.api.generation import Generation, MessageDialect, named_event
from aioinfer.api.http.limits import ACCOUNT
from aioinfer.api.http.logs import RECORD, RequestRecord
from aioinfer.api.logprobs import formatted
from aioinfer.api.messages import Item, Text, converted, input_items, to_messages
from aioinfer.api.openai.chunks import CompletionTokensDetails, PromptTokensDetails
from aioinfer.api.openai.responses_body import (
    EVENTS,
    InputTokens,
    ReplayQuery,
    Response,
    ResponseFault,
    ResponseRequest,
    ResponseUsage,
    Status,
    block_events,
)
from aioinfer.engine.chat_turn import are_whole, encode_turn, new_call_id, num_thought_tokens
from aioinfer.engine.output import StopReason
from aioinfer.errors import FieldError, OverloadedError, RequestError
from aioinfer.scheduler.request import RequestStatus
from aioinfer.tasks import end_tasks
from aioinfer.text.message_blocks import Block, BlockKind
from aioinfer.text.message_parser import ToolUse

#: Tokens of a prompt before `truncation` drops items of it.
_MAX_UNCUT_TOKENS = 2**20
#: Statuses of a request that has had a step.
_HAD_STEPS = RequestStatus.RUNNING, RequestStatus.FINISHED


class ResponseDialect(MessageDialect[ResponseRequest]):
    """Answers a conversation, and stores it unless `store` is false.

    With `background` it is generated without a connection: the reply says that it is queued, or
    follows its events.
    """

    body_type = ResponseRequest
    reply_type = Response
    event_types = tuple(EVENTS.values())
    text_field = "input"
    id_prefix = "resp_"
    task: asyncio.Task[None]

    def __init__(self, request: web.Request, body: ResponseRequest):
        super().__init__(request, body)
        # all ids are made of the stream's key
        state = stream_state(request)
        self.id = f"resp_{state.key}"
        #: The items before its output: of its conversation or of the previous response and its
        #: output, then of its input; once it is decoded.
        self.items: list[Item] = []
        #: The length of the items as JSON.
        self.num_bytes = 0
        #: In the background, the events so far by their sequence numbers, if it is a stream.
        self.events: list[bytes] = []
        #: The response, once it has ended.
        self.ended: Response | None = None
        self._created = state.created
        self._new_items: list[Item] = []  # of the input
        self._number = 0  # of the next event
        self._ids = random.Random(state.key)
        #: Is set with the next events, and is another one then.
        self.news = asyncio.Event()

    @property
    def field_names(self) -> Mapping[str, str]:
        """See `Dialect.field_names`."""
        return {**super().field_names, "messages": "input"}

    async def prompt(self, use: ToolUse) -> list[int]:
        """See `TextDialect.prompt`. With `truncation` as many of the first items are left out as do
        not fit. Raises `RequestError` also if an object is not stored that the body names."""
        frontend, body = self.frontend, self.body
        before, num_bytes = self._items_before()
        if len(before) > MAX_VALUES:
            field = "previous_response_id" if body.conversation is None else "conversation"
            raise FieldError(field, f"has more than {MAX_VALUES} items: begin another one")
        given = body.input
        if isinstance(given, list):
            given = await self._referred(given)
        self._new_items = await converted(
            (item.content for item in (*before, *(given or ())) if isinstance(item, Item)),
            lambda: input_items(given, {item.id for item in before}),
        )
        self.items = items = [*before, *self._new_items]
        self.num_bytes = num_bytes + json_size(self._new_items)
        if body.truncation != "auto":
            return await self._encode(items, use)
        room = frontend.max_model_len - (body.max_output_tokens or 1)
        middle, low, high = 0, 0, len(items) - 1  # the last one stays
        while low < high:
            ids = await self._encode(items[middle:], use, max_tokens=_MAX_UNCUT_TOKENS)
            low, high = (low, middle) if len(ids) <= room else (middle + 1, high)
            middle = (low + high) // 2  # at first all items are tried
        while low < len(items) - 1 and items[low].type == "function_call_output":
            low += 1  # its call is left out
        return await self._encode(items[low:], use)

    def _items_before(self) -> tuple[Sequence[Item], int]:
        """Returns the items of the conversation, or of the previous response and its output, and
        their length as JSON."""
        store, owner = self.request.app[OBJECT_STORE], owner_of(self.request)
        if (id := self.body.conversation_id) is not None:
            found = store.find(owner, "conversation", id, "conversation")
            return found.items, found.item_bytes
        if (id := self.body.previous_response_id) is None:
            return (), 0
        if (owner, id) in self.request.app[RUNNING]:
            raise FieldError("previous_response_id", "is of a response that has not ended yet")
        previous = store.find(owner, "response", id, "previous_response_id")
        output = previous.body.items
        return [*previous.items, *output], previous.item_bytes + json_size(output)

    async def _referred(self, given: list[Item]) -> list[Item]:
        """Returns items with stored ones in the places of references to them. These are looked for
        in a thread where much is stored: it takes 0.1 s for as much as may be."""
        missing = {item.id for item in given if item.is_reference}
        if not missing:
            return given
        store, owner = self.request.app[OBJECT_STORE], owner_of(self.request)
        found: dict[Text, Item] = {}
        records = [*store.all_of(owner, "response"), *store.all_of(owner, "conversation")]

        def look_up() -> None:
            for record in records:
                output = record.body.items if isinstance(record.body, Response) else ()
                new = {item.id: item for item in (*record.items, *output) if item.id in missing}
                found.update(new)
                missing.difference_update(new)
                if not missing:
                    return

        await converted((record.items for record in records), look_up)
        if not missing:
            return [found[item.id] if item.is_reference else item for item in given]
        index = next(index for index, item in enumerate(given) if item.id in missing)
        raise RequestError(
            f"there is no item {str(given[index].id)[:80]!r}, or no longer; items are stored with "
            "responses that have `store`, and with conversations",
            param=f"input[{index}].id",
            status=404,
        )

    async def _encode(
        self, items: Sequence[Item], use: ToolUse, *, max_tokens: int | None = None
    ) -> list[int]:
        """Returns the prompt of items, behind the instructions, which are of one response alone."""
        contents = (item.content for item in items)
        messages = await converted(contents, lambda: to_messages(items))
        if self.body.instructions:
            messages.insert(0, {"role": "system", "content": self.body.instructions})
        kwargs = self.body.template_kwargs()
        return await encode_turn(
            self.frontend, messages, use, template_kwargs=kwargs, max_tokens=max_tokens
        )

    async def decode(self) -> Generation | web.StreamResponse:
        """See `Dialect.decode`."""
        found = await super().decode()
        model = self.model_name
        self._begun = Response.begin(self.id, self._created, model, self.body, self.turn.params)
        if isinstance(found, Generation) and self.body.background:
            return await self._begin_in_background(found)
        return found

    def new_id(self, kind: BlockKind) -> str:
        """See `MessageDialect.new_id`; for a tool call, the id that its result names."""
        if kind == "call":
            return new_call_id(self.frontend, random_bytes=self._ids.randbytes)
        return f"{'msg' if kind == 'text' else 'rs'}_{self._ids.randbytes(16).hex()}"

    def response(self, status: Status, **more: Any) -> Response:
        """Returns the response with its blocks so far; see `Response.entering`."""
        items = [Item.of(block, self._item_status(block)) for block in self.blocks.all]
        if items and status not in ("completed", "incomplete"):
            items[-1].status = "in_progress" if status == "in_progress" else "incomplete"
        return self._begun.entering(status, items, **more)

    def _item_status(self, block: Block) -> str:
        """Returns the status of an item that has ended: the length may have cut it off, and a stop
        string the arguments of a call."""
        if self.ended_by is None or block is not self.blocks.all[-1]:
            return "completed"
        reason, stop_reason = self.ended_by
        is_cut = reason == "length"
        if block.kind == "call":
            is_cut = (is_cut or isinstance(stop_reason, str)) and not are_whole(block.text)
        return "incomplete" if is_cut else "completed"

    def _usage(self, num_tokens: int) -> ResponseUsage:
        prompt, cached = len(self.output.prompt_token_ids), self.output.num_cached_tokens
        (tokens,) = self.output.generated()
        thoughts = min(num_thought_tokens(self.frontend, self.turn, tokens), num_tokens)
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=PromptTokensDetails(cached_tokens=cached),
            output_tokens=num_tokens,
            output_tokens_details=CompletionTokensDetails(reasoning_tokens=thoughts),
            total_tokens=prompt + num_tokens,
        )

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(EVENTS[name](sequence_number=number, **fields))

    def opening(self) -> bytes:
        """See `MessageDialect.opening`."""
        body, event = self.response("in_progress"), self._event
        return event("created", response=body) + event("in_progress", response=body)

    def change(self, kind: str, block: Block, text: str) -> bytes:
        """See `MessageDialect.change`."""
        return block_events(kind, block, text, self._item_status(block), self._event)

    def closing(self, reason: str, stop_reason: StopReason, num_tokens: int) -> bytes:
        """See `MessageDialect.closing`."""
        body = self.message(reason, stop_reason, num_tokens)
        return self._event(body.status, response=body)

    def message(self, reason: str, stop_reason: StopReason, num_tokens: int) -> Response:
        """See `MessageDialect.message`."""
        status: Status = "incomplete" if reason == "length" else "completed"
        self.ended = ended = self.response(status, usage=self._usage(num_tokens))
        if not self.body.background:
            self.keep(ended)
        return ended

    def keep(self, ended: Response) -> None:
        """Stores the response, which has ended, unless `store` is false, and adds it to its
        conversation if it is complete and that is still stored."""
        store, owner = self.request.app[OBJECT_STORE], owner_of(self.request)
        if ended.store:
            store.add(owner, ended, self.items, self.events, self.num_bytes)
        id = self.body.conversation_id
        if (
            id is None
            or ended.status not in ("completed", "incomplete")
            or (owner, id) not in store
        ):
            return
        conversation = store.find(owner, "conversation", id)  # as it is by now
        taken = {item.id for item in conversation.items}
        new = [item for item in self._new_items if item.id not in taken]
        store.extend(conversation, [*new, *ended.items])

    def failed(self, error: Exception) -> Response:
        """Returns the response that an error has ended."""
        described = describe(error)[1].error
        fault = ResponseFault(code=described.code, message=described.message)
        return self.response("failed", error=fault)

    def failure(self, error: Exception) -> bytes:
        """See `Dialect.failure`."""
        return self._event("failed", response=self.failed(error))

    # ------------------------------------------------------------ in the background

    @property
    def current(self) -> Response:
        """The response as it stands."""
        if self.ended is not None:
            return self.ended
        had_steps = self.output.sequences[0].request.status in _HAD_STEPS
        # one that was preempted is in progress
        return self.response("in_progress" if self.blocks.all or had_steps else "queued")

    async def _begin_in_background(self, generation: Generation) -> web.StreamResponse:
        """Begins the response, and returns the reply when it is in the queue: the response, or its
        events. The limits of stored objects, in number and in bytes, bound these responses too.

        Raises `RequestError` if it could not be stored, `OverloadedError` if there are too many,
        and what `submitted` does.
        """
        request, running = self.request, self.request.app[RUNNING]
        what = "a response in the background"
        request.app[OBJECT_STORE].check_room(self.num_bytes, what, "background")
        num_bytes = sum(other.num_bytes for other in running.values()) + self.num_bytes
        if len(running) >= MAX_STORED or num_bytes > MAX_STORED_BYTES:
            raise OverloadedError(
                f"{len(running)} responses are in the background, one more is too many; try "
                "again later"
            )
        place = owner_of(request), self.id
        queued: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        running[place] = self
        self.task = asyncio.create_task(self._generate(generation, queued))
        self.task.add_done_callback(lambda _: running.pop(place))
        try:
            reply = await queued
        except asyncio.CancelledError:  # the client is gone before it got the id
            self.task.cancel()
            raise
        if self.body.stream:
            return await send_events(request, self, 0)
        return json_response(reply)

    async def _generate(self, generation: Generation, queued: asyncio.Future[Response]) -> None:
        """Generates the response beyond its reply, and stores it. `queued` becomes the response
        when it is in the queue, or the error that kept it out."""
        request = self.request
        # the other record ends with the reply
        record = request[RECORD] = RequestRecord(request[RECORD].arrived)
        try:
            with request[ACCOUNT].occupied():
                async with (
                    bounded(request, self.body.timeout_s),
                    submitted(request, generation) as (output,),
                ):
                    writer = self.choice(output, 0)
                    queued.set_result(self.current)
                    async for delta in output:
                        make = partial(writer.events, delta)
                        self._note(await formatted(delta.logprobs or (), make))
        except Exception as error:
            if not queued.done():
                queued.set_exception(error)
                return
            self.ended = self.failed(error)
            self._note(self.failure(error))
        finally:
            record.outputs = ()
        if self.ended is None:
            self.ended = self.response("cancelled")
        self._note(b"")
        self.keep(self.ended)

    def _note(self, events: bytes) -> None:
        """Stores events, and wakes the followers of the stream."""
        if self.body.stream:
            # JSON has no line ends of its own
            self.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self.news.set()
        self.news = asyncio.Event()

    async def cancel(self) -> None:
        """Has the generation end, and returns when it has; the response is cancelled unless it is
        complete."""
        self.output.abort()
        await asyncio.wait([self.task])


#: The responses in the background that have not ended, by API key and id.
RUNNING: web.AppKey[dict[tuple[str, str], ResponseDialect]] = web.AppKey("running_responses")


def add_responses(app: web.Application) -> None:
    """Adds the responses in the background to an application, which ends them when it stops."""
    app[RUNNING] = {}

    async def stop(app: web.Application) -> None:
        await end_tasks(response.task for response in app[RUNNING].values())

    app.on_shutdown.append(stop)


async def send_events(
    request: web.Request, found: ResponseDialect | Stored, first: int
) -> web.StreamResponse:
    """Sends the events of a response from this sequence number on, as they come."""
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    while True:
        if events := found.events[first:]:
            first += len(events)
            await response.write(b"".join(events))
        elif isinstance(found, Stored) or found.ended is not None:
            return response
        else:
            await found.news.wait()


async def get_response(request: web.Request, query: ReplayQuery) -> Response | web.StreamResponse:
    """Returns a stored response, or one in the background as it stands.

    With `stream`, its events behind number `starting_after`, where it was a stream in the
    background.
    """
    found = _find(request)
    if not query.stream:
        return _shown(found)
    if not (found.body.stream if isinstance(found, ResponseDialect) else found.events):
        raise FieldError("stream", "needs a response that was made with background and stream")
    return await send_events(request, found, query.starting_after + 1)


def _find(request: web.Request) -> ResponseDialect | Stored:
    """Returns the response that a request names: one in the background, or a stored one."""
    id, owner = request.match_info["id"], owner_of(request)
    running = request.app[RUNNING].get((owner, id))
    return running or request.app[OBJECT_STORE].find(owner, "response", id)


def _shown(found: ResponseDialect | Stored) -> Response:
    return found.current if isinstance(found, ResponseDialect) else found.body


async def cancel_response(request: web.Request) -> Response:
    """Ends a response in the background; one that is complete stays as it is."""
    found = _find(request)
    if isinstance(found, ResponseDialect):
        await found.cancel()
    elif not found.body.background:
        raise RequestError(
            "Cannot cancel a synchronous response: it was not made with background", param="id"
        )
    return _shown(found)


async def delete_response(request: web.Request) -> Deleted:
    """Drops a stored response; one in the background is cancelled."""
    id, owner, store = request.match_info["id"], owner_of(request), request.app[OBJECT_STORE]
    if (running := request.app[RUNNING].get((owner, id))) is not None:
        await running.cancel()
    if running is None or (owner, id) in store:
        store.remove(owner, "response", id)
    return Deleted(id=id, object="response")


async def list_input_items(request: web.Request, query: PageQuery) -> Page:
    """Lists the input items of a response, newest first, including the items of earlier responses
    and of its conversation; `limit`, `after`, `order`."""
    return page_of(list(reversed(_find(request).items)), query)


async def count_input_tokens(request: web.Request, body: ResponseRequest) -> InputTokens:
    """Returns how many tokens the prompt of a response would have. Nothing is generated."""
    return InputTokens(input_tokens=await count_prompt(request, ResponseDialect, body))
