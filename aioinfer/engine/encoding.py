"""Encodes prompts in threads, so that a long prompt does not delay the others.

Encoding is the only work of the server that grows with the size of a client's body, before anything
has been admitted: 15 MB of digits would take a thread half a minute and 6 GB. So:

- a text that cannot fit the model is rejected by its bytes (`text.token_bound`), unencoded;
- short texts and long ones have threads of their own (`EncodingThreads`);
- long texts are encoded in pieces of about 20 ms, in turn with the pieces of other long texts, and
  are rejected at the first piece with which they exceed the limit.

`PromptMaker` owns the threads and the encoder, and is their only caller.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from aioinfer.engine.pictures import PicturePrompt
from aioinfer.engine.sources import PromptSource, SourcePrompt
from aioinfer.errors import RequestError
from aioinfer.features.pictures.prompt import PromptPictures
from aioinfer.scheduler.block_pool import extend_hashes, root_hash
from aioinfer.scheduler.features import Variant
from aioinfer.text.plain_content import ChatText
from aioinfer.text.tokenizer import Tokenizer

T = TypeVar("T")
#: Texts of up to so many characters are encoded in one go, in 10 to 20 ms.
SHORT_TEXT = 32 * 1024
#: Characters that count for each item of a structure: a template takes about as long over both, and
#: the event loop, which counts them, looks at 2 000 items at most.
_ITEM = 16
#: Token-id prompts up to this length are checked and hashed on the event loop (about 0.1 ms).
_FEW_TOKENS = 1024
#: Token ids that are converted in one go.
_CONVERTED = 16_384


class EncodingThreads:
    """Two threads for short work and one for long work.

    Work of one kind begins in the order in which it came. Cancelling the caller drops its work if
    that has not begun.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="encode-short")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="encode-long")

    async def run(self, work: Callable[[], T], *, is_long: bool = False) -> T:
        """Runs `work` in a thread. Returns its result, or raises its error."""
        threads = self._long if is_long else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def shutdown(self) -> None:
        """Drops work that has not begun. Does not wait."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt whose token ids were checked.

    Attributes:
        token_ids: of the prompt.
        tokens: the same, as int32, behind the virtual tokens of `variant`.
        hashes: of its KV blocks, the same on every engine; empty without a prefix cache.
        root: the parent of the first one.
        variant: of the model that its request asks for; None for the model itself.
        pictures: in the prompt; None for none.
        source: what the encoder reads, of a model that has one before its decoder, whose tokens
            `tokens` are; None for none.
    """

    token_ids: list[int]
    tokens: array[int]
    hashes: list[bytes]
    root: bytes
    variant: Variant | None = None
    pictures: PromptPictures | None = None
    source: PromptSource | None = None


