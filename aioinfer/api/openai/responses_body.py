"""Bodies, replies and events of OpenAI's Responses API; `messages` has the items in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import orjson
from msgspec import UNSET, Meta, Struct, UnsetType

from aioinfer.api import protocol
from aioinfer.api.batch.store import Metadata
from aioinfer.api.logprobs import ScoredToken
from aioinfer.api.messages import Item, Part, input_items, item_id
from aioinfer.api.openai.chunks import CompletionTokensDetails, PromptTokensDetails
from aioinfer.engine.tools import read_tools
from aioinfer.errors import FieldError, RequestError
from aioinfer.sampling_params import GrammarSpec, SamplingParams
from aioinfer.text.message_blocks import Block, BlockKind
from aioinfer.text.message_parser import ToolUse

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


class FunctionTool(Struct, kw_only=True):
    """A function that the model may call; tools that OpenAI's servers run are not supported."""

    strict: bool | None = None
    type: str
    name: str | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True):
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
        return protocol.schema_grammar(self.schema, "text.format.schema")


class TextConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """`text` of a request. `verbosity` is a variable of the chat template."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct, kw_only=True, forbid_unknown_fields=True):
    """How much the model is to think, where its template has a variable for that. `summary` has no
    effect: the thoughts themselves are in the output."""

    #: All other names that are not misspelt ones: `mode`, `context` and the like.
    ignored: ClassVar[Collection[str]] = ()

    effort: str | None = None
    summary: str | None = None


class ConversationId(Struct, kw_only=True):
    """A conversation by its id."""

    id: str


class ResponseRequest(protocol.SamplingFields, kw_only=True):
    """`POST /v1/responses`, and the same without generating for `/v1/responses/input_tokens`."""

    sampling_names = protocol.SamplingFields.sampling_names | {
        "max_output_tokens": "max_tokens", "top_logprobs": "logprobs",
    }  # fmt: skip

    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: protocol.Count | None = None
    top_logprobs: protocol.Int32 | None = None
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
        return protocol.template_variables(kwargs, reasoning_effort=effort, verbosity=verbosity)


class ReplayQuery(Struct, kw_only=True):
    """The query of a stored response: whether its events are wanted, and behind which."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=-1)] = -1


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


_OF_ITEM: Mapping[str, Any] = {"item_id": str, "output_index": int}
_OF_PART: Mapping[str, Any] = {**_OF_ITEM, "content_index": int}
#: The fields of the events of a stream beside their `sequence_number`, by the events' types behind
#: `response.`: the response as it begins and as it ends; an item and its content, which has one
#: part, begin and end; and there is more of a text, or all of it.
_FIELDS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("created in_progress completed incomplete failed", {"response": Response}),
    ("output_item.added output_item.done", {"output_index": int, "item": Item}),
    ("content_part.added content_part.done", {**_OF_PART, "part": Part}),
    ("function_call_arguments.delta", {**_OF_ITEM, "delta": str}),
    ("function_call_arguments.done", {**_OF_ITEM, "name": str, "arguments": str}),
    ("reasoning_text.delta", {**_OF_PART, "delta": str}),
    ("reasoning_text.done", {**_OF_PART, "text": str}),
    ("output_text.delta", {**_OF_PART, "delta": str, "logprobs": list[ScoredToken]}),
    ("output_text.done", {**_OF_PART, "text": str, "logprobs": list[ScoredToken]}),
)
#: The types of all events, by the same names.
EVENTS: Mapping[str, type[Struct]] = {
    name: msgspec.defstruct(
        f"Response{name.title().translate({ord('.'): None, ord('_'): None})}Event",
        [("sequence_number", int), *fields.items()],
        tag=f"response.{name}",
        kw_only=True,
    )
    for names, fields in _FIELDS
    for name in names.split()
}
#: The first part of the names of events of more text, by the kind of its block.
_TEXTS: Mapping[BlockKind, str] = {
    "call": "function_call_arguments", "reasoning": "reasoning_text", "text": "output_text",
}  # fmt: skip


def block_events(
    kind: str, block: Block, text: str, status: str, event: Callable[..., bytes]
) -> bytes:
    """Returns the events of a `BlockChange`. `status` is the item's if it ends; `event` makes one
    of its name in `EVENTS` and its fields."""
    index, is_text, is_call = block.index, block.kind == "text", block.kind == "call"
    place: dict[str, Any] = {"item_id": item_id(block), "output_index": index}
    if not is_call:
        place["content_index"] = 0
    if kind == "delta":
        new = {"logprobs": block.new_logprobs()} if is_text else {}
        return event(f"{_TEXTS[block.kind]}.delta", **place, delta=text, **new)
    item = Item.of(block, "in_progress" if kind == "start" else status)
    if kind == "start":
        data = event("output_item.added", output_index=index, item=item)
        return data if is_call else data + event("content_part.added", **place, part=Part.of(block))
    whole: dict[str, Any] = {"text": block.text}
    if is_call:
        whole = {"name": block.name, "arguments": block.text}
    elif is_text:
        whole["logprobs"] = block.logprobs
    data = event(f"{_TEXTS[block.kind]}.done", **place, **whole)
    if not is_call:
        data += event("content_part.done", **place, part=Part.of(block))
    return data + event("output_item.done", output_index=index, item=item)


class InputTokens(Struct, kw_only=True):
    """The number of tokens that the prompt of a response would have."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
