"""Delivery of generated text to the client: as a stream of events or as one reply.

Completions and chat completions share this module. A body may hold several prompts, each a
`RequestOutput` with n sequences. OpenAI calls these choices and numbers them through: choice number
= prompt number · n + index. However a handler ends, `submitted` aborts the requests that still run:
handlers are cancelled when their client goes away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from aioinfer.api.access import request_id
from aioinfer.api.admission import ADMISSION, deadline_of, sharer
from aioinfer.api.context import FINGERPRINT, FRONTEND
from aioinfer.api.errors import describe
from aioinfer.api.event_stream import EventStream, mark_frame, stream_state
from aioinfer.api.limits import ACCOUNT, TokenCharge
from aioinfer.api.logprobs import formatted
from aioinfer.api.prompt_progress import ProgressReader
from aioinfer.api.record import RECORD
from aioinfer.api.sse import DONE, ChunkTemplate, Envelope, error_event, with_usage
from aioinfer.api.timings import timings
from aioinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aioinfer.engine.output import Delta, RequestOutput
    from aioinfer.features.logprobs.planning import TokenLogprob

T = TypeVar("T")
#: Returns how many of a choice's tokens are thoughts.
ThoughtCount = Callable[[Sequence[int]], int]
#: Prompts of a request that are submitted before other work of the event loop gets its turn.
_SUBMITTED_AT_ONCE = 16
#: Makes the JSON of log-probabilities; the number is where the first token's text begins in its
#: choice's text.
LogprobsFormat = Callable[[Sequence["TokenLogprob"], int], dict[str, Any]]


def new_envelope(
    request: web.Request,
    prefix: str,
    kind: str,
    *,
    include_usage: bool,
    continuous_usage: bool = False,
) -> Envelope:
    """Returns the fields that all parts of a reply have in common; the id is the prefix and the
    request's id."""
    return Envelope(
        f"{prefix}-{request_id(request)}",
        kind,
        stream_state(request).created,
        request.app[FRONTEND].config.served_model_names[0],
        include_usage,
        include_usage and continuous_usage,
        request.app[FINGERPRINT],
    )


@asynccontextmanager
async def submitted(
    request: web.Request,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    name: str,
    priority: int | None,
    cache_salt: str | None = None,
) -> AsyncIterator[list[RequestOutput]]:
    """Submits a request for each prompt (token ids), and aborts unfinished requests at the end of
    the block.

    At the deadline of the HTTP request they end with an error. Raises what `Frontend.submit` does,
    `OverloadedError` if the queue has no room for all of them, and `RateLimitError` if the API key
    has too few tokens left.
    """
    frontend, account = request.app[FRONTEND], request[ACCOUNT]
    by_priority = frontend.config.scheduler.policy == "priority"
    priority = account.priority(priority, has_priorities=by_priority)
    longest = sum(map(len, prompts)) + len(prompts) * params.n * (params.max_tokens or 0)
    outputs: list[RequestOutput] = []
    await _note(request, prompts, outputs)
    charge = TokenCharge(account, longest)
    cancel_deadline = None
    try:
        with request.app[ADMISSION].reserve(
            prompts, params.num_sequences, sharer(request)
        ) as places:
            for index, prompt in enumerate(prompts):
                if index and index % _SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # 0.1 ms are spent on a prompt of a thousand ids
                outputs.append(
                    await frontend.submit(
                        prompt,
                        params,
                        priority=priority,
                        request_id=f"{name}-{index}",
                        flow=account.flow,
                        cache_salt=cache_salt or "",
                        known=stream_state(request).known,
                    )
                )
                places.use(len(prompt), params.num_sequences)
        cancel_deadline = deadline_of(request).hand_over(outputs)
        yield outputs
    finally:
        if cancel_deadline is not None:
            cancel_deadline()
        for output in outputs:
            output.abort()
        charge.settle(outputs)


async def _note(
    request: web.Request, prompts: Sequence[list[int]], outputs: Sequence[RequestOutput]
) -> None:
    """Notes in a request's record the list of its outputs, which may grow."""
    record = request[RECORD]
    record.submitted, record.outputs = time.perf_counter(), outputs
    frontend = request.app[FRONTEND]
    if frontend.config.logging.prompts and (tokenizer := frontend.tokenizer) is not None:
        record.prompts = await asyncio.to_thread(
            lambda: [tokenizer.decode(prompt, False) for prompt in prompts]
        )


