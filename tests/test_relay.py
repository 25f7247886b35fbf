"""What a gateway passes on of a stream with marks, however it is cut into portions."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from aioinfer.api.event_stream import STREAM_HEADER, mark_frame
from aioinfer.engine.output import KnownDelta
from aioinfer.gateway.prompt_reader import Prompt
from aioinfer.gateway.relay import Relay

EVENTS = [
    b'data: {"text":":[0,[1]]"}\n\n',
    b"",  # a token whose text is held back
    b'event: message_start\ndata: {"a":":"}\n\nevent: ping\ndata: {}\n\n',
    b'{"response":"\\n:[1,[2]]\\n"}\n',
]
MARKS = [
    b"[0,[5]]",
    b"[0,[6],3,null,null]",
    b"[1,[7,8],3,null,null]",
    b'[0,[2],null,"stop",":\\n"]',
]


class Request:
    """What a relay reads of its request."""

    method, headers, remote = "POST", {"X-Request-Id": "7", STREAM_HEADER: "forged"}, "192.0.2.1"


def relay() -> Relay:
    request: Any = Request()
    return Relay(request, "/v1/completions", b"{}", Prompt(1, []), "secret")


@pytest.mark.parametrize("seed", range(20))
def test_events_are_passed_on_with_their_marks_alone(seed: int) -> None:
    rng, found = random.Random(seed), relay()
    data = b"".join(b"%b:%b\n" % pair for pair in zip(EVENTS, MARKS, strict=True))
    data += b"data: [DO"  # and the replica is lost
    passed, known = b"", 0
    while data:
        size = rng.randint(1, 30)
        passed += found._read_marks(data[:size])
        data = data[size:]
        known = len(found._marks)
        assert passed == b"".join(EVENTS[:known]), "nothing without its mark, nothing late"
    assert (known, found._marks) == (4, MARKS)


def test_the_next_replica_gets_the_marks_behind_the_body() -> None:
    found = relay()
    headers, body = found.message()
    assert dict(headers)[STREAM_HEADER] == "secret", "whatever the client has sent"
    found._began, found._marks = "1700000000 key", MARKS
    headers, body = found.message()
    token, created, key, size = dict(headers)[STREAM_HEADER].split()
    assert (token, created, key) == ("secret", "1700000000", "key")
    assert body is not None
    assert body[: -int(size)] == b"{}"
    known = msgspec.json.decode(body[-int(size) :], type=list[KnownDelta])
    assert [delta.token_ids for delta in known] == [[5], [6], [7, 8], [2]]
    assert (known[-1].finish_reason, known[-1].stop_reason) == ("stop", ":\n")


def test_a_request_takes_two_replicas_down_at_most_without_a_token_between() -> None:
    found = relay()
    assert found.can_go_on()
    assert not found.can_go_on()
    found = relay()
    found._began = "1700000000 key"
    for _ in range(5):
        found._read_marks(b":[0,[5]]\n")
        assert found.can_go_on()
    assert not found.can_go_on()


@pytest.mark.parametrize(
    ("reason", "stop_reason"), [(None, None), ("length", None), ("stop", "\n")]
)
def test_a_mark_in_a_frame_is_a_line(reason: str | None, stop_reason: str | None) -> None:
    size, line, end = mark_frame(1, 9, reason, stop_reason).split(b"\r\n")
    assert (int(size, 16), end) == (len(line), b"")
    assert line.endswith(b"\n")
    delta = msgspec.json.decode(line[1:], type=KnownDelta)
    assert delta == KnownDelta(1, [9], None, reason, stop_reason)
