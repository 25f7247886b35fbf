"""Prefixes that are evicted last until their time is over, on the device, the host and the disk."""

from __future__ import annotations

import pytest

from aioinfer.ipc.kv_spec import KVGroup
from aioinfer.scheduler.block_pool import BlockPool
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.retention import Retention
from tests.test_kv_store import GROUPS, make_disk_harness, make_harness, prompt_of, run
from tests.test_scheduler import Harness, make_request


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def name(number: int) -> bytes:
    return b"%d" % number


def test_a_block_is_retained_for_its_time() -> None:
    clock = Clock()
    retention = Retention(8, clock)
    retention.keep([name(1), name(2)], 300)
    retention.keep([name(2)], 10)  # the longer time counts
    clock.now += 299
    assert name(1) in retention
    assert name(2) in retention
    clock.now += 2
    assert name(1) not in retention
    assert len(retention) == 1, "an entry goes when it is asked for"


def test_half_of_the_blocks_may_be_retained_and_the_heads_of_prefixes_stay() -> None:
    retention = Retention(8, Clock())
    retention.keep([name(n) for n in range(6)], 300)
    assert [name(n) in retention for n in range(6)] == [True] * 4 + [False] * 2
    retention.keep([name(10), name(11)], 300)
    assert [name(n) in retention for n in (0, 1, 2, 3, 10, 11)] == [True] * 2 + [False] * 2 + (
        [True] * 2
    )


def retaining(clock: Clock) -> BlockPool:
    """Returns a pool of eight blocks, which go in their order, but for the first three."""
    pool = BlockPool(8)
    pool.retention = Retention(8, clock)
    for block in (blocks := pool.allocate(8)):
        pool.commit(block, name(block))
    pool.release(list(reversed(blocks)))
    pool.retain([name(0), name(1), name(2)], 300)
    return pool


def test_retained_blocks_are_evicted_last_and_in_their_order() -> None:
    pool = retaining(Clock())
    assert pool.allocate(5) == [3, 4, 5, 6, 7]
    assert pool.allocate(2) == [0, 1], "where all are retained the oldest goes"
    pool.check_integrity([[3, 4, 5, 6, 7], [0, 1]])


def test_retained_blocks_go_like_others_when_their_time_is_over() -> None:
    clock = Clock()
    pool = retaining(clock)
    clock.now += 301
    assert pool.allocate(1) == [0]


def retained(number: int, length: int = 40) -> Request:
    request = make_request(f"retained {number}", prompt_of(number, length), 4)
    request.retain_s = 300.0
    return request


def others(harness: Harness, count: int) -> None:
    for number in range(count):
        run(harness, make_request(f"other {number}", prompt_of(20 + number, 30), 4))


@pytest.mark.parametrize("groups", GROUPS)
def test_a_retained_prompt_outlives_others_on_the_device(groups: tuple[KVGroup, ...]) -> None:
    harness = make_harness(groups, num_stored=(), num_blocks=8 if groups == GROUPS[-1] else 40)
    run(harness, retained(0), make_request("plain", prompt_of(1), 4))
    others(harness, 9)
    run(harness, again := make_request("again", prompt_of(0), 4))
    run(harness, plain := make_request("plain", prompt_of(1), 4))
    assert again.num_cached == 36
    assert plain.num_cached == 0


def test_a_retained_prompt_outlives_others_on_the_host() -> None:
    harness = make_harness(num_stored=(40,))
    run(harness, retained(0), make_request("plain", prompt_of(1), 4))
    others(harness, 12)
    stored = harness.scheduler.kv_cache.store.groups[0]
    assert sum(h in stored for h in retained_hashes(harness, 0)) == 10
    assert not any(h in stored for h in retained_hashes(harness, 1))


def test_a_retained_prompt_outlives_others_on_the_disk() -> None:
    harness = make_disk_harness(num_files=40)
    run(harness, retained(0), make_request("plain", prompt_of(1), 4))
    run(harness, retained(0))  # by now it has files
    others(harness, 12)
    (disk,) = harness.scheduler.kv_cache.store.connectors
    assert sum(h in disk.files[0] for h in retained_hashes(harness, 0)) == 10
    assert not any(h in disk.files[0] for h in retained_hashes(harness, 1))
    assert len(harness.worker.files) <= 40


def retained_hashes(harness: Harness, number: int) -> list[bytes]:
    request = make_request("asks", prompt_of(number), 1)
    harness.scheduler.kv_cache.prefixes.find(request)
    return request.block_hashes
