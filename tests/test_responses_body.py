"""Items of the Responses API, and the messages that they stand for."""

from __future__ import annotations

from typing import Any

import msgspec

from aioinfer.api.openai.responses_body import Item, Part, input_items, to_messages


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return to_messages(input_items(msgspec.convert(items, list[Item])))


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


CALL = {"type": "function_call", "name": "f", "call_id": "c", "arguments": '{"a": 1'}


def test_all_thoughts_of_an_answer_stay_in_it() -> None:
    said = {"type": "message", "role": "assistant", "content": "Hi"}
    assert messages(thought("One."), thought(""), thought("Two."), said) == [
        {"role": "assistant", "content": "Hi", "reasoning_content": "One.\nTwo."}
    ]


def test_all_thoughts_of_a_generated_message_are_stored() -> None:
    said = {"type": "message", "role": "assistant", "content": "Hi"}
    assert messages(thought("One."), said, thought("Two.")) == [
        {"role": "assistant", "content": "Hi", "reasoning_content": "One.\nTwo."}
    ]


def test_each_item_has_an_id_of_its_own() -> None:
    said = {"id": "msg_1", "role": "user", "content": "Hi"}
    items = input_items(msgspec.convert([said, said, CALL], list[Item]), {"msg_2"})
    assert items[0].id == "msg_1"
    assert len({item.id for item in items}) == 3
    (other,) = input_items(msgspec.convert([said], list[Item]), {"msg_1"})
    assert other.id != "msg_1"
    assert other.content == [Part(type="input_text", text="Hi")]


def test_arguments_that_were_cut_off_do_not_end_a_conversation() -> None:
    (message,) = messages(CALL)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"invalid_json": '{"a": 1'}}


def test_a_refusal_is_what_the_assistant_has_said() -> None:
    content = [{"type": "refusal", "refusal": "No."}]
    assert messages({"type": "message", "role": "assistant", "content": content}) == [
        {"role": "assistant", "content": "No."}
    ]
