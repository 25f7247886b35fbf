"""OpenTelemetry traces: the spans of an HTTP request, made from its record when it has ended.

`server` imports this module if traces are configured, and only then: it needs the packages of
`aioinfer[otel]`. A thread of the SDK sends the spans, and nothing waits for it but the end of the
server. The SDK reads the sampler, the collector's headers and the service's name from its own
environment variables.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPMethod
from urllib.parse import urlsplit

from aiohttp import web
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from aioinfer import __version__
from aioinfer.api.http.limits import ACCOUNT
from aioinfer.api.http.logs import MAX_PATH, RequestRecord, request_id
from aioinfer.config import Config
from aioinfer.process_log import LimitedLog

_log = logging.getLogger(__name__)

#: Spans that wait to be sent, at most; then the oldest are dropped. A request has up to five, of
#: about 2 KiB each.
_MAX_QUEUED = 8192
_MAX_BATCH = 512
#: Milliseconds after which a smaller batch is sent.
_BATCH_DELAY_MS = 2000
#: Seconds that the sending of a batch may take, retries included; then it is dropped.
_EXPORT_TIMEOUT_S = 5.0
#: Choices whose finish reasons are listed, at most.
_MAX_REASONS = 128
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
#: Seconds that the last spans get when the server ends.
_LAST_SPANS_S = 3.0
#: Seconds between two lines about a collector that cannot be reached.
_LOG_INTERVAL_S = 60.0
_MAX_DETAIL = 200  # characters

_Attributes = dict[str, str | int | float | list[str]]


class Tracing:
    """Makes the spans of requests and has them sent. Its methods run on the event loop and never
    block it."""

    def __init__(self, config: Config, sdk_log: _SdkLog):
        """Takes long: made by `start`."""
        self._sdk_log = sdk_log
        self._model = config.name  # of requests that end before they name one
        name = OTELResourceDetector().detect().attributes.get("service.name", "aioinfer")
        url = config.tracing.endpoint or ""
        if urlsplit(url).path in ("", "/"):  # the collector's base
            url = f"{url.rstrip('/')}/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name, "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=_MAX_QUEUED,
                schedule_delay_millis=_BATCH_DELAY_MS,
                max_export_batch_size=_MAX_BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("aioinfer", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    async def start(cls, config: Config) -> Tracing:
        """Returns the traces of a server."""
        return await asyncio.to_thread(cls, config, _SdkLog())

    def trace(self, request: web.Request, record: RequestRecord) -> str:
        """Queues the spans of a request that has ended, if it is sampled. Returns its trace id, 32
        hexadecimal digits."""
        # by one offset for all times: they keep their order
        offset = time.time_ns() - time.perf_counter_ns()
        method = request.method if request.method in HTTPMethod.__members__ else "_OTHER"
        resource = request.match_info.route.resource
        route = None if resource is None else resource.canonical  # as the server's routes have it
        name = "HTTP" if method == "_OTHER" else method
        # headers of one name count as one, with commas: several of `traceparent` are malformed
        given = {
            name: ",".join(values)
            for name in self._propagator.fields
            if (values := request.headers.getall(name, ()))
        }
        context = self._propagator.extract(given, Context())
        span = self._tracer.start_span(
            name if route is None else f"{name} {route}",
            context,
            SpanKind.SERVER,
            start_time=offset + int(record.arrived * 1e9),
        )
        if span.is_recording():
            span.set_attributes(
                {"http.request.method": method}
                | ({} if route is None else {"http.route": route})
                | _http_attributes(request, record)
                | _generation_attributes(
                    record, record.served or self._model, _OPERATIONS.get(route or "")
                )
            )
            _set_status(span, record)
            parent = set_span_in_context(span, context)
            for stage, begin, end in _stages(record):
                child = self._tracer.start_span(stage, parent, start_time=offset + int(begin * 1e9))
                child.end(offset + int(end * 1e9))
            span.end(offset + int(record.ended * 1e9))
        return format_trace_id(span.get_span_context().trace_id)

    async def close(self) -> None:
        """Sends the spans that are left; after some seconds the server ends without them."""

        def send() -> None:
            self._provider.shutdown()
            self._sdk_log.remove()

        # a daemon, unlike the threads of an executor: the process ends without waiting for it
        sending = threading.Thread(target=send, name="last spans", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _LAST_SPANS_S)
        if sending.is_alive():
            _log.warning("the collector has not taken the last spans in %g s", _LAST_SPANS_S)
            self._exporter.shutdown()  # the thread sends no more
        await asyncio.sleep(0)  # lines of the thread are counted
        self._sdk_log.limited.close()


class _SdkLog(logging.Handler):
    """Log handler of OpenTelemetry's packages, which log one or more lines a batch while the
    collector is down: passes on one line a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._loop = asyncio.get_running_loop()
        self.limited = LimitedLog(_log, "problems with sending traces", _LOG_INTERVAL_S)
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Counts a line; called by any thread."""
        if record.name.startswith("opentelemetry.trace"):
            return  # a traceparent or tracestate that is malformed: the line quotes it
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.limited.count, record.getMessage()[:_MAX_DETAIL])

    def remove(self) -> None:
        """Leaves OpenTelemetry's logger as it was."""
        self._logger.removeHandler(self)
        self._logger.propagate = not any(isinstance(h, _SdkLog) for h in self._logger.handlers)


