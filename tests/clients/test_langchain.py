"""langchain-openai: chats, completions, tools, structured output, embeddings, Responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from conftest import QUESTION, Server, check_weather
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # a small model adds members without end
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


@tool
def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Returns the weather of a city for some days."""
    return f"{days} days of sun in {city}"


@tool
def get_time(zone: Literal["CET", "UTC"]) -> str:
    """Returns the time."""
    return f"noon in {zone}"


def make_chat(server: Server, **options: Any) -> ChatOpenAI:
    usual = {"model": server.model, "max_completion_tokens": 48, "temperature": 0}
    return ChatOpenAI(base_url=server.base, api_key="none", max_retries=0, **(usual | options))


def test_invoke(server: Server) -> None:
    reply = make_chat(server).invoke(
        [SystemMessage("You are helpful."), HumanMessage("What is the capital of France?")]
    )
    assert "Paris" in str(reply.content)
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["input_tokens"] > 10
    assert reply.usage_metadata["output_tokens"] > 1
    assert reply.response_metadata["finish_reason"] in ("stop", "length")
    assert reply.response_metadata["model_name"] == server.model


def test_stream(server: Server) -> None:
    chat = make_chat(server, stream_usage=True)
    whole = chat.invoke("Count to five.")
    chunks = list(chat.stream("Count to five."))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]  # type: ignore[index]
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


def test_async_and_batch(server: Server) -> None:
    async def run() -> tuple[str, str, list[Any]]:
        chat = make_chat(server)
        one = await chat.ainvoke("Count to five.")
        streamed = [str(chunk.content) async for chunk in chat.astream("Count to five.")]
        return str(one.content), "".join(streamed), await chat.abatch(["Hello.", "Hi."])

    one, streamed, several = asyncio.run(run())
    assert one == streamed
    assert len(several) == 2


def test_logprobs(server: Server) -> None:
    reply = make_chat(server, logprobs=True, top_logprobs=2).invoke("Hello.")
    content = reply.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith(str(reply.content))
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


@pytest.mark.parametrize("choice", ["any", "required", True, "get_weather"])
def test_enforced_calls(server: Server, choice: Any) -> None:
    bound = make_chat(server).bind_tools(
        [get_weather], tool_choice=choice, parallel_tool_calls=False
    )
    calls = bound.invoke(QUESTION).tool_calls
    assert [call["name"] for call in calls] == ["get_weather"]
    check_weather(calls[0]["args"])
    total: Any = None
    for chunk in bound.stream(QUESTION):
        total = chunk if total is None else total + chunk
    assert [call["args"] for call in total.tool_calls] == [call["args"] for call in calls]
    assert total.response_metadata["finish_reason"] == "tool_calls"


def test_a_tool_s_result_goes_back(server: Server) -> None:
    chat = make_chat(server)
    bound = chat.bind_tools(
        [get_weather, get_time], tool_choice="get_weather", strict=True, parallel_tool_calls=False
    )
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    result = get_weather.invoke(call)
    messages: Any = [HumanMessage(QUESTION), answer, result]
    assert chat.bind_tools([get_weather, get_time]).invoke(messages).content
    assert chat.bind_tools([get_weather], tool_choice="none").invoke(messages).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(server: Server, method: Any) -> None:
    question = 'Answer as JSON such as {"city": "Paris", "days": 3}. ' + QUESTION
    structured = make_chat(server).with_structured_output(Weather, method=method, include_raw=True)
    reply = structured.invoke(question)
    if (
        method == "json_mode"
    ):  # any object: whether it is the one that was meant is the model's part
        assert str(reply["raw"].content).lstrip().startswith("{")  # type: ignore[index]
        return
    assert reply["parsing_error"] is None  # type: ignore[index]
    assert isinstance(reply["parsed"], Weather)  # type: ignore[index]
    *_, last = make_chat(server).with_structured_output(Weather, method=method).stream(question)
    assert last == reply["parsed"]  # type: ignore[index]


def test_structured_output_without_raw(server: Server) -> None:
    strict = make_chat(server).with_structured_output(Weather, strict=True)
    assert isinstance(strict.invoke(QUESTION), Weather)
    schema = Weather.model_json_schema()
    check_weather(make_chat(server).with_structured_output(schema).invoke(QUESTION))  # type: ignore[arg-type]


def test_completions(server: Server) -> None:
    llm = OpenAI(
        model=server.model, base_url=server.base, api_key="none", max_tokens=8, temperature=0
    )
    text = llm.invoke("The capital of France is")
    assert "Paris" in text
    assert "".join(llm.stream("The capital of France is")) == text
    result = llm.generate(["The capital of France is", "Water boils at"], stop=["."])
    assert len(result.generations) == 2
    assert result.llm_output["token_usage"]["total_tokens"] > 10  # type: ignore[index]
    best = OpenAI(
        model=server.model, base_url=server.base, api_key="none", max_tokens=8, n=2, best_of=2
    )
    assert len(best.generate(["Hello"]).generations[0]) == 2


def test_embeddings(server: Server) -> None:
    embeddings = OpenAIEmbeddings(
        model=server.model, base_url=server.base, api_key="none", check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["a river", "a stream"])
    assert len(first) == len(second) == 576
    assert embeddings.embed_query("a river") == pytest.approx(first, abs=1e-3)
    assert len(asyncio.run(embeddings.aembed_query("a river"))) == 576


def test_errors(server: Server) -> None:
    with pytest.raises(ContextOverflowError, match="maximum context length"):
        make_chat(server).invoke("river " * 9000)
    with pytest.raises(openai.NotFoundError):
        make_chat(server, model="missing").invoke("Hello.")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        make_chat(server, temperature=-1).invoke("Hello.")
    with pytest.raises(openai.APITimeoutError):
        make_chat(server, timeout=0.05, max_completion_tokens=400).invoke("Count to 1000.")


def test_responses(server: Server) -> None:
    chat = make_chat(server, use_responses_api=True)
    whole = chat.invoke("What is the capital of France?")
    assert "Paris" in whole.text
    streamed = "".join(chunk.text for chunk in chat.stream("What is the capital of France?"))
    assert streamed == whole.text
    calls = chat.bind_tools([get_weather], tool_choice="get_weather").invoke(QUESTION).tool_calls
    check_weather(calls[0]["args"])
    assert isinstance(chat.with_structured_output(Weather).invoke(QUESTION), Weather)
