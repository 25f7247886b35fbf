from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec import to_builtins

from aioinfer.api.logprobs import chat_logprobs, completion_logprobs
from aioinfer.features.logprobs.planning import TokenLogprob
from aioinfer.text.tokenizer import Tokenizer
from tests.real_tokenizers import qwen_folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_cache: Path) -> Tokenizer:
    return Tokenizer.load(qwen_folder(tokenizer_cache))


def test_a_chat_lists_the_likeliest_with_each_token(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("Hello world")
    logprobs = chat_logprobs(
        tokenizer,
        [TokenLogprob(one, -0.5, [(one, -0.5), (two, -1.5)]), TokenLogprob(two, -0.25, [])],
    )
    hello = {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}
    world = {"token": " world", "logprob": -0.25, "bytes": list(b" world")}
    assert to_builtins(logprobs) == {
        "content": [
            hello | {"top_logprobs": [hello, world | {"logprob": -1.5}]},
            world | {"top_logprobs": []},
        ],
        "refusal": None,
    }


def test_parts_of_a_character_have_exact_bytes(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("𓀀")
    assert len(tokens) > 1
    found = chat_logprobs(tokenizer, [TokenLogprob(token, -1.0, []) for token in tokens])
    assert b"".join(bytes(entry.bytes) for entry in found.content).decode() == "𓀀"


def test_a_completion_has_parallel_lists(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("Hello world")
    tokens = [TokenLogprob(one, -0.5, [(one, -0.5)]), TokenLogprob(two, -2.0, [(one, -1.0)])]
    assert to_builtins(completion_logprobs(tokenizer, tokens, 10)) == {
        "text_offset": [10, 15],
        "token_logprobs": [-0.5, -2.0],
        "tokens": ["Hello", " world"],
        "top_logprobs": [{"Hello": -0.5}, {"Hello": -1.0, " world": -2.0}],
    }


def test_what_is_impossible_has_a_number(tokenizer: Tokenizer) -> None:
    tokens = [TokenLogprob(5, -math.inf, [(6, -math.inf)])]
    assert chat_logprobs(tokenizer, tokens).content[0].top_logprobs[0].logprob == -9999.0
    assert completion_logprobs(tokenizer, tokens, 0).token_logprobs == [-9999.0]
