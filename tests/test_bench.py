"""The load generator against a server whose timing and faults are known: are its figures right?

The server is a real one on a socket. Where times are checked, client and server share a clock that
stands still until the server moves it, so that every figure is exact and nothing sleeps.
"""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentTypeError
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from rich.console import Console

from benchlib import client as client_module
from benchlib import load as load_module
from benchlib.client import Client, EventSplitter, Record, ReplyError
from benchlib.load import Load, Run, arrival_times, run_load, send_load
from benchlib.options import parse_arguments
from benchlib.report import count_errors, percentiles, show, summarize
from benchlib.workload import (
    Call,
    FilePrompts,
    IntRange,
    PromptMaker,
    RandomPrompts,
    RequestShape,
    SharedPrefixPrompts,
    random_token_calls,
    read_entries,
)
from tests.scripted_server import (
    USAGE,
    USAGE_EVENT,
    Handler,
    good_reply,
    run_bench,
    serving,
    sse,
    stream,
    text_event,
)

pytestmark = pytest.mark.slow

SHAPE = RequestShape("m")
CALL = Call(SHAPE.body([5], 4), 4)


class Clock:
    """A clock that moves only in `write_after`, and records when it is read."""

    def __init__(self) -> None:
        self.now = 100.0
        self._read = asyncio.Event()

    def __call__(self) -> float:
        self._read.set()
        return self.now

    async def write_after(self, seconds: float, response: web.StreamResponse, block: bytes) -> None:
        """Moves the clock, writes a block, and waits until the client has noted its time."""
        self.now += seconds
        self._read.clear()
        await response.write(block)
        await self._read.wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(client_module, "perf_counter", clock)
    return clock


async def timed_record(
    clock: Clock, blocks: Sequence[tuple[float, bytes]], shape: RequestShape = SHAPE
) -> Record:
    """Returns the record of a request to a server that sends these blocks after these times."""

    async def reply(request: web.Request) -> web.StreamResponse:
        response = await stream(request)
        for seconds, block in blocks:
            await clock.write_after(seconds, response, block)
        return response

    async with serving(reply) as url, Client(url) as client:
        return await client.send(shape, CALL)


# ---------------------------------------------------------------- times


async def test_times_of_a_stream(clock: Clock) -> None:
    blocks = [
        (0.25, sse(text_event("a"))),
        (0.5, sse(text_event("b"))),
        (0.125, sse(text_event(""))),  # no output: neither a chunk nor the end of a gap
        (0.125, sse(text_event("c"))),
        (1.0, sse(text_event("", "length"), USAGE_EVENT, "[DONE]")),
    ]
    record = await timed_record(clock, blocks)
    assert record.error is None
    assert record.ttft == 0.25
    assert list(record.gaps) == [0.5, 0.25]
    assert record.chunks == 3
    assert record.e2e == 2.0
    assert (record.prompt_tokens, record.output_tokens, record.tokens) == (7, 4, 4)
    assert record.tpot == (2.0 - 0.25) / 3


async def test_a_chat_role_is_not_the_first_token(clock: Clock) -> None:
    def delta(**fields: Any) -> bytes:
        return sse({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})

    blocks = [
        (0.25, delta(role="assistant", content="")),
        (0.5, delta(reasoning_content="hm")),
        (0.5, delta(content="Hi")),
    ]
    record = await timed_record(
        clock, [*blocks, (0.0, sse("[DONE]"))], RequestShape("m", chat=True)
    )
    assert record.ttft == 0.75
    assert list(record.gaps) == [0.5]


async def test_chunks_that_arrive_together_have_no_time_between_them(clock: Clock) -> None:
    two, last = sse(text_event("a"), text_event("b")), sse(text_event("c", "stop"), "[DONE]")
    record = await timed_record(clock, [(0.5, two), (0.5, last)])
    assert record.ttft == 0.5
    assert list(record.gaps) == [0.0, 0.5]


async def test_without_usage_chunks_are_counted(clock: Clock) -> None:
    record = await timed_record(
        clock, [(0.5, sse(text_event("a"))), (0.5, sse(text_event("b"))), (0.5, sse("[DONE]"))]
    )
    assert record.output_tokens is None
    assert record.tokens == 2
    figures = summarize(Run([record], duration_s=1.0))
    assert figures["tokens"]["requests_without_usage"] == 1
    assert figures["throughput"]["output_tokens_per_s"] == 2.0


