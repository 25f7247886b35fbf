"""Spans of requests over sockets: a server sends them to a collector, which may be dead. The engine
is real; instead of a model, something answers with tokens of a text."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from aioinfer.api.server import HttpServer
from aioinfer.process_log import FieldsMessage
from bench_loop import make_frontend
from tests.functional.test_lifecycle import ROOT, Process

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
STAGES = ["tokenize", "queue", "prefill", "decode"]


def plain(value: AnyValue) -> Any:
    """Returns the value of an attribute."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    return getattr(value, kind)


def attributes(of: Any) -> dict[str, Any]:
    """Returns the attributes of a span or of a resource."""
    return {item.key: plain(item.value) for item in of.attributes}


class Collected:
    """What a collector was sent.

    Attributes:
        raw: the bodies.
        headers: those of the last request.
        spans: all spans, in the order in which they came.
        resources: the attributes of the resources.
    """

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []

    def add(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces"
        self.raw.append(body)
        self.headers = headers
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(resource.resource))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def tree(self) -> tuple[Span, list[Span]]:
        """Returns the span of the only request, and those below it in order of their beginning."""
        (root,) = (span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER)
        stages = [span for span in self.spans if span is not root]
        assert {span.parent_span_id for span in stages} <= {root.span_id}
        assert {span.trace_id for span in stages} <= {root.trace_id}
        assert len({span.span_id for span in self.spans}) == len(self.spans)
        return root, sorted(stages, key=lambda span: span.start_time_unix_nano)

    def root(self) -> Span:
        """Returns the only span."""
        (span,) = self.spans
        return span


