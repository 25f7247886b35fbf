"""The request log: one line for each HTTP request when it ends.

`server` installs `RequestLog.record` as middleware. It gives each request a `RequestRecord`, in
which `context` and `delivery` note what happens; at the end the middleware writes the line.
Requests that only look (GET) are logged if they fail, those for `/health` and `/metrics` never. No
line holds text of a prompt, unless `logging.prompts` says so.
"""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web

from aioinfer.api.access import request_id
from aioinfer.api.errors import Handler
from aioinfer.api.limits import ACCOUNT
from aioinfer.api.logs import FieldsMessage
from aioinfer.api.record import RECORD, RequestRecord
from aioinfer.config import Config

_log = logging.getLogger("aioinfer.requests")

_MAX_PATH = 200  # characters
_UNLOGGED = ("/health", "/metrics")


class RequestLog:
    """Writes the lines."""

    def __init__(self, config: Config):
        self._model = config.served_model_names[0]
        self._is_on = config.logging.requests

    @web.middleware
    async def record(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Records a request and logs it when it ends, whatever ends it."""
        record = request[RECORD] = RequestRecord(time.perf_counter())
        try:
            response = await handler(request)
            record.status = response.status
            return response
        except (asyncio.CancelledError, ConnectionError):
            raise  # the client is gone
        finally:
            record.ended = time.perf_counter()
            if self._is_on and _log.isEnabledFor(logging.INFO) and _is_logged(request, record):
                _log.info(FieldsMessage("request", self._fields(request, record)))

    def _fields(self, request: web.Request, record: RequestRecord) -> dict[str, str | float | None]:
        account = request.get(ACCOUNT)
        fields: dict[str, str | float | None] = {
            "id": request_id(request),
            "key": None if account is None else account.key.name,
            "method": request.method,
            "path": request.path[:_MAX_PATH],
            "status": record.status,
            "total_ms": _ms(record.arrived, record.ended),
        }
        stages = record.stages()
        if stages is not None:
            requests = [sequence.request for sequence in record.sequences()]
            fields |= {
                "model": self._model,
                "prompt_tokens": sum(len(o.prompt_token_ids) for o in record.outputs),
                "cached_tokens": sum(o.num_cached_tokens for o in record.outputs),
                "output_tokens": sum(o.num_generated for o in record.outputs),
                "ttft_ms": _ms(record.arrived, stages.first_token),
                "queue_ms": _ms(stages.queued, stages.scheduled),
                "prefill_ms": _ms(stages.scheduled, stages.first_token),
                "decode_ms": _ms(stages.first_token, stages.last_token),
                "finish": ",".join(sorted({r.finish_reason or "error" for r in requests})),
            }
        if record.prompts:
            fields["prompt"] = "\n".join(record.prompts)
        return fields


def _is_logged(request: web.Request, record: RequestRecord) -> bool:
    if request.path.startswith(_UNLOGGED):
        return False
    return request.method == "POST" or record.status >= 400


def _ms(begin: float, end: float) -> float | None:
    """Returns the milliseconds between two times, None if one has not come."""
    return round((end - begin) * 1e3, 1) if begin and end else None
