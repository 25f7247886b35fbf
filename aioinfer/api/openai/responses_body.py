"""Bodies of OpenAI's Responses API, the conversation that their items stand for, and the context of
a response: the items before its input, its input, and the store that keeps it when it has ended."""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Struct

from aioinfer.api.batch.store import OBJECT_STORE, Metadata, owner_of
from aioinfer.api.protocol import Count, Int32, SamplingFields
from aioinfer.api.structured_output import only_grammar, schema_grammar
from aioinfer.engine.chat_turn import call_input, encode_turn, join_thoughts
from aioinfer.engine.tools import make_use, read_choice
from aioinfer.errors import FieldError, RequestError
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.message_parser import ToolUse

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend

#: Tokens of a prompt before `truncation` drops items of it.
_MAX_UNCUT_TOKENS = 2**20

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


class Part(Struct, kw_only=True):
    """A part of an item's content; only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Struct, kw_only=True):
    """An item of the input: the fields of all types that are understood."""

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class FunctionTool(Struct, kw_only=True):
    """A function that the model may call; tools that OpenAI's servers run are not supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Struct, kw_only=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


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
        input_items(self.input)

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
        functions = []
        for index, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                raise FieldError(
                    f"tools[{index}].type", f"{tool.type[:40]!r} is not supported, only 'function'"
                )
            function = {"place": f"tools[{index}].parameters", **msgspec.structs.asdict(tool)}
            functions.append(function)
        choice, name = read_choice(self.tool_choice, bool(functions))
        return make_use(functions, choice, name, parallel=self.parallel_tool_calls)

    def sampling_fields(self) -> dict[str, Any]:
        """Returns the sampling parameters that were given, under the names of `SamplingParams`."""
        fields = super().sampling_fields()
        if self.max_output_tokens is not None:
            fields["max_tokens"] = self.max_output_tokens
        if self.num_logprobs is not None:
            fields["logprobs"] = self.num_logprobs
        found = self._format_grammars()
        if self.structured_outputs is not None:
            found += self.structured_outputs.to_grammars("structured_outputs.")
        if (grammar := only_grammar(found)) is not None:
            fields["grammar"] = grammar
        return fields

    def _format_grammars(self) -> list[GrammarSpec]:
        """Returns the grammar of `text.format`, none for any text."""
        format = self.text.format if self.text is not None else None
        if format is None or format.type == "text":
            return []
        if format.type == "json_object":
            return [GrammarSpec("json_object", param="text.format")]
        if format.schema is None:
            raise FieldError("text.format.schema", "is missing")
        return [schema_grammar(format.schema, "text.format.schema")]

    def template_kwargs(self) -> dict[str, Any]:
        """Returns the variables of the chat template."""
        fields = {
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "verbosity": self.text.verbosity if self.text is not None else None,
        }
        variables = {name: value for name, value in fields.items() if value is not None}
        return variables | (self.chat_template_kwargs or {})


def input_items(
    items: str | Iterable[Item] | None, taken: Container[str] = (), place: str = "input"
) -> list[dict[str, Any]]:
    """Returns items of input as they are stored and shown: complete, and each with an id of its
    own, which is not among the ids in `taken`.

    Raises `RequestError` naming the place of one that is not supported.
    """
    if isinstance(items, str):
        items = [Item(role="user", content=items)]
    found: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(items or ()):
        body = _item_body(item, f"{place}[{index}]")
        id = item.id
        if not id or id in found or id in taken:
            id = f"{_PREFIXES[item.type]}_{secrets.token_hex(16)}"
        found[id] = {"id": id, "type": item.type, "status": "completed", **body}
    return list(found.values())


