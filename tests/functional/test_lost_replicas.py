"""Replicas in processes of their own that are killed while they answer: their clients get the
replies of a replica that lives, unbroken, whatever API they speak."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from aioinfer.api.event_stream import STREAM_HEADER
from aioinfer.config import Config, load_config
from aioinfer.gateway import members
from aioinfer.gateway.proxy import Gateway
from aioinfer.gateway.replica import Address
from tests.functional.test_lifecycle import ROOT
from tests.waiting import until
from tests.worker_processes import worker_processes

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
TOKEN = "secret"
SETTINGS = (
    "parallel.executor=inline", "parallel.cpu_threads=1", "cache.num_blocks=400", "server.port=0",
    "server.shutdown_timeout_s=5",
)  # fmt: skip
MAX_TOKENS = 100
ASK = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS}
FOX = {
    "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"],
    "additionalProperties": True,  # its objects are longer
}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "fox", "schema": FOX}}
STORY = {"prompt": "Once upon a time", "ignore_eos": True, **GREEDY}
USAGE = {"stream_options": {"include_usage": True}}

#: Requests whose stream another replica goes on with.
RESUMABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", STORY | USAGE),
    "two choices": ("/v1/completions", STORY | {"n": 2, "temperature": 1.0, "seed": 7} | USAGE),
    "token ids": ("/v1/completions", STORY | {"return_token_ids": True} | USAGE),
    "a seed": ("/v1/completions", STORY | {"temperature": 1.0, "seed": 7} | USAGE),
    "penalties": ("/v1/completions", STORY | {"frequency_penalty": 1.0} | USAGE),
    "a stop string": ("/v1/completions", STORY | {"stop": ["zebra"]} | USAGE),
    "chat": ("/v1/chat/completions", {"messages": ASK, **GREEDY} | USAGE),
    "a schema": (
        "/v1/chat/completions", {"messages": ASK, "response_format": SCHEMA, **GREEDY} | USAGE,
    ),
    "messages": ("/v1/messages", {"messages": ASK, **GREEDY}),
    "response": (
        "/v1/responses",
        {"input": ASK, "temperature": 0, "max_output_tokens": MAX_TOKENS},
    ),
    "ollama": (
        "/api/chat",
        {"messages": ASK, "options": {"temperature": 0, "num_predict": MAX_TOKENS}},
    ),
    "llama.cpp": ("/completion", {"prompt": "Once", "temperature": 0, "n_predict": MAX_TOKENS}),
}  # fmt: skip
#: Requests whose client has nothing until all of the reply is there.
WHOLE = {
    "whole completion": ("/v1/completions", STORY),
    "whole message": ("/v1/messages", {"messages": ASK, **GREEDY}),
    "whole ollama": (
        "/api/chat",
        {"messages": ASK, "options": {"temperature": 0, "num_predict": MAX_TOKENS},
         "stream": False},
    ),
}  # fmt: skip
#: Fields of events with a part of the text or of the tokens.
PARTS = ("text", "content", "delta", "tokens", "token_ids")


@dataclass
class Fleet:
    """A gateway, the replicas that it may send requests to, and a client."""

    gateway: Gateway
    members: list[Address] = field(default_factory=list)
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    http: aiohttp.ClientSession = field(init=False)

    async def start_replica(self, name: str, *settings: str) -> Address:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.replica_process", name, TOKEN, *SETTINGS, *settings,
            cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.processes[name] = process
        assert process.stdout is not None
        return Address(*json.loads(await process.stdout.readline()))

    async def be(self, *members: Address) -> None:
        """Makes these the replicas, and returns when the gateway knows all of them."""
        self.members[:] = members
        await until(lambda: set(self.gateway.router.names) == {member.name for member in members})

    async def begin(self, path: str, body: dict[str, Any]) -> tuple[Reply, asyncio.Task[Reply]]:
        """Asks, and returns when a part of the reply is there."""
        reply = Reply(self, path, body)
        reading = asyncio.create_task(reply.read())
        await asyncio.wait_for(reply.has_begun.wait(), 60)
        return reply, reading

    async def have_sent(self, member: Address, count: int) -> None:
        """Returns when a replica has reported so many requests. To which one a request goes depends
        on those that are known when its prompt has been encoded, in a thread."""

        def num_requests() -> int:
            load = self.gateway.router._replicas[member.name].load
            return load.running + load.waiting

        await until(lambda: num_requests() == count)

    async def kill(self, member: Address) -> None:
        process = self.processes.pop(member.name)
        process.kill()
        await process.wait()

    def count(self, name: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(f"aioinfer:gateway_{name}_total") or 0


@pytest.fixture(autouse=True)
def asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """New members are known long before a reply ends."""
    monkeypatch.setattr(members, "_ASK_S", 0.02)


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config("configs/smollm2.toml", SETTINGS)


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Fleet]:
    addresses: list[Address] = []

    async def discover() -> Iterable[Address]:
        return addresses

    fleet = Fleet(Gateway(config, discover, TOKEN), addresses)
    url = await fleet.gateway.start()
    async with aiohttp.ClientSession(url) as fleet.http:
        try:
            yield fleet
        finally:
            await fleet.gateway.stop()
            for process in fleet.processes.values():
                process.kill()
                await process.wait()


class Reply:
    """A reply as its client has it."""

    def __init__(self, fleet: Fleet, path: str, body: dict[str, Any]):
        self.data = b""
        self.has_begun = asyncio.Event()
        self._fleet, self._path, self._body = fleet, path, body

    async def read(self) -> Reply:
        async with self._fleet.http.post(self._path, json=self._body) as response:
            assert response.status == 200, await response.text()
            assert STREAM_HEADER not in response.headers
            self.is_stream = response.content_type != "application/json"
            async for data in response.content.iter_any():
                self.data += data
                if len(self.data) > 1500:
                    self.has_begun.set()
        return self

    async def grow(self) -> None:
        """Returns when more of it is there."""
        size = len(self.data) + 1500
        await until(lambda: len(self.data) >= size)

    def events(self) -> list[dict[str, Any]]:
        lines = [line.removeprefix(b"data: ") for line in self.data.splitlines()]
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def essence(self) -> Any:
        """Returns what does not differ from one request to the next. The order among the events of
        several choices may differ, and which tokens share an event."""
        events = self.events()
        assert b"\n:" not in self.data, "marks are between gateways and replicas"
        ids = {event[name] for event in events for name in ("id", "created") if name in event}
        assert len(ids) <= 2
        numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
        assert numbers == list(range(len(numbers)))
        ordered = sorted(events[:-1], key=_choices) + events[-1:]
        found: list[dict[Any, Any]] = []
        for event in (dict(_leaves(_without(event))) for event in ordered):
            if found and (joined := _joined(found[-1], event)) is not None:
                found[-1] = joined
            else:
                found.append(event)
        return found


def _kill_rank(pid: int) -> None:
    """Kills the worker of a replica."""
    (rank,) = worker_processes(pid)
    rank.kill()


def _streamed(path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return path, {"stream": True} | body


def _choices(event: dict[str, Any]) -> list[int]:
    """Returns the numbers of the choices in an event."""
    return [choice["index"] for choice in event.get("choices", ())]


def _leaves(value: Any, *path: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the values of an event, a part as one, each behind its path."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and path[-1] not in PARTS:
        items = list(enumerate(value))
    if not items:
        yield path, value
    for name, item in items:
        yield from _leaves(item, *path, name)


def _joined(first: dict[Any, Any], second: dict[Any, Any]) -> dict[Any, Any] | None:
    """Returns the leaves of an event that brings what two bring, one after the other. None unless
    the second brings a part, and the first has all of its other leaves."""
    parts = {path for path in first.keys() & second if path[-1] in PARTS}
    counted = {path for path in second if path[-1] == "tokens_predicted"}
    rest = [(path, second[path]) for path in second.keys() - parts - counted]
    if not any(second[path] for path in parts) or not all(item in first.items() for item in rest):
        return None
    return first | second | {path: first[path] + second[path] for path in parts}


def _without(value: Any) -> Any:
    """Returns a value without ids, times and numbers of events."""
    dropped = {
        "id", "item_id", "created", "created_at", "system_fingerprint", "timings", "total_duration",
        "prompt_eval_duration", "eval_duration", "tokens_cached", "prompt_tokens_details",
        "input_tokens_details", "cache_read_input_tokens", "input_tokens", "total_tokens",
        "sequence_number",
    }  # fmt: skip
    if isinstance(value, dict):
        return {name: _without(item) for name, item in value.items() if name not in dropped}
    return [_without(item) for item in value] if isinstance(value, list) else value


async def test_replies_of_a_killed_replica_go_on_with_another(config: Config) -> None:
    """All requests are under way on a replica that is killed; no reply differs from that of an
    undisturbed replica."""
    streams = {name: _streamed(*each) for name, each in RESUMABLE.items()}
    async with running(config) as fleet:
        first, second = await asyncio.gather(*map(fleet.start_replica, "ab"))
        await fleet.be(second)
        asked = streams | WHOLE
        wanted = {name: Reply(fleet, *each) for name, each in asked.items()}
        await asyncio.gather(*(reply.read() for reply in wanted.values()))

        await fleet.be(first)
        found = {name: Reply(fleet, *each) for name, each in asked.items()}
        reading = [asyncio.create_task(reply.read()) for reply in found.values()]
        async with asyncio.timeout(60):
            await asyncio.gather(*(found[name].has_begun.wait() for name in streams))
        await fleet.be(first, second)
        assert not any(task.done() for task in reading)
        await fleet.kill(first)
        await asyncio.gather(*reading)
        for name, reply in found.items():
            assert reply.essence() == wanted[name].essence(), name
        assert fleet.count("lost_requests") == fleet.count("resumed_requests") == len(asked)


async def test_a_stream_outlives_one_replica_after_the_other(config: Config) -> None:
    """As long as there is a token between: one that is killed, one whose worker is killed and not
    restarted, and one that hangs. At last it ends on a fourth."""
    worker = ("parallel.executor=multiprocess", "parallel.restart_workers=0")
    path, body = _streamed("/v1/completions", STORY | {"max_tokens": 300} | USAGE)
    async with running(config) as fleet:
        first, second, third, fourth = await asyncio.gather(
            fleet.start_replica("a"),
            fleet.start_replica("b", *worker),
            fleet.start_replica("c"),
            fleet.start_replica("d"),
        )
        await fleet.be(first)
        reply, reading = await fleet.begin(path, body)
        await fleet.be(first, second)
        assert not reading.done()
        await fleet.kill(first)
        await reply.grow()
        await fleet.be(second, third)
        assert not reading.done()
        await asyncio.to_thread(_kill_rank, fleet.processes["b"].pid)
        await reply.grow()
        await fleet.be(third, fourth)
        assert not reading.done()
        fleet.processes["c"].send_signal(signal.SIGSTOP)
        await reading
        assert fleet.count("lost_requests") == fleet.count("resumed_requests") == 3
        whole = await Reply(fleet, path, body).read()
        assert reply.essence() == whole.essence()


async def test_replies_that_no_other_replica_may_go_on_with(config: Config) -> None:
    """A reply that holds more than tokens ends with an error, and so does a request that two
    replicas were lost with: it may be the cause."""
    logprobs = _streamed("/v1/completions", STORY | {"logprobs": 1, "max_tokens": 300})
    whole = ("/v1/completions", STORY | {"max_tokens": 200})
    async with running(config) as fleet:
        first, second, third = await asyncio.gather(*map(fleet.start_replica, "abc"))
        await fleet.be(first)
        stream, reading = await fleet.begin(*logprobs)
        response = asyncio.create_task(fleet.http.post(whole[0], json=whole[1]))
        await fleet.have_sent(first, 2)
        await fleet.be(first, second)
        fleet.processes["b"].send_signal(signal.SIGSTOP)
        await fleet.kill(first)
        await reading
        *_, error = stream.events()
        assert error["error"]["code"] == "replica_lost"
        assert stream.data.endswith(b"data: [DONE]\n\n")
        # sent to the second before the third is known
        await until(lambda: fleet.count("resumed_requests") == 1)
        fleet.members[:] = second, third
        await until(lambda: third.name in fleet.gateway.router.names)  # the second is silent
        async with await response as failed:
            assert failed.status == 502
            assert (await failed.json())["error"]["code"] == "replica_lost"
        assert (fleet.count("lost_requests"), fleet.count("resumed_requests")) == (3, 1)
