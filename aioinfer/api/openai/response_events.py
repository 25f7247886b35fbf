"""The words of `/v1/responses`: the response while it is generated, and its stream's events."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import orjson
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from aioinfer.api.batch.store import (
    OBJECT_STORE,
    owner_of,
)
from aioinfer.api.errors import describe
from aioinfer.api.event_stream import stream_state
from aioinfer.api.generation import Generation, named_event
from aioinfer.api.message_events import Block, BlockKind, MessageDialect
from aioinfer.api.openai.chunks import CompletionTokensDetails, PromptTokensDetails
from aioinfer.api.openai.responses_body import (
    ConversationId,
    FunctionTool,
    Item,
    Part,
    Reasoning,
    ResponseRequest,
    TextConfig,
    TextFormat,
    input_items,
    output_text,
    to_messages,
)
from aioinfer.engine.chat_turn import encode_turn, new_call_id, num_thought_tokens
from aioinfer.errors import RequestError
from aioinfer.text.message_parser import ToolUse

if TYPE_CHECKING:
    pass

#: Tokens of a prompt before `truncation` drops items of it.
_MAX_UNCUT_TOKENS = 2**20


class ResponseUsage(Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseFault(Struct, kw_only=True):
    """The error that has ended a response."""

    code: str
    message: str


class IncompleteDetails(Struct, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class Response(Struct, kw_only=True):
    """The reply of `/v1/responses`, which repeats what was asked for. The first and the last event
    of a stream hold one."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    background: bool
    conversation: ConversationId | None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    presence_penalty: float
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Any
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    status: Status
    completed_at: int | None = None
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[Item]
    usage: ResponseUsage | None = None