@asynccontextmanager
async def collector(status: int = 200) -> AsyncIterator[tuple[str, Collected]]:
    """A collector that answers with `status`; yields its URL and what it is sent."""
    collected = Collected()

    async def export(request: web.Request) -> web.Response:
        collected.add(request.path, dict(request.headers), await request.read())
        return web.Response(status=status)

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", export)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", collected
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serve(
    endpoint: str, *, slots: int = 4, delay_s: float = 0.0, **settings: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    """A server that sends its spans to `endpoint`, at the latest when the block ends."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    frontend = await make_frontend(slots, delay_s, given | {"tracing.endpoint": endpoint})
    server = HttpServer(frontend.config, frontend)
    try:
        async with aiohttp.ClientSession(await server.start()) as http:
            yield http
    finally:
        await server.close()
        await frontend.close()


async def post(
    http: aiohttp.ClientSession,
    path: str = "/v1/completions",
    headers: dict[str, str] | None = None,
    **body: Any,
) -> int:
    """Posts a body, reads the reply and returns its status."""
    body = {"prompt": "A secret word", "max_tokens": 7, "ignore_eos": True} | body
    async with http.post(path, json=body, headers=headers) as response:
        await response.read()
        return response.status


def times(span: Span) -> tuple[int, int]:
    return span.start_time_unix_nano, span.end_time_unix_nano


async def test_the_spans_of_a_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "aioinfer")
    headers = SAMPLED | {
        "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "X-Request-Id": "r",
    }
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-backend")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "X-Token=s3cret")
    async with collector() as (url, collected), serve(url, delay_s=0.01) as http:
        before = time.time_ns()
        assert await post(http, headers=headers) == 200
        after = time.time_ns()
    root, stages = collected.tree()
    assert (root.name, root.kind) == ("POST /v1/completions", Span.SPAN_KIND_SERVER)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert root.trace_state == headers["tracestate"]
    assert [span.name for span in stages] == STAGES

    assert before <= root.start_time_unix_nano
    assert root.end_time_unix_nano <= after + 10**9, "the reply is read before its request ends"
    order = [root.start_time_unix_nano, *(t for span in stages for t in times(span))]
    assert order == sorted(order)
    assert order[-1] <= root.end_time_unix_nano
    assert all(begin < end for begin, end in map(times, [root, *stages]))
    assert [times(span)[0] for span in stages[2:]] == [times(span)[1] for span in stages[1:3]]
    decode = stages[3].end_time_unix_nano - stages[3].start_time_unix_nano
    assert decode >= 20_000_000, "six more steps of 10 ms, of which two overlap at a time"

    assert root.status.code == Status.STATUS_CODE_UNSET
    model = "SmolLM2-135M-Instruct"
    found = attributes(root)
    assert found.pop("gen_ai.usage.input_tokens") == 3
    assert found == {
        "http.request.method": "POST", "http.route": "/v1/completions",
        "http.response.status_code": 200, "url.path": "/v1/completions", "url.scheme": "http",
        "aioinfer.request.id": "r", "aioinfer.api_key.name": "anonymous",
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "aioinfer",
        "gen_ai.request.model": model, "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.2, "gen_ai.request.top_p": 0.5,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.cache_read.input_tokens": 0, "gen_ai.usage.output_tokens": 7,
    }  # fmt: skip
    assert collected.resources[0]["service.name"] == "chat-backend"
    assert collected.headers["x-token"] == "s3cret"
    assert not any(b"secret" in body for body in collected.raw), "text of a prompt"
    (line,) = (record.msg for record in caplog.records if isinstance(record.msg, FieldsMessage))
    assert line.fields["trace_id"] == TRACE_ID


async def test_a_stream_of_several_choices() -> None:
    """The stages are those of all choices together."""
    body = {"messages": [{"role": "user", "content": "A secret word"}], "n": 3, "stream": True}
    async with collector() as (url, collected), serve(url) as http:
        assert await post(http, "/v1/chat/completions", prompt=None, **body) == 200
    root, stages = collected.tree()
    assert root.name == "POST /v1/chat/completions"
    assert (root.parent_span_id, len(root.trace_id)) == (b"", 16)
    assert [span.name for span in stages] == STAGES
    found = attributes(root)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.choice.count"] == 3
    assert found["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert found["gen_ai.usage.output_tokens"] == 21
    assert not any(b"secret" in body for body in collected.raw)


async def test_requests_that_fail() -> None:
    async with collector() as (url, collected), serve(url, delay_s=0.02) as http:
        assert await post(http, model="a secret name") == 404
        assert await post(http, max_tokens=-5) == 400
        assert await post(http, "/no/%FFsuch/" + "x" * 500) == 404
        async with http.request("PURGE", "/v1/models") as response:
            assert response.status == 405
        assert await post(http, max_tokens=500, timeout_s=0.1) == 504
        for path in ("/health", "/metrics"):
            async with http.get(path) as response:
                assert response.status == 200
    roots = [span for span in collected.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [(span.name, attributes(span)["http.response.status_code"]) for span in roots] == [
        ("POST /v1/completions", 404), ("POST /v1/completions", 400), ("POST", 404), ("HTTP", 405),
        ("POST /v1/completions", 504),
    ]  # fmt: skip
    *clients, late = roots
    assert {span.status.code for span in clients} == {Status.STATUS_CODE_UNSET}
    assert "http.route" not in attributes(roots[2])
    assert attributes(roots[2])["url.path"].startswith("/no/%FFsuch/xxx")
    assert len(attributes(roots[2])["url.path"]) == 200
    assert attributes(roots[3])["http.request.method"] == "_OTHER"
    assert late.status.code == Status.STATUS_CODE_ERROR
    assert attributes(late)["error.type"] == "504"
    stages = [span for span in collected.spans if span.kind != Span.SPAN_KIND_SERVER]
    assert {span.parent_span_id for span in stages} == {late.span_id}, "the others had none"
    assert not any(b"secret" in body for body in collected.raw)


async def test_clients_that_go_away() -> None:
    """One in the middle of its stream, the other while it waits for the only slot."""
    async with collector() as (url, collected), serve(url, slots=1, delay_s=0.01) as http:
        body = {"prompt": [7] * 9, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        async with http.post("/v1/completions", json=body) as response:
            assert (await response.content.readline()).startswith(b"data: {")
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(0.2):
                    await post(http, headers=SAMPLED)
    waited = [span for span in collected.spans if span.trace_id.hex() == TRACE_ID]
    streamed = [span for span in collected.spans if span.trace_id.hex() != TRACE_ID]
    for spans, stages, reason in ((waited, STAGES[:2], "abort"), (streamed, STAGES, "abort")):
        root = next(span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
        found = attributes(root)
        assert found["http.response.status_code"] == 499
        assert found["gen_ai.response.finish_reasons"] == [reason]
        assert root.status.code == Status.STATUS_CODE_UNSET
        assert [span.name for span in spans if span is not root] == stages
    queue = next(span for span in waited if span.name == "queue")
    root = next(span for span in waited if span.kind == Span.SPAN_KIND_SERVER)
    assert queue.end_time_unix_nano == root.end_time_unix_nano, "it was waiting until then"
    assert queue.end_time_unix_nano - queue.start_time_unix_nano > 50_000_000


async def test_the_sender_decides_about_sampling(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "aioinfer")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    async with collector() as (url, collected), serve(url) as http:
        assert await post(http) == 200
        assert await post(http, headers=SAMPLED) == 200
    assert collected.tree()[0].trace_id.hex() == TRACE_ID
    async with collector() as (url, collected), serve(url) as http:
        assert await post(http, headers=NOT_SAMPLED) == 200
    assert collected.spans == []
    ids = [record.msg.fields["trace_id"] for record in caplog.records]
    assert ids[1:] == [TRACE_ID, TRACE_ID]
    assert len(ids[0]) == 32


#: Headers whose parts are not to be believed.
MALFORMED = [
    [("traceparent", "")],
    [("traceparent", "00-" + "0" * 32 + f"-{PARENT_ID}-01")],
    [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}")],
    [("traceparent", f"ff-{TRACE_ID}-{PARENT_ID}-00")],
    [("traceparent", f"00-{TRACE_ID.upper()}-{PARENT_ID}-00")],
    [("traceparent", "0" * 5000)],
    [("traceparent", NOT_SAMPLED["traceparent"])] * 2,
    [("tracestate", "a=b")],
]


async def test_a_malformed_traceparent_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """The request has a trace of its own, with all stages."""
    async with collector() as (url, collected), serve(url) as http:
        for number, headers in enumerate(MALFORMED):
            body = {"prompt": [7], "max_tokens": 2}
            given = [*headers, ("X-Request-Id", str(number))]
            async with http.post("/v1/completions", json=body, headers=given) as response:
                assert response.status == 200
    roots = [span for span in collected.spans if span.kind == Span.SPAN_KIND_SERVER]
    ids = {attributes(root)["aioinfer.request.id"] for root in roots}
    assert ids == {str(number) for number in range(len(MALFORMED))}
    assert len({root.trace_id for root in roots}) == len(MALFORMED)
    for root in roots:
        name = str(MALFORMED[int(attributes(root)["aioinfer.request.id"])])[:60]
        assert (root.parent_span_id, root.trace_state) == (b"", ""), name
        assert root.trace_id.hex() not in (TRACE_ID, "0" * 32), name
        stages = [span for span in collected.spans if span.parent_span_id == root.span_id]
        assert {span.trace_id for span in stages} == {root.trace_id}, name
        assert sorted(span.name for span in stages) == sorted(STAGES), name
    assert caplog.records == []


async def test_a_malformed_tracestate_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with collector() as (url, collected), serve(url) as http:
        assert await post(http, headers=SAMPLED | {"tracestate": "Secret=1, =,"}) == 200
    root, _ = collected.tree()
    assert (root.trace_id.hex(), root.trace_state) == (TRACE_ID, "")
    assert caplog.records == [], "a client could fill the log"


@contextmanager
def unresponsive() -> Iterator[str]:
    """Yields the URL of something that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def closed() -> Iterator[str]:
    """Yields a URL where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("dead", [unresponsive, closed])
async def test_a_dead_collector_holds_nothing_up(
    dead: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with dead() as url:
        async with serve(url, slots=64) as http:
            for _ in range(3):
                replies = [post(http, prompt=[7], max_tokens=1) for _ in range(50)]
                assert set(await asyncio.gather(*replies)) == {200}
            await asyncio.sleep(0.2)  # 150 requests have more than one batch of spans
            began = time.monotonic()
        assert time.monotonic() - began < 20, "the end does not wait for the collector"
    await asyncio.to_thread(wait_for_threads)  # they would write to the next test's log
    await asyncio.sleep(0)
    lines = [record.getMessage() for record in caplog.records]
    lines.remove("the collector has not taken the last spans in 3 s")
    assert 1 <= len(lines) <= 2, "the first problem, and at the end the others"
    assert all(line.startswith("problems with sending traces: ") for line in lines)


def wait_for_threads() -> None:
    """Returns when no thread sends spans any more."""
    for thread in threading.enumerate():
        if thread.name == "last spans" or thread.name.startswith("OtelBatch"):
            thread.join(20)
            assert not thread.is_alive()


async def test_a_collector_that_refuses_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer s3cret")
    async with collector(401) as (url, collected), serve(url) as http:
        assert await post(http) == 200
    assert len(collected.spans) == 5
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "401" in record.getMessage()
    assert "s3cret" not in record.getMessage()


class Handler(BaseHTTPRequestHandler):
    """A collector in a thread, for a server that is a process."""

    collected: Collected

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.collected.add(self.path, dict(self.headers), body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def test_a_server_process_sends_the_last_spans_when_it_ends() -> None:
    handler = type("_Handler", (Handler,), {"collected": Collected()})
    with HTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        endpoint = f"tracing.endpoint=http://127.0.0.1:{httpd.server_port}/v1/traces"
        process = Process("inline", endpoint, "logging.format=json")
        try:
            assert process.tell_a_story(max_tokens=5).read().endswith(b"data: [DONE]\n\n")
            process.popen.send_signal(signal.SIGTERM)
            assert process.end(30) == 0
            assert process.popen.stderr is not None
            lines = [line for line in process.popen.stderr if line.startswith("{")]
        finally:
            process.close()
            httpd.shutdown()
            thread.join()
    root, stages = handler.collected.tree()
    assert [span.name for span in stages] == STAGES
    (line,) = (json.loads(line) for line in lines if '"event":"request"' in line)
    assert line["trace_id"] == root.trace_id.hex()
    for span in stages[1:]:
        begin, end = times(span)
        assert (end - begin) * 1e-6 == pytest.approx(line[f"{span.name}_ms"], abs=0.06)


def test_nothing_is_imported_without_a_collector() -> None:
    code = (
        "import sys, aioinfer.api.server\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)
