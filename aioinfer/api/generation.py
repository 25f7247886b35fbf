"""What a body becomes in every API, and how its reply is written: `Generation` and `Dialect`.

`delivery.answer` handles all requests by the `Dialect` of their API: `Dialect.decode` makes a
`Generation` of the body, its prompts are submitted, and the deltas of the sequences are streamed or
collected. A reply has one choice for each sequence of each prompt, numbered through: choice number
= prompt number · n + number of the sequence. OpenAI calls them choices; the other APIs have one,
and call it a message, or have numbered replies.

The words of an API are three: a `ChoiceWriter` turns what comes of a choice into bytes, `Dialect`
has the bytes between and behind the choices, and `Dialect.whole` is a reply in one piece. Replies
and events are msgspec structs, so that `/openapi.json` describes what is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar

from aiohttp import web
from msgspec import Struct

from aioinfer.api.context import STREAM_HEADERS, encode, frontend_of
from aioinfer.api.errors import error_event, json_response, local_path
from aioinfer.api.http.logs import request_id
from aioinfer.api.logprobs import are_many, scored_token
from aioinfer.api.protocol import GenerationBody, PromptsBody
from aioinfer.engine.chat_turn import SHORT_TEXT, Turn, make_parser, make_turn
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import Delta, RequestOutput, StopReason
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.message_blocks import Block, BlockChange, BlockKind, Blocks
from aioinfer.text.message_parser import ToolUse


@dataclass(frozen=True, slots=True)
class Generation:
    """Prompts that are to be continued, and for whom.

    Attributes:
        name: the id of the reply, with which the ids of the engine's requests begin.
        prompts: token ids of each; an engine request is made for each prompt.
        params: the sampling parameters, of all prompts.
        streams: whether the client reads the output while it comes.
        priority: the one that the body names.
        cache_salt: divides the prefix cache; None is for everyone.
        retain_s: for how long the prefix cache keeps the prompts before others, in seconds.
        second_texts: `SamplingParams.second_text` of each prompt; empty: 0 of all.
    """

    name: str
    prompts: Sequence[list[int]]
    params: SamplingParams
    streams: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    retain_s: float = 0.0
    second_texts: Sequence[int] = ()

    def params_of(self, prompt: int) -> SamplingParams:
        """Returns the parameters of a prompt, by its number."""
        second = self.second_texts[prompt] if self.second_texts else 0
        return replace(self.params, second_text=second) if second else self.params


class ChoiceWriter:
    """Writes one choice of a stream as its tokens come.

    Attributes:
        num_tokens: tokens that have come.
    """

    num_tokens = 0

    async def open(self) -> None:
        """Prepares what is known with the first log-probabilities, before they are written."""

    def progress(self) -> bytes:
        """Returns the event that reports how much of the prompt is computed, where a request asks
        for that and there is news; elsewhere nothing."""
        return b""

    def events(self, delta: Delta) -> bytes:
        """Returns the events of a delta of the sequence; empty bytes where its text is held
        back."""
        raise NotImplementedError

    def frame(self, text: str, token: int, reason: str | None, stop_reason: StopReason) -> bytes:
        """Returns the events of one token without log-probabilities, in a frame of HTTP's chunked
        coding (RFC 9112, 7.1)."""
        data = self.events(Delta(0, text, [token], None, reason, stop_reason))
        # a frame without data would end the body
        return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


P = TypeVar("P", bound=PromptsBody)


class Dialect(Generic[P]):
    """The words of an API for one reply. The docstring of a subclass that `routes` has describes
    its endpoint.

    Attributes:
        generates: whether it needs a model that generates text.
        body_type: the type of its bodies.
        reply_type: the type of its replies in one piece.
        event_types: the types of the events of a stream, but for a failure.
        text_field: the field that a model without a tokenizer cannot read; None where the prompt
            may be token ids.
        id_prefix: of its replies' ids.
        content_type: of a stream.
        request, body, frontend: what is answered, and the model that answers.
        variant: of the model, if the body names one.
        model_name: the name of the model in replies.
        id: of the reply, with which the ids of the engine's requests begin.
    """

    generates: ClassVar[bool] = True
    body_type: ClassVar[type[PromptsBody]]
    reply_type: ClassVar[Any]
    event_types: ClassVar[Sequence[type[Struct]]] = ()
    text_field: ClassVar[str | None] = "messages"
    id_prefix: ClassVar[str]
    content_type = STREAM_HEADERS["Content-Type"]

    def __init__(self, request: web.Request, body: P):
        self.request, self.body = request, body
        self.frontend = frontend_of(request)
        self.variant = variant = self.frontend.variants.find(body.model)
        names = self.frontend.config.served_model_names
        self.model_name = names[0] if variant is None else variant.name
        self.id = self.id_prefix + request_id(request)

    @property
    def field_names(self) -> Mapping[str, str]:
        """The body's fields by the names that the engine knows, where they have other names."""
        body = self.body
        given = body.sampling_names.items()
        names = {name: field for field, name in given if getattr(body, field) is not None}
        return names | {"prompt": self.text_field or "prompt"}

    async def decode(self) -> Generation | web.StreamResponse:
        """Returns what is to be computed for the body; or the reply, where there is nothing to be
        computed now. Raises `RequestError`."""
        raise NotImplementedError

    def generation(self, prompts: Sequence[list[int]], params: SamplingParams) -> Generation:
        """Returns the generation of prompts (token ids) for the body."""
        if self.variant is not None:
            params = self.variant.asked_by(params)
        return Generation(self.id, prompts, params, priority=self.body.priority)

    def choice(self, output: RequestOutput, index: int) -> ChoiceWriter:
        """Returns the writer of choice `index`, which is a sequence of an output."""
        raise NotImplementedError

    async def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Returns the events behind all choices. The client does not know yet that it has all."""
        return b""

    def failure(self, error: Exception) -> bytes:
        """Returns the events that end a stream in which something failed."""
        return error_event(error, local_path(self.request))

    async def whole(self, outputs: Sequence[RequestOutput], choices: Sequence[Delta]) -> Any:
        """Returns the reply in one piece: `choices` has all of each choice in one delta."""
        raise NotImplementedError

    async def respond(
        self, outputs: Sequence[RequestOutput], choices: Sequence[Delta]
    ) -> web.StreamResponse:
        """Sends or returns the reply in one piece."""
        return json_response(await self.whole(outputs, choices))


B = TypeVar("B", bound=GenerationBody)


class TextDialect(Dialect[B]):
    """The words of an API whose reply is generated text.

    Attributes:
        turn: of a conversation, once it is decoded.
    """

    body_type: ClassVar[type[GenerationBody]]
    turn: Turn

    @property
    def thought_budget(self) -> int | None:
        """The maximum length of a thought in tokens, None for any."""
        return None

    @classmethod
    async def encode(cls, frontend: Frontend, body: B, use: ToolUse) -> list[list[int]]:
        """Returns the token ids of a body's prompts; `use` has its tools. Raises `RequestError`."""
        raise NotImplementedError

    async def prompt(self, use: ToolUse) -> list[int]:
        """Returns the token ids of a conversation."""
        (prompt,) = await self.encode(self.frontend, self.body, use)
        return prompt

    async def decode(self) -> Generation | web.StreamResponse:
        """See `Dialect.decode`; by default the answer to a conversation is generated."""
        body, frontend, use = self.body, self.frontend, self.body.tool_use()
        fields, prompt = body.sampling_fields(), await self.prompt(use)
        self.turn = await make_turn(
            frontend,
            prompt,
            frontend.defaults.sampling_params(**fields),
            use,
            shows_thoughts=body.shows_thoughts,
            thought_budget=self.thought_budget,
        )
        return self.generation([prompt], self.turn.params)

    def generation(self, prompts: Sequence[list[int]], params: SamplingParams) -> Generation:
        """See `Dialect.generation`."""
        found, body = super().generation(prompts, params), self.body
        return replace(
            found, streams=body.streams, cache_salt=body.cache_salt, retain_s=body.retain_s()
        )


