"""Bodies of Anthropic's Messages API, and the conversation that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from aioinfer.api.protocol import Count, GenerationBody, Int32
from aioinfer.engine.chat_turn import join_thoughts
from aioinfer.engine.tools import Choice, make_use
from aioinfer.errors import RequestError
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.message_parser import ToolUse


class ContentBlock(Struct, kw_only=True):
    """A block of a message's content: the fields of all types that are understood."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None


class InputMessage(Struct, kw_only=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(Struct, kw_only=True):
    """A function that the model may call; tools that Anthropic's servers run are not supported."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None

    def check(self, place: str) -> None:
        """Raises `RequestError` for fields that would change how the tool is called; `place` is the
        tool's in the body."""
        if self.type not in (None, "custom"):
            raise RequestError(
                f"{place}.type {self.type[:40]!r} is not supported, only 'custom'",
                param=f"{place}.type",
            )
        refused = {
            "allowed_callers": self.allowed_callers not in (None, [], ["direct"]),
            "defer_loading": self.defer_loading,
            "input_examples": self.input_examples,
        }
        for name, is_given in refused.items():
            if is_given:
                raise RequestError(
                    f"{place}.{name} is not supported here",
                    param=f"{place}.{name}",
                    code="unsupported_parameter",
                )


class ToolChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """How tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model is to think, in how many tokens at most, and whether the reply has the
    thought. There are no summaries: what stands for one is the thought itself."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, and the effort for it."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(GenerationBody, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """See `Body.check`."""
        self.tool_use()
        list(self.conversation())
        self.answer_grammar()

    def tool_use(self) -> ToolUse:
        """Returns the tools. Raises `RequestError` naming the place."""
        functions = []
        for index, tool in enumerate(self.tools or ()):
            place = f"tools[{index}]"
            tool.check(place)
            functions.append(
                {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                    "place": f"{place}.input_schema",
                }
            )
        given = self.tool_choice
        choices: dict[str, Choice] = {
            "auto": "auto", "any": "required", "tool": "named", "none": "none"
        }  # fmt: skip
        return make_use(
            functions,
            "auto" if given is None else choices[given.type],
            None if given is None else given.name,
            parallel=given is None or not given.disable_parallel_tool_use,
        )

    def answer_grammar(self) -> GrammarSpec | None:
        """Returns the grammar of the answer; `output_format` is the older place of its schema.
        Raises `RequestError`."""
        given = self.output_config.format if self.output_config is not None else None
        if given is not None and self.output_format is not None:
            raise RequestError(
                "output_format and output_config.format are the same: give one of them",
                param="output_format",
            )
        place = "output_format.schema" if given is None else "output_config.format.schema"
        if (format := given or self.output_format) is None:
            return None
        source = msgspec.json.encode(format.schema).decode()
        return GrammarSpec("json_schema", source, param=place)

    def conversation(self) -> Iterator[dict[str, Any]]:
        """Yields the messages as chat templates read them. Raises `RequestError` naming the
        place."""
        if self.system:
            yield {"role": "system", "content": _text(self.system, "system")}
        for index, message in enumerate(self.messages):
            yield from _messages(message, f"messages[{index}]")

    def template_kwargs(self) -> dict[str, Any]:
        """Returns the variables of the chat template."""
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        return variables | (self.chat_template_kwargs or {})


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None

    @property
    def shows_thoughts(self) -> bool:
        """See `GenerationBody.shows_thoughts`."""
        return self.thinking is None or self.thinking.display != "omitted"

    def sampling_fields(self) -> dict[str, Any]:
        """Returns the sampling parameters that were given, under the names of `SamplingParams`."""
        names = ("max_tokens", "temperature", "top_k", "top_p")
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            fields["stop"] = tuple(self.stop_sequences)
        if (grammar := self.answer_grammar()) is not None:
            fields["grammar"] = grammar
        return fields


def _text(content: str | list[ContentBlock], where: str) -> str:
    """Returns the text of content that may hold no other blocks."""
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise _unsupported(block, f"{where}[{index}]")
    return "\n".join(block.text or "" for block in content)


def _unsupported(block: ContentBlock, place: str) -> RequestError:
    return RequestError(
        f"{place}: a block of type {block.type[:40]!r} is not supported here", param=place
    )


def _messages(message: InputMessage, where: str) -> Iterator[dict[str, Any]]:
    """Yields a message; results of tools become messages of their own, before its text. Content
    without blocks is an empty text, as it is for chats."""
    if isinstance(message.content, str) or message.role == "system":
        yield {"role": message.role, "content": _text(message.content, f"{where}.content")}
        return
    texts: list[str] = []
    extra: dict[str, Any] = {}
    for index, block in enumerate(message.content):
        place = f"{where}.content[{index}]"
        match block.type, message.role:
            case "text", _:
                texts.append(block.text or "")
            case "tool_use", "assistant" if block.name:
                function = {"name": block.name, "arguments": block.input or {}}
                call = {"type": "function", "id": block.id or "", "function": function}
                extra.setdefault("tool_calls", []).append(call)
            case "thinking", "assistant":
                join_thoughts(extra, block.thinking or "")
            case "redacted_thinking", "assistant":
                pass
            case "tool_result", "user":
                result = _text(block.content or "", f"{place}.content")
                yield {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": result}
            case _:
                raise _unsupported(block, place)
    if texts or extra or message.role == "assistant" or not message.content:
        yield {"role": message.role, "content": "\n".join(texts), **extra}
