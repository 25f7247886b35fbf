from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aioinfer.text.constraints import Mask
from aioinfer.text.token_lists import AllowedTokens, BadWords, NoEndTokens, mask_of, mask_of_all
from aioinfer.text.tokenizer import Tokenizer
from tests import real_tokenizers


def tokens_of(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 100])
def test_masks(vocab_size: int) -> None:
    assert tokens_of(mask_of_all(vocab_size)) == list(range(vocab_size))
    some = [0, 7, 30, vocab_size - 1]
    assert tokens_of(mask_of(some, vocab_size)) == sorted(set(some))
    assert mask_of([], vocab_size).dtype == np.int32


def test_allowed_tokens_narrow() -> None:
    mask = mask_of([1, 31, 32, 63, 64], 100)
    AllowedTokens([31, 64, 99], 100).narrow(mask, [])
    assert tokens_of(mask) == [31, 64]


def test_end_tokens_go_unless_they_are_all_there_is() -> None:
    no_end = NoEndTokens([2, 95], 100)
    mask = mask_of([1, 2, 95], 100)
    no_end.narrow(mask, [])
    assert tokens_of(mask) == [1]
    mask = mask_of([2], 100)
    no_end.narrow(mask, [])
    assert tokens_of(mask) == [2]


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [
        ([], [5]), ([1], [5, 31]), ([7, 1], [5, 31]), ([1, 2], [5, 63]), ([2], [5]),
        ([9, 1, 2], [5, 63]), ([1, 1], [5, 31]), ([31], [5]),
    ],
)  # fmt: skip
def test_bad_words_lose_their_last_token(output: list[int], forbidden: list[int]) -> None:
    words = BadWords([[5], [1, 31], [1, 2, 63]], 64)
    assert words.max_context == 2
    mask = mask_of_all(64)
    words.narrow(mask, output)
    assert sorted(set(range(64)) - set(tokens_of(mask))) == forbidden


def test_bad_words_are_encoded_with_a_space_and_without(tokenizer_cache: Path) -> None:
    tokenizer = Tokenizer.load(real_tokenizers.smollm2_folder(tokenizer_cache))
    words = BadWords.of([" Paris", "zzyzx"], tokenizer, 49_152)
    for text in ("Paris", " Paris", "zzyzx", " zzyzx"):
        *start, last = tokenizer.encode(text, False)
        mask = mask_of_all(49_152)
        words.narrow(mask, start)
        assert last not in tokens_of(mask), text
    mask = mask_of_all(49_152)
    words.narrow(mask, [])
    assert tokenizer.encode(" London", False)[0] in tokens_of(mask)
