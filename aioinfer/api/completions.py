"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioinfer.api.admission import ADMISSION, deadline_of, sharer
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.delivery import ChoiceEvents, collect, new_envelope, stream, submitted
from aioinfer.api.errors import json_response
from aioinfer.api.logprobs import completion_logprobs
from aioinfer.api.prompt_logprobs import echoed_logprobs, prompt_logprobs
from aioinfer.api.protocol import CompletionRequest
from aioinfer.api.sse import ChunkTemplate, Envelope

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import Delta, RequestOutput, TokenLogprob

#: OpenAI's default of `max_tokens` for completions, where neither the configuration nor the model
#: has one.
_DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Completes each prompt n times."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, CompletionRequest)
    deadline_of(request).shorten(body.timeout_s)
    prompts = body.prompts()
    # before they are encoded: a rejection must be cheap
    request.app[ADMISSION].check(len(prompts), flow=sharer(request))
    # all are encoded before the first is queued: a wrong one leaves nothing to be aborted
    ids = [
        await frontend.encode(p, body.add_special_tokens is not False) if isinstance(p, str) else p
        for p in prompts
    ]
    fields = body.sampling_fields()
    has_default = frontend.defaults.max_tokens is not None or "prompt_only" in fields
    if "max_tokens" not in fields and not has_default:
        room = max(1, frontend.max_model_len - max(map(len, ids)))
        fields["max_tokens"] = min(_DEFAULT_MAX_TOKENS, room)
    params = frontend.defaults.sampling_params(**fields)
    echoes = [await _text_of(frontend, p) for p in prompts] if body.echo else [""] * len(prompts)
    envelope = new_envelope(request, "cmpl", "text_completion", include_usage=body.include_usage)
    n, with_ids = params.n, body.return_token_ids or frontend.tokenizer is None
    shown_ids: list[list[int] | None] = [prompt if with_ids else None for prompt in ids]
    async with submitted(request, ids, params, name=envelope.id, priority=body.priority) as outputs:
        if body.stream:
            choices = [
                _stream_choices(
                    frontend, envelope, range(i * n, i * n + n), echo, prompt,
                    _opening(frontend, body, output),
                )
                for i, (prompt, echo, output) in enumerate(
                    zip(shown_ids, echoes, outputs, strict=True)
                )
            ]  # fmt: skip
            return await stream(request, envelope, outputs, choices)
        reply = await collect(outputs)
    prompts_of = [output for output in outputs for _ in range(n)]
    logprobs = [
        await _logprobs(frontend, body, output, delta.logprobs or ())
        for output, delta in zip(prompts_of, reply.choices, strict=True)
    ]
    of_prompts = [await _of_prompt(frontend, body, output) for output in prompts_of]
    return json_response(
        {
            "id": envelope.id,
            "object": envelope.object,
            "created": envelope.created,
            "model": envelope.model,
            "choices": [
                _choice(i, delta, echoes[i // n], logprobs[i], shown_ids[i // n]) | of_prompts[i]
                for i, delta in enumerate(reply.choices)
            ],
            "usage": reply.usage,
        }
    )


async def _text_of(frontend: Frontend, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return await asyncio.to_thread(frontend.require_tokenizer("echo").decode, prompt, False)


def _stream_choices(
    frontend: Frontend,
    envelope: Envelope,
    indices: range,
    echo: str,
    prompt_token_ids: list[int] | None,
    echoed: Callable[[], Awaitable[Mapping[str, Any]]] | None,
) -> list[ChoiceEvents]:
    """Returns the events of a prompt's n choices, whose indices are given; they hold token ids
    where those of the prompt are given. `echoed` returns the log-probabilities of an echo."""
    choices = []
    for index in indices:
        template = ChunkTemplate.for_completion(envelope, index)
        choices.append(
            ChoiceEvents(
                template,
                template.chunk(echo) if echo and echoed is None else b"",
                partial(completion_logprobs, frontend.tokenizer),
                returns_token_ids=prompt_token_ids is not None,
                prompt_token_ids=prompt_token_ids,
                echo=echo,
                echoed=echoed,
            )
        )
    return choices


def _opening(
    frontend: Frontend, body: CompletionRequest, output: RequestOutput
) -> Callable[[], Awaitable[Mapping[str, Any]]] | None:
    """Returns what makes the log-probabilities of a stream's echo, once they are known; None if
    none are wanted."""
    if not body.echo or body.logprobs is None:
        return None

    async def make() -> Mapping[str, Any]:
        scores = output.prompt_scores
        assert scores is not None
        return await echoed_logprobs(frontend.tokenizer, scores, body.logprobs or 0, ())

    return make


async def _logprobs(
    frontend: Frontend,
    body: CompletionRequest,
    output: RequestOutput,
    generated: Sequence[TokenLogprob],
) -> Mapping[str, Any] | None:
    """Returns the log-probabilities of a choice, those of its echo included."""
    scores = output.prompt_scores
    if body.logprobs is not None and body.echo and scores is not None:
        return await echoed_logprobs(frontend.tokenizer, scores, body.logprobs, generated)
    return completion_logprobs(frontend.tokenizer, generated, 0) if generated else None


async def _of_prompt(
    frontend: Frontend, body: CompletionRequest, output: RequestOutput
) -> dict[str, Any]:
    """Returns vLLM's `prompt_logprobs` as a field of a choice, if the request has it."""
    scores, num_top = output.prompt_scores, body.prompt_logprobs
    if num_top is None or scores is None:
        return {}
    return {"prompt_logprobs": await prompt_logprobs(frontend.tokenizer, scores, num_top)}


def _choice(
    index: int,
    delta: Delta,
    echo: str,
    logprobs: Mapping[str, Any] | None,
    prompt_token_ids: list[int] | None,
) -> dict[str, Any]:
    """Returns a choice of the reply; it holds token ids where those of the prompt are given."""
    choice = {
        "index": index,
        "text": echo + delta.text,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    if prompt_token_ids is not None:
        choice |= {"token_ids": delta.token_ids, "prompt_token_ids": prompt_token_ids}
    return choice
