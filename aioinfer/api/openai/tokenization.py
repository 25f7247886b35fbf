"""`POST /tokenize` and `POST /detokenize`, in the shapes of vLLM and of llama.cpp's server."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from aioinfer.api.context import encode, encode_list, frontend_of
from aioinfer.api.decoding import Body
from aioinfer.api.messages import Message, template_messages
from aioinfer.api.prompts import TokenId, encode_prompt
from aioinfer.api.protocol import check_messages, template_options
from aioinfer.errors import FieldError

#: Longer texts are rejected, unless the model can hold them: a million tokens take a second.
MAX_TOKENS = 2**20
#: Bytes of the text that `/detokenize` returns: a token may stand for a hundred spaces.
MAX_TEXT_BYTES = 16 * 2**20
#: Items or characters that are written as JSON at a time, in half a millisecond. The encoder
#: does not let other threads run meanwhile.
_WRITTEN = 16_384


class TokenizeRequest(Body, kw_only=True):
    """`POST /tokenize`, with a `prompt`, with `messages`, or with llama.cpp's `content`."""

    prompt: str | None = None
    content: str | list[str | TokenId] | None = None
    add_special: bool | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """See `Body.check`."""
        self.check_one_of("prompt", "messages", "content")
        if self.content is not None and self.parse_special is False:
            raise FieldError(
                "parse_special",
                "must be true: the text of a special token in content becomes that token",
            )
        check_messages(self.messages or [])


class DetokenizeRequest(Body, kw_only=True):
    """`POST /detokenize`."""

    token_field: ClassVar[str] = "tokens"

    tokens: list[TokenId]


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


async def tokenize(request: web.Request, body: TokenizeRequest) -> TokenizeReply:
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
        ids = await encode_prompt(frontend, body.content, bool(body.add_special), max_tokens=limit)
    else:
        ids = await frontend.encode(
            body.prompt or "", body.add_special_tokens is not False, max_tokens=limit
        )
    tokenizer = frontend.require_tokenizer() if body.return_token_strs else None

    def make() -> TokenizeReply:
        texts = None
        if tokenizer is not None:
            texts = encode_list((tokenizer.token_text(token)[0] for token in ids), _WRITTEN)
        tokens, longest = encode_list(ids, _WRITTEN), frontend.max_model_len
        return TokenizeReply(count=len(ids), max_model_len=longest, tokens=tokens, token_strs=texts)

    return await asyncio.to_thread(make)


async def detokenize(request: web.Request, body: DetokenizeRequest) -> DetokenizeReply:
    """Returns the text of token ids, special tokens included: as `prompt`, and to a request without
    a `model` as `content` as well, where llama.cpp's clients look for it."""
    frontend = frontend_of(request)
    tokenizer, vocab_size = frontend.require_tokenizer("tokens"), frontend.vocab_size

    def make() -> DetokenizeReply:
        if any(token >= vocab_size for token in body.tokens):
            raise FieldError("tokens", f"hold a token id outside of 0 to {vocab_size - 1}")
        table = tokenizer.token_bytes(False)
        if sum(len(table[token]) for token in body.tokens) > MAX_TEXT_BYTES:
            raise FieldError("tokens", f"stand for a text of more than {MAX_TEXT_BYTES} bytes")
        text = tokenizer.decode(body.tokens, False)
        parts = [encode(text[i : i + _WRITTEN])[1:-1] for i in range(0, len(text), _WRITTEN)]
        shown: Any = msgspec.Raw(b'"%b"' % b"".join(parts))
        return DetokenizeReply(prompt=shown, content=shown if body.model is None else UNSET)

    return await asyncio.to_thread(make)
