"""`POST /v1/chat/completions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from aioinfer.api.generation import Generation
from aioinfer.api.logprobs import ChatLogprobs, chat_logprobs, formatted
from aioinfer.api.messages import Message, TextPart, template_messages
from aioinfer.api.openai import chunks
from aioinfer.api.prompts import cut, max_uncut
from aioinfer.api.protocol import Count, Int32, SamplingBody, check_messages, template_options
from aioinfer.engine.chat_turn import (
    are_whole,
    encode_turn,
    make_parser,
    new_call_id,
    num_thought_tokens,
    parse_message,
)
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import Delta, RequestOutput, StopReason
from aioinfer.engine.tools import read_tools
from aioinfer.errors import FieldError
from aioinfer.text.message_parser import MessageDelta, ToolUse

#: Characters of a predicted text that count.
_MAX_PREDICTION = 32 * 1024


class Prediction(Struct, kw_only=True):
    """The likely output, as OpenAI has it: text, or parts of it."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole text."""
        given = self.content
        return given if isinstance(given, str) else "".join(part.text for part in given)


class ChatRequest(SamplingBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    sampling_names = SamplingBody.sampling_names | {
        "max_completion_tokens": "max_tokens", "logprobs": "", "top_logprobs": "logprobs",
    }  # fmt: skip

    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parse_special: bool | None = None
    prediction: Prediction | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None

    def check(self) -> None:
        super().check()
        check_messages(self.messages)
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) is not None and not self.logprobs:
                raise FieldError(name, "needs logprobs to be true")
        self.tool_use()
        if self.use_beam_search and self.thought_budget is not None:
            raise FieldError("thinking_token_budget", "is not supported in a beam search")
        if self.use_beam_search and self.tools and self.tool_choice != "none":
            raise FieldError("tools", "are not supported in a beam search")

    @property
    def shows_thoughts(self) -> bool:
        return self.include_reasoning is not False

    @property
    def thought_budget(self) -> int | None:
        """The maximum length of a thought in tokens, or None; -1 stands for any length."""
        budget = self.thinking_token_budget
        return None if budget is None or budget < 0 else budget

    def tool_use(self) -> ToolUse:
        """Returns the tools and how they may be called. Raises `RequestError` naming the field."""
        return read_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    def sampling_fields(self) -> dict[str, Any]:
        return ({"logprobs": 0} if self.logprobs else {}) | super().sampling_fields()


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


class AssistantMessage(Struct, kw_only=True):
    """The model's message, or what a chunk adds to it; the thought has the names of two other
    servers."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChatChunkChoice(chunks.Choice, kw_only=True):
    """A choice in a chunk."""

    delta: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatChunk(chunks.Chunk, kw_only=True):
    """An event of a chat's stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: Sequence[ChatChunkChoice] = ()


class ChatChoice(chunks.Choice, kw_only=True):
    """One answer."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(chunks.Envelope, kw_only=True):
    """The reply of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: Sequence[ChatChoice]
    prompt_logprobs: list[Any] | UnsetType | None = UNSET


class ChatWriter(chunks.ChunkWriter):
    """Writes a choice of a chat. Where its text goes through a parser, a token whose text is held
    back has no chunk."""

    def __init__(self, dialect: ChatDialect, output: RequestOutput, index: int):
        super().__init__(dialect, output, index)
        self.empty = ChatChunkChoice(index=index, delta=AssistantMessage())
        self._frontend, self._parses = dialect.frontend, dialect.turn.parses
        self._parser = make_parser(dialect.frontend, dialect.turn)
        #: The arguments of the last call, in pieces.
        self._arguments = list[str]()

    @property
    def can_be_plain(self) -> bool:
        """See `ChunkWriter.can_be_plain`."""
        return super().can_be_plain and not self._parses

    def opening(self) -> Iterator[bytes]:
        """See `ChunkWriter.opening`: the first chunk names the role, and has the prompt's ids."""
        role = replace(self.empty, delta=AssistantMessage(role="assistant", content=""))
        yield self.event(role, prompt_token_ids=self._prompt_token_ids)

    def choices(self, delta: Delta) -> Iterator[chunks.Choice]:
        """See `ChunkWriter.choices`."""
        if not self._parses:
            yield from super().choices(delta)
            return
        reason, fields, new = delta.finish_reason, self.fields(delta), self._parser.feed(delta.text)
        if fields or new:
            yield replace(self.empty, delta=self._delta(new), **fields)
        if reason is None:
            return
        if last := self._parser.flush():
            yield replace(self.empty, delta=self._delta(last))
        if self._parser.num_calls:
            reason = _finish_reason(reason, delta.stop_reason, "".join(self._arguments))
        yield replace(self.empty, finish_reason=reason, stop_reason=delta.stop_reason)

    def shown(self, text: str) -> chunks.Choice:
        """See `ChunkWriter.shown`."""
        return replace(self.empty, delta=AssistantMessage(content=text))

    def logprobs(self, delta: Delta) -> ChatLogprobs:
        """See `ChunkWriter.logprobs`."""
        return chat_logprobs(self._names, delta.logprobs or ())

    def _delta(self, delta: MessageDelta) -> AssistantMessage:
        found = AssistantMessage()
        if delta.reasoning:
            found.reasoning_content = found.reasoning = delta.reasoning
        if delta.content:
            found.content = delta.content
        for call in delta.calls:
            if call.name is not None:
                self._arguments.clear()
            self._arguments.append(call.arguments)
        if delta.calls:
            found.tool_calls = [
                ChatCall(index=call.index, function=CalledFunction(arguments=call.arguments))
                if call.name is None
                else _call(new_call_id(self._frontend), call.name, call.arguments, call.index)
                for call in delta.calls
            ]
        return found


