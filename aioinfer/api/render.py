"""`POST /v1/completions/render` and `/v1/chat/completions/render`: the prompts of a request as the
model would see them, and its sampling parameters, without generating (vLLM has them)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson
from aiohttp import web

from aioinfer.api.access import request_id
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
    rendered = await _rendered(request, body, prompts, "cmpl")
    return await _json(rendered)


async def render_chat(request: web.Request) -> web.Response:
    """Returns the token ids of a conversation under the chat template."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, ChatRequest)
    with renamed(names_of_fields(body)):
        turn = await turn_of(frontend, body)
        (rendered,) = await _rendered(request, body, [turn.prompt], "chatcmpl")
    return await _json(rendered)


async def _rendered(
    request: web.Request, body: SamplingBody, prompts: Sequence[list[int]], prefix: str
) -> list[dict[str, Any]]:
    """Returns what would be submitted for each prompt; the sampling parameters are those of the
    request, and the defaults that count for it."""
    frontend = request.app[FRONTEND]
    fields = await with_token_ids(frontend, body.sampling_fields())
    frontend.defaults.sampling_params(**fields)  # checks them
    sampling = {**frontend.defaults.sampling, **fields}
    for name in ("grammar", "beam_search"):
        if name in sampling:
            sampling[name] = msgspec.to_builtins(sampling[name])
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(k): v for k, v in sampling["logit_bias"].items()}
    tokenizer = frontend.tokenizer

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
                "stream_options": msgspec.to_builtins(body.stream_options),
                "cache_salt": body.cache_salt,
                "priority": body.priority or 0,
            }
            for index, prompt in enumerate(prompts)
        ]

    return await asyncio.to_thread(describe)


async def _json(value: Any) -> web.Response:
    data = await asyncio.to_thread(orjson.dumps, value)
    return web.Response(body=data, content_type="application/json")
