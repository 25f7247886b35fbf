"""Bodies of OpenAI's Responses API, and the conversation that their items stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from aioinfer.api.protocol import Body, Count, Int32, Int64, Seconds
from aioinfer.engine.chat_turn import call_input, join_thoughts
from aioinfer.engine.tools import make_use, read_choice
from aioinfer.errors import RequestError
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.message_parser import ToolUse

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


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
    """`text` of a request; its verbosity is ignored."""

    format: TextFormat | None = None


class Reasoning(Struct, kw_only=True):
    """How much the model is to think, where its template has a variable for that."""

    effort: str | None = None
    summary: str | None = None


class ResponseRequest(Body, kw_only=True):
    """`POST /v1/responses`. Fields for OpenAI's own servers are ignored."""

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    seed: Int64 | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Int32 | None = None
    timeout_s: Seconds | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: Int32 | None = None

    def check(self) -> None:
        """See `Body.check`."""
        for name in ("conversation", "prompt", "top_logprobs"):
            if getattr(self, name):
                raise RequestError(f"{name} is not supported here", param=name)
        if self.background and self.store is False:
            raise RequestError(
                "background can only be used when `store` is true", param="background"
            )
        if not self.input:
            raise RequestError("input is empty", param="input")
        self.tool_use()
        to_messages(self.input)

    def tool_use(self) -> ToolUse:
        """Returns the tools. Raises `RequestError` naming the place."""
        functions = []
        for index, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                raise RequestError(
                    f"tools[{index}].type {tool.type[:40]!r} is not supported, only 'function'",
                    param=f"tools[{index}].type",
                )
            function = {"place": f"tools[{index}].parameters", **msgspec.structs.asdict(tool)}
            functions.append(function)
        choice, name = read_choice(self.tool_choice, bool(functions))
        return make_use(functions, choice, name, parallel=self.parallel_tool_calls)

    def sampling_fields(self) -> dict[str, Any]:
        """Returns the sampling parameters that were given, under the names of `SamplingParams`."""
        names = ("temperature", "top_p", "top_k", "seed")
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.max_output_tokens is not None:
            fields["max_tokens"] = self.max_output_tokens
        if self.text is not None and self.text.format is not None:
            place = "text.format"
            if self.text.format.type == "json_object":
                fields["grammar"] = GrammarSpec("json_object", param=place)
            elif self.text.format.type == "json_schema":
                if self.text.format.schema is None:
                    raise RequestError(f"{place}.schema is missing", param=f"{place}.schema")
                source = msgspec.json.encode(self.text.format.schema).decode()
                fields["grammar"] = GrammarSpec("json_schema", source, param=f"{place}.schema")
        return fields

    def template_kwargs(self) -> dict[str, Any]:
        """Returns the variables of the chat template."""
        effort = self.reasoning.effort if self.reasoning is not None else None
        variables = {} if effort is None else {"reasoning_effort": effort}
        return variables | (self.chat_template_kwargs or {})


def to_messages(items: str | Iterable[Item]) -> list[dict[str, Any]]:
    """Returns items of input as the messages that chat templates read. Thoughts, texts and calls of
    the assistant that follow each other are one message.

    Raises `RequestError` naming the place.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        match item.type:
            case "message" if item.role is not None:
                text = _text(item.content, f"{place}.content")
                if item.role == "assistant":
                    _add(messages, {"content": text})
                else:
                    role = "user" if item.role == "user" else "system"
                    messages.append({"role": role, "content": text})
            case "function_call" if item.name:
                _add(messages, {"call": _call(item)})
            case "function_call_output" if item.call_id is not None:
                text = _text(item.output, f"{place}.output")
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            case "reasoning":
                thought = _text(item.content or item.summary, f"{place}.content")
                _add(messages, {"reasoning_content": thought})
            case _:
                raise RequestError(
                    f"{place}: an item of type {item.type[:40]!r} is not supported, or lacks a "
                    "field",
                    param=place,
                )
    return messages


def _add(messages: list[dict[str, Any]], new: Mapping[str, Any]) -> None:
    """Adds to the assistant's message at the end, or begins one."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant" and (
        "call" in new or not (last["content"] or "tool_calls" in last)
    )
    if not is_open:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if "call" in new:
        last.setdefault("tool_calls", []).append(new["call"])
    elif "reasoning_content" in new:
        join_thoughts(last, new["reasoning_content"])
    else:
        last.update(new)


def _call(item: Item) -> dict[str, Any]:
    function = {"name": item.name, "arguments": call_input(item.arguments or "")}
    return {"type": "function", "id": item.call_id or item.id or "", "function": function}


def _text(content: str | list[Part] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise RequestError(
                f"{place}[{index}]: a part of type {part.type[:40]!r} is not supported",
                param=f"{place}[{index}]",
            )
    return "\n".join(part.text or part.refusal or "" for part in content)