async def test_whole_replies_have_no_first_token() -> None:
    async def reply(request: web.Request) -> web.Response:
        assert (await request.json())["stream"] is False
        return web.json_response({"choices": [{"text": "abcd"}], "usage": USAGE})

    shape = RequestShape("m", stream=False)
    async with serving(reply) as url, Client(url) as client:
        record = await client.send(shape, Call(shape.body("x", 4), 4))
    assert record.error is None
    assert (record.ttft, record.tpot, record.tokens) == (None, None, 4)
    figures = summarize(Run([record], duration_s=2.0))
    assert [figures["latency_ms"][name] for name in ("ttft", "itl", "tpot")] == [None] * 3
    found = figures["throughput"]
    assert found == {"output_tokens_per_s": 2.0, "total_tokens_per_s": 5.5, "requests_per_s": 0.5}


# ---------------------------------------------------------------- faults


async def test_failures_are_counted_by_kind_with_an_example() -> None:
    started = sse(text_event("a"))

    async def overloaded(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "queue is full"}}, status=503)

    async def cut_off(request: web.Request) -> web.StreamResponse:
        response = await stream(request, started)
        assert request.transport is not None
        request.transport.close()
        return response

    def sending(*blocks: bytes) -> Handler:
        return lambda request: stream(request, *blocks)

    error_event = sending(started, sse({"error": {"message": "worker died", "code": 500}}))
    no_end = sending(started, sse(text_event("b")))
    garbage, nothing = sending(started, sse("{nonsense")), sending(sse("[DONE]"))
    waiting = iter(
        [overloaded, error_event, good_reply, cut_off, no_end, garbage, overloaded, nothing]
    )

    async def reply(request: web.Request) -> web.StreamResponse:
        return await next(waiting)(request)

    async with serving(reply) as url, Client(url) as client:
        run = await run_load(client, SHAPE, [CALL] * 8, num_requests=8, concurrency=1)
    figures = summarize(run)
    assert figures["requests"] == {"sent": 8, "succeeded": 1, "failed": 7}
    errors = {error["kind"]: error for error in figures["errors"]}
    assert figures["errors"][0]["kind"] == "HTTP 503"  # the most frequent comes first
    assert errors["HTTP 503"]["count"] == 2
    assert "queue is full" in errors["HTTP 503"]["example"]
    assert errors["error event"]["example"] == "worker died"
    assert "after 2 chunks" in errors["incomplete stream"]["example"]
    assert "{nonsense" in errors["bad reply"]["example"]
    assert {"connection lost", "empty reply"} <= errors.keys()
    assert figures["tokens"]["output"] == USAGE["completion_tokens"]  # what failed counts nowhere
    assert figures["latency_ms"]["ttft"] is not None


async def test_a_server_that_hangs_is_a_timeout() -> None:
    never = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        response = await stream(request, sse(text_event("a")))
        await never.wait()
        return response

    async with serving(hang) as url, Client(url, timeout_s=0.3) as client:
        record = await client.send(SHAPE, CALL)
    assert record.error == "timeout"
    assert record.chunks == 1
    assert 0.3 <= record.e2e < 10


async def test_no_server() -> None:
    async with serving(good_reply) as url:
        pass
    async with Client(url) as client:
        record = await client.send(SHAPE, CALL)
        sentence = f"nothing answers at {url}: connection refused"
        assert (record.error, record.example) == ("no connection", sentence)
        with pytest.raises(ReplyError) as failure:
            await client.first_model()
        assert str(failure.value) == sentence
    async with Client("http://no-such-host.invalid") as client:
        record = await client.send(SHAPE, CALL)
    assert record.error == "no connection"
    assert record.example.startswith("nothing answers at http://no-such-host.invalid: ")


