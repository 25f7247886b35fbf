from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.api.generation import DONE, data_event
from aioinfer.api.openai.chunks import ChunkTemplate, Envelope, role_event

COMPLETION = Envelope(
    "cmpl-1", "text_completion", 1_700_000_000, 'a "quoted" name', fingerprint="fp_1"
)
OF_CHAT = ("chatcmpl-1", "chat.completion.chunk", 1_700_000_000, "m")
CHAT = Envelope(*OF_CHAT, fingerprint="fp_1")
SHARED = dict(zip(("id", "object", "created", "model"), OF_CHAT, strict=True))
SHARED["system_fingerprint"] = "fp_1"

TEXTS = [
    "", "plain", 'quotes " and \\ slashes', "line\nbreaks\r\n\ttabs", "\0\x1f\x7f", "ünï ✓ 🎉",
    "\u2028\u2029", "data: [DONE]\n\n", "</script>",
]  # fmt: skip


def parse(event: bytes) -> dict[str, Any]:
    """Reads one event as a client does: a single line of data, and an empty line."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert b"\r" not in event
    return json.loads(event.removeprefix(b"data: "))


def choice(index: int, **fields: Any) -> dict[str, Any]:
    return {"index": index, "logprobs": None, "finish_reason": None} | fields


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives(text: str) -> None:
    assert parse(ChunkTemplate.for_completion(COMPLETION, 3).chunk(text)) == {
        "id": "cmpl-1", "object": "text_completion", "created": 1_700_000_000,
        "model": 'a "quoted" name', "system_fingerprint": "fp_1",
        "choices": [choice(3, text=text)],
    }  # fmt: skip
    of_chat = SHARED | {"choices": [choice(0, delta={"content": text})]}
    assert parse(ChunkTemplate.for_chat(CHAT, 0).chunk(text)) == of_chat


def test_logprobs_go_with_the_text() -> None:
    logprobs = {"content": [{"token": "a", "logprob": -0.5}]}
    event = parse(ChunkTemplate.for_chat(CHAT, 1).chunk_with_logprobs("a", logprobs))
    assert event["choices"] == [choice(1, delta={"content": "a"}, logprobs=logprobs)]
    event = parse(ChunkTemplate.for_completion(COMPLETION, 0).chunk_with_logprobs("a", logprobs))
    assert event["choices"] == [choice(0, text="a", logprobs=logprobs)]


@pytest.mark.parametrize("stop_reason", [None, 2, "END\n"])
def test_the_last_event_of_a_choice(stop_reason: int | str | None) -> None:
    ends = {"finish_reason": "stop", "stop_reason": stop_reason}
    event = parse(ChunkTemplate.for_chat(CHAT, 1).finish("stop", stop_reason))
    assert event["choices"] == [choice(1, delta={}, **ends)]
    event = parse(ChunkTemplate.for_completion(COMPLETION, 1).finish("stop", stop_reason))
    assert event["choices"] == [choice(1, text="", **ends)]


def test_a_chat_opens_with_the_role() -> None:
    opening = choice(2, delta={"role": "assistant", "content": ""})
    assert parse(role_event(CHAT, 2)) == SHARED | {"choices": [opening]}


def test_with_usage_every_chunk_has_the_field() -> None:
    envelope = Envelope(*OF_CHAT, include_usage=True, fingerprint="fp_1")
    template = ChunkTemplate.for_chat(envelope, 0)
    of_text = template.chunk("x"), template.chunk_with_logprobs("x", {})
    for event in (role_event(envelope, 0), *of_text, template.finish("stop", None)):
        assert parse(event)["usage"] is None
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert parse(envelope.usage_event(usage)) == SHARED | {"choices": [], "usage": usage}


def test_errors_and_the_end() -> None:
    assert parse(data_event({"error": {"message": "gone\n"}})) == {"error": {"message": "gone\n"}}
    assert DONE == b"data: [DONE]\n\n"
