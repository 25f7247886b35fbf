"""Log-probabilities of generated tokens, in the two shapes that OpenAI gives them.

Log-probabilities of prompts, in OpenAI's shape (`echo` with `logprobs`) and in vLLM's
(`prompt_logprobs`).

A long prompt has tens of thousands of entries, so both are made in a thread, in pieces, and go into
the reply as JSON that is finished.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from aioinfer.api.context import encode, encode_list, pieces_of
from aioinfer.features.logprobs.planning import TokenLogprob
from aioinfer.features.prompt_logprobs.planning import PromptScores
from aioinfer.sampling_params import MAX_LOGPROBS
from aioinfer.text.tokenizer import Tokenizer

#: The least log-probability that is reported, as in vLLM: JSON has no infinity.
LOWEST = -9999.0
#: Log-probabilities that are formatted on the event loop, in a millisecond or two, and that are
#: made into JSON in one go elsewhere.
_AT_ONCE = 1024

T = TypeVar("T")


async def formatted(tokens: Sequence[TokenLogprob], make: Callable[[], T]) -> T:
    """Returns the result of `make`, which formats the log-probabilities of tokens: in a thread
    where they are many."""
    return await asyncio.to_thread(make) if are_many(tokens) else make()


def are_many(tokens: Sequence[TokenLogprob]) -> bool:
    """Whether formatting takes so long that it must run in a thread."""
    return bool(tokens) and len(tokens) * (1 + len(tokens[0].top)) > _AT_ONCE


class LikelyToken(Struct, kw_only=True):
    """A token's text, its log-probability, and the bytes that it stands for."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(LikelyToken, kw_only=True):
    """A token of the output, with the likeliest tokens in its place, as chats and Responses have
    it."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(Struct, kw_only=True):
    """The `logprobs` of a chat choice."""

    content: list[ScoredToken]
    refusal: None = None


class CompletionLogprobs(Struct, kw_only=True):
    """The `logprobs` of a completion's choice: parallel lists, with the place in the text where
    each token begins, in characters, and the likeliest tokens by text. The first token of an echoed
    prompt has neither a log-probability nor alternatives."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def chat_logprobs(tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Returns the `logprobs` of a chat choice."""
    return ChatLogprobs(content=[scored_token(tokenizer, token) for token in tokens])


def scored_token(tokenizer: Tokenizer | None, token: TokenLogprob) -> ScoredToken:
    """Returns a token's log-probability, with the likeliest tokens in its place; many of these as
    JSON that is made in pieces, between which other threads may run."""
    fields = likely_fields(tokenizer, token.token_id, token.logprob)
    likely = (LikelyToken(**likely_fields(tokenizer, *each)) for each in token.top)
    are_few = len(token.top) <= _AT_ONCE
    return ScoredToken(
        **fields, top_logprobs=list(likely) if are_few else encode_list(likely, _AT_ONCE)
    )


def likely_fields(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> dict[str, Any]:
    """Returns the fields of `LikelyToken` of a token."""
    text, data = _token_text(tokenizer, token_id)
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}


def _token_text(tokenizer: Tokenizer | None, token_id: int) -> tuple[str, bytes]:
    """Returns a token's text and bytes; without a tokenizer the text names the id, in vLLM's form
    (`return_tokens_as_token_ids`)."""
    return (f"token_id:{token_id}", b"") if tokenizer is None else tokenizer.token_text(token_id)


def token_name(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Returns a token's text, or its id where there is no tokenizer."""
    return _token_text(tokenizer, token_id)[0]


def completion_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprob], offset: int
) -> CompletionLogprobs:
    """Returns the `logprobs` of a completion's choice.

    Args:
        tokenizer: gives the tokens' texts.
        tokens: the tokens of this chunk, or all of them.
        offset: where the text of the first one begins in the choice's text, in characters.
    """
    texts = [token_name(tokenizer, token.token_id) for token in tokens]
    return CompletionLogprobs(
        text_offset=list(accumulate(map(len, texts[:-1]), initial=offset))[: len(texts)],
        token_logprobs=[max(token.logprob, LOWEST) for token in tokens],
        tokens=texts,
        top_logprobs=[
            _by_text(tokenizer, token, text) for token, text in zip(tokens, texts, strict=True)
        ],
    )


