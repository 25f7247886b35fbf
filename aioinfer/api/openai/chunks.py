"""What OpenAI's completions and chat completions have in common: the chunks of their streams, their
usage, and how a stream ends.

Every chunk is a `Chunk`. Most chunks of a choice are the same but for their text: `ChunkWriter` has
the constant bytes around it once, so that a token costs the JSON escape of its text and one join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import orjson
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from aioinfer.api.context import FINGERPRINTS, encode
from aioinfer.api.errors import DONE
from aioinfer.api.event_stream import stream_state
from aioinfer.api.generation import (
    ChoiceWriter,
    PromptProgress,
    TextDialect,
    Timings,
    data_event,
    prompt_progress,
    timings,
)
from aioinfer.api.logprobs import prompt_logprobs
from aioinfer.api.protocol import SamplingBody
from aioinfer.engine.output import FIRST_VERSION, Delta, RequestOutput, StopReason

#: Returns how many of a choice's tokens are thoughts.
ThoughtCount = Callable[[Sequence[int]], int]
S = TypeVar("S", bound=SamplingBody)

#: Stands for the text of a chunk while the bytes around it are looked for.
_GAP = "\0"


class PromptTokensDetails(Struct, kw_only=True):
    """The number of the prompt's tokens that were in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, kw_only=True):
    """The number of generated tokens that are reasoning, with its markers; with a `prediction`, how
    many draft tokens were kept, and how many were not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct, kw_only=True):
    """Tokens of a request. Each prompt counts once, whatever n is. Once the server's weights have
    been updated, it has the version of those that computed the tokens, and of all of them in order,
    oldest first, if they were updated meanwhile."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    weight_versions: Sequence[str] | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    """The fields that all choices have, of replies in one piece and of chunks: the ids of the
    tokens where they are asked for (vLLM's field), and what features of other packages have found.
    The last chunk of a choice has the `finish_reason`, and as the `stop_reason` the token id or
    string that ended the text."""

    index: int
    token_ids: Sequence[int] | UnsetType = UNSET
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    features: dict[str, Any] | UnsetType = UNSET


class Envelope(Struct, kw_only=True):
    """The fields that replies in one piece and chunks have; `created` is in Unix seconds."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: Sequence[Choice] = ()
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET


class Chunk(Envelope, kw_only=True):
    """An event of a stream. Where the client wants the usage, it is null in all chunks but the last
    one, unless each is to have the usage so far."""

    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ChunkDialect(TextDialect[S]):
    """The words of completions and chat completions: the part that they have in common.

    Attributes:
        writer_type: the type of what writes a choice of a stream.
        envelope: the fields that the reply has whatever it is.
        chunk: a chunk without choices.
        names: gives the tokens' texts in log-probabilities; None where they name ids.
        writers: of the choices, in their order.
    """

    event_types: ClassVar[Sequence[type[Chunk]]]
    writer_type: ClassVar[type[ChunkWriter]]

    def __init__(self, request: web.Request, body: S):
        super().__init__(request, body)
        self.envelope: dict[str, Any] = {
            "id": self.id,
            "created": stream_state(request).created,
            "model": self.model_name,
            "system_fingerprint": request.app[FINGERPRINTS][self.frontend.config.name],
        }
        usage = None if body.usage.include_usage else UNSET
        self.chunk = self.event_types[0](usage=usage, **self.envelope)
        self.names = None if body.return_tokens_as_token_ids else self.frontend.tokenizer
        self.writers: list[ChunkWriter] = []
        self._count_thought: ThoughtCount | None = None

    @property
    def with_ids(self) -> bool:
        """Whether events have the ids of their tokens, and the first one those of the prompt."""
        return bool(self.body.return_token_ids)

    async def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Returns what a reply in one piece says of a prompt."""
        scores, num_top = output.prompt_scores, self.body.prompt_logprobs
        return {
            "prompt_token_ids": output.prompt_token_ids if self.with_ids else UNSET,
            "prompt_logprobs": await prompt_logprobs(self.names, scores, num_top),
        }

    def choice_fields(self, output: RequestOutput, index: int, delta: Delta) -> dict[str, Any]:
        """Returns the fields of `Choice` of choice `index` of a reply, all of which is in a
        delta."""
        return {
            "index": index,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self.with_ids else UNSET,
            "features": output.features(delta.index) or UNSET,
        }

    def choice(self, output: RequestOutput, index: int) -> ChoiceWriter:
        """See `Dialect.choice`."""
        self.writers.append(self.writer_type(self, output, index))
        return self.writers[-1]

    async def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Returns the usage, if the client wants it, and `[DONE]`."""
        if not self.body.usage.include_usage:
            return DONE
        num_tokens = sum(writer.num_tokens for writer in self.writers)
        whole = usage(outputs, num_tokens, self._count_thought)
        times = timings(outputs[0], 0, num_tokens) if self.body.timings_per_token else UNSET
        return data_event(replace(self.chunk, usage=whole, timings=times)) + DONE


class ChunkWriter(ChoiceWriter):
    """Writes a choice in chunks.

    Attributes:
        empty: the choice in a chunk that adds nothing.
    """

    empty: Choice

    def __init__(self, dialect: ChunkDialect[Any], output: RequestOutput, index: int):
        """Makes the writer of choice `index`, which is one of an output."""
        wanted = dialect.body.usage
        self._names, self._chunk = dialect.names, dialect.chunk
        self._output, self._num_computed = output, 0  # tokens of the prompt, as reported
        ids = output.prompt_token_ids if dialect.with_ids else UNSET
        self._prompt_token_ids: Sequence[int] | UnsetType = ids
        self._with_usage = bool(wanted.include_usage and wanted.continuous_usage_stats)
        self._is_open = False
        #: The bytes around the text of a chunk that has a text alone, and their number, once all
        #: tokens have such chunks.
        self._around: tuple[bytes, bytes, int] | None = None

    @property
    def can_be_plain(self) -> bool:
        """Whether the chunks of all tokens without log-probabilities have a text alone."""
        return self._prompt_token_ids is UNSET and not self._with_usage

    def progress(self) -> bytes:
        """See `ChoiceWriter.progress`."""
        news = prompt_progress(self._output, self._num_computed)
        if news is None:
            return b""
        self._num_computed = news.processed
        return self.event(self.empty, prompt_progress=news)

    def frame(self, text: str, token: int, reason: str | None, stop_reason: StopReason) -> bytes:
        """See `ChoiceWriter.frame`."""
        if self._around is None or reason is not None:
            return super().frame(text, token, reason, stop_reason)
        self.num_tokens += 1
        before, after, length = self._around
        escaped = orjson.dumps(text)
        return b"%x\r\n%b%b%b\r\n" % (length + len(escaped), before, escaped, after)

    def events(self, delta: Delta) -> bytes:
        """See `ChoiceWriter.events`."""
        self.num_tokens += len(delta.token_ids)
        parts: list[bytes] = []
        if not self._is_open:
            self._is_open = True
            parts += self.opening()
            if self.can_be_plain:
                before, after = self.event(self.shown(_GAP)).split(encode(_GAP))
                self._around = before, after, len(before) + len(after)
        parts += [self.event(choice) for choice in self.choices(delta)]
        return b"".join(parts)

    def event(self, choice: Choice, **fields: Any) -> bytes:
        """Returns a chunk of the choice, with further fields of the chunk."""
        if self._with_usage:
            fields["usage"] = usage([self._output], self.num_tokens)
        return data_event(replace(self._chunk, choices=[choice], **fields))

    def opening(self) -> Iterable[bytes]:
        """Returns the events before those of the first delta."""
        return ()

    def choices(self, delta: Delta) -> Iterator[Choice]:
        """Yields the choice as the chunks of a delta have it; by default its text is shown as it
        is."""
        reason, fields = delta.finish_reason, self.fields(delta)
        if fields or delta.text or reason is None:
            yield replace(self.shown(delta.text), **fields)
        if reason is not None:
            yield replace(self.empty, finish_reason=reason, stop_reason=delta.stop_reason)

    def shown(self, text: str) -> Choice:
        """Returns the choice with a text that is appended."""
        raise NotImplementedError

    def logprobs(self, delta: Delta) -> Struct:
        """Returns the log-probabilities of a delta's tokens."""
        raise NotImplementedError

    def fields(self, delta: Delta) -> dict[str, Any]:
        """Returns what a chunk shows of a delta's tokens beside their text."""
        fields: dict[str, Any] = {}
        if delta.logprobs:
            fields["logprobs"] = self.logprobs(delta)
        if self._prompt_token_ids is not UNSET:
            fields["token_ids"] = delta.token_ids
        return fields


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
    versions = list(dict.fromkeys(each for output in outputs for each in output.weight_versions))
    if versions not in ([], [FIRST_VERSION]):
        found.weight_version = versions[-1]
    if len(versions) > 1:
        found.weight_versions = versions
    counts = [each for output in outputs if (each := output.predicted_counts) is not None]
    if count_thought is None and not counts:
        return found
    details = CompletionTokensDetails(reasoning_tokens=0)
    if count_thought is not None:
        thoughts = sum(count_thought(ids) for output in outputs for ids in output.generated())
        # a token behind a stop string was generated and not sent
        details.reasoning_tokens = min(thoughts, completion_tokens)
    if counts:
        details.accepted_prediction_tokens = sum(kept for kept, _ in counts)
        details.rejected_prediction_tokens = sum(dropped for _, dropped in counts)
    found.completion_tokens_details = details
    return found
