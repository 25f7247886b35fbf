"""`/v1/responses`, judged by the official `openai` client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jsonschema
import openai
import pytest

from aioinfer.api.batch import store
from aioinfer.api.batch.objects import Conversation
from aioinfer.api.messages import Item
from aioinfer.api.openai import responses
from aioinfer.errors import GenerationError
from tests.functional.conftest import Served, serve
from tests.functional.test_tools import WEATHER

pytestmark = [pytest.mark.extended, pytest.mark.asyncio(loop_scope="session")]

USUAL: Any = {"model": "smollm2", "temperature": 0, "max_output_tokens": 6}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
CALL: Any = USUAL | {
    "max_output_tokens": 60, "input": "What is the weather in Paris?", "tools": TOOLS,
    "tool_choice": "required", "parallel_tool_calls": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(speaking: Served) -> Served:
    return speaking


@pytest.mark.sample
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
    found = kinds[-4:]
    assert found == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    (item,) = last.response.output
    assert (item.status, events[-2].item) == ("incomplete", item)  # type: ignore[union-attr]
    assert kinds.count("output_text.delta") > 3


async def test_log_probabilities_of_the_text(client: openai.AsyncOpenAI) -> None:
    body: Any = USUAL | {"input": "What is the capital of France?", "top_logprobs": 2}
    include: Any = ["message.output_text.logprobs"]
    whole = await client.responses.create(**body, include=include)
    (message,) = whole.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 6
    assert all(entry.top_logprobs[0].token == entry.token for entry in part.logprobs)
    chat = await client.chat.completions.create(
        model="smollm2", temperature=0, max_tokens=6, logprobs=True, top_logprobs=2,
        messages=[{"role": "user", "content": body["input"]}],
    )  # fmt: skip
    assert chat.choices[0].logprobs is not None
    known = [entry.model_dump() for entry in chat.choices[0].logprobs.content or ()]
    assert [entry.model_dump() for entry in part.logprobs] == known
    stream = await client.responses.create(**body, include=include, stream=True)
    events = [event async for event in stream]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    sent = [entry for event in deltas for entry in event.logprobs]
    assert all("".join(t.token for t in event.logprobs) == event.delta for event in deltas)
    assert [entry.logprob for entry in sent] == [entry.logprob for entry in part.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.token for entry in done.logprobs] == [entry.token for entry in sent]
    final = events[-1]
    assert final.type == "response.incomplete"
    assert final.response.output[0].content == message.content  # type: ignore[union-attr]
    assert (await client.responses.retrieve(whole.id)).output == whole.output
    plain = await client.responses.create(**USUAL, input=body["input"], include=include)
    assert [e.top_logprobs for e in plain.output[0].content[0].logprobs] == [[]] * 6  # type: ignore[union-attr]


async def test_log_probabilities_of_a_text_alone(client: openai.AsyncOpenAI) -> None:
    """A call has none, and neither has its end token."""
    call = await client.responses.create(**CALL, top_logprobs=1)
    assert [item.type for item in call.output] == ["function_call"]
    ended = await client.responses.create(
        **USUAL, input="Say yes.", top_logprobs=1, extra_body={"stop": ["."], "min_tokens": 2}
    )
    part: Any = ended.output[0].content[0]  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == part.text


async def test_fields_of_sampling(client: openai.AsyncOpenAI, served: Served) -> None:
    """Each has the effect that it has in a chat."""
    ask = "What is the capital of France?"
    plain = (await client.responses.create(**USUAL, input=ask)).output_text
    second = plain.split()[1]
    first, *_ = await served.frontend.encode(plain)
    fields: list[dict[str, Any]] = [
        {"stop": [f" {second}"]},
        {"logit_bias": {str(first): -100}},
        {"structured_outputs": {"choice": ["red", "blue"]}},
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 2.0, "seed": 3, "min_p": 1.0},
        {"temperature": 2.0, "seed": 3, "top_k": 1},
        {"bad_words": [plain.split()[0]]},
        {"ignore_eos": True, "max_output_tokens": 20, "min_tokens": 20},
        {"stop_token_ids": [2], "skip_special_tokens": False, "include_stop_str_in_output": True},
    ]
    for given in fields:
        body = USUAL | {"input": ask} | given
        reply = await served.post("/v1/responses", **body)
        chat = await served.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": ask}],
            **{("max_tokens" if k == "max_output_tokens" else k): v for k, v in body.items()
               if k != "input"},
        )  # fmt: skip
        texts = [part["text"] for item in reply["output"] for part in item["content"]]
        assert "".join(texts) == chat["choices"][0]["message"]["content"], given
    stopped = await served.post("/v1/responses", **USUAL, input=ask, stop=f" {second}")
    assert stopped["status"] == "completed"
    assert stopped["output"][0]["content"][0]["text"] == plain.split()[0]


async def test_a_call_that_is_cut_off_is_incomplete(client: openai.AsyncOpenAI) -> None:
    """By a stop string of the request, or by the length."""
    whole = await client.responses.create(**CALL)
    assert whole.usage is not None
    length = whole.usage.output_tokens - 10
    for cut, status in (
        ({"stop": "}"}, "completed"),
        ({"max_output_tokens": length}, "incomplete"),
    ):
        body: Any = CALL | {"extra_body": cut}
        reply: Any = await client.responses.create(**body)
        (call,) = reply.output
        assert (reply.status, call.type, call.status) == (status, "function_call", "incomplete")
        events = [event async for event in await client.responses.create(**body, stream=True)]
        ended: Any = [e.item for e in events if e.type == "response.output_item.done"]
        (done,) = ended
        assert done == events[-1].response.output[0]  # type: ignore[union-attr]
        assert (done.status, done.arguments) == ("incomplete", call.arguments)


async def test_items_of_the_input(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(**CALL)
    (call,) = first.output
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}  # type: ignore[union-attr]
    system: Any = {"role": "developer", "content": "Be brief."}
    second = await client.responses.create(
        **USUAL, previous_response_id=first.id, input=[result, system]
    )
    page = await client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in page.data] == [
        "message", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    assert page.data[0].content[0].text == CALL["input"]  # type: ignore[union-attr]
    assert page.data[1].id == call.id
    # references to stored items stand for them, as Vercel's `ai` sends a history
    referring: Any = [{"type": "item_reference", "id": page.data[0].id}, {"id": call.id}]
    referred = await client.responses.create(**USUAL, input=[*referring, result, system])
    assert referred.output_text == second.output_text
    assert referred.usage
    assert second.usage
    assert referred.usage.input_tokens == second.usage.input_tokens
    unknown: Any = [system, {"type": "item_reference", "id": "msg_none"}]
    with pytest.raises(openai.NotFoundError, match="no item 'msg_none'") as failed:
        await client.responses.create(**USUAL, input=unknown)
    assert failed.value.param == "input[1].id"
    pages = [i.id async for i in client.responses.input_items.list(second.id, limit=1)]
    assert pages == [item.id for item in reversed(page.data)]
    after = await client.responses.input_items.list(second.id, after=pages[1], limit=1)
    assert ([item.id for item in after.data], after.has_more) == ([pages[2]], True)
    for query in ({"limit": 101}, {"order": "up"}, {"after": "msg_none"}):
        with pytest.raises(openai.BadRequestError):
            await client.responses.input_items.list(second.id, extra_query=query)
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list("resp_none")


class Watched(list[Item]):
    """Items that know in which threads they were walked through."""

    def __init__(self, items: Iterable[Item]):
        super().__init__(items)
        self.threads: set[threading.Thread] = set()

    def __iter__(self) -> Iterator[Item]:
        self.threads.add(threading.current_thread())
        return super().__iter__()


async def test_much_that_is_stored(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is searched in a thread, and no prompt is made of more than a body might hold."""
    assert served.server._application is not None
    stored = served.server._application.app[store.OBJECT_STORE]
    items = Watched(Item(id=f"msg_{n}", role="user", content=f"{n}") for n in range(300))
    kept = Conversation(id="conv_1", created_at=0, metadata={})
    stored.add("anonymous", kept, items, item_bytes=1)
    refers: Any = [{"type": "item_reference", "id": "msg_299"}]
    reply = await served.post("/v1/responses", input=refers, max_output_tokens=1)
    assert items.threads
    assert threading.main_thread() not in items.threads
    # how long the items of a response are is known, and not found by writing them again
    record = stored.find("anonymous", "response", reply["id"])
    assert record.item_bytes == store.json_size(record.items)
    body: Any = {"input": "And?", "max_output_tokens": 1}
    next = await served.post("/v1/responses", **body, previous_response_id=reply["id"])
    record = stored.find("anonymous", "response", next["id"])
    assert record.num_bytes - store.json_size(record.body) == record.item_bytes > 0
    assert abs(record.item_bytes - store.json_size(record.items)) < 8  # brackets and commas
    monkeypatch.setattr(responses, "MAX_VALUES", 299)
    refused = await served.post("/v1/responses", 400, **body, conversation=kept.id)
    assert refused["error"]["param"] == "conversation"
    assert "more than 299 items" in refused["error"]["message"]
    stored.remove("anonymous", "conversation", kept.id)