class MessageDialect(TextDialect[B]):
    """The words of an API whose reply is one message in blocks: Anthropic's, Ollama's, Responses.
    OpenAI's chat has none: its choices have texts and calls side by side (`chat.ChatWriter`).

    Attributes:
        blocks: of the message.
        output: of the engine, once the prompt is submitted.
        ended_by: the finish reason and the stop reason, before the last block ends.
    """

    output: RequestOutput
    ended_by: tuple[str, StopReason] | None = None

    def __init__(self, request: web.Request, body: B):
        super().__init__(request, body)
        self.blocks = Blocks(self.new_id)

    def new_id(self, kind: BlockKind) -> str:
        """Returns the id of a new block."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """Returns the events before the first block."""
        return b""

    def change(self, kind: str, block: Block, text: str) -> bytes:
        """Returns the events of a `BlockChange`."""
        raise NotImplementedError

    def closing(self, reason: str, stop_reason: StopReason, num_tokens: int) -> bytes:
        """Returns the events behind the last block."""
        raise NotImplementedError

    def message(self, reason: str, stop_reason: StopReason, num_tokens: int) -> Any:
        """Returns the reply in one piece, a struct, when all blocks are there."""
        raise NotImplementedError

    def choice(self, output: RequestOutput, index: int) -> BlockWriter:
        """See `Dialect.choice`."""
        self.output = output
        return BlockWriter(self)

    async def whole(self, outputs: Sequence[RequestOutput], choices: Sequence[Delta]) -> Any:
        """See `Dialect.whole`."""
        (self.output,), (delta,) = outputs, choices
        writer = BlockWriter(self)
        if len(delta.text) <= SHORT_TEXT and not are_many(delta.logprobs or ()):
            writer.read(delta)
        else:
            await asyncio.to_thread(writer.read, delta)
        return self.message(delta.finish_reason or "stop", delta.stop_reason, len(delta.token_ids))


class BlockWriter(ChoiceWriter):
    """Writes a message in blocks. A token whose text is held back has no event."""

    def __init__(self, dialect: MessageDialect[Any]):
        self._dialect, self._blocks = dialect, dialect.blocks
        self._tokenizer = dialect.frontend.tokenizer
        self._parser = make_parser(dialect.frontend, dialect.turn)
        self._is_open = False

    def events(self, delta: Delta) -> bytes:
        """See `ChoiceWriter.events`."""
        self.num_tokens += len(delta.token_ids)
        dialect, reason, parts = self._dialect, delta.finish_reason, []
        if not self._is_open:
            self._is_open = True
            parts.append(dialect.opening())
        # a change at a time: the next one changes the block
        parts += [dialect.change(*change) for change in self._changes(delta)]
        if reason is not None:
            dialect.ended_by = reason, delta.stop_reason
            last = chain(self._blocks.take(self._parser.flush()), self._blocks.end())
            parts += [dialect.change(*change) for change in last]
            parts.append(dialect.closing(reason, delta.stop_reason, self.num_tokens))
        return b"".join(parts)

    def read(self, delta: Delta) -> None:
        """Reads a whole message, of which nothing is written."""
        self._dialect.ended_by = delta.finish_reason or "stop", delta.stop_reason
        deque(self._changes(delta), maxlen=0)
        deque(self._blocks.take(self._parser.flush()), maxlen=0)

    def _changes(self, delta: Delta) -> Iterator[BlockChange]:
        if not delta.logprobs:
            yield from self._blocks.take(self._parser.feed(delta.text))
        for token in delta.logprobs or ():
            entry = scored_token(self._tokenizer, token)
            yield from self._blocks.take(self._parser.feed(token.text), entry)


def data_event(event: Struct) -> bytes:
    """Returns an event without a name."""
    return b"data: " + encode(event) + b"\n\n"


def named_event(event: Struct) -> bytes:
    """Returns an event whose name is its `type`, the tag of the struct."""
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), encode(event))


class Timings(Struct, kw_only=True):
    """llama.cpp's `timings`: of the tokens of a prompt that were not in the prefix cache, and of
    the generated ones, how many there are and how fast they came; `cache_n` tokens were in the
    cache."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


