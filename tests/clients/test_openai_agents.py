"""OpenAI's Agents SDK: an agent that calls a function, by chat completions and by Responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from conftest import QUESTION, Server
from pydantic import BaseModel, ConfigDict

set_tracing_disabled(True)


class Answer(BaseModel):
    """What the agent answers with."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


def make_model(server: Server, kind: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=server.base, api_key="none", max_retries=0)
    return kind(model=server.model, openai_client=client)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_an_agent(server: Server, kind: Any) -> None:
    called: list[str] = []

    @function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Returns the weather of a city."""
        called.append(city)
        return f"sun in {city}"

    async def run() -> tuple[Any, Any]:
        model = make_model(server, kind)
        agent = Agent(
            name="weather",
            instructions="Answer by the functions.",
            model=model,
            tools=[get_weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(
                tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=64
            ),
        )
        result = await Runner.run(agent, QUESTION)
        streamed = Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == result.final_output
        answering = Agent(
            name="answer",
            model=model,
            output_type=Answer,
            model_settings=ModelSettings(temperature=0, max_tokens=64),
        )
        return result.final_output, (await Runner.run(answering, QUESTION)).final_output

    text, answer = asyncio.run(run())
    assert text == f"sun in {called[0]}"
    assert isinstance(answer, Answer)
