"""Items of the Responses API, and the messages that they stand for."""

from __future__ import annotations

from typing import Any

import msgspec

from aioinfer.api.blocks import Block
from aioinfer.api.response_events import answer
from aioinfer.api.responses_body import Item, to_messages


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return to_messages(msgspec.convert(items, list[Item]))


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


CALL = {"type": "function_call", "name": "f", "call_id": "c", "arguments": '{"a": 1'}


def test_all_thoughts_of_an_answer_stay_in_it() -> None:
    said = {"type": "message", "role": "assistant", "content": "Hi"}
    assert messages(thought("One."), thought(""), thought("Two."), said) == [
        {"role": "assistant", "content": "Hi", "reasoning_content": "One.\nTwo."}
    ]


def test_all_thoughts_of_a_generated_message_are_stored() -> None:
    kinds: Any = [("reasoning", "One."), ("text", "Hi"), ("reasoning", "Two.")]
    blocks = [Block(place, kind, "", parts=[text]) for place, (kind, text) in enumerate(kinds)]
    assert answer(blocks) == {
        "role": "assistant",
        "content": "Hi",
        "reasoning_content": "One.\nTwo.",
    }


def test_arguments_that_were_cut_off_do_not_end_a_conversation() -> None:
    (message,) = messages(CALL)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"invalid_json": '{"a": 1'}}


def test_a_refusal_is_what_the_assistant_has_said() -> None:
    content = [{"type": "refusal", "refusal": "No."}]
    assert messages({"type": "message", "role": "assistant", "content": content}) == [
        {"role": "assistant", "content": "No."}
    ]