def timings(output: RequestOutput, sequence: int, num_tokens: int) -> Timings:
    """Returns the times of a sequence of an output that has `num_tokens` tokens by now."""
    times, cached = output.sequences[sequence].times, output.num_cached_tokens
    prompt_ms = predicted_ms = 0.0
    if times is not None and times.first_token:
        prompt_ms = (times.first_token - times.scheduled) * 1e3
        predicted_ms = max(0.0, times.last_token - times.first_token) * 1e3
    prompt = _speed("prompt", len(output.prompt_token_ids) - cached, prompt_ms)
    return Timings(cache_n=cached, **prompt, **_speed("predicted", num_tokens, predicted_ms))


def _speed(of: str, count: int, ms: float) -> dict[str, Any]:
    """Returns the fields of `Timings` of so many tokens, which took so many milliseconds."""
    return {
        f"{of}_n": count,
        f"{of}_ms": ms,
        f"{of}_per_token_ms": ms / count if count else 0.0,
        f"{of}_per_second": count * 1e3 / ms if ms else 0.0,
    }


class PromptProgress(Struct, kw_only=True):
    """llama.cpp's `prompt_progress`: how many tokens the prompt has, how many of them were in the
    prefix cache, how many are computed (the cached ones included), and the milliseconds since its
    first step."""

    total: int
    cache: int
    processed: int
    time_ms: float


def prompt_progress(output: RequestOutput, num_reported: int) -> PromptProgress | None:
    """Returns the progress of an output's prompt, of which so many computed tokens were reported;
    None if it is not wanted or nothing is new."""
    progress, times = output.prompt_progress, output.sequences[0].times
    if progress is None or progress.num_computed <= num_reported:
        return None
    began = times.scheduled if times is not None else 0.0
    return PromptProgress(
        total=progress.prompt_len,
        cache=output.num_cached_tokens,
        processed=progress.num_computed,
        time_ms=(time.perf_counter() - began) * 1e3 if began else 0.0,
    )
