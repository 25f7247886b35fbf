"""Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`, their bodies,
and the conversations that the bodies stand for.

Errors come in Anthropic's shape from `errors`.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import astuple

from aioinfer.api import protocol
from aioinfer.api.delivery import count_prompt
from aioinfer.api.generation import MessageDialect, named_event
from aioinfer.api.messages import converted, template_call, template_content
from aioinfer.engine.chat_turn import call_input, encode_turn, join_thoughts, new_call_id
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import StopReason
from aioinfer.engine.tools import Choice, make_use
from aioinfer.errors import FieldError, RequestError, UnsupportedFieldError
from aioinfer.media.source import MediaSource
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.message_blocks import Block, BlockKind
from aioinfer.text.message_parser import ToolUse

#: What Anthropic calls the ways in which tools may be called.
_CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
#: Types of blocks with pictures, or with texts beside the conversation.
_MEDIA = ("image", "document", "search_result")


class CacheControl(Struct, kw_only=True):
    """For how long the prompt is to stay in the prefix cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        """The time in seconds."""
        return 3600.0 if self.ttl == "1h" else protocol.RETAIN_S


class Source(Struct, kw_only=True):
    """Where a picture is, in the block as base64 or at a URL; or the content of a document, as a
    text or in blocks."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[ContentBlock] | None = None


class Citations(Struct, kw_only=True):
    """Whether the answer is to quote a document."""

    enabled: bool = False


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
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    citations: Citations | list[Any] | None = None
    cache_control: CacheControl | None = None

    def shown(self, place: str, others: Collection[str]) -> list[str | MediaSource]:
        """Returns what the model sees of a block that may be a text, or of these other types.
        Raises `RequestError` if it is another one, or lacks something."""
        if self.type == "text":
            return [self.text or ""]
        if self.type not in others:
            text = f"{place}: a block of type {self.type[:40]!r} is not supported here"
            raise RequestError(text, param=place)
        return [self._picture(place)] if self.type == "image" else self._document(place)

    def _picture(self, place: str) -> MediaSource:
        source = self.source
        if isinstance(source, Source) and source.type == "url" and source.url is not None:
            return MediaSource(f"{place}.source.url", source.url)
        if not isinstance(source, Source) or source.type != "base64" or source.data is None:
            text = "must be of type 'base64' with data, or of type 'url'"
            raise FieldError(f"{place}.source", text)
        if source.media_type is not None and not source.media_type.startswith("image/"):
            raise FieldError(f"{place}.source.media_type", "must be an image's")
        return MediaSource(f"{place}.source.data", source.data, is_base64=True)

    def _document(self, place: str) -> list[str | MediaSource]:
        """Returns the texts and pictures of a document or a search result, with what is known of it
        in front."""
        if isinstance(self.citations, Citations) and self.citations.enabled:
            raise UnsupportedFieldError(f"{place}.citations", "are not supported here")
        source, content, where = self.source, self.content, f"{place}.content"
        about = [self.title, self.context]
        if self.type == "search_result":
            about = [self.title, source if isinstance(source, str) else None]
        elif not isinstance(source, Source):
            raise FieldError(f"{place}.source", "must be an object")
        elif source.type == "text":
            content, where = source.data, f"{place}.source.data"
        elif source.type == "content":
            content, where = source.content, f"{place}.source.content"
        else:
            what = f"of type {source.type[:40]!r} are not supported, only 'text' and 'content'"
            text = f"documents {what}: a PDF has to be sent as its text"
            raise UnsupportedFieldError(f"{place}.source.type", text)
        if content is None:
            raise FieldError(where, "is missing", "missing_required_parameter")
        head = "".join(f"{line}\n" for line in about if line)
        return [*([head] if head else []), *_parts(content, where, ("image",))]


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
    cache_control: CacheControl | None = None

    def as_function(self, place: str) -> dict[str, Any]:
        """Returns the function, as `make_use` reads it; `place` is the tool's in the body. Raises
        `RequestError` for fields that would change how it is called."""
        if self.type not in (None, "custom"):
            raise FieldError(f"{place}.type", f"{self.type[:40]!r} is not supported, only 'custom'")
        for name in ("allowed_callers", "defer_loading", "input_examples"):
            if getattr(self, name) not in (None, False, [], ["direct"]):
                raise UnsupportedFieldError(f"{place}.{name}")
        given = {"name": self.name, "description": self.description, "strict": self.strict}
        return given | {"parameters": self.input_schema, "place": f"{place}.input_schema"}


class ToolChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """How tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model is to think, in how many tokens at most, and whether the reply has the
    thought. There are no summaries: what stands for one is the thought itself."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: protocol.Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, and the effort for it."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(protocol.GenerationBody, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    def cache_controls(self) -> Iterator[CacheControl]:
        """Yields all that the body says about caching: its own, and that of tools and blocks."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        inner = [b for block in blocks if isinstance(block.content, list) for b in block.content]
        for each in (self, *(self.tools or ()), *blocks, *inner):
            if each.cache_control is not None:
                yield each.cache_control

    def retain_s(self) -> float:
        """See `GenerationBody.retain_s`: the whole prompt stays for the longest time that any part
        of it is to stay for."""
        asked = [each.seconds for each in self.cache_controls()]
        return max(asked, default=super().retain_s())

    def check(self) -> None:
        """See `Body.check`."""
        self.tool_use()
        list(self.conversation())
        self.sampling_fields()

    def tool_use(self) -> ToolUse:
        """Returns the tools. Raises `RequestError` naming the place."""
        places = enumerate(self.tools or ())
        functions = [tool.as_function(f"tools[{index}]") for index, tool in places]
        given = self.tool_choice or ToolChoice(type="auto")
        parallel = not given.disable_parallel_tool_use
        return make_use(functions, _CHOICES[given.type], given.name, parallel=parallel)

    def grammars(self) -> list[GrammarSpec]:
        """See `GenerationBody.grammars`; `output_format` is the older place of a schema."""
        newer = self.output_config.format if self.output_config is not None else None
        found = {"output_config.format": newer, "output_format": self.output_format}
        return [
            protocol.schema_grammar(format.schema, f"{place}.schema")
            for place, format in found.items()
            if format is not None
        ]

    def conversation(self) -> Iterator[dict[str, Any]]:
        """Yields the messages as chat templates read them. Raises `RequestError` naming the
        place."""
        if self.system:
            yield {"role": "system", "content": template_content(_parts(self.system, "system"))}
        for index, message in enumerate(self.messages):
            yield from _messages(message, f"messages[{index}]")

    def template_kwargs(self) -> dict[str, Any] | None:
        """Returns the variables of the chat template."""
        thinks = None if self.thinking is None else self.thinking.type != "disabled"
        effort = None if self.output_config is None else self.output_config.effort
        kwargs = self.chat_template_kwargs
        return protocol.template_variables(kwargs, enable_thinking=thinks, reasoning_effort=effort)


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    sampling_names: ClassVar[Mapping[str, str]] = {"stop_sequences": "stop"}

    max_tokens: protocol.Count
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: protocol.Int32 | None = None
    top_p: float | None = None

    @property
    def shows_thoughts(self) -> bool:
        """See `GenerationBody.shows_thoughts`."""
        return self.thinking is None or self.thinking.display != "omitted"


def _parts(
    content: str | list[ContentBlock], where: str, others: Collection[str] = ()
) -> list[str | MediaSource]:
    """Returns the texts of a content, and what is seen of blocks of these types. Raises
    `RequestError` for other blocks."""
    if isinstance(content, str):
        return [content]
    places = ((f"{where}[{index}]", block) for index, block in enumerate(content))
    return [part for place, block in places for part in block.shown(place, others)]


def _messages(message: InputMessage, where: str) -> Iterator[dict[str, Any]]:
    """Yields a message; results of tools become messages of their own, before its text. Content
    without blocks is an empty text, as it is for chats."""
    content, where = message.content, f"{where}.content"
    if isinstance(content, str) or message.role == "system":
        yield {"role": message.role, "content": template_content(_parts(content, where))}
        return
    parts: list[str | MediaSource] = []
    extra: dict[str, Any] = {}
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        match block.type, message.role:
            case "tool_use", "assistant" if block.name:
                call = template_call(block.name, block.input, block.id or "")
                extra.setdefault("tool_calls", []).append(call)
            case "thinking", "assistant":
                join_thoughts(extra, block.thinking or "")
            case "redacted_thinking", "assistant":
                pass
            case "tool_result", "user":
                result = template_content(_parts(block.content or "", f"{place}.content", _MEDIA))
                yield {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": result}
            case _:
                parts += block.shown(place, _MEDIA if message.role == "user" else ())
    if parts or extra or message.role == "assistant" or not content:
        yield {"role": message.role, "content": template_content(parts), **extra}


class CacheCreation(Struct, kw_only=True):
    """Tokens that were written to the cache, by the time for which they stay."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(Struct, kw_only=True, omit_defaults=True):
    """Tokens of a message. Tokens that were read from the cache, or are kept there because the body
    asks for that, are not among the input's."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: CacheCreation | UnsetType = UNSET


class TextBlock(Struct, kw_only=True, tag="text"):
    """A text of a message."""

    text: str


class ThinkingBlock(Struct, kw_only=True, tag="thinking"):
    """A thought of a message."""

    thinking: str
    signature: str = ""


class CallBlock(Struct, kw_only=True, tag="tool_use"):
    """A call that a message makes."""

    id: str
    name: str
    input: Mapping[str, Any]


ReplyBlock = TextBlock | ThinkingBlock | CallBlock


class MessageReply(Struct, kw_only=True):
    """The reply of `/v1/messages`. A stream has events that change it."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStart(Struct, kw_only=True, tag="message_start"):
    """The first event: the message without content."""

    message: MessageReply


class Ping(Struct, tag="ping"):
    """An event without a meaning, which clients expect."""


class BlockStart(Struct, kw_only=True, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: ReplyBlock


class TextDelta(Struct, kw_only=True, tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(Struct, kw_only=True, tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class InputDelta(Struct, kw_only=True, tag="input_json_delta"):
    """More of the JSON that a call's input is."""

    partial_json: str


class BlockDelta(Struct, kw_only=True, tag="content_block_delta"):
    """A block gets more."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Struct, kw_only=True, tag="content_block_stop"):
    """A block has ended."""

    index: int


class MessageEnd(Struct, kw_only=True):
    """Why a message has ended, and the stop sequence that ended it."""

    stop_reason: str
    stop_sequence: str | None = None


class MessageDelta(Struct, kw_only=True, tag="message_delta"):
    """The end of the message, and its tokens."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Struct, tag="message_stop"):
    """The last event."""


#: The event of most tokens, with gaps for the index and for the JSON of the text.
_TEXT_EVENT = named_event(BlockDelta(index=0, delta=TextDelta(text="")))
_TEXT_EVENT = _TEXT_EVENT.replace(b"0", b"%d").replace(b'""', b"%b")


class TokenCount(Struct, kw_only=True):
    """The number of tokens of a conversation."""

    input_tokens: int


async def count_tokens(request: web.Request, body: CountTokensRequest) -> TokenCount:
    """Returns the number of tokens of a conversation."""
    return TokenCount(input_tokens=await count_prompt(request, AnthropicDialect, body))


class AnthropicDialect(MessageDialect[MessagesRequest]):
    """Answers a conversation."""

    body_type = MessagesRequest
    reply_type = MessageReply
    event_types = (
        MessageStart, Ping, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop,
    )  # fmt: skip
    id_prefix = "msg_"

    @property
    def thought_budget(self) -> int | None:
        """See `TextDialect.thought_budget`: clients must name one, also where reasoning has
        none."""
        thinking, bounds = self.body.thinking, self.frontend.message_format.bounds_thoughts
        return thinking.budget_tokens if thinking is not None and bounds else None

    @classmethod
    async def encode(
        cls, frontend: Frontend, body: CountTokensRequest, use: ToolUse
    ) -> list[list[int]]:
        """See `TextDialect.encode`."""
        contents = (message.content for message in body.messages)
        messages = await converted(contents, lambda: list(body.conversation()))
        continues = messages[-1]["role"] == "assistant"  # a text that the answer goes on with
        options = {"add_generation_prompt": not continues, "continue_final_message": continues}
        kwargs = body.template_kwargs()
        return [await encode_turn(frontend, messages, use, template_kwargs=kwargs, **options)]

    def new_id(self, kind: BlockKind) -> str:
        """See `MessageDialect.new_id`."""
        return new_call_id(self.frontend, "toolu_") if kind == "call" else secrets.token_hex(8)

    def opening(self) -> bytes:
        """See `MessageDialect.opening`."""
        return named_event(MessageStart(message=self._message([], 1))) + named_event(Ping())

    def change(self, kind: str, block: Block, text: str) -> bytes:
        """See `MessageDialect.change`."""
        if kind == "delta" and block.kind == "text":  # most tokens
            return _TEXT_EVENT % (block.index, orjson.dumps(text))
        if kind == "start":
            return named_event(BlockStart(index=block.index, content_block=_content(block)))
        if kind == "stop":
            return named_event(BlockStop(index=block.index))
        is_thought = block.kind == "reasoning"
        delta = ThinkingDelta(thinking=text) if is_thought else InputDelta(partial_json=text)
        return named_event(BlockDelta(index=block.index, delta=delta))

    def closing(self, reason: str, stop_reason: StopReason, num_tokens: int) -> bytes:
        """See `MessageDialect.closing`."""
        last = MessageDelta(delta=self._stop(reason, stop_reason), usage=self._usage(num_tokens))
        return named_event(last) + named_event(MessageStop())

    def message(self, reason: str, stop_reason: StopReason, num_tokens: int) -> MessageReply:
        """See `MessageDialect.message`."""
        reply = self._message([_content(block) for block in self.blocks.all], num_tokens)
        reply.stop_reason, reply.stop_sequence = astuple(self._stop(reason, stop_reason))
        return reply

    def _message(self, content: list[ReplyBlock], num_tokens: int) -> MessageReply:
        return MessageReply(
            id=self.id, model=self.model_name, content=content, usage=self._usage(num_tokens)
        )

    def _usage(self, num_tokens: int) -> MessageUsage:
        cached, prompt_len = self.output.num_cached_tokens, len(self.output.prompt_token_ids)
        size, created, by_time = self.frontend.block_size, 0, None
        if size and any(self.body.cache_controls()):
            created = max(0, prompt_len // size * size - cached)
            ttl = "1h" if self.body.retain_s() > protocol.RETAIN_S else "5m"
            by_time = CacheCreation(**{f"ephemeral_{ttl}_input_tokens": created})
        return MessageUsage(
            input_tokens=prompt_len - cached - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached,
            output_tokens=num_tokens,
            cache_creation=by_time or UNSET,
        )

    def _stop(self, reason: str, stop_reason: StopReason) -> MessageEnd:
        """Returns why a message has ended, in Anthropic's words."""
        if isinstance(stop_reason, str):
            return MessageEnd(stop_reason="stop_sequence", stop_sequence=stop_reason)
        if reason == "length":
            return MessageEnd(stop_reason="max_tokens")
        called = any(block.kind == "call" for block in self.blocks.all)
        return MessageEnd(stop_reason="tool_use" if called else "end_turn")


def _content(block: Block) -> ReplyBlock:
    """Returns a block as Anthropic's clients expect it: with the text that it has so far."""
    if block.kind == "reasoning":
        return ThinkingBlock(thinking=block.text)
    if block.kind == "text":
        return TextBlock(text=block.text)
    return CallBlock(id=block.id, name=block.name, input=call_input(block.text))
