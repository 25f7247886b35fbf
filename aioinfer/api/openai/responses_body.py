"""Bodies and replies of OpenAI's Responses API, their items, and the messages that items stand
for."""

from __future__ import annotations

import secrets
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson
from msgspec import UNSET, Struct, UnsetType

from aioinfer.api.batch.store import Metadata
from aioinfer.api.logprobs import ScoredToken
from aioinfer.api.messages import AudioPart, InputAudio, TemplateContent, template_content
from aioinfer.api.openai.chunks import CompletionTokensDetails, PromptTokensDetails
from aioinfer.api.protocol import (
    Count,
    Int32,
    Length,
    SamplingFields,
    schema_grammar,
    template_variables,
)
from aioinfer.engine.chat_turn import call_input, join_thoughts
from aioinfer.engine.tools import read_tools
from aioinfer.errors import FieldError, RequestError
from aioinfer.media.source import MediaSource
from aioinfer.sampling_params import GrammarSpec, SamplingParams
from aioinfer.text.message_blocks import Block
from aioinfer.text.message_parser import ToolUse

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")

#: OpenAI's names of what a response may hold in addition.
Includable = Literal[
    "message.output_text.logprobs",
    # thoughts are in the items as they are, and need no other form to be sent back in
    "reasoning.encrypted_content",
    # of items that there are none of
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_LOGPROBS = "message.output_text.logprobs"

#: Items of the input by the beginnings of their ids.
_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
}  # fmt: skip


#: A text of an item that has one.
Text = str | UnsetType | None


class Part(Struct, kw_only=True):
    """A part of an item's content: text, a picture by its URL, or a clip of sound. `detail` has no
    effect."""

    type: str
    text: Text = UNSET
    image_url: Text = UNSET
    input_audio: InputAudio | UnsetType | None = UNSET
    detail: Text = UNSET
    refusal: Text = UNSET
    annotations: list[Any] | UnsetType | None = UNSET
    logprobs: list[Any] | UnsetType | None = UNSET

    @classmethod
    def of(cls, block: Block) -> Part:
        """Returns the part of content that a block is."""
        if block.kind == "reasoning":
            return cls(type="reasoning_text", text=block.text)
        return output_text(block.text, block.logprobs)


Content = str | list[Part] | UnsetType | None


class Item(Struct, kw_only=True):
    """An item of a response's input or output: the fields of all types that are understood."""

    id: Text = UNSET
    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | UnsetType | None = UNSET
    summary: list[Part] | UnsetType | None = UNSET
    status: Text = UNSET
    content: Content = UNSET
    call_id: Text = UNSET
    name: Text = UNSET
    arguments: Text = UNSET
    output: Content = UNSET

    @classmethod
    def of(cls, block: Block, status: str) -> Item:
        """Returns the item of a block, with its content so far."""
        item = cls(id=item_id(block), status=status)
        if block.kind == "call":
            item.type, item.call_id = "function_call", block.id
            item.name, item.arguments = block.name, block.text
            return item
        item.content = [Part.of(block)] if block.parts else []
        if block.kind == "reasoning":
            item.type, item.summary = "reasoning", []
        else:
            item.role = "assistant"
        return item

    @property
    def is_reference(self) -> bool:
        """Whether it stands for a stored item, of which it has the id alone."""
        is_bare = self.type == "message" and self.role is UNSET and self.content is UNSET
        return isinstance(self.id, str) and (is_bare or self.type == "item_reference")


class FunctionTool(Struct, kw_only=True):
    """A function that the model may call; tools that OpenAI's servers run are not supported."""

    strict: bool | None = None
    type: str
    name: str | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET


