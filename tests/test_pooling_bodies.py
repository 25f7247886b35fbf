"""The bodies of requests that pool."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.api.decoding import MAX_PROMPTS, MAX_TOKEN_IDS, decode, decode_large
from aioinfer.api.openai.pooling import EmbeddingRequest
from aioinfer.api.openai.scoring import RerankRequest, ScoreRequest
from aioinfer.errors import RequestError


def embedding(value: Any) -> EmbeddingRequest:
    return decode(json.dumps({"input": value}).encode(), EmbeddingRequest)


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1]], ["a", [1]]),
        ([1, "a"], [[1, "a"]]),
    ],
)
def test_inputs_one_by_one(value: Any, inputs: list[Any]) -> None:
    assert embedding(value).prompts() == inputs


@pytest.mark.parametrize("value", [[], [1, [1]], ["a"] * (MAX_PROMPTS + 1), [-1], None])
def test_wrong_inputs(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        embedding(value)
    assert str(caught.value.param).startswith("input")


def test_long_lists_of_token_ids() -> None:
    value = [list(range(20_000)), [5] * 40_000]
    raw = json.dumps({"input": value, "dimensions": 8}).encode()
    assert decode_large(raw, EmbeddingRequest) == decode(raw, EmbeddingRequest)
    with pytest.raises(RequestError, match="token ids") as caught:
        decode_large(b'{"input":[' + b"1," * MAX_TOKEN_IDS + b"1]}", EmbeddingRequest)
    assert caught.value.param == "input"


def test_texts_of_both_sides() -> None:
    raw = json.dumps({"text_1": "a", "text_2": ["b", "c"]}).encode()
    assert decode(raw, ScoreRequest).sides() == {"text_1": ["a"], "text_2": ["b", "c"]}
    documents = {"query": "a", "documents": ["b", {"text": "c"}]}
    assert decode(json.dumps(documents).encode(), RerankRequest).contents() == ["b", "c"]
