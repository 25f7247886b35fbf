from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from aioinfer.api.messages import Message, Role
from aioinfer.errors import RequestError


def message(**fields: Any) -> Message:
    made = msgspec.convert({"role": "user", "content": "x"} | fields, Message)
    made.check("messages[0]")
    return made


def tool_call(arguments: Any) -> dict[str, Any]:
    return {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize("role", get_args(Role))
def test_roles(role: str) -> None:
    # templates do not know the newer name of the system's role, and the older one of the tool's
    assert message(role=role).for_template() == {
        "role": {"developer": "system", "function": "tool"}.get(role, role),
        "content": "x",
    }


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert message(content=parts).for_template()["content"] == "one\ntwo"


def test_only_an_assistant_may_have_no_content() -> None:
    found = message(role="assistant", content=None).for_template()
    assert found == {"role": "assistant", "content": ""}
    with pytest.raises(RequestError, match="content is missing") as caught:
        message(role="tool", content=None)
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_of_calls_are_objects(arguments: Any) -> None:
    rendered = message(
        role="assistant", content=None, tool_calls=[tool_call(arguments)]
    ).for_template()
    assert rendered["tool_calls"] == [tool_call({"a": 1})]


@pytest.mark.parametrize("arguments", ["", None])
def test_a_call_without_arguments(arguments: str | None) -> None:
    rendered = message(role="assistant", tool_calls=[tool_call(arguments)]).for_template()
    assert rendered["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["{", '{"city": "Par', "[1]", "5", '{"a":' * 100_000])
def test_arguments_that_are_no_object_do_not_end_a_conversation(arguments: str) -> None:
    """A call that `max_tokens` has cut off comes back in the history."""
    made = message(role="assistant", tool_calls=[tool_call(arguments)])
    assert made.for_template()["tool_calls"] == [tool_call({"invalid_json": arguments})]


def test_a_refusal_is_what_the_assistant_has_said() -> None:
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    assert message(role="assistant", content=parts).for_template()["content"] == "Well.\nNo."
    alone = message(role="assistant", content=None, refusal="No.")
    assert alone.for_template() == {"role": "assistant", "content": "No."}
    with pytest.raises(RequestError) as caught:
        message(role="user", content=[parts[1]])
    assert caught.value.param == "messages[0].content[0]"


def test_the_older_form_of_calls() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = message(role="assistant", content=None, function_call=function).for_template()
    assert call["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    result = message(role="function", name="add", content=None).for_template()
    assert result == {"role": "tool", "name": "add", "content": ""}


def test_the_answer_of_a_tool() -> None:
    fields = {"role": "tool", "content": "3", "tool_call_id": "call-1", "name": "add"}
    assert message(**fields).for_template() == fields
