"""A turn of a conversation, as all endpoints that have one run it: the prompt, how to sample, and
how the text becomes a message. `chat`, `anthropic` and `responses` convert their bodies into it."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from aioinfer.api.tools import NO_TOOLS, settle_schemas, show_tools
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
    """What a turn needs from its prompt on.

    Attributes:
        prompt: token ids.
        params: how to sample, with the grammar of calls or of the answer.
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
    if use.choice == "none":
        return await frontend.encode_chat(messages, tools=None, **options)
    shown = (
        tools
        if tools is not None
        else [{"type": "function", "function": _shown(t)} for t in use.tools]
    )
    if not frontend.message_format.knows_tools:
        return await frontend.encode_chat(show_tools(messages, shown), tools=None, **options)
    return await frontend.encode_chat(messages, tools=shown, **options)


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters")
    return {name: tool[name] for name in names if tool.get(name) is not None}


async def make_turn(
    frontend: Frontend,
    prompt: list[int],
    fields: dict[str, Any],
    use: ToolUse = NO_TOOLS,
    *,
    shows_thoughts: bool = True,
) -> Turn:
    """Returns the turn that answers a prompt.

    Args:
        frontend: of the model.
        prompt: token ids of the conversation.
        fields: sampling parameters that were given; a `grammar` among them is the answer's.
        use: the tools.
        shows_thoughts: whether the client gets thoughts.

    Raises:
        RequestError: a parameter or a tool's schema is wrong.
    """
    format = frontend.message_format
    parses = format.parses(use)
    if not parses:
        params = frontend.defaults.sampling_params(**fields)
        return Turn(prompt, params, use, parses)
    tokenizer = frontend.require_tokenizer("messages")
    in_thought = format.opens_thought(tokenizer.decode(prompt[-_MARKER_TOKENS:], False))
    settled = await settle_schemas(frontend, use)
    grammar = format.grammar(settled, in_thought=in_thought, answer=fields.get("grammar"))
    if grammar is not None:
        fields["grammar"] = grammar
    fields["shown_token_ids"] = frozenset(tokenizer.marker_ids[text] for text in format.markers)
    params = frontend.defaults.sampling_params(**fields)
    return Turn(prompt, params, use, parses, in_thought, shows_thoughts)


class PlainParser:
    """A `MessageParser` of models and requests without thoughts and calls: all text is content."""

    num_calls = 0

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
    """A `MessageParser` that leaves out the content of another: where a call is required, that is
    part of a marker, at which the length of the output has ended it."""

    def feed(self, text: str) -> MessageDelta:
        """See `MessageParser.feed`."""
        return replace(self._parser.feed(text), content="")

    def flush(self) -> MessageDelta:
        """See `MessageParser.flush`."""
        return replace(self._parser.flush(), content="")


@dataclass(slots=True)
class Call:
    """A tool call of a message."""

    id: str
    name: str
    arguments: str = ""


def call_input(arguments: str) -> Mapping[str, Any]:
    """Returns the arguments of a call as an object; text that is none in an object of its own."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"invalid_json": arguments}


@dataclass(slots=True)
class ChatMessage:
    """A message that a model has generated."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def new_call_id(frontend: Frontend, prefix: str = "call_") -> str:
    """Returns the id of a call. It begins with `prefix`, but for Mistral's models: their templates
    take nine letters and digits alone."""
    if frontend.message_format.name == "mistral":
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"{prefix}{secrets.token_hex(12)}"


async def parse_message(frontend: Frontend, turn: Turn, text: str) -> ChatMessage:
    """Returns the message of a choice whose text is complete."""
    parser = make_parser(frontend, turn)

    def parse() -> ChatMessage:
        message = ChatMessage()
        for delta in (parser.feed(text), parser.flush()):
            message.content += delta.content
            message.reasoning += delta.reasoning
            for call in delta.calls:
                if call.name is not None:
                    message.calls.append(Call(new_call_id(frontend), call.name))
                message.calls[call.index].arguments += call.arguments
        return message

    return parse() if len(text) <= SHORT_TEXT else await asyncio.to_thread(parse)