class ChatDialect(chunks.ChunkDialect[ChatRequest]):
    """Answers a conversation n times.

    Without `max_tokens`, in the request or as a default, an answer may be as long as fits.
    """

    body_type = ChatRequest
    reply_type = ChatCompletion
    id_prefix = "chatcmpl-"
    writer_type = ChatWriter
    event_types = (ChatChunk,)

    @property
    def thought_budget(self) -> int | None:
        """See `TextDialect.thought_budget`."""
        return self.body.thought_budget

    @classmethod
    async def encode(cls, frontend: Frontend, body: ChatRequest, use: ToolUse) -> list[list[int]]:
        """See `TextDialect.encode`."""
        messages, options = await template_messages(body.messages), template_options(body)
        limit = max_uncut(body)
        ids = await encode_turn(frontend, messages, use, max_tokens=limit, **options)
        if limit is None:
            return [ids]
        return [cut(frontend, body, ids, body.prompt_room(frontend.max_model_len))]

    async def decode(self) -> Generation | web.StreamResponse:
        """See `Dialect.decode`."""
        found = await super().decode()
        if self.turn.parses and self.frontend.message_format.has_thoughts:
            self._count_thought = partial(num_thought_tokens, self.frontend, self.turn)
        if self.body.prediction is not None and isinstance(found, Generation):
            text = self.body.prediction.text[:_MAX_PREDICTION]
            tokens = tuple(await self.frontend.encode(text, add_special_tokens=False))
            params = dataclasses.replace(found.params, predicted_tokens=tokens)
            return dataclasses.replace(found, params=params)
        return found

    async def whole(
        self, outputs: Sequence[RequestOutput], choices: Sequence[Delta]
    ) -> ChatCompletion:
        """See `Dialect.whole`."""
        (output,) = outputs
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        return ChatCompletion(
            **self.envelope,
            choices=[
                await self._choice(output, index, delta) for index, delta in enumerate(choices)
            ],
            usage=chunks.usage(outputs, num_tokens, self._count_thought),
            **await self.prompt_fields(output),
        )

    async def _choice(self, output: RequestOutput, index: int, delta: Delta) -> ChatChoice:
        """Returns a choice of a reply: the message, the ids of its tokens and their
        log-probabilities."""
        parsed = await parse_message(self.frontend, self.turn, delta.text)
        content, fields = parsed.content_or_none, self.choice_fields(output, index, delta)
        message = AssistantMessage(role="assistant", content=content, refusal=None)
        if parsed.reasoning:
            message.reasoning_content = message.reasoning = parsed.reasoning
        if parsed.calls:
            message.tool_calls = [_call(c.id, c.name, c.arguments) for c in parsed.calls]
            fields["finish_reason"] = _finish_reason(
                delta.finish_reason or "stop", delta.stop_reason, parsed.calls[-1].arguments
            )
        tokens = delta.logprobs or ()
        logprobs = await formatted(tokens, partial(chat_logprobs, self.names, tokens))
        return ChatChoice(message=message, logprobs=logprobs if tokens else None, **fields)


def _finish_reason(reason: str, stop_reason: StopReason, arguments: str) -> str:
    """Returns OpenAI's reason for the end of a message whose last call has these arguments: a stop
    string of the request may have cut them off."""
    if reason != "stop":
        return reason
    is_cut = isinstance(stop_reason, str) and not are_whole(arguments)
    return reason if is_cut else "tool_calls"


def _call(id: str, name: str, arguments: str, index: int | UnsetType = UNSET) -> ChatCall:
    function = CalledFunction(name=name, arguments=arguments)
    return ChatCall(index=index, id=id, type="function", function=function)
