"""Counters of the HTTP server: connections refused for lack of room, clients that are too slow,
requests that are answered with an error.

`connections.ConnectionServer` owns one; `listener` and `request_body` count into it as well, and
`metrics` reads it.
"""

from __future__ import annotations

#: Time-outs of clients, by the phase that took too long; `idle` is a kept-alive connection without
#: a request.
TIMEOUTS = ("head", "body", "idle", "send")

_REASON_OF_STATUS = {
    401: "api_key",
    404: "not_found",
    408: "client_timeout",
    413: "too_large",
    421: "host",
    429: "rate_limit",
    431: "too_large",
    500: "failure",
    504: "deadline",
}
_REASON_OF_CODE = {
    "overloaded": "overloaded",
    "not_ready": "not_ready",
    "engine_dead": "engine_dead",
    "malformed_request": "malformed",
}
#: Reasons for which a request is answered with an error; `bad_request` and `failure` stand for 4xx
#: and 5xx without a reason of their own. No reason comes from a client, so the number of reasons is
#: fixed.
REASONS = tuple(
    dict.fromkeys(("bad_request", *_REASON_OF_STATUS.values(), *_REASON_OF_CODE.values()))
)


class HttpCounts:
    """Totals since the start.

    Attributes:
        no_room: connections that were answered 503, or dropped, because there was no room.
        closed_for_room: connections that waited for a request and were closed for others.
        timeouts: clients that were too slow, by the phase (`TIMEOUTS`).
        errors: requests that were answered with an error, by reason (`REASONS`).
    """

    def __init__(self) -> None:
        self.no_room = 0
        self.closed_for_room = 0
        self.timeouts = dict.fromkeys(TIMEOUTS, 0)
        self.errors = dict.fromkeys(REASONS, 0)

    def count_error(self, status: int, code: str | None) -> None:
        """Counts a reply with an error status; `code` is the one of its body, if it has one."""
        reason = _REASON_OF_CODE.get(code or "") or _REASON_OF_STATUS.get(status)
        self.errors[reason or ("bad_request" if status < 500 else "failure")] += 1
