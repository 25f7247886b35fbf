"""llama-index: its models of OpenAI-like servers."""

import asyncio
from typing import Any, Literal

from conftest import QUESTION, Server, check_weather
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """The weather of a city for some days."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


def make_llm(server: Server, **options: Any) -> OpenAILike:
    usual: dict[str, Any] = {
        "is_chat_model": True, "is_function_calling_model": True, "max_tokens": 64,
        "temperature": 0, "context_window": 2048,
    }  # fmt: skip
    return OpenAILike(model=server.model, api_base=server.base, api_key="none", **(usual | options))


def test_chat_and_completion(server: Server) -> None:
    messages = [ChatMessage(role="user", content="What is the capital of France?")]
    llm = make_llm(server)
    whole = llm.chat(messages)
    assert "Paris" in str(whole.message.content)
    *_, last = llm.stream_chat(messages)
    assert last.message.content == whole.message.content
    assert asyncio.run(llm.achat(messages)).message.content == whole.message.content
    plain = make_llm(server, is_chat_model=False, is_function_calling_model=False, max_tokens=8)
    text = plain.complete("The capital of France is").text
    assert "Paris" in text
    *_, last_piece = plain.stream_complete("The capital of France is")
    assert last_piece.text == text


def test_calls(server: Server) -> None:
    def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
        """Returns the weather of a city for some days."""
        return f"{days} days of sun in {city}"

    llm = make_llm(server)
    tool = FunctionTool.from_defaults(get_weather)
    reply = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(reply)
    check_weather(call.tool_kwargs)
    outcome = llm.predict_and_call([tool], user_msg=QUESTION, tool_choice="required")
    assert "days of sun" in str(outcome)


def test_objects(server: Server) -> None:
    assert isinstance(make_llm(server).as_structured_llm(Weather).complete(QUESTION).raw, Weather)
    by_schema = make_llm(
        server, should_use_structured_outputs=True, is_function_calling_model=False
    )
    assert isinstance(by_schema.as_structured_llm(Weather).complete(QUESTION).raw, Weather)


def test_embeddings(server: Server) -> None:
    embedding = OpenAILikeEmbedding(model_name=server.model, api_base=server.base, api_key="none")
    assert [len(found) for found in embedding.get_text_embedding_batch(["a river", "b"])] == [
        576
    ] * 2