class ChoiceEvents:
    """The events of one choice as its deltas come."""

    def __init__(
        self,
        template: ChunkTemplate,
        opening: bytes,
        format_logprobs: LogprobsFormat,
        *,
        returns_token_ids: bool = False,
        prompt_token_ids: Sequence[int] | None = None,
        echo: str = "",
        echoed: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    ):
        """Makes the events of one choice.

        Args:
            template: the constant parts of its events.
            opening: events that go out with the first delta.
            format_logprobs: makes the JSON of log-probabilities.
            returns_token_ids: whether events hold the ids of their tokens.
            prompt_token_ids: the prompt as the first event returns it, under
                `returns_token_ids`.
            echo, echoed: the text that the choice begins with, and what returns its
                log-probabilities, which are known with the first delta.
        """
        self.returns_token_ids = returns_token_ids
        self._prompt_token_ids = prompt_token_ids
        self._template = template
        self._opening = opening
        self._format_logprobs = format_logprobs
        self._text_offset = 0
        self._echo, self._echoed = echo, echoed

    async def open(self) -> None:
        """Adds the echo with its log-probabilities to the opening, before the first delta's events
        are made."""
        if self._echoed is not None:
            logprobs, self._echoed = await self._echoed(), None
            self._opening += self._template.chunk_with_logprobs(self._echo, logprobs)
            self._text_offset = len(self._echo)

    def events(self, delta: Delta) -> bytes:
        """Returns the events that a delta causes.

        A token whose text is held back has one too, so that clients can count tokens.
        """
        data, self._opening = self._opening, b""
        if self.returns_token_ids:
            data += self._chunk_with_token_ids(delta)
        elif delta.logprobs:
            data += self._template.chunk_with_logprobs(
                delta.text, self._format_logprobs(delta.logprobs, self._text_offset)
            )
        elif delta.text or delta.finish_reason is None:
            data += self._template.chunk(delta.text)
        self._text_offset += len(delta.text)
        if delta.finish_reason is not None:
            data += self._template.finish(delta.finish_reason, delta.stop_reason)
        return data

    def _chunk_with_token_ids(self, delta: Delta) -> bytes:
        logprobs = (
            self._format_logprobs(delta.logprobs, self._text_offset) if delta.logprobs else None
        )
        prompt, self._prompt_token_ids = self._prompt_token_ids, None
        return self._template.chunk_with_token_ids(delta.text, logprobs, delta.token_ids, prompt)

    def token_frame(self, text: str, reason: str | None, stop_reason: int | str | None) -> bytes:
        """Returns the events of one token without log-probabilities, as `events` does, in a frame
        of HTTP's chunked coding."""
        if reason is None and not self._opening:
            return self._template.framed_chunk(text)
        data, self._opening = self._opening, b""
        if text or reason is None:
            data += self._template.chunk(text)
        if reason is not None:
            data += self._template.finish(reason, stop_reason)
        return b"%x\r\n%b\r\n" % (len(data), data)


class DirectSink:
    """Writes the events of a stream to its connection from the step loop, while the client keeps
    up.

    What aiohttp does for a write (a coroutine, a task that is woken for each token) costs several
    times what the token costs otherwise. So here the frames of HTTP's chunked coding (RFC 9112,
    7.1) are written to the transport. While `_MAX_BUFFERED` bytes wait to be sent, or the handler
    itself writes, tokens are not accepted: they merge in the queue of the `RequestOutput`.

    Attributes:
        num_tokens: tokens that were accepted.
        handler_writes: whether the handler is writing, so that tokens must not overtake it.
    """

    _MAX_BUFFERED = 32 * 1024  # bytes

    def __init__(
        self,
        transport: asyncio.Transport,
        choices: Sequence[ChoiceEvents],
        *,
        is_marked: bool = False,
    ):
        """With `is_marked`, the events of each token are followed by its line (`mark_frame`)."""
        self.num_tokens = 0
        self._is_marked = is_marked
        self.handler_writes = False
        self._transport = transport
        self._choices = choices

    def push(
        self, index: int, text: str, token: int, reason: str | None, stop_reason: int | str | None
    ) -> bool:
        """See `Sink.push`."""
        transport = self._transport
        if self.handler_writes or transport.get_write_buffer_size() > self._MAX_BUFFERED:
            return False
        self.num_tokens += 1
        if not transport.is_closing():  # else the handler is about to be cancelled
            frame = self._choices[index].token_frame(text, reason, stop_reason)
            if self._is_marked:
                frame += mark_frame(index, token, reason, stop_reason)
            transport.write(frame)
        return True


