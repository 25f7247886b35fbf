from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.api.errors import DONE, error_body
from aioinfer.api.generation import ChoiceWriter, data_event
from aioinfer.api.protocol import StreamOptions
from aioinfer.engine.output import Delta
from aioinfer.features.logprobs.planning import TokenLogprob
from tests.test_generation import SHARED, chat_writer, chunks, text_writer

TEXTS = [
    "", "plain", 'quotes " and \\ slashes', "line\nbreaks\r\n\ttabs", "\0\x1f\x7f", "ünï ✓ 🎉",
    "\u2028\u2029", "data: [DONE]\n\n", "</script>",
]  # fmt: skip


def completion_writer(index: int = 0, **fields: Any) -> ChoiceWriter:
    return text_writer("", index, **fields)


def parse(event: bytes) -> dict[str, Any]:
    """Reads one event as a client does: a single line of data, and an empty line."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert b"\r" not in event
    return json.loads(event.removeprefix(b"data: "))


def unframed(frame: bytes) -> bytes:
    """Reads a frame of HTTP's chunked coding."""
    length, _, rest = frame.partition(b"\r\n")
    data = rest.removesuffix(b"\r\n")
    assert len(data) == int(length, 16)
    return data


def choice(index: int, **fields: Any) -> dict[str, Any]:
    return {"index": index, "logprobs": None, "finish_reason": None} | fields


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives(text: str) -> None:
    writer = completion_writer(3)
    expected = SHARED | {"choices": [choice(3, text=text)]}
    assert parse(writer.events(Delta(3, text, [1]))) == expected
    assert parse(unframed(writer.frame(text, 2, None, None))) == expected
    chat = chat_writer(parses=False)
    *_, event = chunks(chat.events(Delta(1, text, [1])))
    assert event["choices"] == [choice(1, delta={"content": text})]
    assert parse(unframed(chat.frame(text, 2, None, None))) == event


def test_logprobs_go_with_the_text() -> None:
    of_token = [TokenLogprob(5, -0.5, [])]
    writer = completion_writer()
    writer.events(Delta(0, "ab", [4], of_token))
    event = parse(writer.events(Delta(0, "a", [5], of_token)))
    found = event["choices"][0]["logprobs"]
    assert (found["token_logprobs"], found["tokens"]) == ([-0.5], ["token_id:5"])
    assert found["text_offset"] == [2]
    chat = chat_writer(parses=False)
    *_, event = chunks(chat.events(Delta(1, "a", [5], of_token)))
    (entry,) = event["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"]) == ("token_id:5", -0.5)


@pytest.mark.parametrize("stop_reason", [None, 2, "END\n"])
def test_the_last_event_of_a_choice(stop_reason: int | str | None) -> None:
    ends = {"finish_reason": "stop", "stop_reason": stop_reason}
    event = parse(completion_writer(1).events(Delta(1, "", [2], None, "stop", stop_reason)))
    assert event["choices"] == [choice(1, text="", **ends)]
    *_, event = chunks(chat_writer().events(Delta(1, "", [2], None, "stop", stop_reason)))
    assert event["choices"] == [choice(1, delta={}, **ends)]


def test_a_chat_opens_with_the_role() -> None:
    role, _ = chunks(chat_writer(return_token_ids=True).events(Delta(1, "", [1])))
    assert role["choices"] == [choice(1, delta={"role": "assistant", "content": ""})]
    assert role["prompt_token_ids"] == [7, 8]


def test_with_usage_every_chunk_has_the_field() -> None:
    writer = completion_writer(stream_options=StreamOptions(include_usage=True))
    events = writer.events(Delta(0, "x", [1])) + unframed(writer.frame("y", 2, None, None))
    events += writer.events(Delta(0, "z", [3], None, "stop"))
    assert [event["usage"] for event in chunks(events)] == [None] * 4


def test_errors_and_the_end() -> None:
    assert parse(data_event(error_body(500, "gone\n")))["error"]["message"] == "gone\n"
    assert DONE == b"data: [DONE]\n\n"
