"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from aioinfer.api.batch.store import OBJECT_STORE, checked_metadata, owner_of
from aioinfer.api.generation import ChoiceWriter, Generation
from aioinfer.api.logprobs import ChatLogprobs, chat_logprobs, formatted, prompt_logprobs
from aioinfer.api.messages import ContentPart, FunctionCall, Message, ToolCall
from aioinfer.api.openai.chunks import (
    ChunkDialect,
    ChunkTemplate,
    ChunkWriter,
    TextWriter,
    Usage,
    role_event,
    usage,
)
from aioinfer.api.prompts import chat_prompt
from aioinfer.api.protocol import ChatRequest
from aioinfer.engine.chat_turn import (
    make_parser,
    new_call_id,
    num_thought_tokens,
    parse_message,
)
from aioinfer.engine.output import Delta
from aioinfer.text.message_parser import MessageDelta, MessageParser, ToolUse

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import RequestOutput
    from aioinfer.features.logprobs.planning import TokenLogprob


class CalledFunction(Struct, kw_only=True):
    """The function of a call, and the JSON text of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ChatCall(Struct, kw_only=True):
    """A call that the model makes; in a stream its beginning, or further arguments."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class ChatDelta(Struct, kw_only=True):
    """What a chunk adds to a message."""

    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET


class AssistantMessage(Struct, kw_only=True):
    """The model's message; the thought has the names of two other servers."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One answer, with the ids of its tokens where they are asked for, and what features of other
    packages have found."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    features: dict[str, Any] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """The reply of `/v1/chat/completions`. A stream has chunks with a `delta` in the place of the
    `message`, as server-sent events; a stored one has `metadata`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Any] | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET


class StoredMessage(Struct, kw_only=True):
    """A message as OpenAI lists it: its content as text, and its parts beside that."""

    id: str
    role: str
    content: str | None
    name: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    content_parts: list[ContentPart] | None = None


class ChatDialect(ChunkDialect[ChatRequest]):
    """Answers a conversation n times.

    Without `max_tokens`, in the request or as a default, an answer may be as long as fits. With
    `store`, the reply is stored before the client has all of it.
    """

    body_type = ChatRequest
    reply_type = ChatCompletion
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: web.Request, body: ChatRequest):
        super().__init__(request, body)
        self._echo = body.echoed()
        self._with_timings = bool(body.timings_per_token)
        self._recorded: list[Delta] = []

    @property
    def field_names(self) -> Mapping[str, str]:
        """See `Dialect.field_names`."""
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    @property
    def thought_budget(self) -> int | None:
        """See `Dialect.thought_budget`."""
        return self.body.thought_budget

    @classmethod
    async def encode(cls, frontend: Frontend, body: ChatRequest, use: ToolUse) -> list[list[int]]:
        """See `Dialect.encode`."""
        return [await chat_prompt(frontend, body, use)]

    async def decode(self) -> Generation | web.StreamResponse:
        """See `Dialect.decode`."""
        if self.body.store:
            checked_metadata(self.body.metadata)
        found = await super().decode()
        if self.turn.parses and self.frontend.message_format.has_thoughts:
            self._count_thought = partial(num_thought_tokens, self.frontend, self.turn)
        return found

    def choice(self, output: RequestOutput, sequence: int, index: int) -> ChoiceWriter:
        """See `Dialect.choice`."""
        body, envelope, turn = self.body, self.envelope, self.turn
        with_ids = bool(body.return_token_ids)
        template = ChunkTemplate.for_chat(envelope, index)
        opening = role_event(envelope, index, turn.prompt if with_ids else None)
        if self._echo:
            opening += template.chunk(self._echo)
        if body.store:
            self._recorded.append(Delta(index))
        options: dict[str, Any] = {
            "opening": opening,
            "returns_token_ids": with_ids,
            "usage_of": output if envelope.continuous_usage else None,
            "record": self._recorded[-1] if body.store else None,
        }
        names = self.names

        def format_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> ChatLogprobs:
            return chat_logprobs(names, tokens)

        writer: ChunkWriter
        if turn.parses:
            new_id = partial(new_call_id, self.frontend)
            parser = make_parser(self.frontend, turn)
            writer = ParsedWriter(parser, new_id, template, format_logprobs, **options)
        else:
            writer = TextWriter(template, format_logprobs, **options)
        self._writers.append(writer)
        return writer

    async def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See `Dialect.end`."""
        if self._recorded:
            await self.whole(outputs, [delta.join() for delta in self._recorded])
        return await super().end(outputs)

    async def whole(
        self, outputs: Sequence[RequestOutput], choices: Sequence[Delta]
    ) -> ChatCompletion:
        """See `Dialect.whole`."""
        (output,), body, envelope = outputs, self.body, self.envelope
        scores, num_top, of_prompt = output.prompt_scores, body.prompt_logprobs, None
        if num_top is not None and scores is not None:
            of_prompt = await prompt_logprobs(self.names, scores, num_top)
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        reply = ChatCompletion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            system_fingerprint=envelope.fingerprint,
            choices=[
                await self._choice(output, index, delta) for index, delta in enumerate(choices)
            ],
            usage=usage(outputs, num_tokens, self._count_thought),
            prompt_logprobs=of_prompt,
            prompt_token_ids=self.turn.prompt if body.return_token_ids else UNSET,
        )
        if body.store:
            _keep(self.request, body, reply)
        return reply

    async def _choice(self, output: RequestOutput, index: int, delta: Delta) -> ChatChoice:
        """Returns a choice of a reply: the message, whose content begins with the echo, and the ids
        and log-probabilities of its tokens."""
        reason, message = delta.finish_reason, AssistantMessage(content=self._echo + delta.text)
        if self.turn.parses:
            parsed = await parse_message(self.frontend, self.turn, delta.text)
            content = self._echo + parsed.content
            message.content = content or (None if parsed.calls or parsed.reasoning else "")
            if parsed.reasoning:
                message.reasoning_content = message.reasoning = parsed.reasoning
            if parsed.calls:
                message.tool_calls = [
                    _call(call.id, call.name, call.arguments) for call in parsed.calls
                ]
                reason = _finish_reason(reason or "stop", len(parsed.calls))
        tokens = delta.logprobs or ()
        logprobs = await formatted(tokens, partial(chat_logprobs, self.names, tokens))
        return ChatChoice(
            index=index,
            message=message,
            logprobs=logprobs if tokens else None,
            finish_reason=reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self.body.return_token_ids else UNSET,
            features=output.features(delta.index) or UNSET,
        )


def _finish_reason(reason: str, num_calls: int) -> str:
    """Returns OpenAI's reason for the end of a message."""
    return "tool_calls" if num_calls and reason == "stop" else reason