async def _send(
    request: web.Request,
    response: EventStream,
    envelope: Envelope,
    output: RequestOutput,
    choices: Sequence[ChoiceEvents],
    first: int,
) -> int:
    """Sends the events of an output, whose first choice is number `first`, and returns the number
    of its tokens. With `continuous_usage`, each holds the usage of its choice so far.

    The first ones are written by the handler, behind the headers; then a `DirectSink` is attached.
    """
    sink: DirectSink | None = None
    num_tokens = 0
    lengths, progress = [0] * len(choices), ProgressReader(output)
    continuous_usage = envelope.continuous_usage
    async for delta in output:
        if (news := progress.news()) is not None:
            await response.write(envelope.progress_event(first, news))
            if not delta.token_ids and delta.finish_reason is None:
                continue
        num_tokens += len(delta.token_ids)
        if delta.logprobs:
            await choices[delta.index].open()
        events = await formatted(delta.logprobs or (), partial(choices[delta.index].events, delta))
        if continuous_usage:
            lengths[delta.index] += len(delta.token_ids)
            events = with_usage(events, usage([output], lengths[delta.index]))
        if sink is not None:
            sink.handler_writes = True
        await response.write_delta(delta, events)
        if sink is not None:
            sink.handler_writes = False
        elif (
            response.headers.get("Transfer-Encoding") == "chunked"
            and request.transport is not None
            # a sink does not get the ids, nor does it count
            and not choices[0].returns_token_ids
            and not continuous_usage
        ):
            sink = DirectSink(request.transport, choices, is_marked=response.is_marked)
            output.attach(sink)
    return num_tokens + (sink.num_tokens if sink is not None else 0)


async def stream(
    request: web.Request,
    envelope: Envelope,
    outputs: Sequence[RequestOutput],
    choices: Sequence[Sequence[ChoiceEvents]],
    count_thought: ThoughtCount | None = None,
    *,
    with_timings: bool = False,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """Sends the events of all outputs as their deltas come; `choices[i]` make the events of
    `outputs[i]`. `count_thought` is for the usage, which comes `with_timings` of the first choice
    where they are wanted. `before_end` is awaited when all deltas are sent, before the client
    learns that it has all.

    A failure ends the stream with an error event and `[DONE]`, for which some clients wait.
    """
    response = EventStream(request, outputs)
    await response.prepare(request)
    try:
        num_tokens = await together(
            [
                _send(request, response, envelope, output, of_output, number * len(of_output))
                for number, (output, of_output) in enumerate(zip(outputs, choices, strict=True))
            ]
        )
        if before_end is not None:
            await before_end()
        end = b""
        if envelope.include_usage:
            whole = usage(outputs, sum(num_tokens), count_thought)
            times = timings(outputs[0], 0, sum(num_tokens)) if with_timings else None
            end = envelope.usage_event(whole, times)
        await response.write(end + DONE)
    except ConnectionError:  # the client is gone, which is not worth a line in the log
        raise
    except Exception as error:
        await response.write_failure(error, error_event(describe(error)[1]) + DONE)
    return response


@dataclass(slots=True)
class CollectedOutput:
    """The complete generated output: one merged delta for each choice in order, and the usage."""

    choices: list[Delta]
    usage: dict[str, Any]


async def collect(
    outputs: Sequence[RequestOutput], count_thought: ThoughtCount | None = None
) -> CollectedOutput:
    """Waits for all choices of all outputs. `count_thought` is for the usage.

    Raises `EngineDeadError`, `GenerationError`.
    """
    collected = await together([output.collect() for output in outputs])
    choices = [choice for group in collected for choice in group]
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    return CollectedOutput(choices, usage(outputs, num_tokens, count_thought))


def found_features(output: RequestOutput, choice: Delta) -> dict[str, Any]:
    """Returns the field of a choice that has what features of other packages have found for it;
    none if nothing."""
    found = output.features(choice.index)
    return {"features": found} if found else {}


def usage(
    outputs: Sequence[RequestOutput],
    completion_tokens: int,
    count_thought: ThoughtCount | None = None,
) -> dict[str, Any]:
    """Returns OpenAI's usage object. Each prompt counts once, whatever n is. With `count_thought`
    it says how many tokens were reasoning."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached_tokens = sum(output.num_cached_tokens for output in outputs)
    found = usage_of(prompt_tokens, completion_tokens, cached_tokens)
    if count_thought is not None:
        thoughts = sum(count_thought(ids) for output in outputs for ids in output.generated())
        # a token behind a stop string was generated and not sent
        details = {"reasoning_tokens": min(thoughts, completion_tokens)}
        found["completion_tokens_details"] = details
    return found


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Returns OpenAI's usage object of these numbers."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently and returns their results. The first failure cancels the others
    and is raised."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
