"""Every event of every stream is one that `/openapi.json` declares for its endpoint, with no other
fields than it declares."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest

from aioinfer.errors import GenerationError
from tests.functional.conftest import SMOLLM2, Served, serve
from tests.functional.test_tools import ASK, TOOLS, WEATHER

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT, ANTHROPIC, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
OLLAMA, LLAMA = {"num_predict": 6, "temperature": 0}, {"n_predict": 6, "temperature": 0}
OPENAI: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
#: A call as Llama's models write it: JSON alone, which the schema of an answer may ask for.
CALL: Any = {
    "type": "object",
    "properties": {"name": {"const": "weather"}, "parameters": WEATHER},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOKENS = {"logprobs": True, "top_logprobs": 2}
REQUIRED: Any = {"temperature": 0, "tools": TOOLS, "tool_choice": "required"}
#: What a model that is open to everything streams.
TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", OPENAI | {"prompt": "A river", "n": 2, "echo": True, "logprobs": 2}),
    ("/v1/completions", OPENAI | USAGE | {"prompt": ["A", "B"], "return_token_ids": True}),
    ("/v1/completions", OPENAI | {"prompt": "A river"}),
    (CHAT, OPENAI | TOKENS | {"messages": ASK, "n": 2}),
    (CHAT, OPENAI | USAGE | {"messages": ASK, "return_token_ids": True, "timings_per_token": True}),
    (CHAT, OPENAI | {"messages": ASK, "return_progress": True, "stop": ["a"]}),
    (CHAT, OPENAI | {"messages": ASK}),
    (CHAT, REQUIRED | {"messages": ASK}),
    (RESPONSES, {"input": "A river", "max_output_tokens": 6, "temperature": 0, "top_logprobs": 2}),
    (RESPONSES, {
        "input": "A river", "max_output_tokens": 60, "temperature": 0, "tool_choice": "required",
        "tools": [{"type": "function", "name": "weather", "parameters": WEATHER}],
        "parallel_tool_calls": False,
    }),
    (RESPONSES, {"input": "A river", "max_output_tokens": 6, "temperature": 0, "background": True}),
    (ANTHROPIC, {
        "messages": ASK, "max_tokens": 6, "temperature": 0, "cache_control": {"type": "ephemeral"},
    }),
    (ANTHROPIC, {
        "messages": ASK, "max_tokens": 60, "temperature": 0, "tool_choice": {"type": "any"},
        "tools": [{"name": "weather", "input_schema": WEATHER}],
    }),
    ("/api/chat", {"messages": ASK, "options": OLLAMA} | TOKENS),
    ("/api/generate", {"prompt": "A river", "options": OLLAMA}),
    ("/api/generate", {"prompt": "A river", "options": OLLAMA, "raw": True} | TOKENS),
    ("/completion", LLAMA | {"prompt": ["A river", "A hill"], "n_probs": 2}),
]  # fmt: skip
#: What one streams that thinks.
THOUGHTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, OPENAI | TOKENS | {"messages": ASK}),
    (CHAT, OPENAI | USAGE | {"messages": ASK}),
    (RESPONSES, {"input": "A river", "max_output_tokens": 6, "temperature": 0}),
    (ANTHROPIC, {"messages": ASK, "max_tokens": 6, "temperature": 0}),
    ("/api/chat", {"messages": ASK, "options": OLLAMA}),
    ("/api/generate", {"prompt": "A river", "options": OLLAMA}),
]  # fmt: skip
#: What one streams whose calls are JSON alone.
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"messages": ASK, "tools": TOOLS, "format": CALL, "options": {"temperature": 0}}),
]
#: Streams that are long enough to fail.
LONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "A river", "max_tokens": 300, "ignore_eos": True}),
    (CHAT, {"messages": ASK, "max_tokens": 300, "ignore_eos": True}),
    (RESPONSES, {"input": "A river", "max_output_tokens": 300, "ignore_eos": True}),
    (ANTHROPIC, {"messages": ASK, "max_tokens": 300}),
    ("/api/chat", {"messages": ASK, "options": {"num_predict": 300}}),
    ("/completion", {"prompt": "A river", "n_predict": 300, "ignore_eos": True}),
]


class Declared:
    """The streams of a server, as its `/openapi.json` describes them."""

    def __init__(self, document: dict[str, Any]):
        self._paths, self._components = document["paths"], document["components"]
        for schema in self._components["schemas"].values():
            if "properties" in schema:  # a client may ignore what is not declared; the test may not
                schema["additionalProperties"] = False

    def check(self, path: str, content_type: str, text: str) -> list[dict[str, Any]]:
        """Returns the data of the events of a stream, each of which must be declared."""
        content = self._paths[path]["post"]["responses"]["200"]["content"]
        schema = content[content_type]["schema"]
        if content_type == "application/x-ndjson":
            lines = [json.loads(line) for line in text.splitlines()]
            return self._checked(schema, lines)
        events = [
            dict(line.split(": ", 1) for line in event.split("\n"))
            for event in text.removesuffix("\n\n").split("\n\n")
        ]
        self._checked(schema, events)
        data = schema["properties"]["data"]
        if "anyOf" in data:
            data = data["anyOf"][1]
            if events[-1] == {"data": "[DONE]"}:
                events.pop()
        found = [json.loads(event["data"]) for event in events]
        named = [
            each["type"] for each, event in zip(found, events, strict=True) if "event" in event
        ]
        assert named == [event["event"] for event in events if "event" in event]
        return self._checked(data["contentSchema"], found)

    def _checked(self, schema: Any, found: list[Any]) -> list[Any]:
        validator = jsonschema_rs.validator_for(schema | {"components": self._components})
        for each in found:
            validator.validate(each)
        return found


async def declared_by(served: Served) -> Declared:
    return Declared(await served.get("/openapi.json"))


async def read(response: aiohttp.ClientResponse, declared: Declared) -> list[dict[str, Any]]:
    """Returns the events of a stream, which must be declared."""
    text = await response.text()
    assert response.status == 200, text
    return declared.check(response.url.path, response.content_type, text)


async def streamed(served: Served, declared: Declared, path: str, body: Any) -> list[Any]:
    async with served.http.post(path, json=body | {"stream": True}) as response:
        return await read(response, declared)


def kinds(found: list[dict[str, Any]]) -> set[str]:
    return {each["type"] for each in found if "type" in each}


async def test_texts_and_calls(speaking: Served) -> None:
    declared = await declared_by(speaking)
    found = [event for case in TEXTS for event in await streamed(speaking, declared, *case)]
    assert kinds(found) >= {
        "message_start", "ping", "content_block_start", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
        "response.created", "response.in_progress", "response.incomplete", "response.completed",
        "response.output_item.added", "response.output_item.done",
        "response.content_part.added", "response.content_part.done",
        "response.output_text.delta", "response.output_text.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
    }  # fmt: skip
    assert any(event.get("prompt_progress") for event in found)
    assert any(event.get("timings") and event.get("usage") for event in found)


async def test_thoughts_and_calls_of_ollama(tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    text = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"
    await asyncio.to_thread(template.write_text, text)
    settings = {"chat__reasoning_format": "think", "model__chat_template": str(template)}
    async with serve(**settings) as served:
        declared = await declared_by(served)
        found = [event for case in THOUGHTS for event in await streamed(served, declared, *case)]
    assert kinds(found) >= {"response.reasoning_text.delta", "response.reasoning_text.done"}
    assert any(event.get("thinking") for event in found)
    async with serve(model__path=SMOLLM2, chat__tool_format="llama") as served:
        declared = await declared_by(served)
        (case,) = CALLS
        found = await streamed(served, declared, *case)
    assert found[0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(("path", "body"), LONG, ids=[path for path, _ in LONG])
async def test_a_failure(served: Served, path: str, body: dict[str, Any]) -> None:
    declared = await declared_by(served)
    async with served.http.post(path, json=body | {"stream": True}) as response:
        await response.content.readany()
        (sequence,) = served.engine.requests.sequences.values()
        served.engine.requests.fail(sequence.output, GenerationError("the logits held NaN"))
        found = declared.check(path, response.content_type, await rest_of(response))
    assert "the logits held NaN" in str(found[-1])


async def rest_of(response: aiohttp.ClientResponse) -> str:
    """Returns what is left of a stream, from the next event on."""
    separator = "\n" if response.content_type == "application/x-ndjson" else "\n\n"
    text = await response.text()
    return text if text.startswith(("data: {", "event: ", "{")) else text.partition(separator)[2]


async def test_an_event_that_is_not_declared_is_found(served: Served) -> None:
    declared = await declared_by(served)
    line = {"model": "m", "created_at": "t", "done": False}
    assert declared.check("/api/chat", "application/x-ndjson", json.dumps(line)) == [line]
    with pytest.raises(jsonschema_rs.ValidationError):
        declared.check("/api/chat", "application/x-ndjson", json.dumps(line | {"other": 1}))
    with pytest.raises(jsonschema_rs.ValidationError):
        declared.check(ANTHROPIC, "text/event-stream", 'event: pong\ndata: {"type":"pong"}\n\n')
