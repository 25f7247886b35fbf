"""Large bodies: they are decoded as small ones, unless they hold more values than one may."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from aioinfer.api.decoding import MAX_TOKEN_IDS, decode, decode_large
from aioinfer.api.openai.chat import ChatRequest
from aioinfer.api.openai.completions import CompletionRequest
from aioinfer.api.openai.tokenization import DetokenizeRequest, TokenizeRequest
from aioinfer.errors import RequestError


def ids(count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randrange(0, 50_000) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 60_000, MAX_TOKEN_IDS - 1])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("kind", "field", "rest"),
    [
        (CompletionRequest, "prompt", {"max_tokens": 3, "stop": ["["]}),
        (DetokenizeRequest, "tokens", {}),
    ],
)
def test_a_list_of_token_ids(kind, field, rest, count, indent):
    raw = json.dumps({"model": "m", field: ids(count), **rest}, indent=indent).encode()
    assert decode_large(raw, kind) == decode(raw, kind)


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


@pytest.mark.parametrize("indent", [None, 1])
def test_lists_of_lists(indent):
    prompts = [ids(30_000), [], ids(5), ids(40_000)]
    raw = json.dumps({"n": 1, "prompt": prompts, "stop": ["["]}, indent=indent).encode()
    assert decode_large(raw, CompletionRequest).prompt == prompts
    assert decode_large(raw, CompletionRequest) == decode(raw, CompletionRequest)


def call(arguments):
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CompletionRequest, {"prompt": [[]] * 60_000}, "prompt"),
        (CompletionRequest, {"prompt": ["x"] * 60_000}, "prompt"),
        (CompletionRequest, {"prompt": [1] * 1_100_000}, "prompt"),
        (CompletionRequest, {"prompt": [[1] * 1_000] * 1_100}, "prompt"),
        (DetokenizeRequest, {"tokens": [1] * 1_100_000}, "tokens"),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [1] * 60_000}, "stop_token_ids"),
        (CompletionRequest, {"prompt": "x", "stop": ["a"] * 60_000}, "stop"),
        (CompletionRequest, {"prompt": "x", "unknown": [[1] * 6_000] * 10}, "the body"),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}] * 30_000}, "messages"),
        (ChatRequest, {"messages": [call({"a": [1] * 60_000})]}, "messages"),
        (ChatRequest, {"messages": [call(json.dumps({"a": [1] * 60_000}))]}, "messages"),
        (ChatRequest, {"messages": [call(json.dumps({"a": [1] * 200}))] * 300}, "messages"),
        (
            ChatRequest,
            {
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {str(i): i for i in range(60_000)},
            },
            "chat_template_kwargs",
        ),
    ],
)
def test_a_field_with_too_many_values_is_named(kind, fields, param):
    with pytest.raises(RequestError, match="at most") as caught:
        decode_large(json.dumps(fields).encode(), kind)
    assert caught.value.param == param


def test_values_that_many_fields_hold_together_are_bounded():
    fields = {f"field{number}": [number] * 1000 for number in range(60)}
    with pytest.raises(RequestError, match="at most 50000 values"):
        decode_large(json.dumps({"prompt": "x"} | fields).encode(), CompletionRequest)


def test_text_does_not_count_as_values():
    text = '[{"a": [1, 2, 3]}]' * 50_000
    raw = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    assert decode_large(raw, ChatRequest).messages[0].content == text


def test_a_list_that_is_given_twice():
    listed = json.dumps(ids(60_000))
    raw = f'{{"prompt": {listed}, "pr\\u006fmpt": {listed}}}'.encode()
    with pytest.raises(RequestError, match="at most 50000 values"):
        decode_large(raw, CompletionRequest)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 200_000, b'{"prompt": [' + b"1," * 100_000,
        b'{"prompt": [' + b"1," * 100_000 + b"1]", b'{"prompt": [[' + b"1," * 100_000 + b"1]",
        b'{"prompt": [[' + b"1," * 100_000 + b"1]}", b'{"prompt": ' + b"1," * 100_000 + b"1]}",
        b'{"prompt": "' + b"x" * 100_000, b'"' + b"x" * 100_000 + b'"',
        b"[" + b"1," * 100_000 + b"1]", b"{" + b'"a"' * 100_000 + b"}", b"\\" * 100_000,
        b"\x00" * 100_000, b"}" * 100_000,
    ],
    ids=lambda raw: raw[:14].decode(),
)  # fmt: skip
@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_large_bodies_that_are_no_objects(kind, raw):
    with pytest.raises(RequestError):
        decode_large(raw, kind)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (b"-1", b"prompt"), (b"1.5", b"prompt"), (b"null", b"prompt"), (b"{}", b"prompt"),
        (b"", b"JSON"), (b"99999999999", b"prompt"),
    ],
)  # fmt: skip
def test_errors_are_the_same(wrong, where):
    numbers = json.dumps(ids(60_000))[1:-1].encode()
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
    with pytest.raises(RequestError, match="n must be an integer, not a string"):
        decode_large(raw, CompletionRequest)


def test_the_same_bytes_elsewhere():
    listed = json.dumps(ids(60_000))
    raw = f'{{"user": "{listed}", "prompt": {listed}}}'.encode()
    assert decode_large(raw, CompletionRequest) == decode(raw, CompletionRequest)


def test_a_large_body_without_a_token_list_is_decoded_as_usual():
    raw = json.dumps({"prompt": "word " * 60_000}).encode()
    assert decode_large(raw, TokenizeRequest) == decode(raw, TokenizeRequest)


FIRST_BODIES = """
import contextlib, sys, threading
from aiohttp import web
from aioinfer.api.decoding import decode_large
from aioinfer.api.routes import ROUTES, add_routes
from aioinfer.errors import RequestError

def decode(barrier, kind):
    barrier.wait()
    with contextlib.suppress(RequestError):
        decode_large(b'{"messages": [{"role": "user", "content": "x"}]}', kind)

add_routes(web.Application())
sys.setswitchinterval(1e-6)
for kind in {route.body for route in ROUTES if route.body is not None}:
    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=decode, args=(barrier, kind)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_the_first_bodies_may_be_decoded_at_the_same_time() -> None:
    """The decoder reads the declaration of a type at its first use, without a lock."""
    subprocess.run([sys.executable, "-c", FIRST_BODIES], check=True, timeout=120)
