"""Reports on the wire, the load in them, and how many replicas it calls for."""

from __future__ import annotations

import pytest

from aioinfer.cluster.reports import (
    MAX_HASHES,
    ReplicaLoad,
    Report,
    ReportReader,
    divided,
    encode,
    wanted_replicas,
)

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


@pytest.mark.parametrize(
    ("utilizations", "current", "wanted"),
    [
        ([], 3, 3),  # nothing is reported yet
        ([0.6], 1, 1),
        ([0.64, 0.58], 2, 2),  # within a tenth
        ([1.8], 1, 3),
        ([0.9, 0.9], 2, 3),
        ([0.9, 0.9], 3, 3),  # the third is on its way
        ([0.1, 0.2, 0.3], 3, 1),
        ([0.0, 0.0], 2, 1),
    ],
)
def test_the_mean_comes_near_the_target(
    utilizations: list[float], current: int, wanted: int
) -> None:
    assert wanted_replicas(utilizations, 0.6, current) == wanted
