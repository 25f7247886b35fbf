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


def test_results_alone_are_no_text_of_the_user() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "sun"}
    assert conversation({"role": "user", "content": [result]}) == [
        {"role": "tool", "tool_call_id": "a", "content": "sun"}
    ]


def test_all_thoughts_of_an_answer_stay_in_it() -> None:
    thoughts = [{"type": "thinking", "thinking": text} for text in ("One.", "Two.")]
    (message,) = conversation({"role": "assistant", "content": thoughts})
    assert message["reasoning_content"] == "One.\nTwo."
