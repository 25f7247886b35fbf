"""Prompts of all forms: their types, their token ids, and the part of them that is kept. `Frontend`
encodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from aioinfer.api.decoding import MAX_PROMPTS
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.pooled_prompts import MAX_UNCUT_TOKENS, cut_prompt, max_kept
from aioinfer.errors import FieldError, RequestError
from aioinfer.media.source import MediaSource

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
#: Prompts in llama.cpp's forms, of which OpenAI's are a part: a text, token ids, texts and token
#: ids mixed in one prompt, or a list of several of these. A list with a number in it is one prompt;
#: any other list holds a prompt in each place.
Prompts = str | list[str | TokenId | list[str | TokenId]]
#: Stands for a file in the text of a `MediaPrompt`. `/props` tells it; it is the one that llama.cpp
#: had first, which some clients write without asking.
MEDIA_MARKER = "<__media__>"


class MediaPrompt(Struct, kw_only=True):
    """llama.cpp's prompt with pictures or sound: `MEDIA_MARKER` stands in the text for each of the
    files, base64. Without files, all of the text is text."""

    prompt_string: str
    multimodal_data: list[str] | None = None


#: Prompts where they may have pictures and sound.
MediaPrompts = str | MediaPrompt | list[str | TokenId | MediaPrompt | list[str | TokenId]]
#: One prompt: a text, token ids, or both in turn; or one with pictures and sound.
Prompt = str | Sequence[str | int] | MediaPrompt


def is_single(given: Any) -> bool:
    """Whether a field of the type `Prompts` holds one prompt."""
    return not isinstance(given, list) or any(isinstance(each, int) for each in given)


def split_prompts(given: Any) -> list[Prompt]:
    """Returns the prompts of a field of the type `Prompts`, one by one."""
    return [given] if is_single(given) else given


def check_prompts(given: Any, param: str) -> None:
    """Raises `RequestError` naming `param` for no prompts, for too many, and for a list with token
    ids that holds lists, too."""
    if isinstance(given, str):
        return
    prompts = split_prompts(given)
    if not prompts:
        raise RequestError(f"the {param} is empty", param=param)
    if len(prompts) > MAX_PROMPTS:
        raise FieldError(param, f"may hold at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    if any(
        isinstance(each, list) and {list, MediaPrompt} & set(map(type, each)) for each in prompts
    ):
        raise FieldError(param, "with token ids may hold texts besides, and nothing else")


async def encode_prompts(
    frontend: Frontend,
    prompts: Sequence[Prompt],
    field: str,
    add_special_tokens: bool = True,
    *,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Returns the token ids of the prompts of a field, as `encode_prompt` does; of those with
    pictures or sound a `PicturePrompt`."""
    places = [field if len(prompts) == 1 else f"{field}[{index}]" for index in range(len(prompts))]
    sources = [_sources(frontend, *each) for each in zip(prompts, places, strict=True)]
    frontend.check_media(list(chain(*sources)))
    found = []
    for prompt, media in zip(prompts, sources, strict=True):
        given = prompt.prompt_string if isinstance(prompt, MediaPrompt) else prompt
        encode = partial(encode_prompt, frontend)
        if media:
            encode = partial(frontend.encode_media, media, MEDIA_MARKER)
        found.append(await encode(given, add_special_tokens, max_tokens=max_tokens))
    return found


def _sources(frontend: Frontend, prompt: Prompt, place: str) -> list[MediaSource]:
    """Returns the pictures or sounds of a prompt, whose place in the body is given. Raises
    `RequestError` if the text has places for more or fewer."""
    if not isinstance(prompt, MediaPrompt) or prompt.multimodal_data is None:
        return []
    files, places = prompt.multimodal_data, prompt.prompt_string.count(MEDIA_MARKER)
    if places != len(files):
        raise FieldError(
            f"{place}.multimodal_data",
            f"must hold a file for each {MEDIA_MARKER} of the text: {places}, not {len(files)}",
        )
    hears = "audio" in frontend.input_modalities
    return [
        MediaSource(f"{place}.multimodal_data[{index}]", data, is_base64=True, is_sound=hears)
        for index, data in enumerate(files)
    ]


async def encode_prompt(
    frontend: Frontend,
    prompt: str | Sequence[str | int],
    add_special_tokens: bool = True,
    *,
    max_tokens: int | None = None,
) -> list[int]:
    """Returns the token ids of a prompt; only a text at its beginning gets special tokens such as
    BOS. Raises `RequestError`, as `Frontend.encode` does."""
    if isinstance(prompt, str):
        return await frontend.encode(prompt, add_special_tokens, max_tokens=max_tokens)
    if str not in set(map(type, prompt)):
        # a `PicturePrompt` keeps its pictures
        return prompt if isinstance(prompt, list) else list(prompt)  # type: ignore[arg-type]
    ids: list[int] = []
    for index, part in enumerate(prompt):
        if isinstance(part, str):
            special = add_special_tokens and index == 0
            ids += await frontend.encode(part, special, max_tokens=max_tokens)
        else:
            ids.append(part)
    return ids


class Truncated(Protocol):
    """A body whose prompts may be cut."""

    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None


def check_truncation(limit: int | None) -> None:
    """Raises `RequestError` for a `truncate_prompt_tokens` that stands for no length."""
    if limit is not None and (limit == 0 or limit < -1):
        raise FieldError(
            "truncate_prompt_tokens",
            f"must be a number of tokens, or -1 for as many as fit, not {limit}",
        )


def max_uncut(body: Truncated) -> int | None:
    """Returns how many tokens a prompt may have before it is cut; None where it is not cut."""
    return None if body.truncate_prompt_tokens is None else MAX_UNCUT_TOKENS


def cut(frontend: Frontend, body: Truncated, ids: list[int], room: int) -> list[int]:
    """Returns the tokens of a prompt that a body keeps; with a `truncate_prompt_tokens` of -1 as
    many as `room`. Raises `RequestError` for more than the model has."""
    kept = max_kept(frontend, body.truncate_prompt_tokens, room)
    return cut_prompt(frontend, ids, kept, body.truncation_side)