async def test_a_server_that_hangs_up_is_described() -> None:
    async def hang_up(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(hang_up) as url, Client(url) as client:
        record = await client.send(SHAPE, CALL)
    assert record.error == "connection lost"
    assert record.example == f"{url} closed the connection before its reply was complete"


def test_events_are_the_same_however_the_stream_is_cut() -> None:
    text = (
        b': ping\n\ndata: {"a": 1}\n\nevent: x\ndata:two\r\ndata: lines\r\n\r\n\ndata: [DONE]\n\n'
    )
    events = [b'{"a": 1}', b"two\nlines", b"[DONE]"]
    for cut in range(len(text)):
        splitter = EventSplitter()
        assert [*splitter.feed(text[:cut]), *splitter.feed(text[cut:])] == events


def test_an_event_that_is_too_long_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ReplyError, match="100 bytes"):
        list(EventSplitter().feed(b"data: " + b"x" * 100))


# ---------------------------------------------------------------- the shape of the load


async def test_a_closed_loop_keeps_its_streams_busy() -> None:
    four = asyncio.Barrier(4)  # passes only if four requests are under way together
    in_flight = peak = 0

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        async with asyncio.timeout(10):
            await four.wait()
        in_flight -= 1
        return await good_reply(request)

    seen: list[Record] = []
    async with serving(reply) as url, Client(url) as client:
        run = await run_load(
            client, SHAPE, [CALL] * 100, num_requests=12, concurrency=4, on_done=seen.append
        )
    assert peak == run.peak_in_flight == 4
    assert len(run.records) == 12
    assert seen == run.records
    assert not count_errors(run)


async def test_an_open_loop_does_not_wait_for_replies() -> None:
    twenty = asyncio.Barrier(20)

    async def reply(request: web.Request) -> web.StreamResponse:
        async with asyncio.timeout(10):
            await twenty.wait()
        return await good_reply(request)

    async with serving(reply) as url, Client(url) as client:
        begin = perf_counter()
        run = await run_load(
            client, SHAPE, [CALL] * 20, num_requests=20, concurrency=100, rate=500.0
        )
    assert run.peak_in_flight == 20
    assert not count_errors(run)
    sent = sorted(record.sent - begin for record in run.records)
    for at, due in zip(sent, arrival_times(500.0, seed=0), strict=False):
        # an event loop's timers may fire a little early, however late they may be
        assert at >= due - 0.002


async def test_an_open_loop_is_bounded() -> None:
    async with serving(good_reply) as url, Client(url) as client:
        run = await run_load(client, SHAPE, [CALL] * 30, num_requests=30, concurrency=2, rate=1e5)
    assert run.peak_in_flight == 2
    assert len(run.records) == 30


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array(list(islice(arrival_times(50.0, seed=3), 20_000)))
    gaps = np.diff(times)
    assert times[-1] / len(times) == pytest.approx(1 / 50, rel=0.03)
    # an exponential distribution's are equal
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    assert times.tolist() == list(islice(arrival_times(50.0, seed=3), 20_000))
    assert times[0] != next(arrival_times(50.0, seed=4))