class TextFormat(Struct, kw_only=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET
    schema: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET

    def to_grammar(self) -> GrammarSpec:
        """Returns the grammar of a form of JSON. Raises `RequestError` if its schema is missing."""
        if self.type == "json_object":
            return GrammarSpec("json_object", param="text.format")
        if not isinstance(self.schema, dict):
            raise FieldError("text.format.schema", "is missing")
        return schema_grammar(self.schema, "text.format.schema")


class TextConfig(Struct, kw_only=True):
    """`text` of a request. `verbosity` is a variable of the chat template."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct, kw_only=True):
    """How much the model is to think, where its template has a variable for that. `summary` has no
    effect: the thoughts themselves are in the output."""

    effort: str | None = None
    summary: str | None = None


class ConversationId(Struct, kw_only=True):
    """A conversation by its id."""

    id: str


class ResponseRequest(SamplingFields, kw_only=True):
    """`POST /v1/responses`, and the same without generating for `/v1/responses/input_tokens`."""

    sampling_names = SamplingFields.sampling_names | {
        "max_output_tokens": "max_tokens", "top_logprobs": "logprobs",
    }  # fmt: skip

    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Int32 | None = None
    include: list[Includable] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None  # type: ignore[assignment]
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    user: str | None = None

    def check(self) -> None:
        """See `Body.check`."""
        if self.background and self.store is False:
            raise FieldError("background", "can only be used when `store` is true")
        if self.conversation is not None and self.previous_response_id is not None:
            raise FieldError(
                "conversation",
                "and previous_response_id cannot be combined: either says what comes "
                "before the input",
            )
        if not self.input and (self.conversation or self.previous_response_id) is None:
            what = "missing" if self.input is None else "empty"
            raise FieldError("input", f"is {what}")
        self.tool_use()
        self.sampling_fields()
        if isinstance(given := self.input, list):  # what references stand for has been checked
            given = [Item(role="user", content="") if i.is_reference else i for i in given]
        input_items(given)

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that the response belongs to."""
        named = self.conversation
        return named.id if isinstance(named, ConversationId) else named

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens come with each token of the text; None: not even its own
        log-probability."""
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return 0 if self.logprob_token_ids is not None else None

    def tool_use(self) -> ToolUse:
        """Returns the tools. Raises `RequestError` naming the place."""
        tools = msgspec.to_builtins(self.tools or [])
        parallel = self.parallel_tool_calls
        return read_tools(tools, self.tool_choice, parallel=parallel, is_flat=True)

    def grammars(self) -> list[GrammarSpec]:
        """See `GenerationBody.grammars`."""
        format = None if self.text is None else self.text.format
        found = [] if format is None or format.type == "text" else [format.to_grammar()]
        return found + super().grammars()

    def sampling_fields(self) -> dict[str, Any]:
        """See `Parameters.sampling_fields`."""
        found, number = super().sampling_fields(), self.num_logprobs
        return found if number is None else found | {"logprobs": number}

    def template_kwargs(self) -> dict[str, Any] | None:
        """Returns the variables of the chat template."""
        effort = self.reasoning.effort if self.reasoning is not None else None
        verbosity = self.text.verbosity if self.text is not None else None
        kwargs = self.chat_template_kwargs
        return template_variables(kwargs, reasoning_effort=effort, verbosity=verbosity)


class ReplayQuery(Struct, kw_only=True):
    """The query of a stored response: whether its events are wanted, and behind which."""

    stream: bool = False
    starting_after: Length | UnsetType = UNSET


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


#: The fields of a request that its response repeats, and what it says of those that are missing.
_REPEATED: Mapping[str, Any] = {
    "background": False, "instructions": None, "max_output_tokens": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "store": True,
    "tool_choice": "auto", "tools": [], "truncation": "disabled", "user": None,
}  # fmt: skip


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

    @classmethod
    def begin(
        cls, id: str, created_at: int, model: str, body: ResponseRequest, params: SamplingParams
    ) -> Response:
        """Returns a response as it begins: its fields repeat the request. Raises `RequestError` for
        a body that is nested too deeply for that."""
        conversation, text = body.conversation_id, body.text or TextConfig()
        begun = cls(
            id=id,
            created_at=created_at,
            model=model,
            conversation=None if conversation is None else ConversationId(id=conversation),
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            reasoning=Reasoning(effort=body.reasoning.effort if body.reasoning else None),
            temperature=params.temperature,
            text=TextConfig(
                format=text.format or TextFormat(), verbosity=text.verbosity or "medium"
            ),
            top_logprobs=body.num_logprobs or 0,
            top_p=params.top_p,
            status="in_progress",
            output=[],
            **{**_REPEATED, **body.given(*_REPEATED)},
        )
        try:
            orjson.dumps(begun, default=msgspec.to_builtins)  # whose limit is the lower one
        except orjson.JSONEncodeError as error:
            raise RequestError("the body is nested too deeply to be repeated") from error
        return begun

    def entering(self, status: Status, output: list[Item], **more: Any) -> Response:
        """Returns the response as it is in a status, with its output so far, and `usage` or `error`
        where it has them."""
        return msgspec.structs.replace(
            self,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=output,
            **more,
        )

    @property
    def items(self) -> Sequence[Item]:
        """The items of its output; an empty message where it has none, since chat templates want
        the roles to alternate."""
        if self.output:
            return self.output
        id = f"msg_{self.id.removeprefix('resp_')}"
        return [Item(id=id, status=self.status, role="assistant", content=[])]


class ResponseEvent(Struct, kw_only=True):
    """The fields of all events of a stream: which one it is."""

    sequence_number: int


class ResponseCreated(ResponseEvent, kw_only=True, tag="response.created"):
    """The response as it begins."""

    response: Response


class ResponseInProgress(ResponseCreated, kw_only=True, tag="response.in_progress"):
    """The same once more, as OpenAI has it."""


class ResponseCompleted(ResponseCreated, kw_only=True, tag="response.completed"):
    """The response, which is complete."""


class ResponseIncomplete(ResponseCreated, kw_only=True, tag="response.incomplete"):
    """The response, which its length has ended."""


class ResponseFailed(ResponseCreated, kw_only=True, tag="response.failed"):
    """The response, which an error has ended."""


class ItemAdded(ResponseEvent, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: Item


class ItemDone(ItemAdded, kw_only=True, tag="response.output_item.done"):
    """An item has ended."""


class EventOfItem(ResponseEvent, kw_only=True):
    """The fields of events within an item."""

    item_id: str
    output_index: int


class EventOfPart(EventOfItem, kw_only=True):
    """The fields of events within the content of an item, which has one part."""

    content_index: int = 0


class PartAdded(EventOfPart, kw_only=True, tag="response.content_part.added"):
    """The content begins."""

    part: Part


class PartDone(PartAdded, kw_only=True, tag="response.content_part.done"):
    """The content has ended."""


class ArgumentsDelta(EventOfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(EventOfItem, kw_only=True, tag="response.function_call_arguments.done"):
    """The whole arguments of a call."""

    name: str
    arguments: str


class ReasoningDelta(EventOfPart, kw_only=True, tag="response.reasoning_text.delta"):
    """More of a thought."""

    delta: str


class ReasoningDone(EventOfPart, kw_only=True, tag="response.reasoning_text.done"):
    """A whole thought."""

    text: str


class OutputTextDelta(ReasoningDelta, kw_only=True, tag="response.output_text.delta"):
    """More of a text, with the log-probabilities of its tokens, if they are wanted."""

    logprobs: list[ScoredToken]


class OutputTextDone(ReasoningDone, kw_only=True, tag="response.output_text.done"):
    """A whole text."""

    logprobs: list[ScoredToken]


EVENT_TYPES: Sequence[type[ResponseEvent]] = (
    ResponseCreated, ResponseInProgress, ResponseCompleted, ResponseIncomplete, ResponseFailed,
    ItemAdded, ItemDone, PartAdded, PartDone, ArgumentsDelta, ArgumentsDone, ReasoningDelta,
    ReasoningDone, OutputTextDelta, OutputTextDone,
)  # fmt: skip


class InputTokens(Struct, kw_only=True):
    """The number of tokens that the prompt of a response would have."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def input_items(
    items: str | Iterable[Item] | UnsetType | None,
    taken: Container[Text] = (),
    place: str = "input",
) -> list[Item]:
    """Returns items of input as they are stored and shown: complete, and each with an id of its
    own, which is not among the ids in `taken`.

    Raises `RequestError` naming the place of one that is not supported.
    """
    if isinstance(items, str):
        items = [Item(role="user", content=items)]
    found: dict[Text, Item] = {}
    for index, given in enumerate(items or ()):
        item = _completed(given, f"{place}[{index}]")
        if not item.id or item.id in found or item.id in taken:
            item.id = f"{_PREFIXES[item.type]}_{secrets.token_hex(16)}"
        found[item.id] = item
    return list(found.values())