def _http_attributes(request: web.Request, record: RequestRecord) -> _Attributes:
    attributes: _Attributes = {
        "http.response.status_code": record.status,
        # percent-encoded: whatever a client sends, it is ASCII
        "url.path": request.rel_url.raw_path[:MAX_PATH],
        "url.scheme": request.scheme,
        "aioinfer.request.id": request_id(request),
    }
    if (account := request.get(ACCOUNT)) is not None and account.key.name:
        attributes["aioinfer.api_key.name"] = account.key.name
    return attributes


def _generation_attributes(record: RequestRecord, model: str, operation: str | None) -> _Attributes:
    """Returns the attributes of a request that may generate text, by the semantic conventions for
    generative AI."""
    if operation is None:
        return {}
    attributes: _Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "aioinfer",
        "gen_ai.request.model": record.model or model,
    }
    if not record.outputs:
        return attributes
    params = record.outputs[0].params
    sequences = record.sequences()
    attributes |= {
        # they have been rounded to float32
        "gen_ai.request.temperature": round(params.temperature, 6),
        "gen_ai.request.top_p": round(params.top_p, 6),
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [
            sequence.finish_reason or "error" for sequence in sequences[:_MAX_REASONS]
        ],
        "gen_ai.usage.input_tokens": sum(len(o.prompt_token_ids) for o in record.outputs),
        "gen_ai.usage.cache_read.input_tokens": sum(o.num_cached_tokens for o in record.outputs),
        "gen_ai.usage.output_tokens": sum(sequence.num_output for sequence in sequences),
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if params.n > 1:
        attributes["gen_ai.request.choice.count"] = params.n
    return attributes


def _set_status(span: Span, record: RequestRecord) -> None:
    """Marks a failure of the server: a client's error or its disconnection is none."""
    if record.status >= 500:
        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", str(record.status))
    elif any(s.finish_reason in (None, "error") for s in record.sequences()):
        # in a stream, whose status line had been sent
        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", "generation_failed")


def _stages(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Yields name, begin and end of the stages of a request, in order. A stage that has not ended
    by itself ends with the request."""
    if record.submitted:
        yield "tokenize", record.decoded, record.submitted
    stages = record.stages()
    if stages is None:
        return
    if stages.queued:
        yield "queue", stages.queued, stages.scheduled or record.ended
    if stages.scheduled:
        yield "prefill", stages.scheduled, stages.first_token or record.ended
    if stages.first_token:
        yield "decode", stages.first_token, stages.last_token
