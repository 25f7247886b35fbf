"""litellm: the providers that speak to a server like this one, and the exceptions it maps."""

from __future__ import annotations

import asyncio
import copy
from typing import Any, Literal

import litellm
import pytest
from conftest import QUESTION, WEATHER, Server, check_weather
from pydantic import BaseModel, ConfigDict

#: Each provider's name and the path of its base URL.
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "lm_studio": "/v1", "ollama_chat": ""}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
#: A copy, since litellm removes members of the schemas that it is given (`hosted_vllm`).
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": copy.deepcopy(WEATHER)}}
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Answer(BaseModel):
    """What a structured answer holds."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


def options(server: Server, provider: str = "openai", **further: Any) -> dict[str, Any]:
    return {
        "model": f"{provider}/{server.model}", "api_base": server.url + PROVIDERS[provider],
        "api_key": "none", "temperature": 0, "max_tokens": 48, "num_retries": 0, "max_retries": 0,
    } | further  # fmt: skip


@pytest.mark.parametrize("provider", PROVIDERS)
def test_chat(server: Server, provider: str) -> None:
    asked = options(server, provider, messages=MESSAGES)
    reply: Any = litellm.completion(**asked)
    assert "Paris" in reply.choices[0].message.content
    assert reply.usage.completion_tokens > 1
    chunks: Any = list(litellm.completion(**asked, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == reply.choices[0].message.content
    whole: Any = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].finish_reason == reply.choices[0].finish_reason == "stop"


def test_usage_of_a_stream(server: Server) -> None:
    asked = options(server, messages=MESSAGES)
    whole: Any = litellm.completion(**asked)
    *_, last = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls(server: Server, provider: str, choice: Any) -> None:
    asked = options(
        server, provider, messages=[{"role": "user", "content": QUESTION}], tools=TOOLS,
        tool_choice=choice, parallel_tool_calls=False,
    )  # fmt: skip
    reply: Any = litellm.completion(**asked)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    check_weather(call.function.arguments)
    assert reply.choices[0].finish_reason == "tool_calls"
    whole: Any = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))  # type: ignore[arg-type]
    (streamed,) = whole.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    # the conversation goes on with litellm's own form of the message
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "sun"}
    messages = [*asked["messages"], message, result]
    after: Any = litellm.completion(**options(server, provider, messages=messages, tools=TOOLS))
    assert after.choices[0].message.content


def test_structured_output(server: Server) -> None:
    asked = options(server, messages=MESSAGES)
    reply: Any = litellm.completion(**asked, response_format=Answer)
    Answer.model_validate_json(reply.choices[0].message.content)
    reply = litellm.completion(**asked, response_format={"type": "json_object"})
    assert reply.choices[0].message.content.lstrip().startswith("{")


def test_async(server: Server) -> None:
    async def run() -> tuple[Any, list[Any]]:
        asked = options(server, messages=MESSAGES)
        reply = await litellm.acompletion(**asked)
        stream: Any = await litellm.acompletion(**asked, stream=True)
        return reply, [chunk async for chunk in stream]

    reply, chunks = asyncio.run(run())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == reply.choices[0].message.content


def test_logprobs_and_n(server: Server) -> None:
    asked = options(server, messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, seed=1)
    reply: Any = litellm.completion(**(asked | {"temperature": 1, "max_tokens": 4}))
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice in reply.choices:
        assert len(choice.logprobs.content) == 4
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_text_completion(server: Server) -> None:
    asked = options(server, prompt="The capital of France is")
    asked["model"] = f"text-completion-openai/{server.model}"
    reply: Any = litellm.text_completion(**(asked | {"max_tokens": 8}), logprobs=1)
    assert "Paris" in reply.choices[0].text
    streamed: Any = litellm.text_completion(**(asked | {"max_tokens": 8}), stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in streamed) == reply.choices[0].text


def test_embeddings_and_rerank(server: Server) -> None:
    reply: Any = litellm.embedding(
        model=f"openai/{server.model}", api_base=server.base, api_key="none",
        input=["a river", "a stream"], encoding_format="float",
    )  # fmt: skip
    assert [len(entry["embedding"]) for entry in reply.data] == [576, 576]
    ranked: Any = litellm.rerank(
        model=f"hosted_vllm/{server.model}", api_base=server.url, api_key="none", query="a river",
        documents=["a stream", "a car"], top_n=1,
    )  # fmt: skip
    assert len(ranked.results) == 1


def test_other_apis(server: Server) -> None:
    """Responses, and Anthropic's messages, by the same client."""
    made: Any = litellm.responses(
        model=f"openai/{server.model}", api_base=server.base, api_key="none",
        input="What is the capital of France?", max_output_tokens=32,
    )  # fmt: skip
    assert "Paris" in made.output_text
    asked = {
        "model": f"anthropic/{server.model}", "api_base": server.url, "api_key": "none",
        "messages": MESSAGES, "max_tokens": 64, "temperature": 0,
    }  # fmt: skip
    reply: Any = litellm.completion(**asked)
    assert "Paris" in reply.choices[0].message.content
    streamed: Any = litellm.completion(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == reply.choices[0].message.content
    called: Any = litellm.completion(
        **(asked | {"messages": [{"role": "user", "content": QUESTION}]}),
        tools=TOOLS,
        tool_choice=NAMED,
    )
    check_weather(called.choices[0].message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_errors(server: Server, provider: str) -> None:
    long = [{"role": "user", "content": "river " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**options(server, provider, messages=long))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**options(server, provider, messages=MESSAGES, model=f"{provider}/no"))
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**options(server, provider, messages=MESSAGES, temperature=-1))
    with pytest.raises(litellm.Timeout):
        litellm.completion(
            **options(server, provider, messages=MESSAGES, timeout=0.05, max_tokens=400)
        )


def test_fall_back_for_a_long_prompt(server: Server) -> None:
    """A router goes to the model of `context_window_fallbacks` if the prompt is too long."""
    target = {"api_base": server.base, "api_key": "none", "model": f"openai/{server.model}"}
    router = litellm.Router(
        model_list=[
            {"model_name": "short", "litellm_params": target},
            {"model_name": "long", "litellm_params": target | {"mock_response": "from the other"}},
        ],
        context_window_fallbacks=[{"short": ["long"]}],
        num_retries=0,
    )
    reply: Any = router.completion(
        model="short", messages=[{"role": "user", "content": "river " * 9000}]
    )
    assert reply.choices[0].message.content == "from the other"