class ParsedWriter(ChunkWriter):
    """Writes a choice whose text goes through a parser: content, reasoning and tool calls. A token
    whose text is held back has no event."""

    def __init__(
        self, parser: MessageParser, new_id: Callable[[], str], *args: Any, **options: Any
    ):
        """`new_id` makes the id of a call. See `ChunkWriter` for the rest."""
        super().__init__(*args, **options)
        self._parser = parser
        self._new_id = new_id

    def _chunks(self, delta: Delta) -> bytes:
        extra: dict[str, Any] = {}
        if delta.logprobs:
            extra["logprobs"] = self._format_logprobs(delta.logprobs, 0)
        if self._returns_token_ids:
            extra["token_ids"] = delta.token_ids
        new, data = self._parser.feed(delta.text), b""
        if extra or new.reasoning or new.calls:
            data = self._template.chunk_with_delta(self._delta(new), extra)
        elif new.content:
            data = self._template.chunk(new.content)
        if delta.finish_reason is None:
            return data
        if last := self._parser.flush():
            data += self._template.chunk_with_delta(self._delta(last), {})
        reason = _finish_reason(delta.finish_reason, self._parser.num_calls)
        return data + self._template.finish(reason, delta.stop_reason)

    def _delta(self, delta: MessageDelta) -> ChatDelta:
        found = ChatDelta()
        if delta.reasoning:
            found.reasoning_content = found.reasoning = delta.reasoning
        if delta.content:
            found.content = delta.content
        if delta.calls:
            found.tool_calls = [
                ChatCall(index=call.index, function=CalledFunction(arguments=call.arguments))
                if call.name is None
                else _call(self._new_id(), call.name, call.arguments, call.index)
                for call in delta.calls
            ]
        return found


def _call(id: str, name: str, arguments: str, index: int | UnsetType = UNSET) -> ChatCall:
    function = CalledFunction(name=name, arguments=arguments)
    return ChatCall(index=index, id=id, type="function", function=function)


def _keep(request: web.Request, body: ChatRequest, reply: ChatCompletion) -> None:
    """Stores the reply to a chat with its messages, in the place of an older one of its id."""
    stored = msgspec.structs.replace(reply, metadata=checked_metadata(body.metadata))
    messages = [_stored(f"{reply.id}-{index}", each) for index, each in enumerate(body.messages)]
    request.app[OBJECT_STORE].add(owner_of(request), stored, messages)


def _stored(id: str, message: Message) -> StoredMessage:
    fields = msgspec.structs.asdict(message)
    given = {name: value for name, value in fields.items() if value is not None}
    given["content"] = None if message.content is None else message.for_template()["content"]
    parts = message.content if isinstance(message.content, list) else None
    return StoredMessage(id=id, content_parts=parts, **given)
