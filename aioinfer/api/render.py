"""`/render` below `/v1/completions`, `/v1/chat/completions` and `/v1/messages`: returns the prompts
of a request as the model would see them, and its sampling parameters, without generating (as in
vLLM)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson
from aiohttp import web

from aioinfer.api.access import request_id
from aioinfer.api.anthropic import encode_body
from aioinfer.api.anthropic_body import MessagesRequest
from aioinfer.api.chat import names_of_fields, turn_of
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.errors import renamed
from aioinfer.api.prompts import completion_prompts, with_token_ids
from aioinfer.api.protocol import ChatRequest, CompletionRequest, SamplingBody


async def render_completion(request: web.Request) -> web.Response:
    """Returns the token ids of each prompt of a completion."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, CompletionRequest)
    prompts = await completion_prompts(frontend, body)
    for prompt in prompts:
        await frontend.prepare(prompt)  # checks it
    fields = body.sampling_fields()
    rendered = await _rendered(request, body, fields, prompts, "cmpl")
    return await _json(rendered)


async def render_chat(request: web.Request) -> web.Response:
    """Returns the token ids of a conversation under the chat template."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, ChatRequest)
    with renamed(names_of_fields(body)):
        turn = await turn_of(frontend, body)
        fields = body.sampling_fields()
        (rendered,) = await _rendered(request, body, fields, [turn.prompt], "chatcmpl")
    return await _json(rendered)


async def render_message(request: web.Request) -> web.Response:
    """Returns the token ids of a conversation in Anthropic's shape."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, MessagesRequest)
    prompt = await encode_body(frontend, body)
    with renamed({"stop": "stop_sequences"}):
        (rendered,) = await _rendered(request, body, body.sampling_fields(), [prompt], "msg")
    return await _json(rendered)


async def _rendered(
    request: web.Request,
    body: SamplingBody | MessagesRequest,
    fields: dict[str, Any],
    prompts: Sequence[list[int]],
    prefix: str,
) -> list[dict[str, Any]]:
    """Returns the request that would be submitted for each prompt: its sampling parameters are the
    ones that the request names and the defaults that apply to it."""
    frontend = request.app[FRONTEND]
    fields = await with_token_ids(frontend, fields)
    frontend.defaults.sampling_params(**fields)  # checks them
    sampling = {**frontend.defaults.sampling, **fields}
    for name in ("grammar", "beam_search"):
        if name in sampling:
            sampling[name] = msgspec.to_builtins(sampling[name])
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(k): v for k, v in sampling["logit_bias"].items()}
    tokenizer = frontend.tokenizer
    options = body.stream_options if isinstance(body, SamplingBody) else None
    salt = body.cache_salt if isinstance(body, SamplingBody) else None

    def describe() -> list[dict[str, Any]]:
        return [
            {
                "request_id": f"{prefix}-{request_id(request)}-{index}",
                "model": frontend.config.served_model_names[0],
                "prompt": None if tokenizer is None else tokenizer.decode(prompt, False),
                "token_ids": prompt,
                "prompt_token_ids": prompt,
                "sampling_params": sampling,
                "stream": bool(body.stream),
                "stream_options": msgspec.to_builtins(options),
                "cache_salt": salt,
                "priority": body.priority or 0,
            }
            for index, prompt in enumerate(prompts)
        ]

    return await asyncio.to_thread(describe)


async def _json(value: Any) -> web.Response:
    data = await asyncio.to_thread(orjson.dumps, value)
    return web.Response(body=data, content_type="application/json")
