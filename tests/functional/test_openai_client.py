"""The official `openai` client as the judge of what the server replies."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from aioinfer.errors import EngineDeadError, GenerationError
from tests.functional.conftest import Served, openai_client

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "smollm2"
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def test_fields_without_a_value(client: openai.AsyncOpenAI, served: Served) -> None:
    """vLLM's `prompt_logprobs` is null where it was not asked for; the fingerprint is one for
    all."""
    completion = await served.post("/v1/completions", prompt=PROMPT, max_tokens=1, n=2)
    assert [choice["prompt_logprobs"] for choice in completion["choices"]] == [None, None]
    chat = await served.post("/v1/chat/completions", messages=QUESTION, max_tokens=1)
    assert chat["prompt_logprobs"] is None
    stream = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=2, stream=True
    )
    found = {chunk.system_fingerprint async for chunk in stream}
    found |= {reply["system_fingerprint"] for reply in (completion, chat)}
    (fingerprint,) = found
    assert re.fullmatch("fp_[0-9a-f]{10}", fingerprint or "")


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "top_logprobs"])
async def test_all_log_probabilities_need_a_setting(served: Served, name: str) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, name: -1}
    path = "/v1/completions"
    if name == "top_logprobs":
        body, path = {"messages": QUESTION, "logprobs": True, name: -1}, "/v1/chat/completions"
    error = (await served.post(path, 400, **body, max_tokens=1))["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name} must be in [0, 20], not -1, which are all 49152")
    assert "scheduler.max_logprobs = -1 permits it" in error["message"]


async def test_streamed_chat(speaking: Served) -> None:
    async with openai_client(speaking) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
        async with client.chat.completions.stream(
            model=MODEL, messages=QUESTION, temperature=0, stream_options={"include_usage": True}
        ) as stream:
            text = "".join([event.delta async for event in stream if event.type == "content.delta"])
            final = await stream.get_final_completion()
    assert text == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert whole.usage is not None
    # cached_tokens differs: the prompt came twice
    assert final.usage.completion_tokens == whole.usage.completion_tokens


async def test_fields_of_the_client(client: openai.AsyncOpenAI) -> None:
    """Those that the client has names for and that other tests do not use, all in one request."""
    completion = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, n=1, best_of=3, temperature=0.8, seed=3,
        logit_bias={"7042": 5}, user="me",
        extra_body={"cache_salt": "mine", "return_token_ids": True, "top_k": 40},
    )  # fmt: skip
    assert len(completion.choices[0].token_ids) == 4
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 12
    chat = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=4, metadata={"a": "b"}, store=False,
        service_tier="auto", safety_identifier="me", prompt_cache_key="key", modalities=["text"],
        reasoning_effort="low", parallel_tool_calls=True, verbosity="medium",
    )  # fmt: skip
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 4


async def test_an_unknown_model(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert f"this server serves '{MODEL}'" in caught.value.message


FAILURES = [
    (GenerationError("the model's logits held NaN"), 500),
    (EngineDeadError("worker 0 died"), 503),
]


@pytest.mark.parametrize(("error", "status"), FAILURES)
async def test_a_failure_is_reported(
    client: openai.AsyncOpenAI,
    served: Served,
    error: Exception,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the end of a stream, and by the status of a plain reply."""
    stream = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    received = await anext(stream)
    assert received.choices[0].finish_reason is None
    (sequence,) = served.engine.requests.sequences.values()
    served.engine.requests.fail(sequence.output, error)
    with pytest.raises(openai.APIError, match=str(error)):
        async for _ in stream:
            pass
    submit = served.frontend.submit

    async def submit_and_fail(*args: object, **options: object) -> object:
        output = await submit(*args, **options)
        served.engine.requests.fail(output, error)
        return output

    monkeypatch.setattr(served.frontend, "submit", submit_and_fail)
    with pytest.raises(openai.InternalServerError, match=str(error)) as caught:
        await client.chat.completions.create(model=MODEL, messages=QUESTION)
    assert caught.value.status_code == status
