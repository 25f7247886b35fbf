"""Writers of choices: a token that comes straight from the step loop has the bytes that it has as
a delta."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from aioinfer.api.anthropic import AnthropicDialect, MessagesRequest
from aioinfer.api.decoding import decode
from aioinfer.api.generation import ChoiceWriter
from aioinfer.api.openai import chat
from aioinfer.api.openai.chat import ChatChunk, ChatDialect, ChatRequest, ChatWriter
from aioinfer.api.openai.completions import (
    Completion,
    CompletionDialect,
    CompletionRequest,
    CompletionWriter,
)
from aioinfer.api.protocol import StreamOptions
from aioinfer.engine.chat_turn import Turn
from aioinfer.engine.output import Delta, RequestOutput
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.formats.registry import message_format
from aioinfer.text.message_blocks import Blocks
from aioinfer.text.message_parser import ToolUse

USE = ToolUse([{"name": "add", "parameters": {}}], "auto")
FORMAT = message_format("", {}, "hermes", "think")
MESSAGES = b'{"messages": [{"role": "user", "content": "2 + 2?"}]}'
#: The texts of tokens; some are held back while they may become a marker.
TOKENS = [
    "<think>", "so", "</think>", "\n\nLet ", "", "me <", "b. ", "<tool_call>",
    '\n{"name": "add", "arguments": {"a": ', "1}}\n", "</tool_call>",
]  # fmt: skip
SHARED: dict[str, Any] = {
    "id": "cmpl-1", "object": "text_completion", "created": 1_700_000_000,
    "model": 'a "quoted" name', "system_fingerprint": "fp_1",
}  # fmt: skip
USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)
OUTPUT = cast(
    RequestOutput,
    SimpleNamespace(
        prompt_token_ids=[7, 8], num_cached_tokens=1, predicted_counts=None, weight_versions=[],
        params=SimpleNamespace(n=4),
    ),
)  # fmt: skip


def text_writer(echo: str = "2 + 2", index: int = 0, **fields: Any) -> ChoiceWriter:
    dialect = CompletionDialect.__new__(CompletionDialect)
    dialect.frontend = cast(Any, SimpleNamespace(tokenizer=object()))
    dialect.body = CompletionRequest(prompt="2 + 2", stream=True, **fields)
    usage = None if dialect.body.usage.include_usage else UNSET
    dialect.chunk, dialect.names = Completion(**SHARED, usage=usage), None
    dialect.echoes = [echo]
    return CompletionWriter(dialect, OUTPUT, index)


def chat_writer(*, parses: bool = True, **fields: Any) -> ChatWriter:
    dialect = ChatDialect.__new__(ChatDialect)
    dialect.frontend = cast(Any, SimpleNamespace(tokenizer=None, message_format=FORMAT))
    dialect.body = replace(decode(MESSAGES, ChatRequest), **fields)
    dialect.chunk = ChatChunk(id="chatcmpl-1", created=1, model="m", system_fingerprint=None)
    dialect.names = None
    dialect.turn = Turn([7, 8], SamplingParams(), USE, parses=parses)
    return ChatWriter(dialect, OUTPUT, 1)


@pytest.fixture(autouse=True)
def one_call_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "new_call_id", lambda frontend: "call_1")


def anthropic_writer() -> ChoiceWriter:
    config = SimpleNamespace(served_model_names=["m"])
    frontend: Any = SimpleNamespace(
        tokenizer=None, message_format=FORMAT, config=config, block_size=16
    )
    dialect = AnthropicDialect.__new__(AnthropicDialect)
    dialect.frontend, dialect.id, dialect.model_name = frontend, "msg_1", "m"
    dialect.body = decode(
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}', MessagesRequest
    )
    dialect.turn = Turn([7, 8], SamplingParams(), USE, parses=True)
    dialect.blocks = Blocks(lambda kind: f"{kind}_1")
    return dialect.choice(OUTPUT, 0)


@pytest.mark.parametrize(
    "make",
    [
        text_writer, lambda: text_writer(return_token_ids=True),
        lambda: text_writer(stream_options=USAGE), chat_writer,
        lambda: chat_writer(return_token_ids=True), lambda: chat_writer(parses=False),
        anthropic_writer,
    ],
)  # fmt: skip
def test_frames_hold_the_events_of_deltas(make: Callable[[], ChoiceWriter]) -> None:
    by_delta, by_frame = make(), make()
    for token, text in enumerate(TOKENS):
        reason = "stop" if token == len(TOKENS) - 1 else None
        events = by_delta.events(Delta(0, text, [token], None, reason))
        frame = by_frame.frame(text, token, reason, None)
        assert frame == (b"%x\r\n%b\r\n" % (len(events), events) if events else b"")
    assert by_delta.num_tokens == by_frame.num_tokens == len(TOKENS)


def chunks(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in events.split(b"\n\n")[:-1]]


def test_each_token_has_its_id_and_the_usage_so_far() -> None:
    writer = text_writer(stream_options=USAGE, return_token_ids=True)
    writer.events(Delta(0, "a", [5]))
    frame = writer.frame("b", 6, "length", None)
    of_token, end = chunks(frame.partition(b"\r\n")[2].removesuffix(b"\r\n"))
    assert of_token["choices"][0]["token_ids"] == [6]
    assert [event["usage"]["completion_tokens"] for event in (of_token, end)] == [2, 2]
    assert end["choices"][0]["finish_reason"] == "length"
