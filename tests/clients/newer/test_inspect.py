"""inspect-ai: its provider `openai-api`, by chat completions and by Responses, and a task with a
tool."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import inspect_ai
import pytest
from conftest import QUESTION, WEATHER, Server, check_weather
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolFunction, tool
from inspect_ai.util import JSONSchema

APIS = [{"stream": False}, {"stream": True}, {"responses_api": True}]


def make_model(server: Server, **options: Any) -> Model:
    config = GenerateConfig(temperature=0, max_tokens=64, max_retries=0, parallel_tool_calls=False)
    return get_model(
        f"openai-api/aioinfer/{server.model}", base_url=server.base, api_key="none", config=config,
        memoize=False, **options,
    )  # fmt: skip


@tool
def get_weather() -> Tool:
    """A tool whose arguments a small model can write."""

    async def execute(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
        """Returns the weather of a city for some days.

        Args:
            city: a city
            days: how many
        """
        return f"{days} days of sun in {city}"

    return execute


@pytest.mark.parametrize("options", APIS)
def test_text(server: Server, options: dict[str, Any]) -> None:
    async def run() -> Any:
        async with make_model(server, **options) as model:
            return await model.generate("What is the capital of France?")

    found = asyncio.run(run())
    assert "Paris" in found.completion
    usage = found.usage
    assert usage.input_tokens + (usage.input_tokens_cache_read or 0) > 10
    assert usage.output_tokens > 1
    assert found.stop_reason == "stop"


@pytest.mark.parametrize("options", APIS)
def test_an_object(server: Server, options: dict[str, Any]) -> None:
    schema = ResponseSchema(name="weather", json_schema=JSONSchema.model_validate(WEATHER))

    async def run() -> Any:
        async with make_model(server, **options) as model:
            return await model.generate(QUESTION, config=GenerateConfig(response_schema=schema))

    check_weather(asyncio.run(run()).completion)


def test_logprobs(server: Server) -> None:
    async def run() -> Any:
        async with make_model(server) as model:
            config = GenerateConfig(logprobs=True, top_logprobs=2, max_tokens=4)
            return await model.generate("Hello.", config=config)

    entries = asyncio.run(run()).choices[0].logprobs.content
    assert len(entries) == 4
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize("options", APIS)
def test_a_task_with_a_tool(server: Server, options: dict[str, Any], tmp_path: Path) -> None:
    """The model has to call the tool, whose result goes back for its answer."""
    task = inspect_ai.Task(
        dataset=[Sample(input=QUESTION, target="sun") for _ in range(2)],
        solver=[
            use_tools(get_weather(), tool_choice=ToolFunction("get_weather")),
            generate(tool_calls="single"),
        ],
        scorer=includes(),
    )
    (log,) = inspect_ai.eval(
        task, model=make_model(server, **options), log_dir=str(tmp_path), display="none"
    )
    assert log.status == "success", log.error
    assert log.results is not None
    assert log.samples is not None
    for sample in log.samples:
        roles = [message.role for message in sample.messages]
        assert roles[:3] == ["user", "assistant", "tool"]
        (call,) = sample.messages[1].tool_calls
        check_weather(call.arguments)
        assert "days of sun" in sample.messages[2].text