async def test_input_tokens_are_counted(client: openai.AsyncOpenAI, served: Served) -> None:
    ask: Any = {"model": "smollm2", "input": "Who are you?", "instructions": "Be kind."}
    counted = await client.responses.input_tokens.count(**ask, tools=TOOLS)
    assert counted.object == "response.input_tokens"
    reply = await client.responses.create(**ask, tools=TOOLS, max_output_tokens=1)
    assert reply.usage is not None
    assert counted.input_tokens == reply.usage.input_tokens
    sequel: Any = {"previous_response_id": reply.id, "input": "And now?", "tools": TOOLS}
    longer = await client.responses.input_tokens.count(**ask | sequel)
    assert longer.input_tokens > counted.input_tokens
    assert not served.engine.requests.sequences


async def test_a_conversation(client: openai.AsyncOpenAI, served: Served) -> None:
    first: Any = {"role": "user", "content": "What is the capital of France?"}
    made = await client.conversations.create(items=[first], metadata={"topic": "cities"})
    assert (made.object, made.metadata) == ("conversation", {"topic": "cities"})
    assert await client.conversations.retrieve(made.id) == made
    renamed = await client.conversations.update(made.id, metadata={"topic": "rivers"})
    assert renamed.metadata == {"topic": "rivers"}
    more: Any = [{"role": "assistant", "content": "It is Paris."}, first]
    added = await client.conversations.items.create(made.id, items=more)
    items = client.conversations.items
    listed = [item async for item in items.list(made.id, order="asc", limit=2)]
    assert listed[1:] == added.data
    assert [item.role for item in listed] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    left = await items.delete(listed[2].id or "", conversation_id=made.id)
    assert left == renamed
    with pytest.raises(openai.NotFoundError):
        await items.retrieve(listed[2].id or "", conversation_id=made.id)
    assert await items.retrieve(listed[1].id or "", conversation_id=made.id) == listed[1]
    # a response has the items before it, and adds its own
    ask: Any = {"role": "user", "content": "And of Italy?"}
    reply = await client.responses.create(**USUAL, conversation=made.id, input=[ask])
    assert reply.conversation is not None
    assert reply.conversation.id == made.id
    sent: Any = [first, more[0], ask]
    known = await client.responses.create(**USUAL, input=sent)
    assert reply.output_text == known.output_text
    assert reply.usage is not None
    assert known.usage is not None
    assert reply.usage.input_tokens == known.usage.input_tokens
    newest = [item async for item in items.list(made.id)]
    assert [item.role for item in newest] == ["assistant", "user", "assistant", "user"]  # type: ignore[union-attr]
    assert newest[0].id == reply.output[0].id
    assert newest[0].content[0].text == reply.output_text  # type: ignore[union-attr]
    # so do a stream and a response in the background, stored or not
    options: list[dict[str, Any]] = [{"stream": True, "store": False}, {"background": True}]
    for option in options:
        sequel = await client.responses.create(
            **USUAL, **option, conversation={"id": made.id}, input="Go on."
        )
        if "stream" in option:
            assert [event async for event in sequel]
        else:  # what is added meanwhile is kept
            await items.create(made.id, items=[ask])
            await ended(client, sequel.id)
    assert len([item async for item in items.list(made.id)]) == 9
    cancelled = await client.responses.create(
        **LONG, extra_body={"ignore_eos": True}, conversation=made.id, background=True
    )
    await client.responses.cancel(cancelled.id)
    assert len([item async for item in items.list(made.id)]) == 9
    gone = await client.conversations.delete(made.id)
    assert (gone.deleted, gone.object) == (True, "conversation.deleted")
    with pytest.raises(openai.NotFoundError, match="there is no conversation"):
        await client.conversations.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(**USUAL, conversation=made.id, input="Hi")
    assert caught.value.param == "conversation"
    error = await served.post("/v1/conversations", 400, items=[{"type": "web_search_call"}])
    assert error["error"]["param"] == "items[0]"
    await served.post("/v1/conversations", 400, items=[first] * 21)