def _item_body(item: Item, place: str) -> dict[str, Any]:
    """Returns the fields that an item has by its type."""
    match item.type:
        case "message" if item.role is not None:
            kind = "output_text" if item.role == "assistant" else "input_text"
            content = _parts(item.content, kind, f"{place}.content")
            return {"role": item.role, "content": content}
        case "function_call" if item.name:
            call_id = item.call_id or item.id or ""
            return {"call_id": call_id, "name": item.name, "arguments": item.arguments or ""}
        case "function_call_output" if item.call_id is not None:
            output = item.output
            if isinstance(output, str):
                return {"call_id": item.call_id, "output": output}
            parts = _parts(output, "input_text", f"{place}.output")
            return {"call_id": item.call_id, "output": parts}
        case "reasoning":
            summary = _parts(item.summary, "summary_text", f"{place}.summary")
            content = _parts(item.content, "reasoning_text", f"{place}.content")
            return {"summary": summary, "content": content}
    raise RequestError(
        f"{place}: an item of type {item.type[:40]!r} is not supported, or lacks a field",
        param=place,
    )


def _parts(content: str | list[Part] | None, kind: str, place: str) -> list[dict[str, Any]]:
    """Returns the parts of a content; all parts with a text are of one kind."""
    if isinstance(content, str):
        content = [Part(type=kind, text=content)]
    found: list[dict[str, Any]] = []
    for index, part in enumerate(content or ()):
        if part.type not in _TEXT_PARTS:
            raise RequestError(
                f"{place}[{index}]: a part of type {part.type[:40]!r} is not supported",
                param=f"{place}[{index}]",
            )
        if part.type == "refusal":
            found.append({"type": "refusal", "refusal": part.refusal or part.text or ""})
            continue
        found.append({"type": kind, "text": part.text or ""})
        if kind == "output_text":
            found[-1] |= {"annotations": [], "logprobs": []}
    return found


def to_messages(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns stored items as the messages that chat templates read. Reasoning, texts and calls of
    the assistant that follow each other are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                _add(messages, {"content": _text(item["content"])})
            case "message":
                role = "user" if item["role"] == "user" else "system"
                messages.append({"role": role, "content": _text(item["content"])})
            case "function_call":
                function = {"name": item["name"], "arguments": call_input(item["arguments"])}
                call = {"type": "function", "id": item["call_id"], "function": function}
                _add(messages, {"call": call})
            case "function_call_output":
                text = _text(item["output"])
                call_id = item["call_id"]
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case _:
                _add(messages, {"thought": _text(item["content"] or item["summary"])})
    return messages


def _add(messages: list[dict[str, Any]], new: Mapping[str, Any]) -> None:
    """Adds to the assistant's message at the end, or begins one."""
    last = messages[-1] if messages else {}
    calls = "tool_calls" in last
    is_open = last.get("role") == "assistant" and (
        "call" in new or (not calls and ("thought" in new or not last["content"]))
    )
    if not is_open:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if "call" in new:
        last.setdefault("tool_calls", []).append(new["call"])
    elif "thought" in new:
        join_thoughts(last, new["thought"])
    else:
        last["content"] = new["content"]


def _text(content: str | Iterable[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)


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

    async def encode(self, frontend: Frontend, body: ResponseRequest, use: ToolUse) -> list[int]:
        """Returns the prompt: the instructions, which are of one response alone, and the items.
        With `truncation` as many of the first ones are left out as do not fit.

        Raises `RequestError` if the rest does not fit.
        """
        items, middle = self.items, 0
        if body.truncation != "auto":
            return await _encode(frontend, body, use, items)
        room = frontend.max_model_len - (body.max_output_tokens or 1)
        low, high = 0, len(items) - 1  # the last one stays
        while low < high:
            ids = await _encode(frontend, body, use, items[middle:], max_tokens=_MAX_UNCUT_TOKENS)
            low, high = (low, middle) if len(ids) <= room else (middle + 1, high)
            middle = (low + high) // 2  # at first all items are tried
        while low < len(items) - 1 and items[low]["type"] == "function_call_output":
            low += 1  # its call is left out
        return await _encode(frontend, body, use, items[low:])

    def keep(
        self,
        request: web.Request,
        body: ResponseRequest,
        ended: dict[str, Any],
        events: Sequence[bytes] = (),
    ) -> None:
        """Stores a response that has ended, unless `store` is false, and adds it to its
        conversation if it is complete and that is still stored."""
        store, owner = request.app[OBJECT_STORE], owner_of(request)
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
    use: ToolUse,
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
        use,
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
