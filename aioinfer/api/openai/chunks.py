"""What OpenAI's completions and chat completions have in common: the choices of their streams,
their usage, and how a stream ends.

All chunks of a choice are the same but for their text. `ChunkTemplate` makes the constant bytes
around it once, so that a token costs the JSON escape of its text and one join.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import orjson
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from aioinfer.api.context import FINGERPRINT, encode
from aioinfer.api.errors import describe
from aioinfer.api.event_stream import stream_state
from aioinfer.api.generation import (
    DONE,
    ChoiceWriter,
    Dialect,
    PromptProgress,
    Timings,
    data_event,
    timings,
)
from aioinfer.api.protocol import SamplingBody
from aioinfer.engine.output import Delta

if TYPE_CHECKING:
    from aioinfer.engine.output import RequestOutput
    from aioinfer.features.logprobs.planning import TokenLogprob

#: Returns how many of a choice's tokens are thoughts.
ThoughtCount = Callable[[Sequence[int]], int]
#: Makes the JSON of log-probabilities; the number is where the first token's text begins in its
#: choice's text.
LogprobsFormat = Callable[[Sequence["TokenLogprob"], int], Struct]
S = TypeVar("S", bound=SamplingBody)


class PromptTokensDetails(Struct, kw_only=True):
    """The number of the prompt's tokens that were in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, kw_only=True):
    """The number of generated tokens that are reasoning, with its markers."""

    reasoning_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens of a request. Each prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all chunks of a reply have in common; `created` is in Unix seconds, and
    `fingerprint` is the reply's `system_fingerprint`.

    With `include_usage`, chunks carry `"usage": null`, and `usage_event` is to follow the last one;
    with `continuous_usage` as well, they are to carry the usage so far instead (`with_usage`).
    """

    id: str
    object: str
    created: int
    model: str
    include_usage: bool = False
    continuous_usage: bool = False
    fingerprint: str | None = None

    def fields(self) -> dict[str, Any]:
        """Returns these fields."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def head(self) -> bytes:
        """Returns the beginning of an event, up to where the choices go."""
        return b"data: " + orjson.dumps(self.fields())[:-1] + b',"choices":['

    def tail(self) -> bytes:
        """Returns the end of an event, from behind the choices."""
        return b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def usage_event(self, usage: Usage, timings: Timings | None = None) -> bytes:
        """Returns the event with empty choices that reports the usage, and llama.cpp's `timings`
        where they are given."""
        more = b"" if timings is None else b',"timings":' + encode(timings)
        return self.head() + b'],"usage":' + encode(usage) + more + b"}\n\n"

    def progress_event(self, index: int, progress: PromptProgress) -> bytes:
        """Returns the event of choice `index` that has llama.cpp's `prompt_progress` alone."""
        text: dict[str, Any] = {"delta": {}} if "chat" in self.object else {"text": ""}
        choice = {"index": index, **text, "logprobs": None, "finish_reason": None}
        more = b'],"prompt_progress":' + encode(progress)
        return self.head() + orjson.dumps(choice) + more + self.tail()[1:]


