"""Ollama's Python client."""

from __future__ import annotations

from typing import Any

import ollama
import pytest
from conftest import QUESTION, WEATHER, Server, check_weather

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS: Any = {"temperature": 0, "num_predict": 48}


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_models(server: Server, client: ollama.Client) -> None:
    assert server.model in [
        str(model.model).removesuffix(":latest") for model in client.list().models
    ]
    assert client.show(server.model).modelinfo is not None
    (running,) = client.ps().models
    assert str(running.model).removesuffix(":latest") == server.model
    assert running.digest == client.list().models[0].digest
    assert int(running.size or 0) > int(client.list().models[0].size or 0) > 0
    assert running.expires_at is not None


def test_chat_and_generate(server: Server, client: ollama.Client) -> None:
    whole = client.chat(server.model, messages=MESSAGES, options=OPTIONS)
    assert "Paris" in str(whole.message.content)
    assert whole.done
    assert whole.eval_count > 1  # type: ignore[operator]
    pieces = client.chat(server.model, messages=MESSAGES, options=OPTIONS, stream=True)
    assert "".join(str(piece.message.content) for piece in pieces) == whole.message.content
    made = client.generate(server.model, "The capital of France is", options=OPTIONS)
    assert made.response


def test_calls_and_objects(server: Server, client: ollama.Client) -> None:
    made = client.chat(
        server.model,
        messages=[{"role": "user", "content": QUESTION}],
        format=WEATHER,
        options=OPTIONS,
    )
    check_weather(str(made.message.content))
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
    reply = client.chat(
        server.model, messages=[{"role": "user", "content": QUESTION}], tools=tools, options=OPTIONS
    )
    for call in reply.message.tool_calls or ():  # Ollama has no way to require one
        check_weather(dict(call.function.arguments))


def test_embeddings_and_errors(server: Server, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("missing", messages=MESSAGES)
    assert caught.value.status_code == 404
    assert len(client.embed(server.model, ["a river", "a stream"]).embeddings) == 2
