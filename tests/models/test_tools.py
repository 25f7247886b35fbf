"""A real model of tool calls: Qwen2.5-Coder-0.5B-Instruct, asked fifty questions of ours with one
to six tools, behind a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from tests.functional.conftest import Served, serve
from tests.models.files import QWEN
from tests.models.tool_questions import ALL_TOOLS, QUESTIONS, SCHEMAS, Question

# a question takes a second or two on two cores
pytestmark = [
    pytest.mark.extended,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qwen(converted: Callable[[str], Path]) -> AsyncIterator[Served]:
    async with serve(
        model__path=str(await asyncio.to_thread(converted, QWEN)),
        model__max_model_len=2048,
        cache__num_blocks=1200,
        scheduler__max_num_seqs=16,
        scheduler__max_num_batched_tokens=512,
        parallel__cpu_threads=2,
    ) as served:
        yield served


def body_of(question: Question, choice: Any) -> dict[str, Any]:
    return {
        "messages": [*question.before, {"role": "user", "content": question.text}],
        "tools": [ALL_TOOLS[name] for name in question.tools], "tool_choice": choice,
        "parallel_tool_calls": question.num_calls > 1, "temperature": 0, "max_tokens": 160,
    }  # fmt: skip


async def ask(served: Served, choice: Any) -> list[tuple[Question, dict[str, Any]]]:
    """Asks all questions; returns the reply's choice of each. `choice` may be what returns it for a
    question."""

    async def answer(question: Question) -> dict[str, Any]:
        given = choice(question) if callable(choice) else choice
        reply = await served.post("/v1/chat/completions", **body_of(question, given))
        return dict(reply["choices"][0])

    answers = await asyncio.gather(*map(answer, QUESTIONS))
    return list(zip(QUESTIONS, answers, strict=True))


def calls_of(choice: dict[str, Any]) -> list[str]:
    """Returns the names of the functions that were called, whose arguments must follow their
    schemas, unless the last of them is cut off."""
    functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
    complete = functions if choice["finish_reason"] != "length" else functions[:-1]
    for called in complete:
        jsonschema.Draft202012Validator(
            SCHEMAS[called["name"]], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        ).validate(json.loads(called["arguments"]))
    return [called["name"] for called in functions]


def is_right(question: Question, names: list[str]) -> bool:
    return all(name in question.answers for name in names) and bool(names) == bool(question.answers)


def named(question: Question) -> dict[str, Any]:
    """Returns the choice of the function that answers a question, or of its last tool."""
    name = (question.answers or question.tools)[-1]
    return {"type": "function", "function": {"name": name}}


async def test_required_calls_follow_their_schemas(
    qwen: Served, record_property: Callable[[str, object], None]
) -> None:
    right = several = 0
    for question, choice in await ask(qwen, "required"):
        names = calls_of(choice)
        assert names
        assert choice["finish_reason"] in ("tool_calls", "length")
        right += is_right(question, names)
        several += question.num_calls > 1 and len(names) > 1
    record_property("right", right)
    record_property("several", several)
    assert right >= 25  # of 44 that need a call


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_ends_where_several_calls_may_come(qwen: Served, stream: bool) -> None:
    """Clients execute calls of a message that ends with `tool_calls` alone. So the model must find
    its end where `parallel_tool_calls` is not given, as agents leave it."""

    places = asyncio.Semaphore(16)  # no request waits for a slot while its client counts minutes

    async def reason(question: Question) -> str:
        body = body_of(question, "required") | {"max_tokens": 320}
        del body["parallel_tool_calls"]
        async with places:
            if stream:
                last = (await qwen.stream("/v1/chat/completions", **body))[-1]
            else:
                last = await qwen.post("/v1/chat/completions", **body)
        return str(last["choices"][0]["finish_reason"])

    reasons = await asyncio.gather(*map(reason, QUESTIONS))
    assert reasons.count("tool_calls") >= 45


async def test_named_calls_follow_their_schemas(qwen: Served) -> None:
    for question, choice in await ask(qwen, named):
        (name,) = calls_of(choice)
        assert name == named(question)["function"]["name"]


async def test_calls_that_the_model_opens_follow_their_schemas(
    qwen: Served, record_property: Callable[[str, object], None]
) -> None:
    opened = right = 0
    for question, choice in await ask(qwen, "auto"):
        names = calls_of(choice)
        opened += bool(names)
        right += is_right(question, names)
        assert (choice["finish_reason"] == "tool_calls") == (
            bool(names) and choice["finish_reason"] != "length"
        )
    record_property("opened", opened)
    record_property("right", right)
    assert opened >= 35
    assert right >= 25


async def test_a_call_between_fences_is_streamed_as_one(qwen: Served) -> None:
    """What the model writes for most questions with few tools."""
    body = body_of(next(q for q in QUESTIONS if "good morning" in q.text), "auto")
    reply = await qwen.post("/v1/chat/completions", **body)
    (whole,) = reply["choices"][0]["message"]["tool_calls"]
    events = await qwen.stream("/v1/chat/completions", **body)
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["name"] for call in calls if "name" in call] == [whole["function"]["name"]]
    arguments = "".join(call["arguments"] for call in calls)
    assert arguments == whole["function"]["arguments"]
    assert not any(delta.get("content") for delta in deltas)
