"""The block hashes of a request's prompt, as replicas compute them, for the router.

The gateway encodes a prompt as the replica will: with the served tokenizer and its chat template.
Hashes of the prompt's text would be cheaper, but could not be compared with the contents of a
replica's KV cache: a cache forgets blocks of tokens, holds answers as well as prompts, and shares
the text that the template puts before a conversation. The price is that a prompt is encoded twice,
6 ms for 3 700 tokens in a thread of the gateway, where computing them takes an H200 87 ms (8B). A
prompt that cannot fill a block is not encoded, and neither is a request whose prompt the router
would not read: other endpoints' bodies are routed by load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from aioinfer.api.anthropic import AnthropicDialect
from aioinfer.api.context import decode_body
from aioinfer.api.decoding import prepare
from aioinfer.api.generation import TextDialect
from aioinfer.api.openai.chat import ChatDialect
from aioinfer.api.openai.completions import CompletionDialect
from aioinfer.config import Config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.served_model import find_model
from aioinfer.errors import RequestError

#: Bytes of text a token, where nothing was encoded.
_BYTES_PER_TOKEN = 4
#: Longer prompts than any model's are not cut: a replica refuses them.
_MAX_LEN = 2**22
#: By path: the APIs whose prompts are read.
_DIALECTS: Mapping[str, type[TextDialect[Any]]] = {
    "/v1/completions": CompletionDialect,
    "/v1/chat/completions": ChatDialect,
    "/chat/completions": ChatDialect,
    "/v1/messages": AnthropicDialect,
}


class Prompt(NamedTuple):
    """The prompt of a request as the router needs it."""

    length: int
    hashes: list[bytes]


class PromptReader:
    """Encodes prompts for one model, without engines."""

    def __init__(self, config: Config):
        self._frontend = Frontend(config, [])
        self._block_size = 0

    async def load(self) -> None:
        """Loads the tokenizer. Raises `ConfigError`."""
        for dialect in _DIALECTS.values():
            prepare(dialect.body_type)
        config = self._frontend.config
        folder = await asyncio.to_thread(find_model, config)
        await self._frontend.start_text(folder, _MAX_LEN)

    def set_block_size(self, block_size: int) -> None:
        """Sets the tokens of a block, which replicas report; 0 where they have no prefix cache."""
        if block_size != self._block_size:
            self._block_size = block_size
            self._frontend.make_encoder(block_size or None)

    async def close(self) -> None:
        """Ends the threads."""
        await self._frontend.close()

    async def read(self, path: str, body: bytes) -> Prompt:
        """Returns the prompt of a request; without hashes where there are none to compare, or the
        body is wrong, which the replica will report."""
        estimate = Prompt(max(1, len(body) // _BYTES_PER_TOKEN), [])
        if not self._block_size or len(body) < self._block_size:
            return estimate
        try:
            found = await self._encode(path, body)
        except RequestError:
            return estimate
        return found or estimate

    async def _encode(self, path: str, raw: bytes) -> Prompt | None:
        if (dialect := _DIALECTS.get(path)) is None:
            return None
        body = await decode_body([raw], dialect.body_type, ignores_unknown=True)
        prompts = await dialect.encode(self._frontend, body, body.tool_use())
        # the blocks of the first prompt stand for all: most requests have one
        prepared = await self._frontend.prepare(prompts[0], cache_salt=body.cache_salt or "")
        return Prompt(sum(map(len, prompts)), prepared.hashes)
