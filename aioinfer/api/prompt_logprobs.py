"""Log-probabilities of prompts, in OpenAI's shape (`echo` with `logprobs`) and in vLLM's
(`prompt_logprobs`).

A long prompt has tens of thousands of entries, so both are made in a thread, in pieces, and go into
the reply as JSON that is finished.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from aioinfer.api.logprobs import LOWEST, completion_logprobs, token_name
from aioinfer.api.sse import encode
from aioinfer.features.logprobs.planning import TokenLogprob
from aioinfer.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from aioinfer.features.prompt_logprobs.planning import PromptScores
    from aioinfer.text.tokenizer import Tokenizer

#: Tokens of a piece: the event loop may have to wait for the interpreter while one is made into
#: JSON.
_PIECE = 128


async def echoed_logprobs(
    tokenizer: Tokenizer | None,
    scores: PromptScores,
    num_top: int,
    generated: Sequence[TokenLogprob],
) -> dict[str, msgspec.Raw]:
    """Returns the `logprobs` of a completion's choice that begins with its prompt, and how its
    first token has neither a log-probability nor alternatives.

    Args:
        tokenizer: gives the tokens' texts; without it they name ids.
        scores: of the prompt, complete.
        num_top: how many of the likeliest tokens the request wants; -1: all.
        generated: the tokens behind the prompt.
    """

    def make() -> dict[str, msgspec.Raw]:
        first = token_name(tokenizer, scores.tokens[0])
        parts: dict[str, list[bytes]] = {
            "text_offset": [b"0"],
            "token_logprobs": [b"null"],
            "tokens": [encode(first)],
            "top_logprobs": [b"null"],
        }
        offset = len(first)
        for piece in _pieces([*_scored(scores, num_top), *generated]):
            found = completion_logprobs(tokenizer, piece, offset)
            offset = found["text_offset"][-1] + len(found["tokens"][-1])
            for name, values in found.items():
                parts[name].append(encode(values)[1:-1])
        return {name: _as_list(found) for name, found in parts.items()}

    return await _in_thread(make, len(scores.tokens) + len(generated), num_top)


async def prompt_logprobs(tokenizer: Tokenizer | None, scores: PromptScores, num_top: int) -> Any:
    """Returns vLLM's `prompt_logprobs` as JSON: null for the first token, and for every other one
    an object of the token itself and the `num_top` likeliest ones by id, each with its
    log-probability, its rank and its text."""

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
        ranks = iter(scores.ranks.tolist())
        parts = [b"null"]
        for piece in _pieces(list(_scored(scores, num_top))):
            entries = [entry(token, next(ranks)) for token in piece]
            parts.append(encode(entries)[1:-1])
        return _as_list(parts)

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


def _pieces(tokens: Sequence[TokenLogprob]) -> Iterator[Sequence[TokenLogprob]]:
    for start in range(0, len(tokens), _PIECE):
        yield tokens[start : start + _PIECE]


def _as_list(parts: Sequence[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


async def _in_thread(make: Callable[[], Any], num_tokens: int, num_top: int) -> Any:
    few = num_tokens <= _PIECE and 0 <= num_top <= MAX_LOGPROBS
    return make() if few else await asyncio.to_thread(make)