class ResponseEvent(Struct, kw_only=True):
    """An event of a stream: the fields of all types."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: Part | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


#: The events of a block's text by its kind.
_TEXT_EVENTS: Mapping[BlockKind, str] = {
    "call": "function_call_arguments", "reasoning": "reasoning_text", "text": "output_text",
}  # fmt: skip


class ResponseEvents(MessageDialect[ResponseRequest]):
    """The words of a response, whether it is generated for a connection or in the background.

    Attributes:
        items: the items before its output: of its conversation or of the previous response and its
            output, then of its input; once it is decoded.
        ended: the response, once it has ended.
    """

    body_type = ResponseRequest
    text_field = "input"
    id_prefix = "resp_"

    def __init__(self, request: web.Request, body: ResponseRequest):
        super().__init__(request, body)
        # all ids are made of the stream's key
        state = stream_state(request)
        self.id = f"resp_{state.key}"
        self.items: list[Item] = []
        self.ended: Response | None = None
        self._created = state.created
        self._new_items: list[Item] = []  # of the input
        self._number = 0  # of the next event
        self._num_logprobs = 0  # of the block's, that have been sent
        self._ids = random.Random(state.key)

    @property
    def field_names(self) -> Mapping[str, str]:
        """See `Dialect.field_names`."""
        names = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        return names | {"prompt": "input", "messages": "input"}

    async def prompt(self, use: ToolUse) -> list[int]:
        """See `Dialect.prompt`. With `truncation` as many of the first items are left out as do not
        fit. Raises `RequestError` also if an object is not stored that the body names."""
        frontend, body = self.frontend, self.body
        before = self._items_before()
        self._new_items = input_items(body.input, {item.id for item in before})
        self.items = items = [*before, *self._new_items]
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

    def _items_before(self) -> Sequence[Item]:
        """Returns the items of the conversation, or of the previous response and its output."""
        store, owner = self.request.app[OBJECT_STORE], owner_of(self.request)
        if (id := self.body.conversation_id) is not None:
            return store.find(owner, "conversation", id, "conversation").items
        if (id := self.body.previous_response_id) is None:
            return ()
        previous = store.find(owner, "response", id, "previous_response_id")
        return [*previous.items, *_output(previous.body)]

    async def _encode(
        self, items: Sequence[Item], use: ToolUse, *, max_tokens: int | None = None
    ) -> list[int]:
        """Returns the prompt of items, behind the instructions, which are of one response alone."""
        messages = to_messages(items)
        if self.body.instructions:
            messages.insert(0, {"role": "system", "content": self.body.instructions})
        kwargs = self.body.template_kwargs()
        return await encode_turn(
            self.frontend, messages, use, template_kwargs=kwargs, max_tokens=max_tokens
        )

    async def decode(self) -> Generation | web.StreamResponse:
        """See `Dialect.decode`."""
        found = await super().decode()
        self._begun = self._begin()
        return found

    def _begin(self) -> Response:
        """Returns the response as it begins: its fields repeat the request."""
        body, params, conversation = self.body, self.turn.params, self.body.conversation_id
        text = body.text or TextConfig()
        begun = Response(
            id=self.id,
            created_at=self._created,
            model=self.frontend.config.served_model_names[0],
            background=bool(body.background),
            conversation=None if conversation is None else ConversationId(id=conversation),
            frequency_penalty=params.frequency_penalty,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            presence_penalty=params.presence_penalty,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=Reasoning(effort=body.reasoning.effort if body.reasoning else None),
            store=body.store is not False,
            temperature=params.temperature,
            text=TextConfig(
                format=text.format or TextFormat(), verbosity=text.verbosity or "medium"
            ),
            tool_choice=body.tool_choice if body.tool_choice is not None else "auto",
            tools=body.tools or [],
            top_logprobs=body.num_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
            status="in_progress",
            output=[],
        )
        try:
            orjson.dumps(begun, default=msgspec.to_builtins)  # whose limit is the lower one
        except orjson.JSONEncodeError as error:
            raise RequestError("the body is nested too deeply to be repeated") from error
        return begun

    def new_id(self, kind: BlockKind) -> str:
        """See `MessageDialect.new_id`; for a tool call, the id that its result names."""
        if kind == "call":
            return new_call_id(self.frontend, random_bytes=self._ids.randbytes)
        return f"{'msg' if kind == 'text' else 'rs'}_{self._ids.randbytes(16).hex()}"

    def response(
        self,
        status: Status,
        usage: ResponseUsage | None = None,
        error: ResponseFault | None = None,
    ) -> Response:
        """Returns the response with its blocks so far."""
        blocks = self.blocks.all
        last = status if status in ("completed", "in_progress") else "incomplete"
        return msgspec.structs.replace(
            self._begun,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            error=error,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=[_item(block, last if block is blocks[-1] else "completed") for block in blocks],
            usage=usage,
        )

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

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(ResponseEvent(type=f"response.{kind}", sequence_number=number, **fields))

    def opening(self) -> bytes:
        """See `MessageDialect.opening`."""
        body = self.response("in_progress")
        return self._event("created", response=body) + self._event("in_progress", response=body)

    def change(self, kind: str, block: Block, text: str) -> bytes:
        """See `MessageDialect.change`."""
        index, event, name = block.index, self._event, _TEXT_EVENTS[block.kind]
        place: dict[str, Any] = {"item_id": _item_id(block), "output_index": index}
        is_call, is_text = block.kind == "call", block.kind == "text"
        if not is_call:
            place["content_index"] = 0
        if kind == "delta":
            new = block.logprobs[self._num_logprobs :] if is_text else UNSET
            self._num_logprobs = len(block.logprobs)
            return event(f"{name}.delta", **place, delta=text, logprobs=new)
        if kind == "start":
            self._num_logprobs = 0
            data = event("output_item.added", output_index=index, item=_item(block, "in_progress"))
            return (
                data if is_call else data + event("content_part.added", **place, part=_part(block))
            )
        if is_call:
            data = event(f"{name}.done", **place, name=block.name, arguments=block.text)
        else:
            logprobs = block.logprobs if is_text else UNSET
            data = event(f"{name}.done", **place, text=block.text, logprobs=logprobs)
            data += event("content_part.done", **place, part=_part(block))
        return data + event("output_item.done", output_index=index, item=_item(block, "completed"))

    def closing(self, reason: str, stop_reason: int | str | None, num_tokens: int) -> bytes:
        """See `MessageDialect.closing`."""
        body = self.message(reason, stop_reason, num_tokens)
        return self._event(body.status, response=body)

    def message(self, reason: str, stop_reason: int | str | None, num_tokens: int) -> Response:
        """See `MessageDialect.message`."""
        status: Status = "incomplete" if reason == "length" else "completed"
        self.ended = ended = self.response(status, self._usage(num_tokens))
        if not self.body.background:
            self.keep(ended)
        return ended

    def keep(self, ended: Response, events: Sequence[bytes] = ()) -> None:
        """Stores the response, which has ended, unless `store` is false, and adds it to its
        conversation if it is complete and that is still stored."""
        store, owner = self.request.app[OBJECT_STORE], owner_of(self.request)
        if ended.store:
            store.add(owner, ended, self.items, events)
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
        store.add(owner, conversation.body, [*conversation.items, *new, *_output(ended)])

    def failed(self, error: Exception) -> Response:
        """Returns the response that an error has ended."""
        described = describe(error)[1].error
        code = described.code or "server_error"
        return self.response("failed", error=ResponseFault(code=code, message=described.message))

    def failure(self, error: Exception) -> bytes:
        """See `Dialect.failure`."""
        return self._event("failed", response=self.failed(error))


def _part(block: Block) -> Part:
    """Returns the part of content that a block is."""
    if block.kind == "reasoning":
        return Part(type="reasoning_text", text=block.text)
    return output_text(block.text, block.logprobs)


def _item(block: Block, status: str) -> Item:
    """Returns the item of a block, with its content so far."""
    item = Item(id=_item_id(block), status=status)
    if block.kind == "call":
        item.type, item.call_id = "function_call", block.id
        item.name, item.arguments = block.name, block.text
        return item
    item.content = [_part(block)] if block.parts else []
    if block.kind == "reasoning":
        item.type, item.summary = "reasoning", []
    else:
        item.role = "assistant"
    return item


def _item_id(block: Block) -> str:
    return f"fc_{block.id.removeprefix('call_')}" if block.kind == "call" else block.id


def _output(ended: Response) -> Sequence[Item]:
    """Returns the items of a response's output; an empty message where it has none, since chat
    templates want the roles to alternate."""
    if ended.output:
        return ended.output
    id = f"msg_{ended.id.removeprefix('resp_')}"
    return [Item(id=id, status=ended.status, role="assistant", content=[])]