class PromptEncoder:
    """Encodes texts and conversations for one model, and prepares token ids for the scheduler.

    Attributes:
        max_model_len: the maximum length of a prompt in tokens: the length of the longest sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        threads: EncodingThreads,
        *,
        max_model_len: int,
        vocab_size: int,
        hash_block_size: int | None,
    ):
        """`hash_block_size` is the number of tokens of a block in the prefix cache, or None without
        one; `vocab_size` is the model's. Without a tokenizer, prompts are token ids."""
        self.max_model_len = max_model_len
        self._given_tokenizer = tokenizer
        self._threads = threads
        self._vocab_size = vocab_size
        self._hash_block_size = hash_block_size

    @property
    def _tokenizer(self) -> Tokenizer:
        assert self._given_tokenizer is not None, "the caller rejects texts without a tokenizer"
        return self._given_tokenizer

    async def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        param: str = "prompt",
        max_tokens: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: any text.
            add_special_tokens: whether the tokenizer's BOS and the like are put around it.
            param: the parameter that the text came in, for errors.
            max_tokens: the tokens that it may have; `max_model_len` if missing.

        Raises:
            RequestError: the text is not valid Unicode, or a long text has more tokens
                (`context_length_exceeded`). Short texts that are too long are left to the caller.
        """
        if len(text) > SHORT_TEXT:
            limit = self.max_model_len if max_tokens is None else max_tokens
            return await self._encode_long(ChatText(text), add_special_tokens, param, limit)
        return await self._threads.run(
            lambda: self._tokenizer.encode(text, add_special_tokens, param=param)
        )

    async def _encode_long(
        self, chat: ChatText, add_special_tokens: bool, param: str, limit: int
    ) -> list[int]:
        """Encodes a text in pieces, up to the first with which it has more than `limit` tokens."""
        tokenizer, run = self._tokenizer, self._threads.run
        if tokenizer.bound is not None:
            find_bound = tokenizer.bound.min_tokens
            self._check_length(await run(lambda: find_bound(chat.text, limit + 1)), limit, param)
        is_escaped = chat.escaped is not None
        text = chat.text if chat.escaped is None else chat.escaped
        encode = partial(tokenizer.encode, param=param, is_escaped=is_escaped)
        cutter = tokenizer.escaped_pieces if is_escaped else tokenizer.pieces
        if cutter is None:
            return await run(lambda: encode(text, add_special_tokens), is_long=True)
        pieces = cutter.cut(text)

        def encode_next() -> list[int] | None:
            piece = next(pieces, None)
            return None if piece is None else encode(piece, False)

        before, behind = (cutter.prefix, cutter.suffix) if add_special_tokens else ([], [])
        ids = list(before)
        while (found := await run(encode_next, is_long=True)) is not None:
            ids += found
            self._check_length(len(ids) + len(behind), limit, param)
        return ids + behind

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Returns the token ids of a conversation under the model's chat template.

        Args:
            messages: dicts with at least a `role`.
            max_tokens: as of `encode`.
            options: passed to `Tokenizer.render_chat`.

        Raises:
            RequestError: as `encode`, or the template refuses the messages.
        """
        tokenizer = self._tokenizer

        def encode_if_short() -> list[int] | ChatText:
            chat = tokenizer.render_chat(messages, **options)
            if len(chat.text) > SHORT_TEXT:
                return chat
            return tokenizer.encode_rendered(chat)

        is_long = _is_longer([messages, options], SHORT_TEXT)
        found = await self._threads.run(encode_if_short, is_long=is_long)
        if isinstance(found, list):
            return found
        limit = self.max_model_len if max_tokens is None else max_tokens
        # the template writes BOS itself
        return await self._encode_long(found, False, "messages", limit)

    async def prepare(
        self, prompt: str | Sequence[int], add_special_tokens: bool = True, cache_salt: str = "",
        *, virtual: int = 0,
    ) -> PreparedPrompt:  # fmt: skip
        """Returns a prompt, a text or token ids, checked and hashed.

        Prompts share their KV blocks only under the same `cache_salt`. `virtual` tokens of a soft
        prompt come before them.

        Raises:
            RequestError: the prompt is empty, too long, or holds something else than token ids.
        """
        token_ids = (
            await self.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        )
        limit = self.max_model_len - virtual
        self._check_length(len(token_ids), limit, "prompt", is_exact=True)
        if len(token_ids) <= _FEW_TOKENS:
            return self._prepare(token_ids, cache_salt, virtual)
        return await self._threads.run(
            lambda: self._prepare(token_ids, cache_salt, virtual),
            is_long=len(token_ids) > SHORT_TEXT,
        )

    def _check_length(
        self, num_tokens: int, limit: int, param: str, *, is_exact: bool = False
    ) -> None:
        """Raises `RequestError` if a prompt of at least `num_tokens` tokens has more than
        `limit`."""
        if num_tokens <= limit:
            return
        has = f"has {num_tokens if is_exact else f'at least {limit + 1}'} tokens"
        if limit == self.max_model_len:
            # clients look for the beginning, which is OpenAI's
            message = (
                f"This model's maximum context length is {limit} tokens. However, the prompt "
                f"{has}. Please reduce the length of the input prompt."
            )
        else:
            message = f"the text {has}, and at most {limit} are accepted"
        raise RequestError(message, param=param, code="context_length_exceeded")

    def _prepare(self, token_ids: Sequence[int], cache_salt: str, virtual: int) -> PreparedPrompt:
        """Converts, checks and hashes a prompt."""
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        try:
            tokens = array("i")
            # in pieces: the interpreter changes threads between, not within
            for start in range(0, len(token_ids), _CONVERTED):
                tokens.extend(array("i", token_ids[start : start + _CONVERTED]))
        except (TypeError, OverflowError) as error:
            raise RequestError(
                f"the prompt must hold token ids: {error}", param="prompt"
            ) from error
        # numpy's loops, not Python's: a long prompt must not keep the event loop from the
        # interpreter
        values = np.frombuffer(tokens, np.int32)
        if values.min() < 0 or values.max() >= self._vocab_size:
            raise RequestError(
                "the prompt holds a token id that is out of vocabulary: outside of 0 to "
                f"{self._vocab_size - 1}",
                param="prompt",
            )
        hashes: list[bytes] = []
        root = root_hash(cache_salt.encode("utf-8", "surrogatepass"))
        source = None
        if isinstance(token_ids, SourcePrompt):
            source = PromptSource(token_ids.data.key(root), token_ids.data)
            root, token_ids = root_hash(source.key), token_ids.shown_ids
        pictures = token_ids.pictures if isinstance(token_ids, PicturePrompt) else None
        spans = () if pictures is None else pictures.spans
        if virtual:
            if pictures is not None:
                raise RequestError("a soft prompt takes no pictures", param="model")
            # the last row of the vocabulary, which hardly any text has
            tokens = array("i", [self._vocab_size - 1]) * virtual + tokens
        if self._hash_block_size is not None:
            extend_hashes(hashes, tokens, self._hash_block_size, root, spans)
        # not a `PicturePrompt`: outputs outlive their pictures
        ids = token_ids if type(token_ids) is list else list(token_ids)
        return PreparedPrompt(ids, tokens, hashes, root, pictures=pictures, source=source)


def _is_longer(value: Any, limit: int) -> bool:
    """Whether the texts in a structure of lists and dicts have more than `limit` characters in all,
    an item counting as `_ITEM`."""
    left = limit
    pending = [value]
    while pending:
        item = pending.pop()
        left -= max(1, len(item)) if isinstance(item, str) else _ITEM
        if left < 0:
            return True
        if isinstance(item, Mapping):
            pending.extend(islice(item, left // _ITEM + 1))
            pending.extend(islice(item.values(), left // _ITEM + 1))
        elif isinstance(item, (list, tuple)):
            pending.extend(item[: left // _ITEM + 1])
    return False
