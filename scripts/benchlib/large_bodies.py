"""Request bodies just under 16 MiB, the largest that are read, and bodies with as many values as
one may have: the requests that could keep a server's event loop busy the longest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: A little less than `api.context.MAX_BYTES`.
BYTES = 15 * 2**20
#: A little less than the values that a body may hold beside token ids.
VALUES = 49_900
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
#: 44 characters, so that a text of words is encoded as usual ones are.
_SENTENCE = "The quick brown fox jumps over a lazy dog.\n "


@dataclass(frozen=True, slots=True)
class LargeBody:
    """A body that is made when it is needed.

    Attributes:
        name: for the table.
        path: where it is posted.
        make: returns the body.
    """

    name: str
    path: str
    make: Callable[[], bytes]


def _json(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 1, **fields}).encode()


def _chat(content: Any = "Hi", **fields: Any) -> bytes:
    return _json(messages=[{"role": "user", "content": content}], **fields)


def _repeated(before: bytes, item: bytes, count: int, after: bytes) -> bytes:
    """Returns a JSON text with `count` times the same item in a list."""
    return before + b",".join([item] * count) + after


def _text(unit: str = _SENTENCE, size: int = BYTES) -> str:
    """Returns a text of about `size` bytes of UTF-8."""
    return unit * (size // len(unit.encode()))


def _numbers(count: int) -> dict[str, int]:
    return {f"k{number}": number for number in range(count)}


def _nested(count: int) -> list[Any]:
    """Returns `count` values as lists of ten lists of ten."""
    return [[[0] * 10 for _ in range(10)] for _ in range(count // 111)]


def _messages(count: int, size: int = 2, unit: str = _SENTENCE) -> bytes:
    content = _text(unit, size) if size > 2 else "Hi"
    roles = ("user", "assistant")
    return _json(messages=[{"role": roles[i % 2], "content": content} for i in range(count)])


def _calls(count: int, arguments: Any) -> bytes:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call] * count}
    return _json(messages=[{"role": "user", "content": "Hi"}, message])


def _tools(count: int, size: int) -> bytes:
    function = {"description": "d" * size, "parameters": {"type": "object"}}
    tools = ({"name": f"f{number}"} | function for number in range(count))
    return _chat(tools=[{"type": "function", "function": tool} for tool in tools])


def _parts(count: int, size: int) -> bytes:
    return _chat([{"type": "text", "text": _text(size=size) or "Hi"}] * count)


#: Bodies with more values than one may hold: they have to be declined without being decoded.
TOO_MANY = [
    LargeBody("500 000 tool calls", CHAT, lambda: _repeated(
        b'{"messages":[{"role":"assistant","tool_calls":[',
        b'{"function":{"name":"f"}}', 500_000, b"]}]}",
    )),
    LargeBody("a million template arguments", CHAT, lambda: (
        b'{"messages":[{"role":"user","content":"Hi"}],"chat_template_kwargs":{'
        + b",".join(b'"%d":0' % number for number in range(1_000_000)) + b"}}"
    )),
    LargeBody("5 million empty lists as prompt", COMPLETIONS, lambda: _repeated(
        b'{"prompt":[', b"[]", 5_000_000, b"]}"
    )),
    LargeBody("/detokenize of 15 MB", "/detokenize", lambda: _repeated(
        b'{"tokens":[', b"1", BYTES // 2, b"]}"
    )),
    LargeBody("7 million stop ids", COMPLETIONS, lambda: _repeated(
        b'{"prompt":"Hi","stop_token_ids":[', b"7", 7_000_000, b"]}"
    )),
]  # fmt: skip

#: Bodies of 15 MB with few values.
LONG_TEXTS = [
    LargeBody("15 MB as prompt", COMPLETIONS, lambda: _json(prompt=_text())),
    LargeBody("15 MB of digits as prompt", COMPLETIONS, lambda: _json(prompt=_text("7"))),
    LargeBody("15 MB of one word as prompt", COMPLETIONS, lambda: _json(prompt=_text("a"))),
    LargeBody("15 MB of \\u00e9 as prompt", COMPLETIONS, lambda: _json(
        prompt=_text("é", BYTES // 3)
    )),
    LargeBody("15 MB of UTF-8, 60 MB in memory", COMPLETIONS, lambda: (
        b'{"prompt":"' + ("\U0001f600" + _text("ab ", BYTES - 64)).encode() + b'"}'
    )),
    LargeBody("15 MB as a message", CHAT, lambda: _chat(_text())),
    LargeBody("15 MB of special tokens as a message", CHAT, lambda: _chat(_text("<|im_end|>"))),
    LargeBody("15 MB of special tokens in 8 000 messages", CHAT, lambda: _messages(
        8_000, BYTES // 8_040, "<|im_end|>"
    )),
    LargeBody("the same with parse_special", CHAT, lambda: _chat(
        _text("<|im_end|>"), parse_special=True
    )),
    LargeBody("8 000 long messages, 15 MB", CHAT, lambda: _messages(8_000, BYTES // 8_200)),
    LargeBody("15 MB in 16 000 content parts", CHAT, lambda: _parts(16_000, BYTES // 16_800)),
    LargeBody("15 MB in 128 tools", CHAT, lambda: _tools(128, BYTES // 130)),
    LargeBody("15 MB as JSON of arguments", CHAT, lambda: _calls(
        1, json.dumps({"a": _text("x", BYTES - 1000)})
    )),
    LargeBody("1 000 prompts of 15 KB", COMPLETIONS, lambda: _json(
        prompt=[_text(size=BYTES // 1_050)] * 1_000
    )),
    LargeBody("15 MB as a template argument", CHAT, lambda: _chat(
        chat_template_kwargs={"a": _text(size=BYTES - 1000)}
    )),
    LargeBody("15 MB as stop", COMPLETIONS, lambda: _json(prompt="Hi", stop=_text())),
    LargeBody("15 MB as model", COMPLETIONS, lambda: _json(prompt="Hi", model=_text())),
    LargeBody("15 MB in an ignored field", COMPLETIONS, lambda: _json(
        prompt="Hi", metadata=_text()
    )),
    LargeBody("/tokenize of 15 MB", TOKENIZE, lambda: _json(prompt=_text())),
    LargeBody("/tokenize of 4 MB", TOKENIZE, lambda: _json(prompt=_text(size=4 * 2**20))),
    LargeBody("/tokenize of 4 MB, with texts", TOKENIZE, lambda: _json(
        prompt=_text(size=4 * 2**20), return_token_strs=True
    )),
    LargeBody("/tokenize of 15 MB of special tokens", TOKENIZE, lambda: _chat(
        _text("<|im_end|>")
    )),
]  # fmt: skip

#: Bodies with about as many values as one may hold.
MANY_VALUES = [
    LargeBody("16 000 messages", CHAT, lambda: _messages(16_000)),
    LargeBody("16 000 content parts", CHAT, lambda: _parts(16_000, 0)),
    LargeBody("8 000 tool calls", CHAT, lambda: _calls(8_000, "{}")),
    LargeBody("49 900 values in JSON of arguments", CHAT, lambda: _calls(
        1, json.dumps({"a": _nested(VALUES)})
    )),
    LargeBody("49 900 values in arguments", CHAT, lambda: _calls(1, {"a": _nested(VALUES - 20)})),
    LargeBody("128 short tools", CHAT, lambda: _tools(128, 1)),
    LargeBody("49 900 values in a tool", CHAT, lambda: _chat(
        tools=[{"type": "function", "function": {"name": "f", "parameters": _numbers(VALUES - 20)}}]
    )),
    LargeBody("49 900 template arguments", CHAT, lambda: _chat(
        chat_template_kwargs=_numbers(VALUES)
    )),
    LargeBody("49 900 values in response_format", CHAT, lambda: _chat(
        response_format={"type": "json_schema", "json_schema": _numbers(VALUES)}
    )),
    LargeBody("49 900 values in an ignored field", COMPLETIONS, lambda: _json(
        prompt="Hi", metadata=_nested(VALUES)
    )),
    LargeBody("49 900 stops", COMPLETIONS, lambda: _json(
        prompt="Hi", stop=[f"s{number}" for number in range(VALUES)]
    )),
    LargeBody("49 900 stop ids", COMPLETIONS, lambda: _json(
        prompt="Hi", stop_token_ids=list(range(VALUES))
    )),
    LargeBody("49 900 biases", COMPLETIONS, lambda: _json(
        prompt="Hi", logit_bias=dict.fromkeys(range(VALUES), 0.5)
    )),
    LargeBody("1 024 prompts of 500 ids", COMPLETIONS, lambda: _json(
        prompt=[[7] * 500] * 1_024
    )),
    LargeBody("a prompt of 524 000 ids", COMPLETIONS, lambda: _json(prompt=[700] * 524_000)),
    LargeBody(
        "/detokenize of 524 000 ids",
        "/detokenize",
        lambda: json.dumps({"tokens": [700] * 524_000}).encode(),
    ),
]  # fmt: skip

RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"


def _deep(depth: int) -> Any:
    """Returns lists within each other."""
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found


#: The same in the words of other APIs.
OTHER_APIS = [
    LargeBody("16 000 items of a response", RESPONSES, lambda: json.dumps(
        {"input": [{"role": "user", "content": "Hi"}] * 16_000, "max_output_tokens": 1}
    ).encode()),
    LargeBody("16 000 parts of an item", RESPONSES, lambda: json.dumps(
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}] * 16_000}]}
    ).encode()),
    LargeBody("15 MB of instructions", RESPONSES, lambda: json.dumps(
        {"input": "Hi", "instructions": _text(size=BYTES - 1000), "max_output_tokens": 1}
    ).encode()),
    LargeBody("49 900 values in a tool of a response", RESPONSES, lambda: json.dumps(
        {"input": "Hi", "max_output_tokens": 1, "stream": True,
         "tools": [{"type": "function", "name": "f", "parameters": _numbers(VALUES - 20)}]}
    ).encode()),
    LargeBody("20 items of 15 MB of a conversation", "/v1/conversations", lambda: json.dumps(
        {"items": [{"role": "user", "content": _text(size=BYTES // 21)}] * 20}
    ).encode()),
    LargeBody("/v1/messages of 16 000 messages", MESSAGES, lambda: _messages(16_000)),
    LargeBody("/v1/messages of 12 000 blocks", MESSAGES, lambda: _json(
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}] * 12_000}]
    )),
    LargeBody("49 900 values in the input of a call", MESSAGES, lambda: _json(messages=[
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {"a": _nested(VALUES - 40)}}
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
    ])),
    LargeBody("a schema of 49 900 values", MESSAGES, lambda: _json(
        messages=[{"role": "user", "content": "Hi"}],
        tools=[{"name": "f", "input_schema": {"type": "object", "x": _nested(VALUES - 40)}}],
    )),
    LargeBody("/api/chat of 16 000 messages", OLLAMA, lambda: _json(
        messages=[{"role": "user", "content": "Hi"}] * 16_000, stream=False
    ).replace(b'"max_tokens": 1, ', b"")),
    LargeBody("lists 900 deep in a template argument", CHAT, lambda: _chat(
        chat_template_kwargs={"a": [_deep(900)] * 50}
    )),
    LargeBody("1 024 texts to embed", "/v1/embeddings", lambda: json.dumps(
        {"input": [_text(size=BYTES // 1_100)] * 1_024}
    ).encode()),
    LargeBody("524 000 ids to embed", "/v1/embeddings", lambda: json.dumps(
        {"input": [700] * 524_000}
    ).encode()),
    LargeBody("/completion of 524 000 ids", "/completion", lambda: json.dumps(
        {"prompt": [700] * 524_000}
    ).encode()),
    LargeBody("1 000 documents to rank", "/rerank", lambda: json.dumps(
        {"query": "Hi", "documents": [_text(size=BYTES // 1_050)] * 1_000}
    ).encode()),
]  # fmt: skip

BODIES = [*TOO_MANY, *LONG_TEXTS, *MANY_VALUES, *OTHER_APIS]
