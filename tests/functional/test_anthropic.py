"""The official `anthropic` client as the judge of `/v1/messages`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import jsonschema
import pytest
import pytest_asyncio

from aioinfer.errors import GenerationError
from tests.functional.conftest import Served
from tests.functional.test_tools import WEATHER

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a long story."}]
TOOLS: Any = [{"name": "weather", "description": "of a city", "input_schema": WEATHER}]
#: The client has no parameter of this name any more.
GREEDY = {"temperature": 0}
USUAL: Any = {"model": "smollm2", "max_tokens": 6, "extra_body": GREEDY}
CALL: Any = USUAL | {
    "max_tokens": 60,
    "messages": ASK,
    "tools": TOOLS,
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture(scope="module")
def served(speaking: Served) -> Served:
    return speaking


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=served.url, api_key="none", max_retries=0
    ) as client:
        yield client


async def test_a_text(client: anthropic.AsyncAnthropic) -> None:
    reply = await client.messages.create(**USUAL, messages=ASK, system="Be brief.")
    (block,) = reply.content
    assert block.type == "text"
    assert block.text
    assert reply.stop_reason == "max_tokens"
    assert reply.usage.output_tokens == 6
    count = await client.messages.count_tokens(model="smollm2", messages=ASK, system="Be brief.")
    cached = reply.usage.cache_read_input_tokens or 0
    assert count.input_tokens == reply.usage.input_tokens + cached
    again = await client.messages.create(**USUAL, messages=ASK, system="Be brief.")
    assert (again.usage.cache_read_input_tokens or 0) >= 16  # a block of the KV cache
    assert again.content[0].text == block.text  # type: ignore[union-attr]


async def test_the_tokens_that_are_kept_are_told(client: anthropic.AsyncAnthropic) -> None:
    text = "Remember every one of these words, since they will be asked for: " + "sun moon " * 40
    block: Any = {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages: Any = [{"role": "user", "content": [block]}]
    first = (await client.messages.create(**USUAL, messages=messages)).usage
    again = (await client.messages.create(**USUAL, messages=messages)).usage
    assert first.cache_creation is not None
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens
    created, cached = first.cache_creation_input_tokens or 0, again.cache_read_input_tokens or 0
    assert created >= 64
    assert cached == created + (first.cache_read_input_tokens or 0)
    assert again.cache_creation_input_tokens == 0
    whole = first.input_tokens + created + (first.cache_read_input_tokens or 0)
    assert whole == again.input_tokens + cached


async def test_models(client: anthropic.AsyncAnthropic, served: Served) -> None:
    page = await client.models.list()
    assert (page.has_more, page.first_id) == (False, "smollm2")
    model = page.data[0]
    assert (model.type, model.display_name) == ("model", "smollm2")
    assert await client.models.retrieve("smollm2") == model
    async with served.http.get("/v1/models") as plain:  # as OpenAI has it
        card = (await plain.json())["data"][0]
    assert model.created_at.timestamp() == card["created"]
    assert "display_name" not in card


async def test_a_streamed_text(client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(**USUAL, messages=ASK)
    kinds = []
    async with client.messages.stream(**USUAL, messages=ASK) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_message()
    assert final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("text") > 3


async def test_a_cached_prompt_counts_once_at_both_ends_of_a_stream(
    client: anthropic.AsyncAnthropic,
) -> None:
    story: Any = [{"role": "user", "content": "Tell me a story. " * 12}]
    count = (await client.messages.count_tokens(model="smollm2", messages=story)).input_tokens
    await client.messages.create(**USUAL, messages=story)
    usages: list[Any] = []
    async for event in await client.messages.create(**USUAL, messages=story, stream=True):
        if event.type == "message_start":
            usages.append(event.message.usage)
        elif event.type == "message_delta":
            usages.append(event.usage)
    start, end = usages
    for usage in usages:
        assert usage.cache_read_input_tokens >= 16  # a block of the KV cache
        assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert start.input_tokens == end.input_tokens
    assert end.output_tokens == 6


async def test_a_stop_sequence(client: anthropic.AsyncAnthropic) -> None:
    reply = await client.messages.create(
        **USUAL | {"max_tokens": 40}, messages=ASK, stop_sequences=["Paris"]
    )
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Paris")


async def test_a_call_and_its_result(client: anthropic.AsyncAnthropic) -> None:
    reply = await client.messages.create(**CALL)
    (block,) = reply.content
    assert block.type == "tool_use"
    assert block.name == "weather"
    jsonschema.validate(block.input, WEATHER)
    assert reply.stop_reason == "tool_use"
    async with client.messages.stream(**CALL) as stream:
        final = await stream.get_final_message()
    (streamed,) = final.content
    assert streamed.type == "tool_use"
    assert streamed.input == block.input
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    conversation: Any = [
        *ASK,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    reply = await client.messages.create(**USUAL, messages=conversation, tools=TOOLS)
    assert reply.content[0].type == "text"


async def test_an_answer_by_a_schema(client: anthropic.AsyncAnthropic) -> None:
    form = {"type": "json_schema", "schema": WEATHER}
    usual = USUAL | {"max_tokens": 60, "messages": ASK}
    for place in ({"output_format": form}, {"output_config": {"format": form}}):
        reply = await client.messages.create(**usual | {"extra_body": GREEDY | place})
        jsonschema.validate(json.loads(reply.content[0].text), WEATHER)  # type: ignore[union-attr]
    broken = {"type": "json_schema", "schema": {"type": "frob"}}
    both = {"output_format": form, "output_config": {"format": form}}
    for body, place in (
        (both, "output_format"),
        ({"output_format": broken}, "output_format"),
        ({"output_config": {"task_budget": 1}}, "output_config.task_budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"tools": [{"name": "f", "defer_loading": True}]}, r"tools\[0\].defer_loading"),
        ({"temprature": 1}, "temprature"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=place):
            await client.messages.create(**usual | {"extra_body": body})


async def test_a_failure_ends_a_stream(client: anthropic.AsyncAnthropic, served: Served) -> None:
    stream = await client.messages.create(
        **USUAL | {"max_tokens": 300}, messages=STORY, stream=True
    )
    assert (await anext(stream)).type == "message_start"
    (sequence,) = served.engine.requests.sequences.values()
    served.engine.requests.fail(sequence.output, GenerationError("the logits held NaN"))
    with pytest.raises(anthropic.APIStatusError, match="the logits held NaN"):
        async for _ in stream:
            pass


async def test_errors_have_anthropics_shape(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as refused:
        await client.messages.create(**USUAL | {"max_tokens": 0}, messages=ASK)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://a"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
        await client.messages.create(**USUAL, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await client.messages.create(**USUAL | {"model": "other"}, messages=ASK)
    source: Any = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    pdf: Any = {"type": "document", "source": source}
    with pytest.raises(anthropic.BadRequestError, match="a PDF has to be sent as its text"):
        await client.messages.create(**USUAL, messages=[{"role": "user", "content": [pdf]}])
    broken: Any = [{"name": "f", "input_schema": {"type": "frob"}}]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema"):
        await client.messages.create(**CALL | {"tools": broken})
