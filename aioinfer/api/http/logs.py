"""The log of HTTP requests: a line for each one when it ends.

`server` installs `RequestLog.record` as middleware. It gives each request a `RequestRecord`, in
which `context` and `delivery` note what happens; at the end the middleware writes the line, and
`tracing` makes the spans. GET requests are logged if they fail; requests for `/health` and
`/metrics` are neither logged nor traced. Requests without a valid API key, which any client can
send as often as it likes, leave one line in ten seconds with their number. A line names the address
of the client (behind a proxy, the proxy's address), and of a request that was refused the code and
the message of the error, which may name a model or a role that the request named. No line and no
span holds text of a prompt.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from aioinfer.api.errors import ERROR_CODE, ERROR_REASON, Handler, local_path
from aioinfer.api.http.limits import ACCOUNT
from aioinfer.config import Config
from aioinfer.engine.metrics import RequestTimes
from aioinfer.process_log import FieldsMessage, LimitedLog

if TYPE_CHECKING:
    from aioinfer.engine.output import OutputSequence, RequestOutput

_request_log = logging.getLogger("aioinfer.requests")

REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID_KEY = web.RequestKey("request_id", str)
_REQUEST_ID = re.compile(r"[\x20-\x7e]{1,128}")
#: The status of a request whose client went away, as nginx has it: nothing is sent.
CLIENT_GONE = 499
MAX_PATH = 200  # characters
_UNLOGGED = ("/health", "/metrics")


@dataclass(slots=True)
class RequestRecord:
    """The record of an HTTP request. Times are of `time.perf_counter`; 0 stands for a stage that
    was not reached.

    Attributes:
        arrived: when its handler began.
        decoded: when its body was read and decoded.
        submitted: when its prompts were encoded.
        ended: when its last byte was written, or its client had gone.
        status: the HTTP status; 499 if its client went away.
        code, reason: of the error that answers it, where there is one.
        outputs: one for each prompt that was queued.
        model: the model that its body names, if it does.
        served: the first name of the model that answers it, once that is known.
    """

    arrived: float
    decoded: float = 0.0
    submitted: float = 0.0
    ended: float = 0.0
    status: int = CLIENT_GONE
    code: str | None = None
    reason: str | None = None
    outputs: Sequence[RequestOutput] = ()
    model: str | None = None
    served: str | None = None

    def sequences(self) -> list[OutputSequence]:
        """Returns the sequences of all outputs."""
        return [sequence for output in self.outputs for sequence in output.sequences]

    def stages(self) -> RequestTimes | None:
        """Returns the times of its sequences together: the first of them to reach each stage, and
        the last token of all. None if it has no sequences, 0 for a stage that was not reached."""
        found = [s.times for s in self.sequences() if s.times is not None]

        def first(name: str) -> float:
            return min((when for times in found if (when := getattr(times, name))), default=0.0)

        if not found:
            return None
        names = ("arrived", "queued", "scheduled", "first_token")
        last = max(times.last_token for times in found)
        return RequestTimes(
            **{name: first(name) for name in names}, prompt_tokens=0, last_token=last
        )


RECORD = web.RequestKey("record", RequestRecord)
Tracer = Callable[[web.Request, RequestRecord], str]


def request_id(request: web.BaseRequest) -> str:
    """Returns the id that the request brought, if it is 1 to 128 characters of printable ASCII,
    else one made up for it."""
    if _REQUEST_ID_KEY not in request:
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request[_REQUEST_ID_KEY] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
    return request[_REQUEST_ID_KEY]


class RequestLog:
    """Writes the log lines, and hands the requests to the tracer."""

    def __init__(self, config: Config, trace: Tracer | None = None):
        """`trace` queues the spans of a request, and returns its trace id."""
        self._trace = trace
        self._is_on = config.logging.requests
        self._without_key = LimitedLog(_request_log, "requests without a valid API key")

    @web.middleware
    async def record(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Records a request and logs it when it ends, whatever ends it."""
        record = request[RECORD] = RequestRecord(time.perf_counter())
        try:
            response = await handler(request)
            record.status = response.status
            record.code, record.reason = response.get(ERROR_CODE), response.get(ERROR_REASON)
            return response
        finally:
            record.ended = time.perf_counter()
            if not local_path(request).startswith(_UNLOGGED):
                trace_id = self._trace(request, record) if self._trace is not None else None
                if self._is_on and (request.method == "POST" or record.status >= 400):
                    self._log(request, record, trace_id)
            # aiohttp keeps the request until the next one of its connection
            record.outputs = ()

    async def close(self, app: web.Application) -> None:
        """Logs the requests counted since the last line; a handler of `on_cleanup`."""
        self._without_key.close()

    def _log(self, request: web.Request, record: RequestRecord, trace_id: str | None) -> None:
        if not _request_log.isEnabledFor(logging.INFO):
            return
        if record.status == 401:
            self._without_key.count(f"from {request.remote}")
            return
        account = request.get(ACCOUNT)
        fields: dict[str, str | float | None] = {
            "id": request_id(request),
            "trace_id": trace_id,
            "client": request.remote or None,
            "key": None if account is None else account.key.name,
            "method": request.method,
            "path": request.path[:MAX_PATH],
            "status": record.status,
            "code": record.code,
            "reason": record.reason,
            "total_ms": _ms(record.arrived, record.ended),
        }
        stages = record.stages()
        if stages is not None:
            requests = [sequence.request for sequence in record.sequences()]
            fields |= {
                "model": record.model or record.served,
                "prompt_tokens": sum(len(o.prompt_token_ids) for o in record.outputs),
                "cached_tokens": sum(o.num_cached_tokens for o in record.outputs),
                "output_tokens": sum(o.num_generated for o in record.outputs),
                "ttft_ms": _ms(record.arrived, stages.first_token),
                "queue_ms": _ms(stages.queued, stages.scheduled),
                "prefill_ms": _ms(stages.scheduled, stages.first_token),
                "decode_ms": _ms(stages.first_token, stages.last_token),
                "finish": ",".join(sorted({r.finish_reason or "error" for r in requests})),
            }
        _request_log.info(FieldsMessage("request", fields))


def _ms(begin: float, end: float) -> float | None:
    """Returns the milliseconds between two times, None if one has not come."""
    return round((end - begin) * 1e3, 1) if begin and end else None
