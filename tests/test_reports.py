"""Reports on the wire, and the load in them."""

from __future__ import annotations

import pytest

from aioinfer.cluster.reports import MAX_HASHES, ReplicaLoad, Report, ReportReader, divided, encode

LOAD = ReplicaLoad(1, 2, 300, 4000, 50, 6000, 7)


@pytest.mark.parametrize("sizes", [[], [1] * 200, [3, 1, 60, 4], [200]])
def test_reports_arrive_in_whatever_portions(sizes: list[int]) -> None:
    reports = [
        Report(LOAD, [b"a" * 16], [], 16, is_first=True),
        Report(ReplicaLoad(), [], []),
        Report(LOAD, [], [b"b" * 16, b"c" * 16], 128, is_leaving=True),
    ]
    data = b"".join(map(encode, reports))
    reader, found = ReportReader(), []
    for size in sizes:
        found += reader.feed(data[:size])
        data = data[size:]
    found += reader.feed(data)
    assert found == reports


def test_a_stream_of_something_else_is_an_error() -> None:
    with pytest.raises(ValueError, match="a report of"):
        list(ReportReader().feed(b"HTTP/1.1 404"))
    with pytest.raises(ValueError):
        list(ReportReader().feed(b"\x02\0\0\0\xff\xff"))


def test_a_long_report_is_divided() -> None:
    hashes = [i.to_bytes(16, "little") for i in range(2 * MAX_HASHES + 1)]
    parts = list(divided(Report(LOAD, hashes, hashes[:3], 16, is_first=True)))
    assert [part.is_first for part in parts] == [True, False, False]
    assert [h for part in parts for h in part.added] == hashes
    assert [h for part in parts for h in part.removed] == hashes[:3]


def test_utilization_is_of_what_is_scarcer() -> None:
    assert ReplicaLoad(running=3, waiting=1, max_requests=8, max_tokens=100).utilization == 0.5
    full = ReplicaLoad(running=1, max_requests=8, used_tokens=90, waiting_tokens=30, max_tokens=100)
    assert full.utilization == pytest.approx(1.2)
