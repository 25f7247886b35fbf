"""Bodies with long lists of token ids: decoded in pieces they are what they are decoded whole, and
so are their errors."""

from __future__ import annotations

import json
import random

import pytest

from aioinfer.api import token_list
from aioinfer.api.protocol import CompletionRequest, DetokenizeRequest, TokenizeRequest, decode
from aioinfer.api.token_list import PIECE, decode_large
from aioinfer.errors import RequestError


def ids(count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randrange(0, 50_000) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 1000, 30_000, 60_000])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("kind", "field"), [(CompletionRequest, "prompt"), (DetokenizeRequest, "tokens")]
)
def test_a_list_in_pieces(kind, field, count, indent, monkeypatch):
    pieces = []
    whole = token_list._decode_ids
    monkeypatch.setattr(
        token_list, "_decode_ids", lambda piece: pieces.append(piece) or whole(piece)
    )
    raw = json.dumps(
        {"model": "m", field: ids(count), "max_tokens": 3, "stop": ["["]}, indent=indent
    ).encode()
    assert decode_large(raw, kind) == decode(raw, kind)
    assert (len(pieces) > 1) == (count >= 30_000)
    assert all(len(piece) < PIECE + 20 for piece in pieces)


@pytest.mark.parametrize(
    "prompt",
    ["word " * 60_000, [ids(30_000), ids(5)], ["word " * 60_000], [[1], "two", *ids(40_000)]],
    ids=["text", "lists", "texts", "mixture"],
)
def test_other_prompts_are_left_alone(prompt):
    raw = json.dumps({"prompt": prompt}).encode()
    outcomes = []
    for function in (decode, decode_large):
        try:
            outcomes.append(function(raw, CompletionRequest))
        except RequestError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (b"-1", b"prompt"),
        (b"1.5", b"prompt"),
        (b"null", b"prompt"),
        (b"{}", b"prompt"),
        (b"", b"JSON"),
        (b"99999999999", b"prompt"),
    ],
)
def test_errors_are_the_same(wrong, where):
    numbers = json.dumps(ids(40_000))[1:-1].encode()
    raw = b'{"prompt": [' + numbers + b"," + wrong + b"," + numbers + b'], "n": 1}'
    messages = []
    for function in (decode, decode_large):
        with pytest.raises(RequestError) as error:
            function(raw, CompletionRequest)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert where.decode() in messages[0]


def test_a_wrong_field_beside_the_list():
    raw = json.dumps({"prompt": ids(40_000), "n": "two"}).encode()
    with pytest.raises(RequestError, match="n: expected `int"):
        decode_large(raw, CompletionRequest)


def test_the_same_bytes_elsewhere():
    listed = json.dumps(ids(40_000))
    raw = f'{{"user": "{listed}", "prompt": {listed}}}'.encode()
    assert decode_large(raw, CompletionRequest) == decode(raw, CompletionRequest)


def test_a_large_body_without_a_token_list_is_decoded_as_usual():
    raw = json.dumps({"prompt": "word " * 60_000}).encode()
    assert decode_large(raw, TokenizeRequest) == decode(raw, TokenizeRequest)
