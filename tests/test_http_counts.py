"""Which reason an error reply is counted under."""

from __future__ import annotations

import pytest

from aioinfer.api.http.connections import REASONS, HttpCounts


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (400, None, "bad_request"),
        (400, "context_length_exceeded", "bad_request"),
        (400, "malformed_request", "malformed"),
        (415, "unsupported_media_type", "bad_request"),
        (401, "invalid_api_key", "api_key"),
        (413, "request_too_large", "too_large"),
        (429, "rate_limit_exceeded", "rate_limit"),
        (500, None, "failure"),
        (503, None, "failure"),
        (503, "overloaded", "overloaded"),
        (503, "not_ready", "not_ready"),
        (503, "engine_dead", "engine_dead"),
        (504, "timeout", "deadline"),
        (499, "of a client", "bad_request"),
    ],
)
def test_the_reason_of_a_reply(status: int, code: str | None, reason: str) -> None:
    counts = HttpCounts()
    counts.count_error(status, code)
    assert counts.errors == dict.fromkeys(REASONS, 0) | {reason: 1}
