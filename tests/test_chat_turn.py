"""The message of a choice, which is built while its text comes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aioinfer.async_llm import StreamedCompletion
from aioinfer.engine.chat_turn import MessageBuilder, Turn
from aioinfer.engine.frontend import Frontend
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.formats.registry import message_format
from aioinfer.text.message_parser import ToolUse

USE = ToolUse([{"name": "add", "parameters": {"type": "object"}}], "auto")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TEXTS = [
    "",
    "Hello",
    "<think>\nHm.\n</think>\n\nHello",
    CALL,
    f"<think>\nHm\n</think>\n{CALL}{CALL.replace('2', '3')}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_dict_grows_to_the_message(text: str) -> None:
    format = message_format("", {}, "hermes", "think")
    frontend = cast(Frontend, SimpleNamespace(message_format=format))
    turn = Turn([1], SamplingParams(), USE, parses=True)
    builder = MessageBuilder(frontend, turn)
    as_dict: dict[str, Any] = builder.as_dict
    for place, piece in enumerate(text, 1):
        builder.feed(piece, ended=place == len(text))
        assert builder.as_dict is as_dict
        assert as_dict == builder.message.to_dict()
    assert len(builder.message.calls) == text.count("<tool_call>")
    assert bool(builder.message.reasoning) == ("Hm" in text)


def test_a_streamed_completion_joins_what_is_read() -> None:
    completion = StreamedCompletion()
    for piece in ("Two", "", " and", " two"):
        completion.append(piece)
    assert completion.text == "Two and two"
    completion.append(" are")
    copied = replace(completion, message={"role": "assistant"})
    completion.append(" four")
    assert (copied.text, copied.message) == ("Two and two are", {"role": "assistant"})
    assert (completion.text, completion.message) == ("Two and two are four", None)
    assert completion != copied
    assert completion == StreamedCompletion(text="Two and two are four")
