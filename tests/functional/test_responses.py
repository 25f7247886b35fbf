"""`/v1/responses`, judged by the official `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from aioinfer.errors import GenerationError
from tests.functional.conftest import Served, serve
from tests.functional.test_tools import WEATHER

pytestmark = pytest.mark.asyncio(loop_scope="session")

USUAL: Any = {"model": "smollm2", "temperature": 0, "max_output_tokens": 6}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
CALL: Any = USUAL | {
    "max_output_tokens": 60,
    "input": "What is the weather in Paris?",
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_a_text_that_is_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(**USUAL, input="What is the capital of France?")
    assert whole.status == "incomplete"
    assert whole.output_text
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 6
    events = [
        event
        async for event in await client.responses.create(
            **USUAL, input="What is the capital of France?", stream=True
        )
    ]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    assert kinds.count("output_text.delta") > 3


async def test_a_call_and_its_result(client: openai.AsyncOpenAI) -> None:
    reply = await client.responses.create(**CALL)
    (call,) = reply.output
    assert reply.status == "completed"
    assert call.type == "function_call"
    assert call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    async with client.responses.stream(**CALL) as stream:
        final = await stream.get_final_response()
    (streamed,) = final.output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    kept = await client.responses.create(**USUAL, previous_response_id=reply.id, input=[result])
    item: Any = call.model_dump(exclude_none=True)
    sent = await client.responses.create(
        **USUAL, input=[{"role": "user", "content": CALL["input"]}, item, result]
    )
    assert kept.output_text == sent.output_text


async def test_a_failure_ends_a_stream(client: openai.AsyncOpenAI, served: Served) -> None:
    stream = await client.responses.create(
        model="smollm2", input="Tell me a long story.", temperature=0, stream=True
    )
    first = await anext(stream)
    assert first.type == "response.created"
    (sequence,) = served.engine._sequences.values()
    served.engine.fail(sequence.output, GenerationError("the logits held NaN"))
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "the logits held NaN"
    with pytest.raises(openai.NotFoundError):  # what failed is not stored
        await client.responses.retrieve(first.response.id)


async def test_structured_text(client: openai.AsyncOpenAI) -> None:
    format: Any = {"format": {"type": "json_schema", "name": "x", "schema": WEATHER}}
    reply = await client.responses.create(
        **USUAL | {"max_output_tokens": 60}, input="Weather in Paris?", text=format
    )
    jsonschema.validate(json.loads(reply.output_text), WEATHER)


async def test_conversations_are_kept_unless_not_wanted(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(**USUAL, instructions="Be brief.", input="My name is Ann")
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    second = await client.responses.create(
        **USUAL, input="Who am I?", previous_response_id=first.id
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="there is no response"):
        await client.responses.create(**USUAL, input="So?", previous_response_id=first.id)
    unkept = await client.responses.create(**USUAL, input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unkept.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
    ],
)
async def test_wrong_fields_are_named(served: Served, fields: dict[str, Any], param: str) -> None:
    reply = await served.post("/v1/responses", status=400, **{"input": "Hi"} | fields)
    assert reply["error"]["param"] == param


async def test_the_oldest_responses_go() -> None:
    async with serve(chat__max_stored_responses=1) as served:
        ids = []
        for _ in range(2):
            reply = await served.post("/v1/responses", input="Hi", max_output_tokens=1)
            ids.append(reply["id"])
        async with served.http.get(f"/v1/responses/{ids[0]}") as response:
            assert response.status == 404
        async with served.http.get(f"/v1/responses/{ids[1]}") as response:
            assert response.status == 200


async def retrieved(client: openai.AsyncOpenAI, id: str, is_wanted: Callable[[Any], bool]) -> Any:
    """Returns a response in the background once it is as wanted."""
    for _ in range(3000):
        found = await client.responses.retrieve(id)
        if is_wanted(found):
            return found
        await asyncio.sleep(0.02)
    raise TimeoutError(found)


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    """Returns a response in the background when it has ended."""
    return await retrieved(client, id, lambda r: r.status not in ("queued", "in_progress"))


async def test_a_response_in_the_background(client: openai.AsyncOpenAI) -> None:
    ask = "What is the capital of France?"
    whole = await client.responses.create(**USUAL, input=ask)
    queued = await client.responses.create(**USUAL, input=ask, background=True)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    found = await ended(client, queued.id)
    assert (found.status, found.output_text) == (whole.status, whole.output_text)
    assert found.usage.output_tokens == 6
    # it goes on as any other, and what is complete stays complete
    sequel = [
        await client.responses.create(**USUAL, input="So?", previous_response_id=id)
        for id in (whole.id, found.id)
    ]
    assert sequel[0].output_text == sequel[1].output_text
    assert (await client.responses.cancel(found.id)).status == found.status
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await client.responses.cancel(whole.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_none")


LONG: Any = {"model": "smollm2", "temperature": 0, "input": "Tell me a long story."}


async def test_a_response_is_cancelled(client: openai.AsyncOpenAI, served: Served) -> None:
    response = await client.responses.create(**LONG, background=True)
    found = await retrieved(client, response.id, lambda r: bool(r.output_text))
    assert found.status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        await client.responses.create(**USUAL, input="So?", previous_response_id=response.id)
    cancelled = await client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text.startswith(found.output_text)
    assert await client.responses.retrieve(response.id) == cancelled
    assert not served.engine._sequences
    other = await client.responses.create(**LONG, background=True)
    await client.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(other.id)
    assert not served.engine._sequences


async def test_a_failure_in_the_background(client: openai.AsyncOpenAI, served: Served) -> None:
    response = await client.responses.create(**LONG, background=True)
    (sequence,) = served.engine._sequences.values()
    served.engine.fail(sequence.output, GenerationError("the logits held NaN"))
    found = await ended(client, response.id)
    assert found.status == "failed"
    assert found.error.message == "the logits held NaN"


async def test_events_of_the_background_are_resumed(
    client: openai.AsyncOpenAI, served: Served
) -> None:
    stream = await client.responses.create(
        **USUAL | {"max_output_tokens": 40}, input="Name a river.", background=True, stream=True
    )
    seen = [await anext(stream) for _ in range(6)]
    await stream.close()  # it goes on without a reader
    id = seen[0].response.id
    resumed = await client.responses.retrieve(id, stream=True, starting_after=3)
    rest = [event async for event in resumed]
    assert rest[:2] == seen[4:6]
    assert [event.sequence_number for event in rest] == list(range(4, 4 + len(rest)))
    events = [*seen[:4], *rest]
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    found = await ended(client, id)
    assert found.output_text == text
    again = await client.responses.retrieve(id, stream=True)
    assert [event async for event in again] == events
    async with served.http.get(f"/v1/responses/{id}?stream=true&starting_after=x") as reply:
        assert reply.status == 400
    plain = await client.responses.create(**USUAL, input="Hi")
    with pytest.raises(openai.BadRequestError):
        await client.responses.retrieve(plain.id, stream=True)


async def test_the_background_is_bounded() -> None:
    async with serve(chat__max_stored_responses=1, chat__max_stored_bytes=1500) as served:
        body: Any = {"input": "Tell me a long story.", "background": True}
        first = await served.post("/v1/responses", **body)
        error = await served.post("/v1/responses", 503, **body)
        assert error["error"]["code"] == "overloaded"
        await served.post(f"/v1/responses/{first['id']}/cancel")
        error = await served.post("/v1/responses", 400, **body | {"input": "x" * 2000})
        assert error["error"]["param"] == "background"
        second = await served.post("/v1/responses", **body)
        assert second["status"] == "queued"  # and the server ends all the same