async def test_a_prompt_that_does_not_fit_is_truncated(client: openai.AsyncOpenAI) -> None:
    turns: Any = [{"role": "user", "content": f"{i} " + "word " * 100} for i in range(8)]
    turns.append({"role": "user", "content": "What is the capital of France?"})
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.responses.create(**USUAL, input=turns)
    cut = await client.responses.create(**USUAL, input=turns, truncation="auto")
    assert cut.truncation == "auto"
    assert cut.usage is not None
    assert 300 < cut.usage.input_tokens <= 512 - 6
    same = await client.responses.create(**USUAL, input=turns[-5:], truncation="auto")
    assert same.output_text == cut.output_text


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
    (sequence,) = served.engine.requests.sequences.values()
    served.engine.requests.fail(sequence.output, GenerationError("the logits held NaN"))
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
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"include": ["message.tone"]}, "include[0]"),
        ({"truncation": "middle"}, "truncation"),
        ({"text": {"verbosity": "mute"}}, "text.verbosity"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"logit_bias": {"two words": 1}}, "logit_bias"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
            "structured_outputs.regex",
        ),
        ({"temprature": 1}, "temprature"),
        ({"text": {"formt": {"type": "json_object"}}}, "text.formt"),
        ({"text": {"format": {"type": "json_object", "scheme": {}}}}, "text.format.scheme"),
        ({"reasoning": {"efort": "low", "mode": "standard"}}, "reasoning.efort"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "txt": "Hi"}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
    ],
)
async def test_wrong_fields_are_named(served: Served, fields: dict[str, Any], param: str) -> None:
    reply = await served.post("/v1/responses", status=400, **{"input": "Hi"} | fields)
    assert reply["error"]["param"] == param


