"""pydantic-ai: its models of chats, of Responses and of Anthropic's API."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from conftest import QUESTION, Server
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.messages import ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """The weather of a city for some days."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


def make_model(server: Server, kind: str) -> Model:
    if kind == "anthropic":
        provider: Any = AnthropicProvider(base_url=server.url, api_key="none")
        return AnthropicModel(server.model, provider=provider)
    provider = OpenAIProvider(base_url=server.base, api_key="none")
    if kind == "responses":
        return OpenAIResponsesModel(server.model, provider=provider)
    return OpenAIChatModel(server.model, provider=provider)


KINDS = ["chat", "responses", "anthropic"]
SETTINGS: Any = {"temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}


@pytest.mark.parametrize("kind", KINDS)
def test_text(server: Server, kind: str) -> None:
    agent = Agent(make_model(server, kind), instructions="Be short.", model_settings=SETTINGS)
    first = agent.run_sync("What is the capital of France?")
    assert "Paris" in first.output
    assert first.usage.input_tokens > 10
    assert first.usage.output_tokens > 1
    second = agent.run_sync("And of Italy?", message_history=first.new_messages())
    assert second.output


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text(server: Server, kind: str) -> None:
    async def run() -> tuple[str, str, int]:
        agent = Agent(make_model(server, kind), model_settings=SETTINGS)
        whole = await agent.run("Count to five.")
        async with agent.run_stream("Count to five.") as result:
            pieces = [piece async for piece in result.stream_text(delta=True)]
            return whole.output, "".join(pieces), result.usage.output_tokens

    whole, streamed, tokens = asyncio.run(run())
    assert streamed == whole
    assert tokens > 1


@pytest.mark.parametrize(
    ("kind", "output"),
    [(kind, ToolOutput) for kind in KINDS]
    # for Anthropic's API the client itself knows which models have it
    + [("chat", NativeOutput), ("responses", NativeOutput)],
)
def test_objects(server: Server, kind: str, output: Any) -> None:
    agent: Any = Agent(
        make_model(server, kind), output_type=output(Weather), model_settings=SETTINGS, retries=0
    )
    assert isinstance(agent.run_sync(QUESTION).output, Weather)

    async def run() -> Any:
        async with agent.run_stream(QUESTION) as result:
            return [found async for found in result.stream_output()][-1]

    assert isinstance(asyncio.run(run()), Weather)


def test_prompted_output(server: Server) -> None:
    """The chat model asks for a JSON object, with the schema in the prompt."""
    agent: Any = Agent(
        make_model(server, "chat"), output_type=PromptedOutput(Weather), model_settings=SETTINGS
    )

    async def first() -> Any:
        async with agent.iter(QUESTION) as run:
            async for node in run:
                if Agent.is_call_tools_node(node):
                    return node.model_response.text
        return None

    assert str(asyncio.run(first())).lstrip().startswith("{")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_and_its_result(server: Server, kind: str) -> None:
    """The output is a tool, too, so that every turn calls one; a tool's result goes back."""
    agent: Any = Agent(
        make_model(server, kind),
        output_type=[ToolOutput(Weather, name="answer")],
        model_settings=SETTINGS,
        retries=0,
    )
    seen: list[str] = []

    @agent.tool_plain
    def look_up(city: Literal["Paris", "Rome"]) -> str:
        """Looks the weather of a city up."""
        seen.append(city)
        return f"sun in {city}"

    async def run() -> tuple[list[Any], Any]:
        try:
            result = await agent.run(QUESTION, usage_limits=UsageLimits(request_limit=3))
        except UsageLimitExceeded:  # the model may look the weather up for ever
            return [], None
        return result.all_messages(), result.output

    messages, output = asyncio.run(run())
    assert output is None or isinstance(output, Weather)
    assert seen or isinstance(output, Weather)
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolCallPart | ToolReturnPart):
                assert part.tool_name in ("look_up", "answer")


def test_logprobs(server: Server) -> None:
    settings = SETTINGS | {"openai_logprobs": True, "openai_top_logprobs": 2}
    agent = Agent(make_model(server, "chat"), model_settings=settings)
    (response,) = (
        m for m in agent.run_sync("Hello.").all_messages() if isinstance(m, ModelResponse)
    )
    assert response.provider_details is not None
    assert len(response.provider_details["logprobs"]) > 1


def test_embeddings(server: Server) -> None:
    provider = OpenAIProvider(base_url=server.base, api_key="none")
    embedder = Embedder(OpenAIEmbeddingModel(server.model, provider=provider))
    found = embedder.embed_documents_sync(["a river", "a stream"])
    assert [len(vector) for vector in found.embeddings] == [576, 576]


@pytest.mark.parametrize("kind", KINDS)
def test_errors(server: Server, kind: str) -> None:
    agent = Agent(make_model(server, kind), model_settings={"max_tokens": 8})
    with pytest.raises(ModelHTTPError) as caught:
        agent.run_sync("river " * 9000)
    assert caught.value.status_code == 400
    assert "maximum context length" in str(caught.value.body)