def _completed(given: Item, place: str) -> Item:
    """Returns an item with the fields that it has by its type."""
    item = Item(id=given.id, type=given.type, status="completed")
    match given.type:
        case "message" if given.role:
            kind = "output_text" if given.role == "assistant" else "input_text"
            item.role, item.content = given.role, _parts(given.content, kind, f"{place}.content")
        case "function_call" if given.name:
            item.call_id, item.name = given.call_id or given.id or "", given.name
            item.arguments = given.arguments or ""
        case "function_call_output" if isinstance(given.call_id, str):
            item.call_id, item.output = given.call_id, given.output
            if not isinstance(given.output, str):
                item.output = _parts(given.output, "input_text", f"{place}.output")
        case "reasoning":
            item.summary = _parts(given.summary, "summary_text", f"{place}.summary")
            item.content = _parts(given.content, "reasoning_text", f"{place}.content")
        case _:
            raise RequestError(
                f"{place}: an item of type {given.type[:40]!r} is not supported, or lacks a field",
                param=place,
            )
    return item


def _parts(content: Content, kind: str, place: str) -> list[Part]:
    """Returns the parts of a content; all parts with a text are of one kind."""
    if isinstance(content, str):
        content = [Part(type=kind, text=content)]
    found: list[Part] = []
    for index, part in enumerate(content or ()):
        if part.type == "input_image" and kind == "input_text":
            if not isinstance(part.image_url, str):
                raise FieldError(
                    f"{place}[{index}].image_url", "must be a URL; files are not stored"
                )
            found.append(Part(type="input_image", image_url=part.image_url, detail="auto"))
            continue
        if part.type == "input_audio" and kind == "input_text":
            if not isinstance(part.input_audio, InputAudio):
                raise FieldError(f"{place}[{index}].input_audio", "is missing")
            found.append(Part(type="input_audio", input_audio=part.input_audio))
            continue
        if part.type not in _TEXT_PARTS:
            raise RequestError(
                f"{place}[{index}]: a part of type {part.type[:40]!r} is not supported",
                param=f"{place}[{index}]",
            )
        if part.type == "refusal":
            found.append(Part(type="refusal", refusal=part.refusal or part.text or ""))
        elif kind == "output_text":
            found.append(output_text(part.text or ""))
        else:
            found.append(Part(type=kind, text=part.text or ""))
    return found