class ChunkTemplate:
    """The events of one choice. Made by `for_completion` or `for_chat`."""

    __slots__ = (
        "_after_logprobs",
        "_after_text",
        "_before_text",
        "_fixed_len",
        "_head",
        "_no_logprobs",
        "_tail",
        "_without_text",
    )

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        before_text: bytes,
        after_text: bytes,
        without_text: bytes,
    ):
        """Takes the JSON around a choice's text, and the whole of it in a chunk that has no
        text."""
        self._head = head = envelope.head() + b'{"index":%d,' % index
        self._before_text = head + before_text
        self._after_text = after_text + b',"logprobs":'
        self._tail = b"}" + envelope.tail()
        self._after_logprobs = b',"finish_reason":null' + self._tail
        self._no_logprobs = self._after_text + b"null" + self._after_logprobs
        self._without_text = head + without_text + b',"logprobs":null,"finish_reason":'
        self._fixed_len = len(self._before_text) + len(self._no_logprobs)

    @classmethod
    def for_completion(cls, envelope: Envelope, index: int) -> ChunkTemplate:
        """Returns the template of a choice of `/v1/completions`."""
        return cls(envelope, index, b'"text":', b"", b'"text":""')

    @classmethod
    def for_chat(cls, envelope: Envelope, index: int) -> ChunkTemplate:
        """Returns the template of a choice of `/v1/chat/completions`."""
        return cls(envelope, index, b'"delta":{"content":', b"}", b'"delta":{}')

    def chunk(self, text: str) -> bytes:
        """Returns the event that appends `text`."""
        return b"".join((self._before_text, orjson.dumps(text), self._no_logprobs))

    def framed_chunk(self, text: str) -> bytes:
        """Returns that event in a frame of HTTP's chunked coding (RFC 9112, 7.1)."""
        escaped = orjson.dumps(text)
        return b"%x\r\n%b%b%b\r\n" % (
            self._fixed_len + len(escaped),
            self._before_text,
            escaped,
            self._no_logprobs,
        )

    def chunk_with_logprobs(self, text: str, logprobs: Struct) -> bytes:
        """Returns the event that appends `text`, with the log-probabilities of its tokens."""
        return b"".join(
            (
                self._before_text,
                orjson.dumps(text),
                self._after_text,
                encode(logprobs),
                self._after_logprobs,
            )
        )

    def chunk_with_token_ids(
        self,
        text: str,
        logprobs: Struct | None,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int] | None,
    ) -> bytes:
        """Returns the event that appends `text`, with the ids of its tokens, and with the ids of
        the prompt's tokens where they are given (vLLM's fields)."""
        ids: dict[str, Any] = {"token_ids": token_ids}
        if prompt_token_ids is not None:
            ids["prompt_token_ids"] = prompt_token_ids
        return b"".join(
            (
                self._before_text,
                orjson.dumps(text),
                self._after_text,
                encode(logprobs),
                b",",
                orjson.dumps(ids)[1:-1],
                self._after_logprobs,
            )
        )

    def chunk_with_delta(self, delta: Struct, fields: Mapping[str, Any]) -> bytes:
        """Returns the event of a chat that appends `delta` to the message. `fields` are further
        ones of the choice, such as the log-probabilities of the tokens."""
        return b"".join(
            (
                self._head,
                b'"delta":',
                encode(delta),
                b",",
                encode({"logprobs": None, **fields})[1:-1],
                self._after_logprobs,
            )
        )

    def finish(self, reason: str, stop_reason: int | str | None) -> bytes:
        """Returns the choice's last event.

        `stop_reason` (vLLM's field) is the token id or string that ended the text.
        """
        return b"".join(
            (
                self._without_text,
                orjson.dumps(reason),
                b',"stop_reason":',
                orjson.dumps(stop_reason),
                self._tail,
            )
        )


def with_usage(events: bytes, usage: Usage) -> bytes:
    """Returns events of an envelope with `include_usage`, with this usage in place of null."""
    # no text can hold the end of an event: JSON escapes line ends
    return events.replace(b'],"usage":null}\n\n', b'],"usage":' + encode(usage) + b"}\n\n")


def role_event(
    envelope: Envelope, index: int, prompt_token_ids: Sequence[int] | None = None
) -> bytes:
    """Returns the event that opens a choice of a chat: it names the role, with empty content, and
    the ids of the prompt where they are given (vLLM's field)."""
    choice = (
        b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        % index
    )
    if prompt_token_ids is None:
        return envelope.head() + choice + envelope.tail()
    ids = b'],"prompt_token_ids":' + orjson.dumps(prompt_token_ids)
    return envelope.head() + choice + ids + envelope.tail()[1:]


