"""Bodies of Anthropic's Messages API, and the messages that they stand for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aioinfer.api.anthropic import CountTokensRequest


def conversation(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    body = msgspec.convert({"messages": messages}, CountTokensRequest)
    return list(body.conversation())


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_content_without_blocks_is_an_empty_text(role: str) -> None:
    assert conversation({"role": role, "content": []}) == [{"role": role, "content": ""}]


def test_a_prompt_is_retained_for_the_longest_time_that_is_asked_for() -> None:
    hour = {"type": "ephemeral", "ttl": "1h"}
    text = {"type": "text", "text": "x"}
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [text | {"cache_control": hour}],
    }
    tool = {"name": "f", "input_schema": {"type": "object"}}

    def retain_s(*blocks: dict[str, Any], **more: Any) -> float:
        body = {"messages": [{"role": "user", "content": list(blocks)}]} | more
        return msgspec.convert(body, CountTokensRequest).retain_s()

    short = {"cache_control": {"type": "ephemeral"}}
    assert retain_s(text) == 0
    assert retain_s(text | short) == 300
    assert retain_s(text, **short) == 300
    assert retain_s(text, system=[text | {"cache_control": hour}]) == 3600
    assert retain_s(text | short, tools=[tool | {"cache_control": hour}]) == 3600
    assert retain_s(result, text | short) == 3600
    assert retain_s(text, tools=[tool]) == 300, "a conversation goes on when its tools have run"
    with pytest.raises(msgspec.ValidationError):
        retain_s(text | {"cache_control": {"type": "ephemeral", "ttl": "2h"}})


def test_results_alone_are_no_text_of_the_user() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "sun"}
    assert conversation({"role": "user", "content": [result]}) == [
        {"role": "tool", "tool_call_id": "a", "content": "sun"}
    ]


def test_all_thoughts_of_an_answer_stay_in_it() -> None:
    thoughts = [{"type": "thinking", "thinking": text} for text in ("One.", "Two.")]
    (message,) = conversation({"role": "assistant", "content": thoughts})
    assert message["reasoning_content"] == "One.\nTwo."
