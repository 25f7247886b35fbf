"""The load generator against a server whose timing and faults are known: are its figures right?

The server is a real one on a socket. Where times are checked, client and server share a clock that stands
still until the server moves it, so that every figure is exact and nothing sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from argparse import ArgumentTypeError
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from benchlib import client as client_module
from benchlib.client import Client, EventSplitter, Record, ReplyError
from benchlib.load import Run, arrival_times, run_load
from benchlib.report import count_errors, percentiles, summarize
from benchlib.workload import Call, IntRange, RequestShape, file_calls, random_token_calls, random_word_calls, read_entries

BENCH = Path(__file__).parent.parent / "scripts" / "bench.py"
SHAPE = RequestShape("m")
CALL = Call(SHAPE.body([5], 4), 4)
USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serves completions and chat by `handler` on a free port, and yields the base URL."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "known-model"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def text_event(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


USAGE_EVENT: dict[str, Any] = {"choices": [], "usage": USAGE}


def sse(*events: dict[str, Any] | str) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, str) else json.dumps(e)).encode() + b"\n\n" for e in events)


async def stream(request: web.Request, *blocks: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for block in blocks:
        await response.write(block)
    return response


async def good_reply(request: web.Request) -> web.StreamResponse:
    return await stream(request, sse(text_event("a"), text_event("b"), text_event("", "length"), USAGE_EVENT, "[DONE]"))


class Clock:
    """A clock that moves only when it is told to, and that knows when it was read."""

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


async def timed_record(clock: Clock, blocks: Sequence[tuple[float, bytes]], shape: RequestShape = SHAPE) -> Record:
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
    record = await timed_record(
        clock,
        [
            (0.25, sse(text_event("a"))),
            (0.5, sse(text_event("b"))),
            (0.125, sse(text_event(""))),  # no output: neither a chunk nor the end of a gap
            (0.125, sse(text_event("c"))),
            (1.0, sse(text_event("", "length"), USAGE_EVENT, "[DONE]")),
        ],
    )
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

    blocks = [(0.25, delta(role="assistant", content="")), (0.5, delta(reasoning_content="hm")), (0.5, delta(content="Hi"))]
    record = await timed_record(clock, [*blocks, (0.0, sse("[DONE]"))], RequestShape("m", chat=True))
    assert record.ttft == 0.75
    assert list(record.gaps) == [0.5]


async def test_chunks_that_arrive_together_have_no_time_between_them(clock: Clock) -> None:
    record = await timed_record(clock, [(0.5, sse(text_event("a"), text_event("b"))), (0.5, sse(text_event("c", "stop"), "[DONE]"))])
    assert record.ttft == 0.5
    assert list(record.gaps) == [0.0, 0.5]


async def test_without_usage_chunks_are_counted(clock: Clock) -> None:
    record = await timed_record(clock, [(0.5, sse(text_event("a"))), (0.5, sse(text_event("b"))), (0.5, sse("[DONE]"))])
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
    assert figures["latency_ms"]["ttft"] is figures["latency_ms"]["itl"] is figures["latency_ms"]["tpot"] is None
    assert figures["throughput"] == {"output_tokens_per_s": 2.0, "total_tokens_per_s": 5.5, "requests_per_s": 0.5}


# ---------------------------------------------------------------- faults


async def test_failures_are_counted_by_kind_with_an_example() -> None:
    started = sse(text_event("a"))

    async def overloaded(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "queue is full"}}, status=503)

    async def error_event(request: web.Request) -> web.StreamResponse:
        return await stream(request, started, sse({"error": {"message": "worker died", "code": 500}}))

    async def cut_off(request: web.Request) -> web.StreamResponse:
        response = await stream(request, started)
        assert request.transport is not None
        request.transport.close()
        return response

    async def no_end(request: web.Request) -> web.StreamResponse:
        return await stream(request, started, sse(text_event("b")))

    async def garbage(request: web.Request) -> web.StreamResponse:
        return await stream(request, started, sse("{nonsense"))

    async def nothing(request: web.Request) -> web.StreamResponse:
        return await stream(request, sse("[DONE]"))

    replies: list[Handler] = [overloaded, error_event, good_reply, cut_off, no_end, garbage, overloaded, nothing]
    waiting = iter(replies)

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
    assert {"ClientPayloadError", "empty reply"} <= errors.keys()
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
        assert record.error == "ClientConnectorError"
        with pytest.raises(ReplyError, match="connect"):
            await client.first_model()


def test_events_are_the_same_however_the_stream_is_cut() -> None:
    text = b': ping\n\ndata: {"a": 1}\n\nevent: x\ndata:two\r\ndata: lines\r\n\r\n\ndata: [DONE]\n\n'
    for cut in range(len(text)):
        splitter = EventSplitter()
        assert [*splitter.feed(text[:cut]), *splitter.feed(text[cut:])] == [b'{"a": 1}', b"two\nlines", b"[DONE]"]


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ReplyError, match="100 bytes"):
        list(EventSplitter().feed(b"data: " + b"x" * 100))


# ---------------------------------------------------------------- the shape of the load


async def test_a_closed_loop_keeps_its_streams_busy() -> None:
    four = asyncio.Barrier(4)  # passes only if four requests are under way together
    in_flight = most = 0

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        async with asyncio.timeout(10):
            await four.wait()
        in_flight -= 1
        return await good_reply(request)

    seen: list[Record] = []
    async with serving(reply) as url, Client(url) as client:
        run = await run_load(client, SHAPE, [CALL] * 100, num_requests=12, concurrency=4, on_done=seen.append)
    assert most == run.peak_in_flight == 4
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
        run = await run_load(client, SHAPE, [CALL] * 20, num_requests=20, concurrency=100, rate=500.0)
    assert run.peak_in_flight == 20
    assert not count_errors(run)
    sent = sorted(record.sent - begin for record in run.records)
    for at, due in zip(sent, arrival_times(500.0, seed=0), strict=False):
        assert at >= due - 0.002  # an event loop's timers may fire a little early, however late they may be


async def test_an_open_loop_is_bounded() -> None:
    async with serving(good_reply) as url, Client(url) as client:
        run = await run_load(client, SHAPE, [CALL] * 30, num_requests=30, concurrency=2, rate=1e5)
    assert run.peak_in_flight == 2
    assert len(run.records) == 30


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array(list(islice(arrival_times(50.0, seed=3), 20_000)))
    gaps = np.diff(times)
    assert times[-1] / len(times) == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # an exponential distribution's are equal
    assert times.tolist() == list(islice(arrival_times(50.0, seed=3), 20_000))
    assert times[0] != next(arrival_times(50.0, seed=4))


# ---------------------------------------------------------------- what is sent


def test_random_prompts_keep_their_ranges_and_repeat_by_seed() -> None:
    def bodies(seed: int) -> list[dict[str, Any]]:
        calls = random_token_calls(SHAPE, IntRange(3, 6), IntRange(10, 12), IntRange(500, 600), seed)
        return [json.loads(call.body) for call in islice(calls, 200)]

    some = bodies(0)
    assert {len(body["prompt"]) for body in some} == {3, 4, 5, 6}
    assert {body["max_tokens"] for body in some} == {10, 11, 12}
    ids = [token for body in some for token in body["prompt"]]
    assert min(ids) == 500
    assert max(ids) == 600
    assert some == bodies(0) != bodies(1)
    assert len({tuple(body["prompt"]) for body in some}) > 195


def test_bodies_by_endpoint() -> None:
    body = json.loads(RequestShape("m", ignore_eos=True).body([1, 2], 8))
    assert body == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 8,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    shape = RequestShape("m", chat=True, stream=False, temperature=0.5)
    assert shape.path == "/v1/chat/completions"
    call = next(random_word_calls(shape, IntRange(7, 7), IntRange(8, 8), seed=0))
    body = json.loads(call.body)
    [message] = body.pop("messages")
    assert body == {"model": "m", "max_tokens": 8, "temperature": 0.5, "stream": False}
    assert message["role"] == "user"
    assert len(message["content"].split()) == 7


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "two"}]
    file.write_text(json.dumps({"prompt": "one", "max_tokens": 3}) + "\n\n" + json.dumps({"messages": messages}) + "\n", "utf-8")
    calls = list(islice(file_calls(RequestShape("m", chat=True), read_entries(file, chat=True), IntRange(9, 9), seed=0), 3))
    bodies = [json.loads(call.body) for call in calls]
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": "one"}], messages, bodies[0]["messages"]]
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
    first = Record(0.0, 3, e2e=1.0, ttft=0.2, gaps=array("d", [0.1, 0.7]), chunks=3, prompt_tokens=10, output_tokens=5)
    second = Record(0.0, 9, e2e=3.0, ttft=0.4, gaps=array("d", [0.3]), chunks=2, prompt_tokens=20, output_tokens=3)
    failed = Record(0.0, 9, e2e=9.0, ttft=7.0, gaps=array("d", [5.0]), chunks=2, prompt_tokens=1, output_tokens=1, error="timeout")
    figures = summarize(Run([first, failed, second], duration_s=4.0, peak_in_flight=2, client_cpu=0.5))
    assert figures["requests"] == {"sent": 3, "succeeded": 2, "failed": 1}
    assert figures["tokens"] == {
        "prompt": 30,
        "output": 8,
        "output_chunks": 5,
        "requests_without_usage": 0,
        "requests_shorter_than_asked": 1,
    }
    assert figures["throughput"] == {"output_tokens_per_s": 2.0, "total_tokens_per_s": 9.5, "requests_per_s": 0.5}
    latency = figures["latency_ms"]
    assert latency["ttft"] == pytest.approx({"mean": 300, "p50": 300, "p90": 380, "p99": 398})
    assert latency["itl"] == pytest.approx({"mean": 1100 / 3, "p50": 300, "p90": 620, "p99": 692})
    assert latency["tpot"] == pytest.approx({"mean": 750, "p50": 750, "p90": 1190, "p99": 1289})
    assert latency["e2e"] == pytest.approx({"mean": 2000, "p50": 2000, "p90": 2800, "p99": 2980})
    assert percentiles([]) is None


# ---------------------------------------------------------------- the command


async def run_bench(*arguments: str) -> tuple[int, str, str]:
    """Runs the script as a process of its own. Returns its exit status, output and error output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, BENCH, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_the_command_writes_a_table_and_json(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        assert request.headers["X-Key"] == "secret"
        bodies.append(await request.json())
        return await good_reply(request)

    file = tmp_path / "result.json"
    async with serving(reply) as url:
        arguments = ["--url", f"{url}/v1", "--num-requests", "6", "--warmup", "2", "--concurrency", "3", "--input-len", "5-9"]
        status, output, errors = await run_bench(*arguments, "--ignore-eos", "--header", "X-Key: secret", "--output", str(file))
    assert status == 0, errors
    assert len(bodies) == 8
    assert all(body["model"] == "known-model" and 5 <= len(body["prompt"]) <= 9 and body["ignore_eos"] for body in bodies)
    for word in ("TTFT", "ITL", "TPOT", "end to end", "output tokens/s", "6 of 6", "p99"):
        assert word in output
    figures = json.loads(file.read_text("utf-8"))
    assert figures["requests"]["succeeded"] == 6  # the warm-up does not count
    assert figures["settings"]["input_len"] == "5-9"
    assert "secret" not in file.read_text("utf-8")
    assert figures["latency_ms"]["e2e"]["p99"] >= figures["latency_ms"]["ttft"]["p50"] > 0


async def test_the_command_fails_if_a_request_did() -> None:
    count = 0

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        return await good_reply(request) if count != 2 else web.Response(status=500, text="[oops] no markup")

    async with serving(reply) as url:
        status, output, _ = await run_bench("--url", url, "--num-requests", "4", "--endpoint", "chat")
    assert status == 1
    assert "3 of 4" in output
    assert "1 failed: HTTP 500, such as: [oops] no markup" in output


async def test_the_command_without_a_server() -> None:
    async with serving(good_reply) as url:
        pass
    status, _, errors = await run_bench("--url", url)
    assert status == 1
    assert "onnect" in errors
    assert "Traceback" not in errors