async def test_the_oldest_responses_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_STORED", 1)
    async with serve() as served:
        ids = []
        for _ in range(2):
            reply = await served.post("/v1/responses", input="Hi", max_output_tokens=1)
            ids.append(reply["id"])
        await served.get(f"/v1/responses/{ids[0]}", 404)
        await served.get(f"/v1/responses/{ids[1]}")


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


@pytest.mark.sample
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
    assert not served.engine.requests.sequences
    other = await client.responses.create(**LONG, background=True)
    await client.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(other.id)
    assert not served.engine.requests.sequences


async def test_a_failure_in_the_background(client: openai.AsyncOpenAI, served: Served) -> None:
    response = await client.responses.create(**LONG, background=True)
    (sequence,) = served.engine.requests.sequences.values()
    served.engine.requests.fail(sequence.output, GenerationError("the logits held NaN"))
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
    await served.get(f"/v1/responses/{id}?stream=true&starting_after=x", 400)
    plain = await client.responses.create(**USUAL, input="Hi")
    with pytest.raises(openai.BadRequestError):
        await client.responses.retrieve(plain.id, stream=True)


async def test_the_background_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_STORED", 1)
    monkeypatch.setattr(responses, "MAX_STORED_BYTES", 1500)
    monkeypatch.setattr(store, "MAX_STORED_BYTES", 1500)
    async with serve() as served:
        body: Any = {"input": "Tell me a long story.", "background": True}
        first = await served.post("/v1/responses", **body)
        error = await served.post("/v1/responses", 503, **body)
        assert error["error"]["code"] == "overloaded"
        await served.post(f"/v1/responses/{first['id']}/cancel")
        error = await served.post("/v1/responses", 400, **body | {"input": "x" * 2000})
        assert error["error"]["param"] == "background"
        second = await served.post("/v1/responses", **body)
        assert second["status"] == "queued"  # and the server ends all the same
