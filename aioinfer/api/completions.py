"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from aioinfer.api.admission import admit
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.delivery import (
    ChoiceEvents,
    CollectedOutput,
    collect,
    found_features,
    new_envelope,
    stream,
    submitted,
    usage_of,
)
from aioinfer.api.errors import json_response
from aioinfer.api.logprobs import completion_logprobs, formatted
from aioinfer.api.prompt_logprobs import echoed_logprobs, prompt_logprobs
from aioinfer.api.prompts import completion_prompts, ends_of_middle, with_token_ids
from aioinfer.api.protocol import CompletionRequest
from aioinfer.api.sse import ChunkTemplate, Envelope
from aioinfer.engine.output import Delta
from aioinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import RequestOutput
    from aioinfer.text.tokenizer import Tokenizer

#: OpenAI's default of `max_tokens` for completions, where neither the configuration nor the model
#: has one.
_DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Completes each prompt n times."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, CompletionRequest)
    prompts = body.prompts()
    admit(request, body.timeout_s, len(prompts))
    # all are encoded before the first is queued: a wrong one leaves nothing to be aborted
    ids = await completion_prompts(frontend, body)
    params = await _sampling_params(frontend, body, max(map(len, ids)))
    shown = prompts if body.truncate_prompt_tokens is None else ids
    echoes = [await _text_of(frontend, p) for p in shown] if body.echo else [""] * len(prompts)
    envelope = new_envelope(
        request,
        "cmpl",
        "text_completion",
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
    n, with_ids = params.n, body.return_token_ids or frontend.tokenizer is None
    # of a beam search `best_of` is the width: it returns the n best itself
    num_candidates = n if body.use_beam_search else body.best_of or n
    shown_ids: list[list[int] | None] = [prompt if with_ids else None for prompt in ids]
    names = None if body.return_tokens_as_token_ids else frontend.tokenizer
    of_prompts: Sequence[RequestOutput] = ()
    if body.max_tokens == 0 and params.prompt_logprobs is None:
        reply = await _no_output(frontend, ids, n)
    else:
        async with submitted(
            request,
            ids,
            _with_candidates(params, num_candidates),
            name=envelope.id,
            priority=body.priority,
            cache_salt=body.cache_salt,
        ) as outputs:
            if body.stream:
                choices = [
                    _stream_choices(
                        names, envelope, range(i * n, i * n + n), echo, prompt,
                        _opening(names, body, output),
                    )
                    for i, (prompt, echo, output) in enumerate(
                        zip(shown_ids, echoes, outputs, strict=True)
                    )
                ]  # fmt: skip
                return await stream(request, envelope, outputs, choices)
            reply, of_prompts = await collect(outputs), outputs
    found = _best(reply.choices, num_candidates, params)
    whole: list[dict[str, Any]] = []
    for number, (echo, prompt_ids) in enumerate(zip(echoes, shown_ids, strict=True)):
        output = of_prompts[number] if of_prompts else None
        prompt_logprobs = None if output is None else await _of_prompt(names, body, output)
        for index in range(number * n, number * n + n):
            delta = found[index]
            logprobs = await _logprobs(names, body, output, delta)
            choice = _choice(index, delta, echo, logprobs, prompt_ids)
            choice |= {"prompt_logprobs": prompt_logprobs}
            whole.append(choice | ({} if output is None else found_features(output, delta)))
    return json_response(envelope.fields() | {"choices": whole, "usage": reply.usage})


async def _sampling_params(
    frontend: Frontend, body: CompletionRequest, prompt_len: int
) -> SamplingParams:
    """Returns the sampling parameters of a completion whose longest prompt has so many tokens."""
    fields = await with_token_ids(frontend, body.sampling_fields())
    has_default = frontend.defaults.max_tokens is not None or "prompt_only" in fields
    has_default |= body.n_predict is not None
    if "max_tokens" not in fields and not has_default:
        fields["max_tokens"] = min(_DEFAULT_MAX_TOKENS, max(1, frontend.max_model_len - prompt_len))
    if ends := ends_of_middle(frontend, body):
        fields["stop_token_ids"] = [*fields.get("stop_token_ids", ()), *ends]
    return frontend.defaults.sampling_params(**fields)


async def _no_output(frontend: Frontend, prompts: Sequence[list[int]], n: int) -> CollectedOutput:
    """Returns the reply to prompts that are only to be echoed: n choices for each, without
    tokens."""
    for prompt in prompts:
        await frontend.prepare(prompt)  # checks it
    choices = [Delta(i % n, finish_reason="length") for i in range(n * len(prompts))]
    return CollectedOutput(choices, usage_of(sum(map(len, prompts)), 0, 0))


def _with_candidates(params: SamplingParams, best_of: int) -> SamplingParams:
    """Returns the parameters with which `best_of` sequences are sampled, of which the n best are
    returned."""
    if best_of == params.n:
        return params
    return replace(params, n=best_of, logprobs=params.logprobs or 0)


def _best(candidates: Sequence[Delta], best_of: int, params: SamplingParams) -> Sequence[Delta]:
    """Returns the n of each prompt's `best_of` candidates whose tokens have the highest mean
    log-probability, the best first (OpenAI's rule)."""
    if best_of == params.n:
        return candidates
    best: list[Delta] = []
    for first in range(0, len(candidates), best_of):
        group = sorted(candidates[first : first + best_of], key=_mean_logprob, reverse=True)
        best += group[: params.n]
    if params.logprobs is None:
        for delta in best:
            delta.logprobs = None
    return best


def _mean_logprob(delta: Delta) -> float:
    found = [token.logprob for token in delta.logprobs or ()]
    return sum(found) / len(found) if found else -math.inf


async def _text_of(frontend: Frontend, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return await asyncio.to_thread(frontend.require_tokenizer("echo").decode, prompt, False)


def _stream_choices(
    tokenizer: Tokenizer | None,
    envelope: Envelope,
    indices: range,
    echo: str,
    prompt_token_ids: list[int] | None,
    echoed: Callable[[], Awaitable[Mapping[str, Any]]] | None,
) -> list[ChoiceEvents]:
    """Returns the events of a prompt's n choices, whose indices are given; they hold token ids
    where `prompt_token_ids` are given. Without a tokenizer, log-probabilities name ids.

    `echoed` returns the log-probabilities of an echo.
    """
    choices = []
    for index in indices:
        template = ChunkTemplate.for_completion(envelope, index)
        choices.append(
            ChoiceEvents(
                template,
                template.chunk(echo) if echo and echoed is None else b"",
                partial(completion_logprobs, tokenizer),
                returns_token_ids=prompt_token_ids is not None,
                prompt_token_ids=prompt_token_ids,
                echo=echo,
                echoed=echoed,
            )
        )
    return choices


def _opening(
    tokenizer: Tokenizer | None, body: CompletionRequest, output: RequestOutput
) -> Callable[[], Awaitable[Mapping[str, Any]]] | None:
    """Returns a function that makes the log-probabilities of a stream's echo, once they are known;
    None if none are wanted."""
    if not body.echo or body.logprobs is None:
        return None

    async def make() -> Mapping[str, Any]:
        scores = output.prompt_scores
        assert scores is not None
        return await echoed_logprobs(tokenizer, scores, body.logprobs or 0, ())

    return make


async def _logprobs(
    tokenizer: Tokenizer | None,
    body: CompletionRequest,
    output: RequestOutput | None,
    delta: Delta,
) -> Mapping[str, Any] | None:
    """Returns the log-probabilities of a choice, its echoed prompt included."""
    scores = None if output is None else output.prompt_scores
    generated = delta.logprobs or ()
    if body.logprobs is not None and body.echo and scores is not None:
        return await echoed_logprobs(tokenizer, scores, body.logprobs, generated)
    if not generated:
        return None
    return await formatted(generated, partial(completion_logprobs, tokenizer, generated, 0))


async def _of_prompt(
    tokenizer: Tokenizer | None, body: CompletionRequest, output: RequestOutput
) -> orjson.Fragment | None:
    """Returns vLLM's `prompt_logprobs`, if the request has it."""
    scores, num_top = output.prompt_scores, body.prompt_logprobs
    if num_top is None or scores is None:
        return None
    return await prompt_logprobs(tokenizer, scores, num_top)


def _choice(
    index: int,
    delta: Delta,
    echo: str,
    logprobs: Mapping[str, Any] | None,
    prompt_token_ids: list[int] | None,
) -> dict[str, Any]:
    """Returns a choice of the reply; it holds token ids where `prompt_token_ids` are given."""
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
