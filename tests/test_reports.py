"""Reports of replicas: on the wire, the load in them, and how many replicas it calls for."""

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
from aioinfer.gateway.reporter import load_of, take_changes
from tests.test_scheduler import FULL, STATES, Harness, make_request

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


SIZES = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 2, "token_budget": 64}


def test_a_request_is_waiting_then_running_then_gone() -> None:
    engine = Harness(**SIZES, prefill_cap=64)
    assert load_of([engine.scheduler]) == (load := load_of([engine.scheduler]))
    assert (load.max_tokens, load.max_requests) == (32, 2)
    engine.add(make_request("a", list(range(10)), 4))
    load = load_of([engine.scheduler])
    assert (load.waiting, load.waiting_tokens, load.prefill_tokens, load.running) == (1, 10, 10, 0)
    engine.post()
    load = load_of([engine.scheduler, engine.scheduler])
    assert (load.waiting, load.running, load.used_tokens) == (0, 2, 24)
    engine.run()
    load = load_of([engine.scheduler])
    assert (load.running, load.used_tokens, load.prefill_tokens) == (0, 0, 0)


def test_changes_are_what_is_held_and_what_is_not() -> None:
    engine = Harness(**SIZES, prefill_cap=64)
    pool = engine.scheduler.kv_cache.leading_pool
    pool.changed = set()
    first = make_request("a", list(range(10)), 4)
    engine.add(first)
    engine.run()
    added, removed = take_changes([pool])
    assert set(added) == set(first.block_hashes[:3])
    assert removed == []
    assert take_changes([pool]) == ([], [])
    other = make_request("b", [9] * 25, 4)  # needs the whole pool
    engine.add(other)
    engine.run()
    added, removed = take_changes([pool])
    assert set(added) <= set(other.block_hashes)
    assert set(removed) <= set(first.block_hashes)
    assert removed
    assert set(pool.hashes()) == set(added) | (set(first.block_hashes[:3]) - set(removed))


def test_the_hashes_of_a_model_with_states_are_those_of_its_snapshots() -> None:
    engine = Harness(groups=(FULL, *STATES), **SIZES | {"num_blocks": 64}, prefill_cap=64)
    cache = engine.scheduler.kv_cache
    cache.found_pool.changed = set()
    first = make_request("a", list(range(22)), 10)
    engine.add(first)
    engine.run()
    added, _ = take_changes([cache.found_pool])
    assert set(added) == {first.block_hashes[4], first.block_hashes[6]}
    assert cache.leading_pool.has(first.block_hashes[5])  # keys, but no request can begin there
