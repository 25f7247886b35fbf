"""Prompts in the forms of llama.cpp's server: a text, token ids, texts and token ids mixed in one
prompt, an object with a text, or a list of several of these.

A list with a number in it is one prompt; any other list holds a prompt in each place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from aioinfer.api.messages import ContentPart
from aioinfer.api.protocol import MAX_PROMPTS, TokenId
from aioinfer.errors import RequestError

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend


class PromptObject(Struct, kw_only=True):
    """A prompt with a name: `prompt_string`, or parts of content of the type `text`."""

    prompt_string: str | None = None
    content: list[ContentPart] | None = None
    multimodal_data: list[Any] | None = None

    def text(self, param: str) -> str:
        """Returns the text. Raises `RequestError` naming `param`."""
        if self.multimodal_data:
            raise RequestError(f"{param}.multimodal_data is not supported", param=param)
        if self.prompt_string is not None:
            return self.prompt_string
        parts = self.content or []
        if not parts or any(part.type != "text" or part.text is None for part in parts):
            raise RequestError(
                f"an object in {param} must hold a prompt_string, or content of parts of type "
                "'text'",
                param=param,
            )
        return "".join(part.text or "" for part in parts)


Mixed = list[str | TokenId]
Prompts = str | PromptObject | list[str | TokenId | PromptObject | Mixed]
#: One prompt: a text, token ids, or both in turn.
Prompt = str | Sequence[str | int]


def is_single(given: Any) -> bool:
    """Whether a field of the type `Prompts` holds one prompt."""
    return not isinstance(given, list) or any(isinstance(part, int) for part in given)


def split_prompts(given: Any, param: str) -> list[Prompt]:
    """Returns the prompts of a field of the type `Prompts`, one by one.

    Raises `RequestError` naming `param` for none, and for too many.
    """
    prompts = [given] if is_single(given) else given
    if not prompts:
        raise RequestError(f"the {param} is empty", param=param)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"{param} may hold at most {MAX_PROMPTS} prompts, not {len(prompts)}", param=param
        )
    found: list[Prompt] = []
    for each in prompts:
        if isinstance(each, list) and any(isinstance(part, list | PromptObject) for part in each):
            raise RequestError(
                f"a list with token ids in {param} may hold texts besides, and nothing else",
                param=param,
            )
        found.append(each.text(param) if isinstance(each, PromptObject) else each)
    return found


async def encode_prompt(
    frontend: Frontend,
    prompt: Prompt,
    add_special_tokens: bool = True,
    *,
    max_tokens: int | None = None,
) -> list[int]:
    """Returns the token ids of a prompt; only a text at its beginning gets special tokens such as
    BOS. Raises `RequestError`, as `Frontend.encode` does."""
    if isinstance(prompt, str):
        return await frontend.encode(prompt, add_special_tokens, max_tokens=max_tokens)
    if not any(isinstance(part, str) for part in prompt):
        return list(prompt)  # type: ignore[arg-type]
    ids: list[int] = []
    for index, part in enumerate(prompt):
        if isinstance(part, str):
            special = add_special_tokens and index == 0
            ids += await frontend.encode(part, special, max_tokens=max_tokens)
        else:
            ids.append(part)
    return ids
