"""`POST /tokenize` and `POST /detokenize`, in the shapes of vLLM and of llama.cpp's server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from aioinfer.api.context import FRONTEND, read_body, template_messages
from aioinfer.api.mixed_prompts import encode_prompt
from aioinfer.api.protocol import DetokenizeRequest, TokenizeRequest, template_options
from aioinfer.errors import RequestError

if TYPE_CHECKING:
    from aioinfer.text.tokenizer import Tokenizer

#: Longer texts are rejected, unless the model can hold them: a million tokens take a second.
MAX_TOKENS = 2**20
#: Bytes of the text that `/detokenize` returns: a token may stand for a hundred spaces.
MAX_TEXT_BYTES = 16 * 2**20
#: Items or characters that are written as JSON at a time, in half a millisecond. orjson does not
#: let other threads run meanwhile.
_WRITTEN = 16_384


async def tokenize(request: web.Request) -> web.Response:
    """Returns the token ids of a text or of a conversation.

    A text in `content`, as llama.cpp's clients send it, gets no BOS unless `add_special`; with
    `with_pieces` each id comes with its text.
    """
    frontend = request.app[FRONTEND]
    body = await read_body(request, TokenizeRequest)
    limit = max(MAX_TOKENS, frontend.max_model_len)
    if body.messages is not None:
        ids = await frontend.encode_chat(
            await template_messages(body), max_tokens=limit, **template_options(body)
        )
    elif body.content is not None:
        special = bool(body.add_special)
        ids = await encode_prompt(frontend, body.content, special, max_tokens=limit)
    else:
        ids = await frontend.encode(
            body.prompt or "", body.add_special_tokens is not False, max_tokens=limit
        )
    wants_texts = body.return_token_strs or body.with_pieces
    tokenizer = frontend.require_tokenizer() if wants_texts else None

    def write() -> bytes:
        start = {"count": len(ids), "max_model_len": frontend.max_model_len}
        parts = [orjson.dumps(start)[:-1], b',"tokens":']
        if tokenizer is not None and body.with_pieces:
            parts += _written_list([_piece(tokenizer, token) for token in ids])
            return b"".join([*parts, b',"token_strs":null}'])
        parts += [*_written_list(ids), b',"token_strs":']
        if tokenizer is None:
            parts.append(b"null")
        else:
            parts += _written_list([tokenizer.token_text(token)[0] for token in ids])
        return b"".join([*parts, b"}"])

    return _response(await asyncio.to_thread(write))


async def detokenize(request: web.Request) -> web.Response:
    """Returns the text of token ids, special tokens included: as `prompt`, and to a request without
    a `model` as `content` as well, where llama.cpp's clients look for it."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, DetokenizeRequest)
    tokenizer = frontend.require_tokenizer("tokens")

    def write() -> bytes:
        table = tokenizer.token_bytes(False)
        if sum(len(table[token]) for token in body.tokens) > MAX_TEXT_BYTES:
            raise RequestError(
                f"the text of these tokens has more than {MAX_TEXT_BYTES} bytes", param="tokens"
            )
        text = tokenizer.decode(body.tokens, False)
        pieces = range(0, len(text), _WRITTEN)
        written = [orjson.dumps(text[start : start + _WRITTEN])[1:-1] for start in pieces]
        names = [b'"prompt"'] if body.model is not None else [b'"prompt"', b'"content"']
        texts = [b"".join([name, b':"', *written, b'"']) for name in names]
        return b"".join([b"{", b",".join(texts), b"}"])

    return _response(await asyncio.to_thread(write))


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """Returns a token as llama.cpp shows it: its text, or its bytes if they are no text alone."""
    text, data = tokenizer.token_text(token)
    return {"id": token, "piece": list(data) if "\ufffd" in text else text}


def _written_list(items: Sequence[Any]) -> Iterator[bytes]:
    """Yields the JSON of a list in pieces."""
    separator = b"["
    for start in range(0, len(items), _WRITTEN):
        yield separator
        yield orjson.dumps(items[start : start + _WRITTEN])[1:-1]
        separator = b","
    yield b"]" if items else b"[]"


def _response(written: bytes) -> web.Response:
    return web.Response(body=written, content_type="application/json")
