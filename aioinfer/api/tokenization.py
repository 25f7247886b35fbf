"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from aioinfer.api.context import FRONTEND, read_body, template_messages
from aioinfer.api.errors import json_response
from aioinfer.api.protocol import DetokenizeRequest, TokenizeRequest, template_options
from aioinfer.errors import RequestError

#: Longer texts are rejected, unless the model can hold them: a million tokens take a second.
MAX_TOKENS = 2**20
#: Bytes of the text that `/detokenize` returns: a token may stand for a hundred spaces, and writing
#: a reply as JSON keeps the event loop.
MAX_TEXT_BYTES = 16 * 2**20


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

    def decode() -> str:
        table = tokenizer.token_bytes(False)
        if sum(len(table[token]) for token in body.tokens) > MAX_TEXT_BYTES:
            raise RequestError(
                f"the text of these tokens has more than {MAX_TEXT_BYTES} bytes", param="tokens"
            )
        return tokenizer.decode(body.tokens, False)

    return json_response({"prompt": await asyncio.to_thread(decode)})