def _by_text(tokenizer: Tokenizer | None, token: TokenLogprob, text: str) -> Any:
    """Returns the likeliest tokens' log-probabilities by text, the sampled one's always among
    them; many as in `scored_token`."""
    likely = [(token_name(tokenizer, token_id), logprob) for token_id, logprob in token.top]
    found: dict[str, float] = {}
    for name, logprob in [*likely, (text, token.logprob)]:
        # tokens of the same text: the likeliest counts
        found.setdefault(name, max(logprob, LOWEST))
    if len(found) <= _AT_ONCE:
        return found
    pieces = [encode(dict(piece))[1:-1] for piece in pieces_of(found.items(), _AT_ONCE)]
    return msgspec.Raw(b"{" + b",".join(pieces) + b"}")


#: Tokens of a piece: the event loop may have to wait for the interpreter while one is made into
#: JSON.
_PIECE = 128


async def echoed_logprobs(
    tokenizer: Tokenizer | None,
    scores: PromptScores,
    num_top: int,
    generated: Sequence[TokenLogprob],
) -> CompletionLogprobs:
    """Returns the `logprobs` of a completion's choice that begins with its prompt.

    Args:
        tokenizer: gives the tokens' texts; without it they name ids.
        scores: of the prompt, complete.
        num_top: how many of the likeliest tokens the request wants; -1: all.
        generated: the tokens behind the prompt.
    """

    def make() -> CompletionLogprobs:
        first = token_name(tokenizer, scores.tokens[0])
        parts: dict[str, list[bytes]] = {
            "text_offset": [b"0"],
            "token_logprobs": [b"null"],
            "tokens": [encode(first)],
            "top_logprobs": [b"null"],
        }
        offset = len(first)
        for piece in pieces_of(chain(_scored(scores, num_top), generated), _AT_ONCE):
            found = completion_logprobs(tokenizer, piece, offset)
            offset = found.text_offset[-1] + len(found.tokens[-1])
            for name, written in parts.items():
                written.append(encode(getattr(found, name))[1:-1])
        lists: dict[str, Any] = {
            name: msgspec.Raw(b"[" + b",".join(written) + b"]") for name, written in parts.items()
        }
        return CompletionLogprobs(**lists)

    return await _in_thread(make, len(scores.tokens) + len(generated), num_top)


async def prompt_logprobs(
    tokenizer: Tokenizer | None, scores: PromptScores | None, num_top: int | None
) -> Any:
    """Returns vLLM's `prompt_logprobs` as JSON, None where these are not asked for: null for the
    first token, and for every other one an object of the token itself and the `num_top` likeliest
    ones by id, each with its log-probability, its rank and its text."""
    if scores is None or num_top is None:
        return None

    def entry(token: TokenLogprob, rank: int) -> dict[str, Any]:
        ranked = [(rank, token.token_id, token.logprob)]
        ranked += [(place, *likely) for place, likely in enumerate(token.top, 1)]
        return {
            str(token_id): {
                "logprob": max(logprob, LOWEST),
                "rank": place,
                "decoded_token": token_name(tokenizer, token_id),
            }
            for place, token_id, logprob in ranked
        }

    def make() -> msgspec.Raw:
        entries = map(entry, _scored(scores, num_top), scores.ranks.tolist())
        return encode_list(chain([None], entries), _PIECE)

    return await _in_thread(make, len(scores.tokens), num_top)


def _scored(scores: PromptScores, num_top: int) -> Iterator[TokenLogprob]:
    """Yields the tokens of a prompt from the second one on, with their log-probabilities."""
    num_top = scores.num_top if num_top < 0 else min(num_top, scores.num_top)
    for start in range(0, len(scores.logprobs), _PIECE):
        rows = slice(start, start + _PIECE)
        for token, logprob, tops, values in zip(
            scores.tokens[start + 1 : start + 1 + _PIECE],
            scores.logprobs[rows].tolist(),
            scores.top_tokens[rows, :num_top].tolist(),
            scores.top_logprobs[rows, :num_top].tolist(),
            strict=True,
        ):
            # NaN is what broken logits give; JSON has none
            known = logprob if not math.isnan(logprob) else LOWEST
            yield TokenLogprob(token, known, list(zip(tops, values, strict=True)))


async def _in_thread(make: Callable[[], Any], num_tokens: int, num_top: int) -> Any:
    few = num_tokens <= _PIECE and 0 <= num_top <= MAX_LOGPROBS
    return make() if few else await asyncio.to_thread(make)
