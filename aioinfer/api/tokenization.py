"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from aioinfer.api.context import FRONTEND, read_body, template_messages
from aioinfer.api.errors import json_response
from aioinfer.api.protocol import DetokenizeRequest, TokenizeRequest, template_options

#: Longer texts are rejected, unless the model can hold them: a million tokens take a second.
MAX_TOKENS = 2**20


async def tokenize(request: web.Request) -> web.Response:
    """Returns the token ids of a text or of a conversation."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, TokenizeRequest)
    limit = max(MAX_TOKENS, frontend.max_model_len)
    if body.messages is not None:
        ids = await frontend.encode_chat(
            await template_messages(body), max_tokens=limit, **template_options(body)
        )
    else:
        ids = await frontend.encode(
            body.prompt or "", body.add_special_tokens is not False, max_tokens=limit
        )
    texts = None
    if body.return_token_strs:
        tokenizer = frontend.require_tokenizer()
        texts = await asyncio.to_thread(lambda: [tokenizer.token_text(token)[0] for token in ids])
    reply: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": frontend.max_model_len,
        "tokens": ids,
        "token_strs": texts,
    }
    return json_response(reply)


async def detokenize(request: web.Request) -> web.Response:
    """Returns the text of token ids, special tokens included."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, DetokenizeRequest)
    tokenizer = frontend.require_tokenizer("tokens")
    return json_response({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)})
