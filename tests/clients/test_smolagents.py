"""smolagents: its model of OpenAI-like servers, and an agent that calls a tool."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import QUESTION, WEATHER, Server, check_weather
from smolagents import ChatMessage, OpenAIModel, Tool, ToolCallingAgent
from smolagents.models import agglomerate_stream_deltas

MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


class GetWeather(Tool):  # type: ignore[misc]
    """A tool whose arguments a small model can write."""

    name = "get_weather"
    description = "Returns the weather of a city for some days."
    inputs = {  # noqa: RUF012  # as the library has it
        "city": {"type": "string", "description": "a city", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "description": "how many", "minimum": 1, "maximum": 9},
    }
    output_type = "string"

    def __init__(self) -> None:
        super().__init__()
        self.called: list[dict[str, Any]] = []

    def forward(self, city: str, days: int) -> str:
        self.called.append({"city": city, "days": days})
        return f"{days} days of sun in {city}"


def make_model(server: Server, **options: Any) -> OpenAIModel:
    usual = {"temperature": 0, "max_tokens": 64, "client_kwargs": {"max_retries": 0}}
    return OpenAIModel(server.model, api_base=server.base, api_key="none", **(usual | options))


def whole(model: OpenAIModel, **options: Any) -> ChatMessage:
    """Returns a streamed message, put together as agents do it."""
    return agglomerate_stream_deltas(list(model.generate_stream(MESSAGES, **options)))


def test_text(server: Server) -> None:
    model = make_model(server)
    reply = model.generate(MESSAGES)
    assert reply.content
    assert reply.token_usage.output_tokens > 1
    streamed = whole(model)
    assert streamed.content == reply.content
    assert streamed.token_usage.output_tokens == reply.token_usage.output_tokens
    first = str(reply.content).split()[2]
    assert first not in str(model.generate(MESSAGES, stop_sequences=[first]).content)


def test_an_object(server: Server) -> None:
    described = {"name": "weather", "schema": WEATHER, "strict": True}
    form: Any = {"type": "json_schema", "json_schema": described}
    model = make_model(server)
    check_weather(str(model.generate(MESSAGES, response_format=form).content))
    check_weather(str(whole(model, response_format=form).content))


def test_a_call(server: Server) -> None:
    """The client requires a call where it is given tools."""
    model, tools = make_model(server, parallel_tool_calls=False), [GetWeather()]
    (call,) = model.generate(MESSAGES, tools_to_call_from=tools).tool_calls
    check_weather(call.function.arguments)
    (streamed,) = whole(model, tools_to_call_from=tools).tool_calls
    assert streamed.function.name == "get_weather"
    assert streamed.function.arguments == call.function.arguments


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent(server: Server, streams: bool) -> None:
    """Its prompt names all tools; whether it ends by `final_answer` is the model's part."""
    tool = GetWeather()
    agent = ToolCallingAgent(
        tools=[tool],
        model=make_model(server, parallel_tool_calls=False),
        max_steps=2,
        stream_outputs=streams,
        verbosity_level=0,
    )
    agent.run(QUESTION)
    called = [
        call for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or ()
    ]
    assert called
    for call in called:
        if call.name == "get_weather":
            check_weather(call.arguments)
    assert len(tool.called) == sum(call.name == "get_weather" for call in called)
