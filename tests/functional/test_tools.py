"""Tools and thoughts of chat completions on a real model. SmolLM2 rarely calls a tool by itself:
calls are required here, so that grammars write them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.functional.conftest import SMOLLM2, Served, serve

pytestmark = [pytest.mark.extended, pytest.mark.asyncio(loop_scope="session")]

CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
]
SCHEMAS = {"weather": WEATHER, "add": ADD}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
NAMED: Any = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def served(speaking: Served) -> Served:
    return speaking


def check_calls(calls: Any) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("temperature", [0, 1])
async def test_required_calls_fit_their_schemas(
    client: openai.AsyncOpenAI, temperature: int
) -> None:
    reply = await client.chat.completions.create(
        model="smollm2", messages=ASK, tools=TOOLS, tool_choice="required",
        parallel_tool_calls=False, temperature=temperature, seed=3, n=2,
    )  # fmt: skip
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or ()
        assert call.id.startswith("call_")
        check_calls([call])
    first, second = (choice.message.tool_calls[0].id for choice in reply.choices)  # type: ignore[index]
    assert first != second


async def test_streamed_calls_are_those_of_the_whole_reply(client: openai.AsyncOpenAI) -> None:
    options: Any = {
        "model": "smollm2", "messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "temperature": 0,
    }  # fmt: skip
    whole = (await client.chat.completions.create(**options)).choices[0]
    deltas = []
    async for chunk in await client.chat.completions.create(**options, stream=True):
        deltas.append(chunk.choices[0])
    calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
    assert calls[0].id
    assert calls[0].type == "function"
    assert calls[0].function is not None
    assert calls[0].function.name == "add"
    assert all(call.id is None and call.index == 0 for call in calls[1:])
    assert len(calls) > 2  # as they are generated, not at the end
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert whole.message.tool_calls is not None
    assert arguments == whole.message.tool_calls[0].function.arguments  # type: ignore[union-attr]
    assert not any(choice.delta.content for choice in deltas)
    assert deltas[-1].finish_reason == whole.finish_reason == "tool_calls"
    async with client.chat.completions.stream(**options) as stream:
        final = (await stream.get_final_completion()).choices[0]
    check_calls(final.message.tool_calls)


@pytest.mark.parametrize(("stop", "reason"), [('"a"', "stop"), ("</tool_call>", "tool_calls")])
async def test_a_stop_string_cuts_a_call_off_or_follows_it(
    served: Served, stop: str, reason: str
) -> None:
    ask: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "stop": stop}
    (choice,) = (await served.post(CHAT, **ask))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    *_, last = await served.stream(CHAT, **ask)
    assert last["choices"][0]["finish_reason"] == reason


async def test_a_model_that_repeats_a_call_ends(served: Served) -> None:
    """All calls of the only function are equal, and the model may not end by itself."""
    stop = {"type": "function", "function": {"name": "stop"}}
    ask = {
        "messages": ASK, "tools": [stop], "tool_choice": "required", "logit_bias": {"2": -100},
        "max_tokens": 200, "n": 2,
    }  # fmt: skip
    for choice in (await served.post(CHAT, **ask))["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["stop_reason"] is None
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {}
    *events, last = await served.stream(CHAT, **ask | {"n": 1})
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [event["choices"][0]["delta"] for event in events]
    names = [c["function"].get("name") for d in deltas for c in d.get("tool_calls", ())]
    assert [name for name in names if name] == ["stop"]
    single = ask | {"n": 1, "parallel_tool_calls": False}
    (choice,) = (await served.post(CHAT, **single))["choices"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_a_required_call_that_is_cut_in_its_marker_is_no_text(
    served: Served, choice: Any, max_tokens: int
) -> None:
    asked = {"messages": ASK, "tools": TOOLS, "tool_choice": choice, "max_tokens": max_tokens}
    (whole,) = (await served.post(CHAT, **asked))["choices"]
    assert not whole["message"]["content"]
    assert not whole["message"].get("tool_calls")
    assert whole["finish_reason"] == "length"
    events = await served.stream(CHAT, **asked)
    assert not any(event["choices"][0]["delta"].get("content") for event in events)


async def test_text_stays_text_under_auto(served: Served) -> None:
    plain = {"messages": ASK, "max_tokens": 6, "temperature": 0, "tools": TOOLS}
    reply = await served.post(CHAT, **plain)
    (choice,) = reply["choices"]
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"
    events = await served.stream(CHAT, **plain)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == choice["message"]["content"]


async def test_the_model_sees_the_tools_unless_none_may_be_called(served: Served) -> None:
    async def prompt_tokens(**options: Any) -> int:
        reply = await served.post(CHAT, messages=ASK, max_tokens=1, **options)
        return int(reply["usage"]["prompt_tokens"])

    without = await prompt_tokens()
    assert await prompt_tokens(tools=TOOLS, tool_choice="none") == without
    assert await prompt_tokens(tools=[]) == without
    assert await prompt_tokens(tools=TOOLS) > without + 50


@pytest.mark.sample
async def test_an_answer_by_a_schema_or_a_call(served: Served) -> None:
    schema = {
        "type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
        "additionalProperties": False,
    }  # fmt: skip
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = await served.post(
        CHAT, messages=ASK, tools=TOOLS, response_format=format, temperature=1, max_tokens=60
    )
    message = reply["choices"][0]["message"]
    if calls := message.get("tool_calls"):
        for call in calls[:-1]:
            json.loads(call["function"]["arguments"])
    else:
        assert json.loads(message["content"]).keys() >= {"x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOLS[0], {"type": "web"}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOLS[0]] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ],
)
async def test_wrong_tools_are_named(served: Served, fields: dict[str, Any], param: str) -> None:
    reply = await served.post(CHAT, status=400, messages=ASK, **fields)
    assert reply["error"]["param"] == param


async def test_a_schema_that_cannot_be_enforced(served: Served) -> None:
    """It is refused where calls must follow it; under "auto" any arguments may come."""
    function = {"name": "f", "parameters": {"type": "object", "not": {"pattern": "a"}}}
    tools = [TOOLS[0], {"type": "function", "function": function}]
    ask = {"messages": ASK, "max_tokens": 1}
    place = "tools[1].function.parameters"
    reply = await served.post(CHAT, status=400, **ask, tools=tools, tool_choice="required")
    assert reply["error"]["param"] == place
    assert "'not'" in reply["error"]["message"]
    await served.post(CHAT, **ask, tools=tools)
    function["strict"] = True
    reply = await served.post(CHAT, status=400, **ask, tools=tools)
    assert reply["error"]["param"] == place


async def test_results_of_tools_are_rendered(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":true}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
    ]
    reply = await served.post(CHAT, messages=messages, tools=TOOLS, max_tokens=2)
    assert reply["usage"]["completion_tokens"] == 2


async def test_a_call_that_was_cut_off_may_be_in_the_history(served: Served) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 400}}}
    schema |= {"required": ["text"]}
    tools = [{"type": "function", "function": {"name": "note", "parameters": schema}}]
    ask = {"messages": ASK, "tools": tools, "tool_choice": "required", "max_tokens": 40}
    (choice,) = (await served.post(CHAT, **ask))["choices"]
    (call,) = choice["message"]["tool_calls"]
    with pytest.raises(ValueError):
        json.loads(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "the arguments are no JSON"}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    older = {"role": "function", "name": "add", "content": "42"}
    history = [*ASK, choice["message"], result, refused, older]
    await served.post(CHAT, messages=history, tools=TOOLS, max_tokens=2)
    item = {"type": "function_call", "call_id": call["id"], **call["function"]}
    await served.post("/v1/responses", input=[*ASK, item], max_output_tokens=2)


async def test_a_thought_that_the_prompt_opens() -> None:
    messages = [*ASK, {"role": "assistant", "content": "<think>"}]
    ask = {
        "messages": messages,
        "max_tokens": 5,
        "temperature": 0,
        "continue_final_message": True,
        "response_format": {"type": "json_object"},  # holds for the answer alone
    }
    async with serve(chat__reasoning_format="think") as served:
        reply = await served.post(CHAT, **ask)
        assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
        message = reply["choices"][0]["message"]
        assert message["reasoning_content"] == message["reasoning"] != ""
        assert message["content"] is None
        *events, last = await served.stream(CHAT, **ask, stream_options={"include_usage": True})
        assert last["usage"] == reply["usage"] | {
            "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
        }
        deltas = [event["choices"][0]["delta"] for event in events]
        text = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert text == message["reasoning_content"]
        hidden = await served.post(CHAT, **ask, include_reasoning=False)
        assert hidden["choices"][0]["message"].keys() == {"role", "content", "refusal"}
        plain = await served.post(CHAT, messages=ASK, max_tokens=3)
        assert plain["choices"][0]["message"]["content"]
        assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_thoughts_of_responses_are_counted(tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    text = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"
    await asyncio.to_thread(template.write_text, text)
    async with serve(chat__reasoning_format="think", model__chat_template=str(template)) as served:
        reply = await served.post("/v1/responses", input="Hello", max_output_tokens=4)
        assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
        assert reply["output"][0]["type"] == "reasoning"
        body = {"input": "Hello", "max_output_tokens": 4, "stream": True}
        async with served.http.post("/v1/responses", json=body) as response:
            last = (await response.text()).strip().rpartition("data: ")[2]
        assert json.loads(last)["response"]["usage"]["output_tokens_details"] == {
            "reasoning_tokens": 4
        }


@pytest.mark.parametrize("name", ["nemotron", "qwen_coder", "kimi", "lfm2", "gemma"])
async def test_calls_of_every_format_fit_their_schemas(name: str) -> None:
    """The markers are text here: SmolLM2's tokenizer has none of them."""
    note: Any = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 20}, "tags": {"type": "array"}},
        "required": ["text"],
        "additionalProperties": False,
    }
    functions = {"weather": WEATHER, "note": note}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in functions.items()
    ]
    ask = {"messages": ASK, "tools": tools, "temperature": 1, "max_tokens": 150}
    async with serve(model__path=SMOLLM2, chat__tool_format=name) as served:

        async def check(function: str, schema: Any) -> None:
            choice = {"type": "function", "function": {"name": function}}
            body = ask | {"tool_choice": choice, "seed": 3}
            whole, events = await asyncio.gather(
                served.post(CHAT, **body), served.stream(CHAT, **body)
            )
            (whole,) = whole["choices"]
            deltas = [event["choices"][0]["delta"] for event in events]
            calls = [call["function"] for d in deltas for call in d.get("tool_calls", ())]
            arguments = "".join(call.get("arguments", "") for call in calls)
            assert calls[0]["name"] == function
            (call,) = whole["message"]["tool_calls"]
            assert call["function"] == {"name": function, "arguments": arguments}
            assert not whole["message"]["content"]
            is_text = (name, function) == ("qwen_coder", "note")
            if whole["finish_reason"] == "tool_calls" and not is_text:
                jsonschema.validate(json.loads(arguments), schema)
            if function == "weather":
                assert whole["finish_reason"] == "tool_calls"

        await asyncio.gather(*(check(*each) for each in functions.items()))
