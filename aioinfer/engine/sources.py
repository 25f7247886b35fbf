"""Prompts of models with an encoder before the decoder: what the encoder reads, and the tokens with
which the decoder begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aioinfer.errors import RequestError
from aioinfer.models.source import SourceData, SourceFormat


class SourcePrompt(list[int]):
    """The token ids with which a decoder begins. It is a list, so that what counts and echoes a
    prompt need not know of sources; a part of it is a list without one.

    Attributes:
        data: what the encoder reads.
    """

    def __init__(self, ids: Sequence[int], data: SourceData):
        super().__init__(ids)
        self.data = data

    @property
    def shown_ids(self) -> list[int]:
        """The token ids that a client's reply counts and echoes: of a text the source's."""
        values = self.data.values
        return values.tolist() if values.dtype == np.int32 else list(self)


class PromptSource(NamedTuple):
    """The source of a prepared prompt.

    Attributes:
        key: equal for equal sources under the same cache salt.
        data: what the encoder reads.
    """

    key: bytes
    data: SourceData


def text_prompt(ids: Sequence[int], format: SourceFormat, vocab_size: int) -> SourcePrompt:
    """Returns the prompt whose source are the token ids of a text. Raises `RequestError` if they
    are none, too many or out of vocabulary."""
    if not ids:
        raise RequestError("the prompt is empty", param="prompt")
    if len(ids) > format.max_values:
        raise RequestError(
            f"This model's encoder takes {format.max_values} tokens. However, the prompt has "
            f"{len(ids)} tokens. Please reduce the length of the input prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids):
        raise RequestError(
            "the prompt holds something else than token ids, or a token id that is out of "
            f"vocabulary: outside of 0 to {vocab_size - 1}",
            param="prompt",
        )
    return SourcePrompt(format.start, format.source(np.array(ids, np.int32)))
