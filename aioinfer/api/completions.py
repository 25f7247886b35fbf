"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioinfer.api.admission import ADMISSION, deadline_of
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.delivery import ChoiceEvents, collect, new_envelope, stream, submitted
from aioinfer.api.errors import json_response
from aioinfer.api.logprobs import completion_logprobs
from aioinfer.api.protocol import CompletionRequest
from aioinfer.api.sse import ChunkTemplate, Envelope

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import Delta

#: OpenAI's default of `max_tokens` for completions.
_DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Completes each prompt n times."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, CompletionRequest)
    deadline_of(request).shorten(body.timeout_s)
    prompts = body.prompts()
    # before they are encoded: a rejection must be cheap
    request.app[ADMISSION].check(len(prompts))
    # all are encoded before the first is queued: a wrong one leaves nothing to be aborted
    ids = [
        await frontend.encode(p, body.add_special_tokens is not False) if isinstance(p, str) else p
        for p in prompts
    ]
    room = max(1, frontend.max_model_len - max(map(len, ids)))
    params = frontend.defaults.sampling_params(
        **({"max_tokens": min(_DEFAULT_MAX_TOKENS, room)} | body.sampling_fields())
    )
    echoes = [await _text_of(frontend, p) for p in prompts] if body.echo else [""] * len(prompts)
    envelope = new_envelope(request, "cmpl", "text_completion", include_usage=body.include_usage)
    async with submitted(
        request, ids, params, name=envelope.id, priority=body.priority or 0
    ) as outputs:
        if body.stream:
            choices = [
                _stream_choices(frontend, envelope, prompt, params.n, echo)
                for prompt, echo in enumerate(echoes)
            ]
            return await stream(request, envelope, outputs, choices)
        reply = await collect(outputs)
    echo_of_choice = [echo for echo in echoes for _ in range(params.n)]
    return json_response(
        {
            "id": envelope.id,
            "object": envelope.object,
            "created": envelope.created,
            "model": envelope.model,
            "choices": [
                _choice(frontend, index, delta, echo)
                for index, (delta, echo) in enumerate(
                    zip(reply.choices, echo_of_choice, strict=True)
                )
            ],
            "usage": reply.usage,
        }
    )


async def _text_of(frontend: Frontend, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return await asyncio.to_thread(frontend.tokenizer.decode, prompt, False)


def _stream_choices(
    frontend: Frontend, envelope: Envelope, prompt: int, n: int, echo: str
) -> list[ChoiceEvents]:
    """Returns the events of a prompt's n choices."""
    choices = []
    for index in range(prompt * n, prompt * n + n):
        template = ChunkTemplate.for_completion(envelope, index)
        opening = template.chunk(echo) if echo else b""
        choices.append(
            ChoiceEvents(template, opening, partial(completion_logprobs, frontend.tokenizer))
        )
    return choices


def _choice(frontend: Frontend, index: int, delta: Delta, echo: str) -> dict[str, Any]:
    return {
        "index": index,
        "text": echo + delta.text,
        "logprobs": completion_logprobs(frontend.tokenizer, delta.logprobs, 0)
        if delta.logprobs
        else None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
