"""`POST /tokenize` and `POST /detokenize`, in the shapes of vLLM and of llama.cpp's server."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from aioinfer.api.context import encode, encode_list, frontend_of
from aioinfer.api.messages import template_messages
from aioinfer.api.prompts import encode_prompt
from aioinfer.api.protocol import DetokenizeRequest, TokenizeRequest, template_options
from aioinfer.errors import RequestError

#: Longer texts are rejected, unless the model can hold them: a million tokens take a second.
MAX_TOKENS = 2**20
#: Bytes of the text that `/detokenize` returns: a token may stand for a hundred spaces.
MAX_TEXT_BYTES = 16 * 2**20
#: Items or characters that are written as JSON at a time, in half a millisecond. The encoder
#: does not let other threads run meanwhile.
_WRITTEN = 16_384


class TokenizeReply(Struct, kw_only=True):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(Struct, kw_only=True):
    """The text of token ids, under llama.cpp's name as well unless the request has a `model`."""

    prompt: str
    content: str | UnsetType = UNSET


async def tokenize(request: web.Request, body: TokenizeRequest) -> web.Response:
    """Returns the token ids of a text or of a conversation.

    A text in `content`, as llama.cpp's clients send it, gets no BOS unless `add_special`.
    """
    frontend = frontend_of(request)
    limit = max(MAX_TOKENS, frontend.max_model_len)
    if body.messages is not None:
        ids = await frontend.encode_chat(
            await template_messages(body.messages), max_tokens=limit, **template_options(body)
        )
    elif body.content is not None:
        special = bool(body.add_special)
        ids = await encode_prompt(frontend, body.content, special, max_tokens=limit)
    else:
        ids = await frontend.encode(
            body.prompt or "", body.add_special_tokens is not False, max_tokens=limit
        )
    tokenizer = frontend.require_tokenizer() if body.return_token_strs else None

    def write() -> bytes:
        texts = None
        if tokenizer is not None:
            texts = encode_list((tokenizer.token_text(token)[0] for token in ids), _WRITTEN)
        return encode(
            TokenizeReply(
                count=len(ids),
                max_model_len=frontend.max_model_len,
                tokens=encode_list(ids, _WRITTEN),
                token_strs=texts,
            )
        )

    return _response(await asyncio.to_thread(write))


async def detokenize(request: web.Request, body: DetokenizeRequest) -> web.Response:
    """Returns the text of token ids, special tokens included: as `prompt`, and to a request without
    a `model` as `content` as well, where llama.cpp's clients look for it."""
    frontend = frontend_of(request)
    tokenizer = frontend.require_tokenizer("tokens")

    def write() -> bytes:
        table = tokenizer.token_bytes(False)
        if sum(len(table[token]) for token in body.tokens) > MAX_TEXT_BYTES:
            raise RequestError(
                f"the text of these tokens has more than {MAX_TEXT_BYTES} bytes", param="tokens"
            )
        text = tokenizer.decode(body.tokens, False)
        pieces = range(0, len(text), _WRITTEN)
        written = [encode(text[start : start + _WRITTEN])[1:-1] for start in pieces]
        shown: Any = msgspec.Raw(b"".join([b'"', *written, b'"']))
        return encode(DetokenizeReply(prompt=shown, content=shown if body.model is None else UNSET))

    return _response(await asyncio.to_thread(write))


def _response(written: bytes) -> web.Response:
    return web.Response(body=written, content_type="application/json")
