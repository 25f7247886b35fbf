"""Conversations: the history is what was really answered, turns wait for answers, and files in
ShareGPT's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from benchlib.client import Client, Record
from benchlib.conversation import Conversation, Conversations, Turn, read_transcripts
from benchlib.load import Run, run_load
from benchlib.report import summarize
from benchlib.workload import IntRange, RequestShape
from tests.scripted_server import USAGE_EVENT, serving, sse, stream, text_event

CHAT = RequestShape("m", chat=True)
TALK = Conversation((Turn("one", 5), Turn("two", 6), Turn("three", 7)), system="Be brief.")


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


class Answering:
    """Answers with the number of the request, in two chunks of chat or of completion; can fail from
    one number on."""

    def __init__(self, fail_from: int = 10**9) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._fail_from = fail_from

    async def reply(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        number = len(self.bodies)
        if number >= self._fail_from:
            return web.Response(status=500, text="no")
        if not self.bodies[-1]["stream"]:
            message = {"message": {"content": f"an{number}"}}
            return web.json_response({"choices": [message], "usage": USAGE_EVENT["usage"]})
        event = delta if request.path.endswith("chat/completions") else text_event
        return await stream(request, sse(event("an"), event(str(number)), USAGE_EVENT, "[DONE]"))


async def talk(
    shape: RequestShape, conversations: Sequence[Conversation], server: Answering
) -> Run:
    async with serving(server.reply) as url, Client(url) as client:
        return await run_load(
            client, shape, conversations, num_requests=len(conversations), concurrency=1
        )


@pytest.mark.parametrize("stream_it", [True, False])
async def test_a_chat_keeps_its_history(stream_it: bool) -> None:
    server = Answering()
    run = await talk(RequestShape("m", chat=True, stream=stream_it), [TALK], server)
    said = [
        [(message["role"], message["content"]) for message in body["messages"]]
        for body in server.bodies
    ]
    start = [("system", "Be brief."), ("user", "one")]
    middle = [*start, ("assistant", "an1"), ("user", "two")]
    assert said == [start, middle, [*middle, ("assistant", "an2"), ("user", "three")]]
    assert (
        [body["max_tokens"] for body in server.bodies]
        == [record.max_tokens for record in run.records]
        == [5, 6, 7]
    )
    assert [record.turn for record in run.records] == [1, 2, 3]
    assert {record.text for record in run.records} == {
        ""
    }  # the text is kept only while the conversation needs it
    assert all(
        record.sent >= before.sent + before.e2e
        for before, record in zip(run.records, run.records[1:], strict=False)
    )


async def test_completions_get_one_text() -> None:
    server = Answering()
    await talk(RequestShape("m"), [TALK], server)
    found = [body["prompt"] for body in server.bodies[:2]]
    assert found == ["Be brief.\n\none\n\n", "Be brief.\n\none\n\nan1\n\ntwo\n\n"]


async def test_a_turn_that_fails_ends_its_conversation_alone() -> None:
    server = Answering(fail_from=5)
    run = await talk(CHAT, [TALK, TALK, TALK], server)
    assert [(record.turn, record.error) for record in run.records] == [
        (1, None), (2, None), (3, None), (1, None), (2, "HTTP 500"), (1, "HTTP 500"),
    ]  # fmt: skip
    assert run.num_items == 3


async def test_users_think_before_a_turn() -> None:
    begin = perf_counter()
    run = await talk(
        CHAT, [Conversation((Turn("one", 5), Turn("two", 5, think_s=0.2)))], Answering()
    )
    first, second = run.records
    assert second.sent - (first.sent + first.e2e) >= 0.19
    assert second.e2e < perf_counter() - begin - 0.19  # thinking is no part of a request


def test_made_conversations() -> None:
    workload = Conversations([], IntRange(2, 4), IntRange(5, 9), IntRange(10, 12), 2.0, seed=3)
    some = [workload.item(index) for index in range(300)]
    assert {len(conversation.turns) for conversation in some} == {2, 3, 4}
    turns = [turn for conversation in some for turn in conversation.turns]
    assert {len(turn.text.split()) for turn in turns} == {5, 6, 7, 8, 9}
    assert {turn.max_tokens for turn in turns} == {10, 11, 12}
    pauses = [turn.think_s for conversation in some for turn in conversation.turns[1:]]
    assert np.mean(pauses) == pytest.approx(2.0, rel=0.15)
    assert {conversation.turns[0].think_s for conversation in some} == {0.0}
    assert workload.item(5) == some[5] != some[6]


def test_conversations_of_a_file(tmp_path: Path) -> None:
    talks = [
        {
            "conversations": [
                {"from": who, "value": text}
                for who, text in zip(("system", *["human", "gpt"] * 3), "Saxbyc", strict=False)
            ]
        },
        {"conversations": [{"from": "gpt", "value": "nobody asked"}]},
        {"messages": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "z"}]},
    ]
    as_list, as_lines = tmp_path / "talks.json", tmp_path / "talks.jsonl"
    as_list.write_text(json.dumps(talks, indent=1), "utf-8")
    as_lines.write_text("\n".join(map(json.dumps, talks)) + "\n\n", "utf-8")
    transcripts = read_transcripts(as_list)
    assert read_transcripts(as_lines) == transcripts
    workload = Conversations(
        transcripts, IntRange(2, 2), IntRange(1, 1), IntRange(9, 9), 0.0, seed=0
    )
    items = [workload.item(index) for index in range(3)]
    found = [(item.system, [turn.text for turn in item.turns]) for item in items]
    assert found == [("S", ["a", "b"]), ("", ["d"]), ("S", ["a", "b"])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{", "neither a JSON list nor JSON lines"),
        ('{"conversations": []}\n', "no conversation in which a user speaks"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}\n{"prompt": "x"}',
            "conversation 2: an object with",
        ),
        ('{"messages": [{"role": "user", "content": [1]}]}', "conversation 1"),
        ("[3]", "conversation 1"),
    ],
)
def test_a_bad_file_of_conversations(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "talks.json"
    file.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        read_transcripts(file)


def test_figures_by_turn() -> None:
    one = Record(0.0, 1, ttft=0.2, e2e=1.0, prompt_tokens=10, cached_tokens=0, chunks=1,
                 output_tokens=1, turn=1)  # fmt: skip
    two = replace(one, sent=1.0, ttft=0.1, prompt_tokens=30, cached_tokens=20, turn=2)
    run = Run([one, two, replace(two, ttft=0.3)], duration_s=2.0)
    first, second = summarize(run)["turns"]
    known = {"turn": 1, "requests": 1, "prompt_tokens": 10, "cached_share": 0.0}
    assert first.items() >= known.items()
    known = {"turn": 2, "requests": 2, "prompt_tokens": 30, "cached_share": 2 / 3}
    assert second.items() >= known.items()
    assert second["ttft_ms"]["mean"] == pytest.approx(200)
