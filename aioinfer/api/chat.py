"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioinfer.api.admission import ADMISSION, deadline_of, sharer
from aioinfer.api.chat_turn import (
    Call,
    Turn,
    encode_turn,
    make_parser,
    make_turn,
    new_call_id,
    parse_message,
)
from aioinfer.api.context import FRONTEND, read_body, template_messages
from aioinfer.api.delivery import ChoiceEvents, collect, new_envelope, stream, submitted
from aioinfer.api.errors import json_response
from aioinfer.api.logprobs import chat_logprobs
from aioinfer.api.message_events import MessageEvents, finish_reason
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
    turn = await _turn(frontend, body)
    params = turn.params
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = new_envelope(request, "chatcmpl", kind, include_usage=body.include_usage)
    async with submitted(
        request, [turn.prompt], params, name=envelope.id, priority=body.priority
    ) as outputs:
        if body.stream:
            return await stream(
                request, envelope, outputs, [_stream_choices(frontend, envelope, turn)]
            )
        reply = await collect(outputs)
    return json_response(
        {
            "id": envelope.id,
            "object": envelope.object,
            "created": envelope.created,
            "model": envelope.model,
            "choices": [
                await _choice(frontend, turn, index, delta)
                for index, delta in enumerate(reply.choices)
            ],
            "usage": reply.usage,
        }
    )


async def _turn(frontend: Frontend, body: ChatRequest) -> Turn:
    """Encodes the conversation. Raises `RequestError`."""
    fields, use, options = body.sampling_fields(), body.tool_use(), template_options(body)
    messages = await template_messages(body)
    prompt = await encode_turn(frontend, messages, use, **options)
    shows_thoughts = body.include_reasoning is not False
    return await make_turn(frontend, prompt, fields, use, shows_thoughts=shows_thoughts)


def _name_of_field(body: ChatRequest, param: str | None) -> str | None:
    """Returns the client's name for a parameter that the engine rejected."""
    if param == "max_tokens" and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "messages" if param == "prompt" else param


def _stream_choices(frontend: Frontend, envelope: Envelope, turn: Turn) -> list[ChoiceEvents]:
    def format_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return chat_logprobs(frontend.tokenizer, tokens)

    indices = range(turn.params.n)
    if turn.parses:
        new_id = partial(new_call_id, frontend)
        return [
            MessageEvents(envelope, index, make_parser(frontend, turn), new_id, format_logprobs)
            for index in indices
        ]
    return [
        ChoiceEvents(
            ChunkTemplate.for_chat(envelope, index), role_event(envelope, index), format_logprobs
        )
        for index in indices
    ]


async def _choice(frontend: Frontend, turn: Turn, index: int, delta: Delta) -> dict[str, Any]:
    reason = delta.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    if turn.parses:
        parsed = await parse_message(frontend, turn, delta.text)
        message["content"] = parsed.content or (None if parsed.calls or parsed.reasoning else "")
        if parsed.reasoning:
            message["reasoning_content"] = message["reasoning"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [_call(call) for call in parsed.calls]
            reason = finish_reason(reason or "stop", len(parsed.calls))
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(frontend.tokenizer, delta.logprobs) if delta.logprobs else None,
        "finish_reason": reason,
        "stop_reason": delta.stop_reason,
    }


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
