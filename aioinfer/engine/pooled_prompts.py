"""Prompts of requests that are pooled: texts that are cut to a length, and the two texts that a
cross-encoder scores together. The API and the Python interfaces make them alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from aioinfer.engine.pictures import PicturePrompt
from aioinfer.errors import FieldError
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.special_tokens import Pair

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend

Side = Literal["left", "right"]
#: Tokens of a prompt before it is cut: a million take a second to encode.
MAX_UNCUT_TOKENS = 2**20


def max_kept(frontend: Frontend, kept: int | None, room: int) -> int | None:
    """Returns how many tokens of a prompt are kept where `truncate_prompt_tokens` is `kept`: `room`
    for -1; None for all. Raises `RequestError` for more than the model has."""
    if kept is not None and kept > frontend.max_model_len:
        raise FieldError(
            "truncate_prompt_tokens",
            f"is {kept}, which is more than this model's maximum context length of "
            f"{frontend.max_model_len} tokens. Please request a smaller truncation size.",
        )
    return room if kept is not None and kept <= 0 else kept


def cut_prompt(
    frontend: Frontend, ids: list[int], kept: int | None, side: Side | None
) -> list[int]:
    """Returns `kept` tokens of a prompt at most; None: all.

    Args:
        frontend: of the model. An encoder's prompt keeps its special tokens.
        ids: the prompt.
        kept: the result of `max_kept`.
        side: where tokens are left out; by default on the right of an encoder's prompt, and on
            the left of any other.
    """
    if kept is None:
        return ids
    if isinstance(ids, PicturePrompt):
        if len(ids) > kept:
            raise FieldError("truncate_prompt_tokens", "would cut a prompt with pictures")
        return ids
    if frontend.is_encoder and frontend.tokenizer is not None:
        return frontend.tokenizer.special_tokens.cut(ids, kept, side or "right")
    return ids[:kept] if side == "right" else ids[-kept:]


def join_texts(
    frontend: Frontend, first: list[int], second: list[int], kept: int | None = None
) -> Pair:
    """Returns two texts as a prompt of a cross-encoder: an encoder's tokenizer joins them, of other
    models the second is behind the first.

    Args:
        frontend: of the model.
        first, second: token ids, of an encoder without special tokens.
        kept: the result of `max_kept`; an encoder's prompt is cut to it.
    """
    if not frontend.is_encoder:
        return Pair(first + second, 0)
    return frontend.require_tokenizer().special_tokens.join(first, second, kept)


async def cut_text(
    frontend: Frontend, prompt: str | Sequence[int], truncate_prompt_tokens: int | None
) -> str | Sequence[int]:
    """Returns a prompt, a text or token ids, cut to `truncate_prompt_tokens`, or as it is without
    them. Raises `RequestError`."""
    kept = max_kept(frontend, truncate_prompt_tokens, frontend.max_model_len)
    if kept is None:
        return prompt
    if isinstance(prompt, str):
        prompt = await frontend.encode(prompt, max_tokens=MAX_UNCUT_TOKENS)
    return cut_prompt(frontend, list(prompt), kept, None)


async def cross_prompt(
    frontend: Frontend, first: str, second: str
) -> tuple[list[int], SamplingParams]:
    """Returns the prompt and the parameters by which a model with a head of one class scores two
    texts together. Raises `RequestError`."""
    head = frontend.pooling.cross_encoder
    assert head is not None
    special = not frontend.is_encoder
    one = await frontend.encode(first, special)
    pair = join_texts(frontend, one, await frontend.encode(second, special))
    params = SamplingParams(temperature=0, pooling=head.pooling)
    return pair.ids, replace(params, second_text=pair.second_text)
