"""What OpenAI's completions and chat completions have in common: the choices of their streams,
their usage, and how a stream ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioinfer.api.context import FINGERPRINT, FRONTEND
from aioinfer.api.errors import describe
from aioinfer.api.event_stream import stream_state
from aioinfer.api.generation import ChoiceWriter, Dialect
from aioinfer.api.http.access import request_id
from aioinfer.api.protocol import SamplingBody
from aioinfer.api.sse import (
    DONE,
    ChunkTemplate,
    CompletionTokensDetails,
    Envelope,
    PromptTokensDetails,
    Usage,
    error_event,
    with_usage,
)
from aioinfer.api.timings import timings
from aioinfer.engine.output import Delta

if TYPE_CHECKING:
    from aioinfer.engine.output import RequestOutput
    from aioinfer.features.logprobs.planning import TokenLogprob

#: Returns how many of a choice's tokens are thoughts.
ThoughtCount = Callable[[Sequence[int]], int]
#: Makes the JSON of log-probabilities; the number is where the first token's text begins in its
#: choice's text.
LogprobsFormat = Callable[[Sequence["TokenLogprob"], int], dict[str, Any]]


def new_envelope(request: web.Request, body: SamplingBody, prefix: str, kind: str) -> Envelope:
    """Returns the fields that all parts of a reply have in common; the id is the prefix and the
    request's id."""
    return Envelope(
        f"{prefix}-{request_id(request)}",
        kind,
        stream_state(request).created,
        request.app[FRONTEND].config.served_model_names[0],
        body.include_usage,
        body.include_usage and body.continuous_usage,
        request.app[FINGERPRINT],
    )


class ChunkDialect(Dialect):
    """The words of completions and chat completions: the part that they have in common.

    Attributes:
        envelope: of the reply.
        names: gives the tokens' texts in log-probabilities; None where they name ids.
    """

    def __init__(self, request: web.Request, body: SamplingBody, envelope: Envelope):
        self.envelope = envelope
        self.names = None if body.return_tokens_as_token_ids else request.app[FRONTEND].tokenizer
        self._writers: list[ChunkWriter] = []
        self._count_thought: ThoughtCount | None = None
        self._with_timings = False

    def progress(self, output: RequestOutput, index: int, news: Mapping[str, float]) -> bytes:
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
        return error_event(describe(error)[1]) + DONE


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
    found = usage_of(
        sum(len(output.prompt_token_ids) for output in outputs),
        completion_tokens,
        sum(output.num_cached_tokens for output in outputs),
    )
    if count_thought is not None:
        thoughts = sum(count_thought(ids) for output in outputs for ids in output.generated())
        # a token behind a stop string was generated and not sent
        found.completion_tokens_details = CompletionTokensDetails(
            reasoning_tokens=min(thoughts, completion_tokens)
        )
    return found


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Returns the usage of these numbers."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
