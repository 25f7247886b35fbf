"""Bodies of Anthropic's Messages API, and the messages that they stand for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aioinfer.api.anthropic import CountTokensRequest
from aioinfer.errors import RequestError


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


TEXT = {"type": "text", "media_type": "text/plain", "data": "The Seine."}
BLOCKS = {
    "type": "content",
    "content": [{"type": "text", "text": "The "}, {"type": "text", "text": "Seine."}],
}
RESULT = {"type": "search_result", "source": "https://a.org", "title": "Rivers"}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": TEXT}, "The Seine."),
        (
            {"type": "document", "source": TEXT, "title": "Rivers", "context": "Of France."},
            "Rivers\nOf France.\n\nThe Seine.",
        ),
        (
            {"type": "document", "source": BLOCKS, "title": "Rivers",
             "citations": {"enabled": False}},
            "Rivers\n\nThe \nSeine.",
        ),
        ({"type": "document", "source": {"type": "content", "content": "x"}}, "x"),
        (RESULT | {"content": BLOCKS["content"]}, "Rivers\nhttps://a.org\n\nThe \nSeine."),
    ],
)  # fmt: skip
def test_documents_are_texts(block: dict[str, Any], text: str) -> None:
    """In messages and in results of tools."""
    asked = {"type": "text", "text": "Which river?"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block, asked]}
    for content, role in (([block, asked], "user"), ([result], "tool")):
        (message,) = conversation({"role": "user", "content": content})
        assert (message["role"], message["content"]) == (role, f"{text}\nWhich river?")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}},
         r"content\[0\]\.source\.type documents of type 'base64' are not .*: a PDF has"),
        ({"type": "document", "source": {"type": "url", "url": "https://a.org"}}, "type 'url'"),
        ({"type": "document", "source": {"type": "file", "file_id": "a"}}, "type 'file'"),
        ({"type": "document", "source": {"type": "text"}}, r"\[0\]\.source\.data is missing"),
        ({"type": "document"}, r"\[0\]\.source must be an object"),
        (RESULT, r"\[0\]\.content is missing"),
        ({"type": "document", "source": TEXT, "citations": {"enabled": True}},
         r"\[0\]\.citations are not supported here"),
        ({"type": "document", "source": {"type": "content", "content": [RESULT]}},
         r"source\.content\[0\]: a block of type 'search_result' is not supported"),
    ],
)  # fmt: skip
def test_documents_that_are_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        conversation({"role": "user", "content": [block]})
