"""A turn of a conversation, as all endpoints that have one and `LLM` run it: the prompt, how to
sample, and how the text becomes a message. `api.generation`
converts bodies into it."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

import msgspec

from aioinfer.engine.tools import NO_TOOLS, read_tools, settle_schemas, show_tools
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.message_parser import MessageDelta, MessageParser, ToolUse

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend

#: Tokens at the end of a prompt that may hold the marker of a thought, and line breaks.
_MARKER_TOKENS = 16
#: Longer texts are parsed in a thread.
SHORT_TEXT = 32 * 1024
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn, ready to be submitted: the prompt, the sampling parameters, and how to parse the
    output.

    Attributes:
        prompt: token ids.
        params: the sampling parameters, with the grammar of calls or of the answer.
        use: the tools.
        parses: whether the text has to be parsed; else all of it is content.
        in_thought: whether the prompt's end has opened a thought.
        shows_thoughts: whether the client gets thoughts.
    """

    prompt: list[int]
    params: SamplingParams
    use: ToolUse
    parses: bool
    in_thought: bool = False
    shows_thoughts: bool = True


async def encode_turn(
    frontend: Frontend,
    messages: Sequence[dict[str, Any]],
    use: ToolUse,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """Returns the prompt of a conversation. Raises `RequestError`.

    Args:
        frontend: of the model.
        messages: as chat templates read them.
        use: the tools; under "none" the model does not see them.
        tools: the same in OpenAI's shape, for the template; made of `use` if missing.
        options: further ones of `Frontend.encode_chat`.
    """
    messages, shown = await conversation_input(frontend, messages, use, tools)
    return await frontend.encode_chat(messages, tools=shown, **options)


async def conversation_input(
    frontend: Frontend,
    messages: Sequence[dict[str, Any]],
    use: ToolUse,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[Sequence[dict[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """Returns the messages and the tools that the chat template gets; see `encode_turn`. A template
    that does not know tools has them in the messages."""
    messages = frontend.message_format.template_messages(messages)
    if use.choice == "none":
        return messages, None
    shown = (
        tools
        if tools is not None
        else [{"type": "function", "function": _shown(t)} for t in use.tools]
    )
    if not frontend.message_format.knows_tools:
        # in a thread: their descriptions may be megabytes
        return await asyncio.to_thread(show_tools, messages, shown), None
    return messages, shown


async def conversation_turn(
    frontend: Frontend,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    **options: Any,
) -> Turn:
    """Returns the turn that answers a conversation in a Python program.

    Args:
        frontend: of the model.
        messages: as OpenAI's chat has them; the arguments of calls may be objects.
        params: the sampling parameters; a `grammar` is the answer's.
        tools, tool_choice, parallel_tool_calls: as OpenAI's chat has them.
        options: further ones of `Frontend.encode_chat`.

    Raises:
        RequestError: the tools or the conversation are wrong.
    """
    use = read_tools(tools, tool_choice, parallel=parallel_tool_calls)
    rendered = [_with_objects(message) for message in messages]
    prompt = await encode_turn(frontend, rendered, use, tools, **options)
    return await make_turn(frontend, prompt, params, use)


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as chat templates read it: with a text as its content, or parts if some are
    no texts, and the arguments of its calls as objects."""
    content = message.get("content")
    if content is None:
        message = {**message, "content": ""}
    elif isinstance(content, list) and all(map(_is_text, content)):
        message = {**message, "content": "\n".join(part["text"] for part in content)}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _is_text(part: Any) -> bool:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = call_input(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters")
    return {name: tool[name] for name in names if tool.get(name) is not None}


async def make_turn(
    frontend: Frontend,
    prompt: list[int],
    params: SamplingParams,
    use: ToolUse = NO_TOOLS,
    *,
    shows_thoughts: bool = True,
    thought_budget: int | None = None,
) -> Turn:
    """Returns the turn that answers a prompt.

    Args:
        frontend: of the model.
        prompt: token ids of the conversation.
        params: the sampling parameters; a `grammar` is the answer's.
        use: the tools.
        shows_thoughts: whether the client gets thoughts.
        thought_budget: the maximum length of a thought in tokens, None for any.

    Raises:
        RequestError: a tool's schema is wrong.
    """
    format = frontend.message_format
    if not format.parses(use):
        return Turn(prompt, params, use, False)
    tokenizer = frontend.require_tokenizer("messages")
    in_thought = format.opens_thought(tokenizer.decode(prompt[-_MARKER_TOKENS:], False))
    settled = await settle_schemas(frontend, use)
    grammar = format.grammar(
        settled, in_thought=in_thought, answer=params.grammar, thought_budget=thought_budget
    )
    shown = frozenset(tokenizer.marker_ids[text] for text in format.markers)
    may_repeat = use.choice in ("auto", "required") and use.parallel and grammar is not None
    params = replace(
        params,
        grammar=grammar,
        shown_token_ids=shown,
        make_parser=partial(format.parser, use, in_thought=in_thought) if may_repeat else None,
    )
    return Turn(prompt, params, use, True, in_thought, shows_thoughts)


class PlainParser:
    """A `MessageParser` of models and requests without thoughts and calls: all text is content."""

    num_calls = 0
    repeats_call = False

    def feed(self, text: str) -> MessageDelta:
        """See `MessageParser.feed`."""
        return MessageDelta(content=text)

    def flush(self) -> MessageDelta:
        """See `MessageParser.flush`."""
        return MessageDelta()


class ThoughtlessParser:
    """A `MessageParser` that leaves out the thoughts of another."""

    def __init__(self, parser: MessageParser):
        self._parser = parser

    @property
    def num_calls(self) -> int:
        """See `MessageParser.num_calls`."""
        return self._parser.num_calls

    @property
    def repeats_call(self) -> bool:
        """See `MessageParser.repeats_call`."""
        return self._parser.repeats_call

    def feed(self, text: str) -> MessageDelta:
        """See `MessageParser.feed`."""
        return replace(self._parser.feed(text), reasoning="")

    def flush(self) -> MessageDelta:
        """See `MessageParser.flush`."""
        return replace(self._parser.flush(), reasoning="")


def make_parser(frontend: Frontend, turn: Turn) -> MessageParser:
    """Returns the parser of one choice."""
    if not turn.parses:
        return PlainParser()
    parser = frontend.message_format.parser(turn.use, in_thought=turn.in_thought)
    if not turn.shows_thoughts:
        parser = ThoughtlessParser(parser)
    return CallsOnlyParser(parser) if turn.use.choice in ("required", "named") else parser


class CallsOnlyParser(ThoughtlessParser):
    """A `MessageParser` that leaves out the content of another: where a call is required, content
    is part of a marker, inside which the maximum length has ended the output."""

    def feed(self, text: str) -> MessageDelta:
        """See `MessageParser.feed`."""
        return replace(self._parser.feed(text), content="")

    def flush(self) -> MessageDelta:
        """See `MessageParser.flush`."""
        return replace(self._parser.flush(), content="")


def num_thought_tokens(frontend: Frontend, turn: Turn, tokens: Sequence[int]) -> int:
    """Returns how many tokens of an output are thoughts."""
    if not turn.parses or not frontend.message_format.has_thoughts:
        return 0
    tokenizer = frontend.require_tokenizer("messages")
    return frontend.message_format.num_thought_tokens(
        tokens, lambda some: tokenizer.decode(some, False), in_thought=turn.in_thought
    )


@dataclass(slots=True)
class Call:
    """A tool call of a message."""

    id: str
    name: str
    arguments: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the call as OpenAI's chat has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def call_input(arguments: str) -> Mapping[str, Any]:
    """Returns the arguments of a call as an object; text that is none in an object of its own."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"invalid_json": arguments}


def are_whole(arguments: str) -> bool:
    """Whether the arguments of a call are JSON: the length, or a stop string of the request, may
    have cut them off."""
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def join_thoughts(message: dict[str, Any], thought: str) -> None:
    """Adds a thought to a message as chat templates read it, behind the thoughts that it has."""
    before = message.get("reasoning_content")
    message["reasoning_content"] = (
        f"{before}\n{thought}" if before and thought else before or thought
    )


@dataclass(slots=True)
class ChatMessage:
    """A message that a model has generated."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def content_or_none(self) -> str | None:
        """The content as OpenAI's chat has it: None if there are thoughts or calls alone."""
        return self.content or (None if self.calls or self.reasoning else "")

    def to_dict(self) -> dict[str, Any]:
        """Returns the message as OpenAI's chat has it, which can go into the next conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content_or_none}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.to_dict() for call in self.calls]
        return message


def new_call_id(
    frontend: Frontend,
    prefix: str = "call_",
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> str:
    """Returns the id of a call. It begins with `prefix`, but for Mistral's models: their templates
    take nine letters and digits alone."""
    if frontend.message_format.name == "mistral":
        return "".join(_LETTERS[byte % len(_LETTERS)] for byte in random_bytes(9))
    return f"{prefix}{random_bytes(12).hex()}"


class MessageBuilder:
    """The message of a choice while its text comes. It is joined when it is read."""

    def __init__(self, frontend: Frontend, turn: Turn):
        self._message = ChatMessage()
        self._as_dict = self._message.to_dict()
        self._content, self._reasoning = StringIO(), StringIO()
        self._arguments: list[StringIO] = []  # of each call
        self._frontend = frontend
        self._parser = make_parser(frontend, turn)

    @property
    def message(self) -> ChatMessage:
        """All so far. It is one object."""
        self._join()
        return self._message

    @property
    def as_dict(self) -> dict[str, Any]:
        """The same as `ChatMessage.to_dict` returns it. It is one object, in which reading changes
        only the new parts."""
        self._join()
        return self._as_dict

    def feed(self, text: str, *, ended: bool = False) -> None:
        """Takes the next piece of text, which may be the last."""
        self._take(self._parser.feed(text))
        if ended:
            self._take(self._parser.flush())

    def _take(self, delta: MessageDelta) -> None:
        self._content.write(delta.content)
        self._reasoning.write(delta.reasoning)
        for change in delta.calls:
            if change.name is not None:
                call = Call(new_call_id(self._frontend), change.name)
                self._message.calls.append(call)
                self._as_dict.setdefault("tool_calls", []).append(call.to_dict())
                self._arguments.append(StringIO())
            self._arguments[change.index].write(change.arguments)

    def _join(self) -> None:
        message, as_dict = self._message, self._as_dict
        message.content, message.reasoning = self._content.getvalue(), self._reasoning.getvalue()
        for index, (call, arguments) in enumerate(zip(message.calls, self._arguments, strict=True)):
            call.arguments = arguments.getvalue()
            as_dict["tool_calls"][index]["function"]["arguments"] = call.arguments
        as_dict["content"] = message.content_or_none
        if message.reasoning:
            as_dict["reasoning_content"] = message.reasoning


async def parse_message(frontend: Frontend, turn: Turn, text: str) -> ChatMessage:
    """Returns the message of a choice from its complete text."""
    builder = MessageBuilder(frontend, turn)
    if len(text) <= SHORT_TEXT:
        builder.feed(text, ended=True)
    else:
        await asyncio.to_thread(builder.feed, text, ended=True)
    return builder.message
