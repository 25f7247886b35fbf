"""A real model of tool calls: Qwen2.5-Coder-0.5B-Instruct, asked questions of ours with one, three
and six tools, behind a socket."""

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

pytestmark = pytest.mark.asyncio(loop_scope="module")


def function(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [name for name, schema in properties.items() if "default" not in schema],
    }
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


TEXT: dict[str, Any] = {"type": "string", "maxLength": 60}
NUMBER: dict[str, Any] = {"type": "number"}
TOOLS = [
    function(
        "get_weather",
        "The weather forecast of a city",
        city=TEXT,
        unit={"enum": ["celsius", "fahrenheit"], "default": "celsius"},
    ),
    function("send_email", "Send an email", to=TEXT, subject=TEXT, text=TEXT),
    function(
        "set_timer",
        "Set a timer",
        minutes={"type": "integer", "minimum": 1, "maximum": 600},
        label=TEXT | {"default": ""},
    ),
    function(
        "convert_currency",
        "Convert an amount of money",
        amount=NUMBER,
        source={"type": "string", "pattern": "^[A-Z]{3}$"},
        target={"type": "string", "pattern": "^[A-Z]{3}$"},
    ),
    function(
        "search_files",
        "Search files by words in them",
        words={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 4},
        folder=TEXT | {"default": "."},
    ),
    function("run_sql", "Run a query on the database and return its rows", query=TEXT),
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
#: How many of the tools are given, the question, and the function that answers it.
QUESTIONS = [
    (1, "What is the weather in Paris?", "get_weather"),
    (1, "Do I need an umbrella in London today?", "get_weather"),
    (3, "How warm is it in Cairo, in fahrenheit?", "get_weather"),
    (3, "Write to ann@example.org that the meeting is moved to Monday.", "send_email"),
    (3, "Wake me in 20 minutes.", "set_timer"),
    (6, "Remind me in an hour to call my mother.", "set_timer"),
    (6, "How many US dollars are 250 euros?", "convert_currency"),
    (6, "Find the files that mention invoices and taxes.", "search_files"),
    (6, "How many rows has the table orders?", "run_sql"),
    (6, "Will it rain in Oslo tomorrow?", "get_weather"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qwen(converted: Callable[[str], Path]) -> AsyncIterator[Served]:
    async with serve(
        model__path=str(await asyncio.to_thread(converted, QWEN)),
        model__max_model_len=2048,
        cache__num_blocks=600,
        scheduler__max_num_batched_tokens=512,
        parallel__cpu_threads=2,
    ) as served:
        yield served


async def ask(served: Served, choice: str) -> list[tuple[str, dict[str, Any]]]:
    """Asks all questions; returns the expected function and the reply's choice of each."""

    async def answer(number: int, question: str) -> dict[str, Any]:
        reply = await served.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": question}],
            tools=TOOLS[:number],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=160,
        )
        return dict(reply["choices"][0])

    answers = await asyncio.gather(*(answer(number, text) for number, text, _ in QUESTIONS))
    return list(zip([expected for _, _, expected in QUESTIONS], answers, strict=True))


def calls_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the functions that were called, whose arguments must follow their schemas."""
    functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
    for called in functions:
        jsonschema.validate(json.loads(called["arguments"]), SCHEMAS[called["name"]])
    return functions


async def test_required_calls_are_right(qwen: Served) -> None:
    right = 0
    for expected, choice in await ask(qwen, "required"):
        assert choice["finish_reason"] == "tool_calls"
        (called,) = calls_of(choice)
        print(expected, called)  # noqa: T201
        right += called["name"] == expected
    assert right >= 7


async def test_calls_that_the_model_opens_follow_their_schemas(qwen: Served) -> None:
    opened = 0
    for expected, choice in await ask(qwen, "auto"):
        calls = calls_of(choice)
        print(expected, calls or choice["message"]["content"])  # noqa: T201
        opened += bool(calls)
        assert (choice["finish_reason"] == "tool_calls") == bool(calls)
    assert opened >= 5  # the others come as text between fences
