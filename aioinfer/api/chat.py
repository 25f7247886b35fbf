"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioinfer.api.admission import ADMISSION, deadline_of, sharer
from aioinfer.api.context import FRONTEND, read_body, template_messages
from aioinfer.api.delivery import ChoiceEvents, collect, new_envelope, stream, submitted
from aioinfer.api.errors import json_response
from aioinfer.api.logprobs import chat_logprobs
from aioinfer.api.prompt_logprobs import prompt_logprobs
from aioinfer.api.protocol import ChatRequest, template_options
from aioinfer.api.sse import ChunkTemplate, Envelope, role_event
from aioinfer.errors import RequestError

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import Delta, TokenLogprob


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
    params = frontend.defaults.sampling_params(**body.sampling_fields())
    prompt = await frontend.encode_chat(await template_messages(body), **template_options(body))
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = new_envelope(request, "chatcmpl", kind, include_usage=body.include_usage)
    async with submitted(
        request, [prompt], params, name=envelope.id, priority=body.priority
    ) as outputs:
        if body.stream:
            return await stream(
                request, envelope, outputs, [_stream_choices(frontend, envelope, params.n)]
            )
        reply = await collect(outputs)
    scores, num_top, of_prompt = outputs[0].prompt_scores, body.prompt_logprobs, {}
    if num_top is not None and scores is not None:
        found = await prompt_logprobs(frontend.tokenizer, scores, num_top)
        of_prompt = {"prompt_logprobs": found}
    return json_response(
        {
            "id": envelope.id,
            "object": envelope.object,
            "created": envelope.created,
            "model": envelope.model,
            "choices": [
                _choice(frontend, index, delta) for index, delta in enumerate(reply.choices)
            ],
            "usage": reply.usage,
        }
        | of_prompt
    )


def _name_of_field(body: ChatRequest, param: str | None) -> str | None:
    """Returns the client's name for a parameter that the engine rejected."""
    if param == "max_tokens" and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "messages" if param == "prompt" else param


def _stream_choices(frontend: Frontend, envelope: Envelope, n: int) -> list[ChoiceEvents]:
    def format_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return chat_logprobs(frontend.tokenizer, tokens)

    return [
        ChoiceEvents(
            ChunkTemplate.for_chat(envelope, index), role_event(envelope, index), format_logprobs
        )
        for index in range(n)
    ]


def _choice(frontend: Frontend, index: int, delta: Delta) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": delta.text, "refusal": None},
        "logprobs": chat_logprobs(frontend.tokenizer, delta.logprobs) if delta.logprobs else None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
