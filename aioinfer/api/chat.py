"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioinfer.api.admission import ADMISSION, deadline_of, sharer
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.delivery import ChoiceEvents, collect, new_envelope, stream, submitted
from aioinfer.api.errors import json_response
from aioinfer.api.logprobs import chat_logprobs
from aioinfer.api.prompt_logprobs import prompt_logprobs
from aioinfer.api.prompts import chat_prompt, with_token_ids
from aioinfer.api.protocol import ChatRequest
from aioinfer.api.sse import ChunkTemplate, Envelope, role_event
from aioinfer.errors import RequestError

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import Delta, TokenLogprob
    from aioinfer.text.tokenizer import Tokenizer


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answers a conversation n times.

    Without `max_tokens`, in the request or as a default, an answer may be as long as fits.
    """
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, ChatRequest)
    deadline_of(request).shorten(body.timeout_s)
    # before it is encoded: a rejection must be cheap
    request.app[ADMISSION].check(1, flow=sharer(request))
    try:
        return await _answer(request, frontend, body)
    except RequestError as error:
        error.param = _name_of_field(body, error.param)
        raise


async def _answer(
    request: web.Request, frontend: Frontend, body: ChatRequest
) -> web.StreamResponse:
    fields = await with_token_ids(frontend, body.sampling_fields())
    params = frontend.defaults.sampling_params(**fields)
    prompt = await chat_prompt(frontend, body)
    envelope = new_envelope(
        request,
        "chatcmpl",
        "chat.completion.chunk" if body.stream else "chat.completion",
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
    shown_ids = prompt if body.return_token_ids else None
    names = None if body.return_tokens_as_token_ids else frontend.tokenizer
    async with submitted(
        request,
        [prompt],
        params,
        name=envelope.id,
        priority=body.priority,
        cache_salt=body.cache_salt,
    ) as outputs:
        if body.stream:
            return await stream(
                request, envelope, outputs, [_stream_choices(names, envelope, params.n, shown_ids)]
            )
        reply = await collect(outputs)
    scores, num_top, of_prompt = outputs[0].prompt_scores, body.prompt_logprobs, {}
    if num_top is not None and scores is not None:
        found = await prompt_logprobs(names, scores, num_top)
        of_prompt = {"prompt_logprobs": found}
    with_ids = {} if shown_ids is None else {"prompt_token_ids": shown_ids}
    return json_response(
        {
            "id": envelope.id,
            "object": envelope.object,
            "created": envelope.created,
            "model": envelope.model,
            "choices": [
                _choice(names, index, delta, with_ids=shown_ids is not None)
                for index, delta in enumerate(reply.choices)
            ],
            "usage": reply.usage,
        }
        | of_prompt
        | with_ids
    )


def _name_of_field(body: ChatRequest, param: str | None) -> str | None:
    """Returns the client's name for a parameter that the engine rejected."""
    if param == "max_tokens" and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "messages" if param == "prompt" else param


def _stream_choices(
    tokenizer: Tokenizer | None, envelope: Envelope, n: int, prompt_token_ids: list[int] | None
) -> list[ChoiceEvents]:
    """Returns the events of n choices; they hold token ids where those of the prompt are given.
    Without a tokenizer, log-probabilities name ids."""

    def format_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return chat_logprobs(tokenizer, tokens)

    return [
        ChoiceEvents(
            ChunkTemplate.for_chat(envelope, index),
            role_event(envelope, index, prompt_token_ids),
            format_logprobs,
            returns_token_ids=prompt_token_ids is not None,
        )
        for index in range(n)
    ]


def _choice(
    tokenizer: Tokenizer | None, index: int, delta: Delta, *, with_ids: bool
) -> dict[str, Any]:
    choice = {
        "index": index,
        "message": {"role": "assistant", "content": delta.text, "refusal": None},
        "logprobs": chat_logprobs(tokenizer, delta.logprobs) if delta.logprobs else None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    return choice | {"token_ids": delta.token_ids} if with_ids else choice