async def test_seconds_bound_a_closed_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are sent until the time is over, by a clock that moves a second with each request,
    and the last ones are waited for."""
    now, count = 100.0, 0

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal now, count
        now += 1.0
        count += 1
        return await good_reply(request)

    monkeypatch.setattr(load_module, "perf_counter", lambda: now)
    async with serving(reply) as url, Client(url) as client:
        load = Load(1, seconds=4.5)
        arrivals = ((index, at, CALL) for index, at in load.arrivals())
        run = await send_load(client, SHAPE, arrivals, load, concurrency=1)
    assert run.num_items == len(run.records) == count == 5
    assert not count_errors(run)


def test_seconds_bound_an_open_loop() -> None:
    at = [at for _, at in Load(9, rate=100.0, seconds=2.0).arrivals()]
    assert at == [at for at in islice(arrival_times(100.0, 0), 400) if at < 2.0]


def test_an_infinite_rate_is_all_at_once() -> None:
    assert list(Load(9, rate=float("inf"), num_items=5).arrivals()) == [
        (index, 0.0) for index in range(5)
    ]


@pytest.mark.parametrize(
    "load", [Load(7, num_items=500), Load(7, 50.0, num_items=500), Load(7, 50.0, seconds=8.0)]
)
def test_processes_divide_the_arrivals_of_one(load: Load) -> None:
    parts = [list(load.arrivals(process, 3)) for process in range(3)]
    assert sorted(arrival for part in parts for arrival in part) == list(load.arrivals())
    assert [load.concurrency_of(process, 3) for process in range(3)] == [3, 2, 2]


def test_a_thinned_poisson_process_is_one() -> None:
    for process in range(4):
        part = list(islice(Load(1, 40.0).arrivals(process, 4), 10_000))
        gaps = np.diff([at for _, at in part])
        assert gaps.mean() == pytest.approx(4 / 40, rel=0.05)
        assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
        # distributed round-robin instead of at random, no two arrivals of a process would be
        # neighbours
        assert np.mean(np.diff([index for index, _ in part]) == 1) == pytest.approx(1 / 4, abs=0.02)


# ---------------------------------------------------------------- what is sent


def test_random_prompts_keep_their_ranges_and_repeat_by_seed() -> None:
    def bodies(seed: int) -> list[dict[str, Any]]:
        calls = random_token_calls(
            SHAPE, IntRange(3, 6), IntRange(10, 12), IntRange(500, 600), seed
        )
        return [json.loads(call.body) for call in islice(calls, 200)]

    some = bodies(0)
    assert {len(body["prompt"]) for body in some} == {3, 4, 5, 6}
    assert {body["max_tokens"] for body in some} == {10, 11, 12}
    ids = [token for body in some for token in body["prompt"]]
    assert min(ids) == 500
    assert max(ids) == 600
    assert some == bodies(0) != bodies(1)
    assert len({tuple(body["prompt"]) for body in some}) > 195


def test_shared_prefixes() -> None:
    maker = PromptMaker(IntRange(500, 600))
    workload = SharedPrefixPrompts(SHAPE, maker, 3, 40, IntRange(5, 7), IntRange(8, 8), seed=1)
    prompts = [json.loads(workload.item(index).body)["prompt"] for index in range(120)]
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 3
    assert {len(prompt) for prompt in prompts} == {45, 46, 47}
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 120
    assert workload.item(7) == workload.item(7)
    assert replace(workload, seed=2).item(7) != workload.item(7)
    shape, two, eight = RequestShape("m", chat=True), IntRange(2, 2), IntRange(8, 8)
    chat = SharedPrefixPrompts(shape, PromptMaker(None), 1, 4, two, eight, seed=1)
    bodies = [json.loads(chat.item(index).body) for index in range(2)]
    [[system, user], [same, other]] = [body["messages"] for body in bodies]
    said = [(each["role"], len(each["content"].split())) for each in (system, user)]
    assert said == [("system", 4), ("user", 2)]
    assert system == same
    assert user != other
    words = replace(chat, shape=SHAPE)
    assert len(json.loads(words.item(0).body)["prompt"].split()) == 6


def test_bodies_by_endpoint() -> None:
    body = json.loads(RequestShape("m", ignore_eos=True).body([1, 2], 8))
    assert body == {
        "model": "m", "prompt": [1, 2], "max_tokens": 8, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    shape = RequestShape("m", chat=True, stream=False, temperature=0.5)
    assert shape.path == "/v1/chat/completions"
    call = RandomPrompts(shape, PromptMaker(None), IntRange(7, 7), IntRange(8, 8), seed=0).item(0)
    body = json.loads(call.body)
    [message] = body.pop("messages")
    assert body == {"model": "m", "max_tokens": 8, "temperature": 0.5, "stream": False}
    assert message["role"] == "user"
    assert len(message["content"].split()) == 7


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "two"}]
    lines = (json.dumps({"prompt": "one", "max_tokens": 3}), "", json.dumps({"messages": messages}))
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    shape, nine = RequestShape("m", chat=True), IntRange(9, 9)
    workload = FilePrompts(shape, read_entries(file, chat=True), nine, seed=0)
    calls = [workload.item(index) for index in range(3)]
    bodies = [json.loads(call.body) for call in calls]
    first = [{"role": "user", "content": "one"}]
    assert [body["messages"] for body in bodies] == [first, messages, first]
    assert [call.max_tokens for call in calls] == [3, 9, 3]
    assert [body["max_tokens"] for body in bodies] == [3, 9, 3]


@pytest.mark.parametrize(
    ("line", "chat", "message"),
    [
        ("{", False, "line 2"),
        ("[]", False, "line 2: an object"),
        ('{"max_tokens": 3}', True, "`prompt` or `messages`"),
        ('{"messages": [{"role": "user", "content": "x"}]}', False, "--endpoint chat"),
        ('{"prompt": [1, 2]}', True, "no token ids"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, chat: bool, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line, "utf-8")
    with pytest.raises(ValueError, match=message):
        read_entries(file, chat)


def test_ranges() -> None:
    assert IntRange.parse("128") == IntRange(128, 128)
    assert IntRange.parse("100-1024") == IntRange(100, 1024)
    assert str(IntRange(1, 2)) == "1-2"
    for wrong in ("", "0", "9-3", "x", "-5", "1-2-3"):
        with pytest.raises(ArgumentTypeError, match="range"):
            IntRange.parse(wrong)


# ---------------------------------------------------------------- the figures


def test_figures_of_known_records() -> None:
    first = Record(
        0.0, 3, e2e=1.0, ttft=0.2, gaps=array("d", [0.1, 0.7]), chunks=3, prompt_tokens=10,
        output_tokens=5, cached_tokens=6,
    )  # fmt: skip
    second = Record(
        0.0, 9, e2e=3.0, ttft=0.4, gaps=array("d", [0.3]), chunks=2, prompt_tokens=20,
        output_tokens=3,
    )  # fmt: skip
    failed = Record(
        0.0, 9, e2e=9.0, ttft=7.0, gaps=array("d", [5.0]), chunks=2, prompt_tokens=1,
        output_tokens=1, error="timeout",
    )  # fmt: skip
    figures = summarize(Run([first, failed, second], duration_s=4.0, client_cpus=[0.2, 0.5]))
    assert figures["requests"] == {"sent": 3, "succeeded": 2, "failed": 1}
    assert figures["tokens"] == {
        "prompt": 30,
        "output": 8,
        "output_chunks": 5,
        "chunks_per_token": 5 / 8,
        "cached_share": 0.6,  # of the one reply that reports it
        "requests_without_usage": 0,
        "requests_shorter_than_asked": 1,
    }
    found = figures["throughput"]
    assert found == {"output_tokens_per_s": 2.0, "total_tokens_per_s": 9.5, "requests_per_s": 0.5}
    latency = figures["latency_ms"]
    assert latency["ttft"] == pytest.approx({"mean": 300, "p50": 300, "p90": 380, "p99": 398})
    assert latency["itl"] == pytest.approx({"mean": 1100 / 3, "p50": 300, "p90": 620, "p99": 692})
    assert latency["tpot"] == pytest.approx({"mean": 750, "p50": 750, "p90": 1190, "p99": 1289})
    assert latency["e2e"] == pytest.approx({"mean": 2000, "p50": 2000, "p90": 2800, "p99": 2980})
    assert percentiles([]) is None
    assert (figures["peak_in_flight"], figures["client_cpu"]) == (3, 0.5)
    assert figures["client_cpus"] == [0.2, 0.5]
    assert figures["goodput"] is None


def test_chunks_per_token_leaves_out_replies_without_usage() -> None:
    reporting, silent = Record(0.0, 9, chunks=6, output_tokens=8), Record(0.0, 9, chunks=5)
    assert summarize(Run([reporting, silent], duration_s=1.0))["tokens"]["chunks_per_token"] == 0.75
    assert summarize(Run([silent], duration_s=1.0))["tokens"]["chunks_per_token"] is None


def test_peak_in_flight() -> None:
    # the third begins as the first ends
    times = [(0.0, 2.0), (1.0, 4.0), (2.0, 3.0), (2.5, 0.5), (9.0, 1.0)]
    run = Run([Record(sent, 1, e2e=e2e) for sent, e2e in times])
    assert run.peak_in_flight == 3
    assert Run().peak_in_flight == 0


def test_a_client_that_is_the_bottleneck_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(0.0, 1, e2e=1.0, chunks=1, output_tokens=1)
    for cpu, warned in ((0.89, False), (0.95, True)):
        run = Run([record], duration_s=1.0, client_cpus=[0.1, cpu])
        show(summarize(run), "title", Console(width=200))
        output = capsys.readouterr().out
        assert f"10%, {cpu:.0%} of a core" in output
        assert ("measured itself" in output) == warned


# ---------------------------------------------------------------- the command


async def test_the_command_writes_a_table_and_json(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        assert request.headers["X-Key"] == "secret"
        bodies.append(await request.json())
        return await good_reply(request)

    file = tmp_path / "result.json"
    async with serving(reply) as url:
        status, output, errors = await run_bench(
            f"--url {url}/v1 --num-requests 6 --warmup 2 --concurrency 3 --input-len 5-9"
            f" --ignore-eos --header 'X-Key: secret' --output {file}"
        )
    assert status == 0, errors
    assert len(bodies) == 8
    assert all(
        body["model"] == "known-model" and 5 <= len(body["prompt"]) <= 9 and body["ignore_eos"]
        for body in bodies
    )
    words = ("TTFT", "ITL", "TPOT", "end to end", "output tokens/s", "6 of 6", "p99")
    assert [word for word in words if word not in output] == []
    figures = json.loads(file.read_text("utf-8"))
    assert figures["requests"]["succeeded"] == 6  # the warm-up does not count
    assert figures["settings"]["input_len"] == "5-9"
    assert "secret" not in file.read_text("utf-8")
    assert figures["latency_ms"]["e2e"]["p99"] >= figures["latency_ms"]["ttft"]["p50"] > 0


async def test_the_command_shows_goodput_and_the_cache(tmp_path: Path) -> None:
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}

    async def reply(request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["prompt"]
        slow = len(prompt) > 60
        return await stream(
            request,
            sse(text_event("a"), text_event("b"), {"choices": [], "usage": usage}, "[DONE]"),
            delay_s=0.6 * slow,
        )

    file, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    file.write_text(
        "".join(json.dumps({"prompt": [5] * length}) + "\n" for length in (3, 70, 4, 5)), "utf-8"
    )
    async with serving(reply) as url:
        status, output, errors = await run_bench(
            f"--url {url} --file {file} --slo ttft=300ms,itl=300ms,e2e=10s --output {result}"
        )
    assert status == 0, errors
    figures = json.loads(result.read_text("utf-8"))
    assert (figures["goodput"]["met"], figures["goodput"]["share"]) == (3, 0.75)
    assert figures["goodput"]["missed"] == {"ttft": 1, "itl": 0, "e2e": 0}
    assert figures["goodput"]["requests_per_s"] == pytest.approx(3 / figures["duration_s"])
    assert figures["tokens"]["cached_share"] == pytest.approx(4 / 7)
    assert figures["tokens"]["chunks_per_token"] == 0.5
    for words in ("75.0%", "ttft 1", "57.1%", "0.500"):
        assert words in output
    assert figures["settings"]["slo"] == "ttft=300ms,itl=300ms,e2e=10000ms"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--rate 0", "--rate must be above 0"),
        ("--sweep rate=1,2 --rate 3", "excludes --rate"),
        ("--sweep speed=1", "no sweep"),
        ("--slo ttft=200", "no limit"),
        ("--slo itl=20ms --no-stream", "e2e limit only"),
        ("--workload multi-turn --num-requests 4", "--conversations"),
        ("--workload multi-turn --prompts tokens", "are text"),
        ("--conversations 4", "needs --workload multi-turn"),
        ("--workload shared-prefix --file x", "takes no --file"),
        ("--force", "needs --compare"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


async def test_the_command_fails_if_a_request_did() -> None:
    count = 0

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        failure = web.Response(status=500, text="[oops] no markup")
        return failure if count == 2 else await good_reply(request)

    async with serving(reply) as url:
        status, output, _ = await run_bench(f"--url {url} --num-requests 4 --endpoint chat")
    assert status == 1
    assert "3 of 4" in output
    assert "1 failed: HTTP 500, such as: [oops] no markup" in output


async def test_the_command_without_a_server() -> None:
    async with serving(good_reply) as url:
        pass
    status, _, errors = await run_bench(f"--url {url}")
    assert status == 1
    assert "onnect" in errors
    assert "Traceback" not in errors