def output_text(text: str, logprobs: Sequence[Any] = ()) -> Part:
    """Returns the part of an answer that a text is."""
    return Part(type="output_text", text=text, annotations=[], logprobs=list(logprobs))


def to_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Returns stored items as the messages that chat templates read. Reasoning, texts and calls of
    the assistant that follow each other are one message."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if item.type == "message" and item.role != "assistant":
            role = "user" if item.role == "user" else "system"
            content = _for_template(item.content, f"{place}.content")
            messages.append({"role": role, "content": content})
        elif item.type == "function_call_output":
            text, call_id = _for_template(item.output, f"{place}.output"), item.call_id
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            _join(messages, item)
    return messages


def _join(messages: list[dict[str, Any]], item: Item) -> None:
    """Adds an item of the assistant's to its message at the end, or begins one."""
    last = messages[-1] if messages else {}
    if (
        last.get("role") != "assistant"
        or (item.type != "function_call" and "tool_calls" in last)
        or (item.type == "message" and last["content"])
    ):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if item.type == "function_call":
        function = {"name": item.name, "arguments": call_input(item.arguments or "")}
        call = {"type": "function", "id": item.call_id, "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif item.type == "reasoning":
        join_thoughts(last, str(_for_template(item.content or item.summary)))
    else:
        last["content"] = _for_template(item.content)


def _for_template(content: Content, place: str = "") -> TemplateContent:
    """Returns a content, whose place in the body is given, as chat templates read it."""
    if isinstance(content, str):
        return content
    return template_content(
        _shown(part, f"{place}[{index}]") for index, part in enumerate(content or ())
    )


def _shown(part: Part, place: str) -> str | MediaSource:
    """Returns what the model sees of a stored part."""
    if isinstance(part.image_url, str):
        return MediaSource(f"{place}.image_url", part.image_url)
    if isinstance(part.input_audio, InputAudio):
        return AudioPart(part.input_audio).shown(place)
    return (part.refusal if part.type == "refusal" else part.text) or ""


def item_id(block: Block) -> str:
    return f"fc_{block.id.removeprefix('call_')}" if block.kind == "call" else block.id
