"""The engine in Python programs: asynchronous, step by step, and inside another application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import aiohttp
import jsonschema
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from aioinfer import LLM, AsyncLLM, GrammarSpec, LLMEngine, SamplingParams, create_app, load_config
from aioinfer.errors import EngineDeadError, RequestError
from tests.functional.conftest import SMOLLM2, Served
from tests.waiting import until

pytestmark = pytest.mark.extended

SETTINGS = {
    "model.max_model_len": 256, "parallel.executor": "inline", "parallel.cpu_threads": 1,
    "cache.num_blocks": 80, "scheduler.max_num_seqs": 4,
}  # fmt: skip
PROMPT = "The capital of France is"
in_session = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def served(speaking: Served) -> Served:
    return speaking


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


# ---------------------------------------------------------------- AsyncLLM


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def llm() -> AsyncIterator[AsyncLLM]:
    async with await AsyncLLM.launch(SMOLLM2, settings=SETTINGS, progress=False) as llm:
        yield llm
        llm.frontend.engines[0].scheduler.check_integrity()
    for call in (llm.add_request, llm.add_chat, llm.embed):
        with pytest.raises(EngineDeadError, match="this AsyncLLM is closed"):
            await call("Hello")


async def last_of(outputs: Any) -> Any:
    last = None
    async for output in outputs:
        last = output
    return last


@in_session
async def test_tasks_share_one_engine(llm: AsyncLLM, served: Served) -> None:
    """Six tasks, more than there are slots; one counts by deltas, one samples twice."""
    prompts = [PROMPT, "Water boils at", "Once upon a time", "def f(x):", "1, 2, 3,", "Hello"]
    whole = await asyncio.gather(*(last_of(llm.generate(p, greedy(6))) for p in prompts))
    for prompt, output in zip(prompts, whole, strict=True):
        choice = await served.complete(prompt=prompt, max_tokens=6, temperature=0, ignore_eos=True)
        assert output.text == choice["text"]
        assert (output.is_finished, output.completions[0].finish_reason) == (True, "length")
    pieces = [o async for o in llm.generate(PROMPT, greedy(6, n=2, logprobs=1), deltas=True)]
    assert [piece.is_finished for piece in pieces].count(True) == 1
    assert pieces[-1].is_finished
    for index in range(2):
        assert "".join(piece.completions[index].text for piece in pieces) == whole[0].text
        assert sum(len(piece.completions[index].logprobs or ()) for piece in pieces) == 6


@in_session
async def test_a_chat_and_what_is_wrong_with_a_request(llm: AsyncLLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = await last_of(llm.chat(question, greedy(12)))
    assert "Paris" in answer.text
    fields = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    same = await last_of(llm.chat(question[0]["content"], fields))
    assert (same.outputs[0].text, same.finished) == (answer.text, True)
    with pytest.raises(RequestError, match="maximum context length is 256") as raised:
        await llm.add_request(PROMPT, greedy(1000))
    assert raised.value.param == "max_tokens"
    stream = await llm.add_request(PROMPT, greedy(50), request_id="same")
    with pytest.raises(RequestError, match="under way"):
        await llm.add_request(PROMPT, greedy(5), request_id="same")
    stream.abort()
    assert await last_of(stream) is None
    again = await llm.add_request(PROMPT, greedy(2), request_id="same")
    assert (await last_of(again)).is_finished


@in_session
async def test_abort_pause_and_leaving_early(llm: AsyncLLM) -> None:
    scheduler = llm.frontend.engines[0].scheduler
    stream = await llm.add_request(PROMPT, greedy(200), request_id="long")
    first = await anext(stream)
    llm.pause()
    assert llm.is_paused
    await until(lambda: not scheduler.num_in_flight)
    num_known = scheduler.running[0].num_output
    await asyncio.sleep(0.1)
    assert scheduler.running[0].num_output == num_known < 200
    llm.resume()
    await until(lambda: scheduler.running[0].num_output > num_known)
    assert llm.abort("long")
    assert not llm.abort("long")
    assert not llm.abort("unknown")
    last = await last_of(stream)
    assert last is first  # it holds all so far
    assert (last.is_finished, last.completions[0].finish_reason) == (True, "abort")
    assert num_known <= len(last.token_ids) < 200
    async with aclosing(llm.generate(PROMPT, greedy(200))) as outputs:
        async for _ in outputs:
            break
    await until(lambda: scheduler.is_idle)
    assert (await last_of(llm.generate(PROMPT, greedy(2)))).num_cached_tokens >= 0
    llm.reset_prefix_cache()
    assert scheduler.kv_cache.num_cached == 0


QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
CALL: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


def check_call(message: Any) -> str:
    """Checks a message that calls the tool; returns the arguments."""
    (call,) = message["tool_calls"]
    assert (message["role"], message["content"]) == ("assistant", None)
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
    return str(call["function"]["arguments"])


@in_session
async def test_tools_and_a_schema(llm: AsyncLLM, served: Served) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    whole = await last_of(llm.chat(QUESTION, params, **CALL))
    arguments = check_call(whole.message)
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 60, **CALL}
    reply = await served.post("/v1/chat/completions", **body)
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments
    pieces, lengths = [], []
    async for piece in llm.chat(QUESTION, params, deltas=True, **CALL):
        pieces.append(piece)
        lengths.append(len(str(piece.message)))
    assert lengths == sorted(lengths)  # the message grows
    assert lengths[0] < lengths[-1]
    assert check_call(pieces[-1].message) == arguments
    assert "".join(piece.text for piece in pieces) == whole.text
    # the message goes into the next turn
    result = {"role": "tool", "content": "18 degrees"}
    turn = [*QUESTION, whole.message, result]
    answer = await last_of(llm.chat(turn, greedy(3), tools=TOOLS, tool_choice="none"))
    assert answer.message == {"role": "assistant", "content": answer.text}
    grammar = GrammarSpec.of_schema(CITY)
    by_schema = SamplingParams(temperature=0, max_tokens=60, grammar=grammar)
    outputs = await asyncio.gather(
        last_of(llm.chat(QUESTION, by_schema)), last_of(llm.generate(PROMPT, by_schema))
    )
    for output in outputs:
        jsonschema.validate(json.loads(output.text), CITY)
    assert outputs[1].message is None
    with pytest.raises(RequestError, match="twice"):
        await llm.add_chat(QUESTION, params, tools=TOOLS * 2)


@in_session
async def test_embeddings(llm: AsyncLLM) -> None:
    texts = ["a cat", "a kitten", "the price of steel"]
    found = await asyncio.gather(*(llm.embed(text) for text in texts))
    assert all(abs(float(vector @ vector) - 1) < 1e-4 for vector in found)
    assert float(found[0] @ found[1]) > float(found[0] @ found[2])
    assert len(await llm.embed([5, 6], dimensions=7, pooling="mean")) == 7
    state = await llm.encode("a cat")
    length = float((state @ state) ** 0.5)
    assert np.allclose(state / length, found[0], atol=1e-5)
    states = await llm.encode("a cat", "all")
    assert states.ndim == 2
    assert np.allclose(states[-1], state, atol=1e-3 * float(np.abs(state).max()))
    assert await llm.score(*texts[:2]) == pytest.approx(float(found[0] @ found[1]), abs=1e-4)
    with pytest.raises(RequestError, match="dimensions"):
        await llm.embed("a", dimensions=100_000)


# ---------------------------------------------------------------- LLMEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(SMOLLM2, settings=SETTINGS, progress=False) as engine:
        yield engine
    for call in (engine.step, lambda: engine.add_request("late", "Hello")):
        with pytest.raises(EngineDeadError, match="this LLMEngine is closed"):
            call()


def test_steps_return_what_is_new(engine: LLMEngine) -> None:
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    lengths = {f"r{number}": 2 + 3 * number for number in range(5)}
    for name, length in lengths.items():
        engine.add_request(name, PROMPT, greedy(length))
    with pytest.raises(RequestError, match="maximum context length is 256") as raised:
        engine.add_request("too long", PROMPT, greedy(1000))
    assert raised.value.param == "max_tokens"
    seen: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        assert outputs
        for output in outputs:
            former = seen.get(output.request_id)
            if former is not None:  # outputs grow, and those that were returned stay as they are
                assert not former.is_finished
                assert output.text.startswith(former.text)
            seen[output.request_id] = output
    assert {name: len(output.token_ids) for name, output in seen.items()} == lengths
    assert all(output.is_finished and output.error is None for output in seen.values())
    assert seen["r4"].text.startswith(seen["r1"].text)
    assert engine.step() == []


def test_an_engine_aborts_pauses_and_chats(engine: LLMEngine) -> None:
    engine.add_request("long", PROMPT, greedy(200))
    engine.add_chat("chat", "What is the capital of France?", greedy(12))
    while not any(output.request_id == "long" for output in engine.step()):
        pass
    engine.pause()
    engine.abort(["long", "unknown"])
    engine.resume()
    ended: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.is_finished}
    assert ended["long"].completions[0].finish_reason == "abort"
    assert 0 < len(ended["long"].token_ids) < 200
    assert "Paris" in ended["chat"].text


def test_an_engine_calls_tools_and_embeds(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, n=2)
    engine.add_chat("call", QUESTION, params, **CALL)
    (vector,) = engine.embed("a cat", dimensions=5)
    assert vector.shape == (5,)
    last: Any = None
    while engine.has_unfinished_requests():
        (last,) = engine.step()
    first, second = (check_call(each.message) for each in last.completions)
    assert first == second
    assert engine.score("a cat", ["a cat"]) == pytest.approx([1.0], abs=1e-4)
    with pytest.raises(RequestError, match="tool_choice"):
        engine.add_chat("wrong", QUESTION, params, tool_choice="required")


# ---------------------------------------------------------------- LLM


def test_a_chat_with_tools() -> None:
    with LLM(SMOLLM2, settings=SETTINGS, progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=60)
        outputs = llm.chat([QUESTION, QUESTION], params, **CALL)
        assert len({check_call(output.message) for output in outputs}) == 1
        (plain,) = llm.chat(QUESTION, greedy(4))
        assert plain.message == {"role": "assistant", "content": plain.text}
        with pytest.raises(RequestError, match="not in tools"):
            llm.chat(QUESTION, params, tools=TOOLS,
                     tool_choice={"type": "function", "function": {"name": "f"}})  # fmt: skip


# ---------------------------------------------------------------- create_app


@in_session
async def test_the_server_inside_another_application(llm: AsyncLLM) -> None:
    """Mounted below a path, over the engine that `AsyncLLM` uses, with keys for its paths alone."""
    config = load_config(
        None,
        {"model.path": SMOLLM2, "server.api_keys": ["key"], "server.admin_key": "admin"} | SETTINGS,
    )
    outer = web.Application()

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="outer")

    outer.router.add_get("/hello", hello)
    outer.add_subapp("/llm", await create_app(config, llm.frontend))
    runner = web.AppRunner(outer, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    key = {"Authorization": "Bearer key"}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:

        async def status(path: str, **options: Any) -> int:
            async with http.get(path, **options) as response:
                return response.status

        assert await status("/hello") == 200
        assert await status("/llm/health/ready") == 200
        assert await status("/llm/v1/models") == 401
        assert await status("/llm/v1/models", headers=key) == 200
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        async with http.post("/llm/v1/completions", json=body, headers=key) as response:
            (choice,) = (await response.json())["choices"]
        async with http.post(
            "/llm/v1/completions", json=body | {"stream": True}, headers=key
        ) as response:
            text = await response.text()
        assert text.endswith("data: [DONE]\n\n")
        async with http.post("/llm/pause", headers=key) as response:
            assert response.status == 401
    own = await last_of(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4)))
    assert own.text == choice["text"]
    await runner.cleanup()
    # the engine is the caller's
    assert (await last_of(llm.generate(PROMPT, greedy(1)))).is_finished


@in_session
async def test_an_application_with_engines_of_its_own_ends_them() -> None:
    app = await create_app(load_config(None, {"model.path": SMOLLM2} | SETTINGS))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:
        async with http.post("/tokenize", json={"prompt": "Hello"}) as response:
            assert (await response.json())["count"] == 1
        await runner.cleanup()
