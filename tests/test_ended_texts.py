"""Texts of requests that have ended: found by their n-grams, by those alone that may use them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from aioinfer.features.speculation import texts
from aioinfer.features.speculation.ngram import MAX_SUFFIX
from aioinfer.features.speculation.texts import MIN_COMMON, EndedTexts
from aioinfer.scheduler.block_pool import root_hash
from aioinfer.scheduler.request import Request
from tests.test_scheduler import make_request

CHANCE = random.Random(3)


def text(count: int) -> list[int]:
    return [CHANCE.randrange(2**31) for _ in range(count)]


def request(prompt: Sequence[int], output: Sequence[int] = (), salt: bytes = b"") -> Request:
    made = make_request("a", [*prompt], 9999)
    made.hash_root = root_hash(salt)
    made.tokens.extend(output)
    return made


def found(ended: EndedTexts, tokens: Sequence[int], salt: bytes = b"") -> list[int] | None:
    """What follows the tokens in another text."""
    part = ended.find(request(tokens, salt=salt))
    if part is None:
        return None
    assert part[:MAX_SUFFIX].tolist() == tokens[-MAX_SUFFIX:]
    return part[MAX_SUFFIX:].tolist()


def test_what_follows_equal_tokens_is_found() -> None:
    """From the first token of an output on, and where another text ends alike in the middle."""
    ended, prompt, output = EndedTexts(), text(40), text(50)
    ended.add(request(prompt, output))
    assert found(ended, prompt) == output
    assert found(ended, [*text(9), *prompt[-MIN_COMMON:]]) == output
    assert found(ended, [*text(3), *output[5:30]]) == output[30:]
    assert found(ended, output[:49]) == output[49:]
    for unknown in (output, output[5 : 4 + MIN_COMMON], prompt[:30], text(30), []):
        assert found(ended, unknown) is None


def test_the_latest_text_is_found() -> None:
    ended, prompt, output = EndedTexts(), text(40), text(30)
    for last in range(3):
        ended.add(request(prompt, [*output, last]))
        assert found(ended, prompt) == [*output, last]


def test_texts_under_another_salt_or_before_a_reset_are_not_found() -> None:
    """The hash of a salt, an adapter or a source; a text of one does not hide another's."""
    ended, prompt, output, other = EndedTexts(), text(20), text(30), text(30)
    ended.add(request(prompt, output, b"a"))
    ended.add(request(prompt, other, b"b"))
    assert found(ended, prompt, b"a") == output
    assert found(ended, prompt, b"b") == other
    assert found(ended, prompt) is None
    later = request(prompt, salt=b"a")
    later.cache_era += 1
    assert ended.find(later) is None


def test_an_entry_of_an_equal_hash_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index has one entry for all n-grams: of other tokens, or of another tenant."""
    monkeypatch.setattr(
        EndedTexts, "_places", lambda self, key, ngrams: np.zeros(ngrams.shape[:-1], np.uint64)
    )
    ended, tokens = EndedTexts(), text(MIN_COMMON + 1)
    ended.add(request(tokens[:1], tokens[1:], b"a"))
    assert found(ended, tokens[:-1], b"a") == tokens[-1:]
    assert found(ended, tokens[:-1], b"b") is None
    assert found(ended, text(MIN_COMMON), b"a") is None


def test_the_oldest_texts_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_TOKENS", 200)
    ended, outputs = EndedTexts(), [text(60) for _ in range(5)]
    for output in outputs:
        ended.add(request([1], output))
    assert [found(ended, output[:30]) is not None for output in outputs] == [False] * 2 + [True] * 3
    ended.add(request([1], text(500)))
    assert [found(ended, output[:30]) for output in outputs] == [None] * 5
