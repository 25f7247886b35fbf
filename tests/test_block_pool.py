"""The block pool: reference counts, the order of reuse, and the prefix index."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aioinfer.ipc.kv_spec import KVGroup
from aioinfer.scheduler.block_pool import BlockPool
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.retention import Retention
from tests.test_kv_store import GROUPS, make_disk_harness, make_harness, prompt_of
from tests.test_scheduler import Harness, make_request


def test_blocks_are_handed_out_once_and_come_back():
    pool = BlockPool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.num_free == 0
    assert pool.usage == 1.0
    pool.release(first)
    assert pool.num_free == 3
    pool.check_integrity([second])


def test_a_shared_block_is_free_only_when_its_last_owner_lets_go():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_cached_blocks_are_found_until_they_are_reused():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.commit(blocks[0], b"a")
    pool.commit(blocks[1], b"b")
    pool.release(blocks)
    assert pool.count_cached([b"a", b"b", b"c"]) == 2
    assert pool.lookup([b"b", b"a"]) == blocks[::-1]
    assert pool.count_cached([b"x", b"a"]) == 0, "a prefix is known from its start or not at all"
    pool.allocate(1)
    assert pool.count_cached([b"a", b"b"]) == 2, "empty blocks are reused before cached ones"
    pool.allocate(1)
    assert pool.count_cached([b"a", b"b"]) == 1, "the end of a prefix is reused before its head"


def test_least_recently_released_goes_first():
    pool = BlockPool(2)
    old, new = pool.allocate(1), pool.allocate(1)
    pool.commit(old[0], b"old")
    pool.commit(new[0], b"new")
    pool.release(old)
    pool.release(new)
    pool.share(old)  # a hit makes it recent
    pool.release(old)
    assert pool.allocate(1) == new


def test_a_second_block_with_the_same_hash_stays_anonymous():
    pool = BlockPool(3)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.commit(first[0], b"a")
    pool.commit(second[0], b"a")
    assert pool.lookup([b"a"]) == first
    assert pool.num_cached == 1
    pool.release(second)
    pool.check_integrity([first])


def test_a_run_of_cached_blocks_is_found_from_the_back():
    pool = BlockPool(6)
    hashes = [b"0", b"1", b"2", b"3", b"4", b"5"]
    for block, known in zip(pool.allocate(5), [b"0", b"1", b"3", b"4", b"x"], strict=True):
        pool.commit(block, known)
    count = pool.count_cached_before
    assert [count(hashes, end, 1) for end in range(7)] == [0, 1, 2, 2, 4, 5, 5]
    assert [count(hashes, end, 2) for end in range(7)] == [0, 1, 2, 2, 2, 5, 5]
    assert [count(hashes, end, 3) for end in range(7)] == [0, 1, 2, 2, 2, 2, 2]
    assert count(hashes, 6, 0) == 6, "where nothing before it is read, any length will do"


def test_forgotten_hashes_are_not_found_and_their_blocks_stay_owned():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, known in zip(blocks, [b"a", b"b", b"c"], strict=True):
        pool.commit(block, known)
    pool.forget([b"b", b"unknown"])
    assert pool.count_cached([b"a", b"b", b"c"]) == 1
    assert pool.count_cached([b"c"]) == 1
    pool.release(blocks[:1])
    pool.forget_all()
    assert (pool.num_cached, pool.num_free_cached) == (0, 0)
    pool.check_integrity([blocks[1:]])


def test_integrity_check_notices_a_leak_and_a_double_owner():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="1 references, 2 owners"):
        pool.check_integrity([blocks, blocks])


def test_the_checks_do_not_rest_on_assert_statements() -> None:
    """Which `python -O` leaves out."""
    code = """
from aioinfer.errors import IntegrityError
from aioinfer.scheduler.block_pool import BlockPool
pool = BlockPool(4)
pool.allocate(2)
try:
    pool.check_integrity([])
except IntegrityError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "block 0: 1 references, 0 owners\n"


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
        harness.serve(make_request(f"other {number}", prompt_of(20 + number, 30), 4))


@pytest.mark.parametrize("groups", GROUPS)
def test_a_retained_prompt_outlives_others_on_the_device(groups: tuple[KVGroup, ...]) -> None:
    harness = make_harness(groups, num_stored=(), num_blocks=8 if groups == GROUPS[-1] else 40)
    harness.serve(retained(0), make_request("plain", prompt_of(1), 4))
    others(harness, 9)
    harness.serve(again := make_request("again", prompt_of(0), 4))
    harness.serve(plain := make_request("plain", prompt_of(1), 4))
    assert again.num_cached == 36
    assert plain.num_cached == 0


def test_a_retained_prompt_outlives_others_on_the_host() -> None:
    harness = make_harness(num_stored=(40,))
    harness.serve(retained(0), make_request("plain", prompt_of(1), 4))
    others(harness, 12)
    stored = harness.scheduler.kv_cache.store.groups[0]
    assert sum(h in stored for h in retained_hashes(harness, 0)) == 10
    assert not any(h in stored for h in retained_hashes(harness, 1))


def test_a_retained_prompt_outlives_others_on_the_disk() -> None:
    harness = make_disk_harness(num_files=40)
    harness.serve(retained(0), make_request("plain", prompt_of(1), 4))
    harness.serve(retained(0))  # by now it has files
    others(harness, 12)
    (disk,) = harness.scheduler.kv_cache.store.connectors
    assert sum(h in disk.files[0] for h in retained_hashes(harness, 0)) == 10
    assert not any(h in disk.files[0] for h in retained_hashes(harness, 1))
    assert len(harness.worker.files) <= 40


def retained_hashes(harness: Harness, number: int) -> list[bytes]:
    request = make_request("asks", prompt_of(number), 1)
    harness.scheduler.kv_cache.prefixes.find(request)
    return request.block_hashes
