"""Limits and goodput: arithmetic on known records, and a server whose delays are known."""

from __future__ import annotations

from argparse import ArgumentTypeError
from array import array
from dataclasses import replace

import pytest
from aiohttp import web

from benchlib.client import Client, Record
from benchlib.load import run_load
from benchlib.slo import Slo, goodput
from benchlib.workload import RequestShape
from tests.scripted_server import USAGE_EVENT, serving, sse, stream, text_event

GOOD = Record(
    0.0, 9, e2e=1.0, ttft=0.2, gaps=array("d", [0.01] * 99 + [0.11]), chunks=101, output_tokens=101
)


def test_limits_are_parsed() -> None:
    assert Slo.parse("ttft=200ms, itl=500us,tpot=.5s,e2e=5s").limits == pytest.approx(
        {"ttft": 0.2, "itl": 0.0005, "tpot": 0.5, "e2e": 5.0}
    )
    assert str(Slo.parse("ttft=0.2s,e2e=5s")) == "ttft=200ms,e2e=5000ms"
    for wrong in ("", "ttft", "ttft=5", "ttft=0ms", "speed=5ms", "ttft=1s,ttft=2s", "ttft=1m"):
        with pytest.raises(ArgumentTypeError, match="no limit"):
            Slo.parse(wrong)


@pytest.mark.parametrize(
    ("limit", "record", "met"),
    [
        ("ttft=200ms", GOOD, True),
        ("ttft=199ms", GOOD, False),
        ("ttft=10s", replace(GOOD, ttft=None), False),
        # p99 of a hundred gaps lies a hundredth of the way from the 99th to the greatest: 10 ms +
        # 0.01 · 100 ms
        ("itl=11.1ms", GOOD, True),
        ("itl=10.9ms", GOOD, False),
        ("itl=1us", replace(GOOD, gaps=array("d")), True),
        ("tpot=8ms", GOOD, True),
        ("tpot=7.9ms", GOOD, False),
        ("e2e=1s", GOOD, True),
        ("e2e=0.99s", GOOD, False),
    ],
)
def test_each_limit(limit: str, record: Record, met: bool) -> None:
    slo = Slo.parse(limit)
    assert (slo.missed(record) == []) == met


def test_all_limits_must_be_met_and_failures_meet_none() -> None:
    slow, stalled = replace(GOOD, ttft=0.9), replace(GOOD, ttft=0.9, gaps=array("d", [0.5]))
    figures = goodput(
        [GOOD, slow, stalled, replace(GOOD, error="timeout")], 2.0, Slo.parse("ttft=300ms,itl=50ms")
    )
    assert figures == {
        "limits_ms": {"ttft": 300.0, "itl": 50.0}, "met": 1, "share": 0.25, "requests_per_s": 0.5,
        "missed": {"ttft": 2, "itl": 1},
    }  # fmt: skip
    assert goodput([], 0.0, Slo.parse("e2e=1s"))["share"] == 0.0


async def test_scripted_delays() -> None:
    """Of four requests one waits before its first token, one between two tokens."""
    count = 0

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        tokens = [sse(text_event("a")), sse(text_event("b"), USAGE_EVENT, "[DONE]")]
        if count == 2:
            return await stream(request, b"".join(tokens), delay_s=0.5)
        return await stream(
            request, *(tokens if count == 3 else [b"".join(tokens)]), delay_s=0.5 * (count == 3)
        )

    shape = RequestShape("m")
    async with serving(reply) as url, Client(url) as client:
        run = await run_load(client, shape, [shape.call([5], 4)] * 4, num_requests=4, concurrency=1)
    assert goodput(run.records, run.duration_s, Slo.parse("itl=250ms"))["missed"] == {"itl": 1}
    figures = goodput(run.records, run.duration_s, Slo.parse("ttft=250ms,itl=250ms,e2e=10s"))
    assert figures["missed"] == {"ttft": 2, "itl": 1, "e2e": 0}
    assert figures["share"] == 0.5
