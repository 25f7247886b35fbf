"""Delivery of generated text to the client: as a stream of events or as one reply.

All APIs share it. `generation` says what is generated, and the words come from a `Dialect`. However
a handler ends, `submitted` aborts the requests that still run: handlers are cancelled when their
client goes away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from aioinfer.api.admission import DEADLINE, admission_of, admit, flow_of, sharer
from aioinfer.api.context import frontend_of, read_body
from aioinfer.api.errors import json_response, renamed
from aioinfer.api.event_stream import EventStream, event_stream, mark_frame, stream_state
from aioinfer.api.generation import ChoiceWriter, Dialect, Generation, TextDialect
from aioinfer.api.http.limits import ACCOUNT, TokenCharge
from aioinfer.api.http.logs import RECORD
from aioinfer.api.logprobs import formatted
from aioinfer.engine.output import RequestOutput, StopReason, collect
from aioinfer.sampling_params import SamplingParams
from aioinfer.tasks import together

D = TypeVar("D", bound=Dialect[Any])
#: Prompts of a request that are submitted before other work of the event loop gets its turn.
_SUBMITTED_AT_ONCE = 16


async def answer(request: web.Request, kind: type[Dialect[Any]]) -> web.StreamResponse:
    """Answers a request in a dialect with what is generated for its body.

    Raises what `read_body`, `admit`, `submitted` and `collect` do.
    """
    body = await read_body(request, kind.body_type)
    if kind.generates:
        frontend_of(request).check_generates()
    with _admitted(request, kind, body) as dialect:
        generation = await dialect.decode()
        if isinstance(generation, web.StreamResponse):
            return generation
        if stream_state(request).wants_offer:
            return await _offer(request, generation)
        async with submitted(request, generation) as outputs:
            if generation.streams:
                return await stream(dialect, outputs)
            choices = await collect(outputs)
        return await dialect.respond(outputs, choices)


async def count_prompt(request: web.Request, kind: type[TextDialect[Any]], body: Any) -> int:
    """Returns the number of tokens of the prompt of a conversation, for which nothing is generated.
    Raises what `admit` and `TextDialect.prompt` do."""
    with _admitted(request, kind, body) as dialect:
        return len(await dialect.prompt(body.tool_use()))


@contextmanager
def _admitted(request: web.Request, kind: type[D], body: Any) -> Iterator[D]:
    """Admits a request, and yields the dialect that answers it: errors in the block name the fields
    of its body. Raises what `admit` does."""
    if kind.text_field is not None:
        frontend_of(request).require_tokenizer(kind.text_field)
    admit(request, body.timeout_s, body.num_prompts)
    dialect = kind(request, body)
    with renamed(dialect.field_names):
        yield dialect


async def _offer(request: web.Request, generation: Generation) -> web.Response:
    """Computes the prompt of a request, and answers with the `Handover` of its KV blocks to a
    gateway; without a body where there are none, or several prompts."""
    if len(generation.prompts) != 1:
        return web.Response(status=204)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    variant = frontend_of(request).variants.of_request(generation.params)
    if variant is not None:
        params = variant.asked_by(params)
    alone = replace(generation, params=params, streams=False, second_texts=())
    async with submitted(request, alone) as outputs:
        await collect(outputs)
    offered = frontend_of(request).offer(outputs[0])
    return web.Response(status=204) if offered is None else json_response(offered)


@asynccontextmanager
async def submitted(
    request: web.Request, generation: Generation
) -> AsyncIterator[list[RequestOutput]]:
    """Submits a request for each prompt, and aborts unfinished requests at the end of the block.

    At the deadline of the HTTP request they end with an error. Raises what `Frontend.submit` does,
    `OverloadedError` if the queue has no room for all of them, and `RateLimitError` if the API key
    has too few tokens left.
    """
    frontend, account = frontend_of(request), request[ACCOUNT]
    prompts, params = generation.prompts, generation.params
    priority = account.priority(generation.priority)
    longest = sum(map(len, prompts)) + len(prompts) * params.n * (params.max_tokens or 0)
    outputs: list[RequestOutput] = []
    record, state = request[RECORD], stream_state(request)
    record.submitted, record.outputs = time.perf_counter(), outputs  # more may follow
    record.served = frontend.config.name
    charge = TokenCharge(account, longest)
    cancel_deadline = None
    try:
        num_sequences = len(prompts) * params.num_sequences
        with admission_of(request).reserve(num_sequences, sharer(request)) as use:
            for index, prompt in enumerate(prompts):
                if index and index % _SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # 0.1 ms are spent on a prompt of a thousand ids
                outputs.append(
                    await frontend.submit(
                        prompt,
                        generation.params_of(index),
                        priority=priority,
                        request_id=f"{generation.name}-{index}",
                        flow=flow_of(request, len(prompts)),
                        cache_salt=generation.cache_salt or "",
                        known=state.known,
                        handover=state.handover if len(prompts) == 1 else None,
                        retain_s=generation.retain_s,
                    )
                )
                use(params.num_sequences)
        cancel_deadline = request[DEADLINE].hand_over(outputs)
        yield outputs
    finally:
        if cancel_deadline is not None:
            cancel_deadline()
        for output in outputs:
            output.abort()
        charge.settle(outputs)


class DirectSink:
    """Writes the events of a stream to its connection from the step loop, while the client keeps
    up.

    What aiohttp does for a write (a coroutine, a task that is woken for each token) costs several
    times what the token costs otherwise. So here the frames of HTTP's chunked coding (RFC 9112,
    7.1) are written to the transport. While `_MAX_BUFFERED` bytes wait to be sent, or the handler
    itself writes, tokens are not accepted: they merge in the queue of the `RequestOutput`.

    Attributes:
        handler_writes: whether the handler is writing, so that tokens must not overtake it.
    """

    _MAX_BUFFERED = 32 * 1024  # bytes

    def __init__(
        self, transport: asyncio.Transport, choices: Sequence[ChoiceWriter], *, is_marked: bool
    ):
        """`choices` write the sequences of one output. With `is_marked`, the events of each token
        are followed by its line (`mark_frame`)."""
        self.handler_writes = False
        self._is_marked, self._transport, self._choices = is_marked, transport, choices

    def push(
        self, index: int, text: str, token: int, reason: str | None, stop_reason: StopReason
    ) -> bool:
        """See `Sink.push`."""
        transport = self._transport
        if self.handler_writes or transport.get_write_buffer_size() > self._MAX_BUFFERED:
            return False
        if not transport.is_closing():  # else the handler is about to be cancelled
            frame = self._choices[index].frame(text, token, reason, stop_reason)
            if self._is_marked:
                frame += mark_frame(index, token, reason, stop_reason)
            transport.write(frame)
        return True


async def _send(
    dialect: Dialect[Any], response: EventStream, output: RequestOutput, number: int
) -> None:
    """Sends the events of the output of a prompt, whose number is given.

    The first ones are written by the handler, behind the headers; then a `DirectSink` is attached.
    """
    sink: DirectSink | None = None
    transport, first = dialect.request.transport, number * output.params.n
    choices = [dialect.choice(output, first + index) for index in range(output.params.n)]
    async for delta in output:
        if progress := choices[0].progress():
            await response.write(progress)
            if not delta.token_ids and delta.finish_reason is None:
                continue
        choice = choices[delta.index]
        if delta.logprobs:
            await choice.open()
        if sink is not None:
            sink.handler_writes = True
        events = await formatted(delta.logprobs or (), partial(choice.events, delta))
        await response.write_delta(delta, events)
        if sink is not None:
            sink.handler_writes = False
        elif response.headers.get("Transfer-Encoding") == "chunked" and transport is not None:
            sink = DirectSink(transport, choices, is_marked=response.is_marked)
            output.attach(sink)


async def stream(dialect: Dialect[Any], outputs: Sequence[RequestOutput]) -> web.StreamResponse:
    """Sends the events of all outputs as their deltas come. A failure ends the stream with the
    dialect's events for it."""
    response = EventStream(dialect.request, outputs, dialect.content_type)
    async with event_stream(dialect.request, response, dialect.failure):
        numbered = enumerate(outputs)
        await together([_send(dialect, response, each, number) for number, each in numbered])
        if end := await dialect.end(outputs):
            await response.write(end)
    return response