class ChunkDialect(Dialect[S]):
    """The words of completions and chat completions: the part that they have in common.

    Attributes:
        chunk_object: the `object` of a stream's chunks.
        envelope: of the reply.
        names: gives the tokens' texts in log-probabilities; None where they name ids.
    """

    chunk_object: ClassVar[str]

    def __init__(self, request: web.Request, body: S):
        super().__init__(request, body)
        self.envelope = Envelope(
            self.id,
            self.chunk_object,
            stream_state(request).created,
            self.frontend.config.served_model_names[0],
            body.include_usage,
            body.include_usage and body.continuous_usage,
            request.app[FINGERPRINT],
        )
        self.names = None if body.return_tokens_as_token_ids else self.frontend.tokenizer
        self._writers: list[ChunkWriter] = []
        self._count_thought: ThoughtCount | None = None
        self._with_timings = False

    def progress(self, output: RequestOutput, index: int, news: PromptProgress) -> bytes:
        """See `Dialect.progress`."""
        return self.envelope.progress_event(index, news)

    async def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Returns the usage, if the client wants it, and `[DONE]`."""
        if not self.envelope.include_usage:
            return DONE
        num_tokens = sum(writer.num_tokens for writer in self._writers)
        whole = usage(outputs, num_tokens, self._count_thought)
        times = timings(outputs[0], 0, num_tokens) if self._with_timings else None
        return self.envelope.usage_event(whole, times) + DONE

    def failure(self, error: Exception) -> bytes:
        """Returns an error event and `[DONE]`, for which some clients wait."""
        return data_event(describe(error)[1]) + DONE


class ChunkWriter(ChoiceWriter):
    """Writes a choice in chunks."""

    def __init__(
        self,
        template: ChunkTemplate,
        format_logprobs: LogprobsFormat,
        opening: bytes = b"",
        *,
        returns_token_ids: bool = False,
        usage_of: RequestOutput | None = None,
        record: Delta | None = None,
    ):
        """Makes the writer of one choice.

        Args:
            template: the constant parts of its events.
            format_logprobs: makes the JSON of log-probabilities.
            opening: events that go out with the first delta.
            returns_token_ids: whether events hold the ids of their tokens.
            usage_of: the output whose usage so far each event has; None where none has.
            record: is merged with all that comes, where the reply is to be stored.
        """
        self._template = template
        self._format_logprobs = format_logprobs
        self._opening = opening
        self._returns_token_ids = returns_token_ids
        self._usage_of = usage_of
        self._record = record

    def events(self, delta: Delta) -> bytes:
        """See `ChoiceWriter.events`."""
        self.num_tokens += len(delta.token_ids)
        if self._record is not None:
            self._record.merge(delta)
        data, self._opening = self._opening, b""
        data += self._chunks(delta)
        if self._usage_of is not None:
            data = with_usage(data, usage([self._usage_of], self.num_tokens))
        return data

    def _chunks(self, delta: Delta) -> bytes:
        """Returns the chunks of a delta."""
        raise NotImplementedError


class TextWriter(ChunkWriter):
    """Writes a choice whose text goes out as it is. A token whose text is held back has an event
    too, so that clients can count tokens."""

    def __init__(self, *args: Any, prompt_token_ids: Sequence[int] | None = None, **options: Any):
        """`prompt_token_ids` is the prompt as the first event returns it, beside the ids of its
        tokens. See `ChunkWriter` for the rest."""
        super().__init__(*args, **options)
        self._prompt_token_ids = prompt_token_ids
        self._text_offset = 0  # in the choice's text, of the next delta
        others = self._returns_token_ids, self._usage_of is not None, self._record is not None
        self._can_be_plain = not any(others)
        #: Whether the template makes the next token's event out of its text alone.
        self._is_plain = False

    def frame(
        self, text: str, token: int, reason: str | None, stop_reason: int | str | None
    ) -> bytes:
        """See `ChoiceWriter.frame`."""
        if self._is_plain and reason is None:
            self.num_tokens += 1
            return self._template.framed_chunk(text)
        return super().frame(text, token, reason, stop_reason)

    def _chunks(self, delta: Delta) -> bytes:
        self._is_plain = self._can_be_plain  # the opening is written
        data, text, found = b"", delta.text, None
        if delta.logprobs:
            found = self._format_logprobs(delta.logprobs, self._text_offset)
        self._text_offset += len(text)
        if self._returns_token_ids:
            prompt, self._prompt_token_ids = self._prompt_token_ids, None
            data = self._template.chunk_with_token_ids(text, found, delta.token_ids, prompt)
        elif found is not None:
            data = self._template.chunk_with_logprobs(text, found)
        elif text or delta.finish_reason is None:
            data = self._template.chunk(text)
        if delta.finish_reason is not None:
            data += self._template.finish(delta.finish_reason, delta.stop_reason)
        return data


def usage(
    outputs: Sequence[RequestOutput],
    completion_tokens: int,
    count_thought: ThoughtCount | None = None,
) -> Usage:
    """Returns the usage of outputs. With `count_thought` it says how many tokens were reasoning."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    found = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
    if count_thought is not None:
        thoughts = sum(count_thought(ids) for output in outputs for ids in output.generated())
        # a token behind a stop string was generated and not sent
        found.completion_tokens_details = CompletionTokensDetails(
            reasoning_tokens=min(thoughts, completion_tokens)
        )
    return found
