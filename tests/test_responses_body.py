"""Items of the Responses API, and the messages that they stand for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aioinfer.api.decoding import decode
from aioinfer.api.messages import Item, Part, input_items, to_messages
from aioinfer.api.openai.responses_body import ResponseRequest
from aioinfer.errors import RequestError


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return to_messages(input_items(msgspec.convert(items, list[Item])))


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


CALL = {"type": "function_call", "name": "f", "call_id": "c", "arguments": '{"a": 1'}


def test_all_thoughts_before_and_behind_an_answer_stay_in_it() -> None:
    said = {"type": "message", "role": "assistant", "content": "Hi"}
    found = {"role": "assistant", "content": "Hi", "reasoning_content": "One.\nTwo."}
    assert messages(thought("One."), thought(""), thought("Two."), said) == [found]
    assert messages(thought("One."), said, thought("Two.")) == [found]


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


def tool_body(tools: list[dict[str, Any]], choice: Any) -> bytes:
    return msgspec.json.encode({"input": "Hi", "tools": tools, "tool_choice": choice})


def test_allowed_tools_restrict_the_calls() -> None:
    tools = [{"type": "function", "name": name, "parameters": {}} for name in ("f", "g")]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [tools[1]]}
    use = decode(tool_body(tools, allowed), ResponseRequest).tool_use()
    assert ([tool["name"] for tool in use.tools], use.choice) == (["g"], "required")
    assert use.tools[0]["place"] == "tools[1].parameters"


def test_a_tool_of_a_server_is_named() -> None:
    with pytest.raises(RequestError, match="'web_search' is not supported") as caught:
        decode(tool_body([{"type": "web_search"}], "auto"), ResponseRequest)
    assert caught.value.param == "tools[0].type"
