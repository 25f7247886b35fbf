"""How a request's generations reach the client: as a stream of events or as one reply.

Completions and chat completions share this module. A request may hold several prompts (each a
`Generation`) with n choices each; choice number = prompt number · n + index. Whatever ends a
handler, `submitted` gives up what still runs: handlers are cancelled when their client goes away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from aioinfer.api.access import request_id
from aioinfer.api.admission import ADMISSION, deadline_of
from aioinfer.api.context import FRONTEND
from aioinfer.api.errors import describe
from aioinfer.api.sse import DONE, STREAM_HEADERS, ChunkTemplate, Envelope, error_event
from aioinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aioinfer.engine.output import Delta, Generation, TokenLogprob

T = TypeVar("T")
#: Makes the JSON of log-probabilities; the number is where the first token's text begins in its
#: choice's text.
LogprobsFormat = Callable[[Sequence["TokenLogprob"], int], dict[str, Any]]


def new_envelope(request: web.Request, prefix: str, kind: str, *, include_usage: bool) -> Envelope:
    """Returns what all parts of a reply share; its id is the request's behind a prefix."""
    name = request.app[FRONTEND].config.served_model_names[0]
    return Envelope(f"{prefix}-{request_id(request)}", kind, int(time.time()), name, include_usage)


@asynccontextmanager
async def submitted(
    request: web.Request,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    name: str,
    priority: int,
) -> AsyncIterator[list[Generation]]:
    """Queues a generation for each prompt (token ids), and gives up those that are unfinished at
    the end of the block.

    At the request's deadline they end with an error. Raises what `Frontend.submit` does, and
    `OverloadedError` if they are not all to be taken on.
    """
    frontend = request.app[FRONTEND]
    generations: list[Generation] = []
    call_off = None
    try:
        with request.app[ADMISSION].reserve(prompts, params.n) as places:
            for index, prompt in enumerate(prompts):
                generations.append(
                    await frontend.submit(
                        prompt, params, priority=priority, request_id=f"{name}-{index}"
                    )
                )
                places.use(len(prompt), params.n)
        call_off = deadline_of(request).hand_over(generations)
        yield generations
    finally:
        if call_off is not None:
            call_off()
        for generation in generations:
            generation.abort()


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
    ):
        """Makes the events of one choice.

        Args:
            template: the constant parts of its events.
            opening: events that go out with the first delta.
            format_logprobs: makes the JSON of log-probabilities.
            returns_token_ids: whether events hold the ids of their tokens.
            prompt_token_ids: what the first event says that the prompt is, under
                `returns_token_ids`.
        """
        self.returns_token_ids = returns_token_ids
        self._prompt_token_ids = prompt_token_ids
        self._template = template
        self._opening = opening
        self._format_logprobs = format_logprobs
        self._text_offset = 0

    def events(self, delta: Delta) -> bytes:
        """Returns the events that a delta causes.

        A token whose text is held back has one too: clients see that it was made.
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
    7.1) are written to the transport. While more than a little waits to be sent, or the handler
    itself writes, tokens are turned down: they merge in the queue.
    """

    _MOST_WAITING = 32 * 1024  # bytes

    def __init__(self, transport: asyncio.Transport, choices: Sequence[ChoiceEvents]):
        self.num_tokens = 0
        self.handler_writes = False
        self._transport = transport
        self._choices = choices

    def take(
        self, index: int, text: str, reason: str | None, stop_reason: int | str | None
    ) -> bool:
        """See `Sink.take`."""
        transport = self._transport
        if self.handler_writes or transport.get_write_buffer_size() > self._MOST_WAITING:
            return False
        self.num_tokens += 1
        if not transport.is_closing():  # else the handler is about to be cancelled
            transport.write(self._choices[index].token_frame(text, reason, stop_reason))
        return True


async def _send(
    request: web.Request,
    response: web.StreamResponse,
    generation: Generation,
    choices: Sequence[ChoiceEvents],
) -> int:
    """Sends the events of a generation; returns the number of its tokens.

    The first ones go the ordinary way, behind the headers.
    """
    sink: DirectSink | None = None
    num_tokens = 0
    async for delta in generation:
        num_tokens += len(delta.token_ids)
        if sink is not None:
            sink.handler_writes = True
        await response.write(choices[delta.index].events(delta))
        if sink is not None:
            sink.handler_writes = False
        elif (
            response.headers.get("Transfer-Encoding") == "chunked"
            and request.transport is not None
            and not choices[0].returns_token_ids  # a sink is not told the ids
        ):
            sink = DirectSink(request.transport, choices)
            generation.attach(sink)
    return num_tokens + (sink.num_tokens if sink is not None else 0)


async def stream(
    request: web.Request,
    envelope: Envelope,
    generations: Sequence[Generation],
    choices: Sequence[Sequence[ChoiceEvents]],
) -> web.StreamResponse:
    """Sends the events of generations as their deltas come; `choices[i]` are those of
    `generations[i]`.

    A failure ends the stream with an error event, without `[DONE]`.
    """
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    try:
        num_tokens = await together(
            [_send(request, response, *pair) for pair in zip(generations, choices, strict=True)]
        )
        end = (
            envelope.usage_event(usage(generations, sum(num_tokens)))
            if envelope.include_usage
            else b""
        )
        await response.write(end + DONE)
    except ConnectionError:  # the client is gone, which is not worth a line in the log
        raise
    except Exception as error:
        await response.write(error_event(describe(error)[1]))
    return response


@dataclass(slots=True)
class Reply:
    """All that was generated: the merged deltas of all choices in order, and the usage."""

    choices: list[Delta]
    usage: dict[str, Any]


async def collect(generations: Sequence[Generation]) -> Reply:
    """Waits for all choices. Raises `EngineDeadError`, `GenerationError`."""
    collected = await together([_collect_one(generation) for generation in generations])
    choices = [choice for group in collected for choice in group]
    return Reply(choices, usage(generations, sum(len(choice.token_ids) for choice in choices)))


async def _collect_one(generation: Generation) -> list[Delta]:
    choices: dict[int, Delta] = {}
    async for delta in generation:
        if delta.index in choices:
            choices[delta.index].merge(delta)
        else:
            choices[delta.index] = delta
    return [choices[index] for index in sorted(choices)]


def usage(generations: Sequence[Generation], completion_tokens: int) -> dict[str, Any]:
    """Returns OpenAI's usage object. Each prompt counts once, whatever n is."""
    prompt_tokens = sum(len(generation.prompt_token_ids) for generation in generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(generation.num_cached_tokens for generation in generations)
        },
    }


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines side by side and returns their results; the first failure cancels the others
    and is raised."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
