"""The block pool: reference counts, the order of reuse, and the prefix index."""

from __future__ import annotations

import pytest

from aioinfer.scheduler.block_pool import BlockPool


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
    assert pool.find([b"a", b"b", b"c"]) == blocks
    assert pool.find([b"x", b"a"]) == [], "a prefix is known from its start or not at all"
    pool.allocate(1)
    assert pool.find([b"a", b"b"]) == blocks, "empty blocks are reused before cached ones"
    pool.allocate(1)
    assert pool.find([b"a", b"b"]) == blocks[:1], "the end of a prefix is given up before its head"


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
    assert pool.find([b"a"]) == first
    assert pool.num_cached == 1
    pool.release(second)
    pool.check_integrity([first])


def test_integrity_check_notices_a_leak_and_a_double_owner():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="1 references, 2 owners"):
        pool.check_integrity([blocks, blocks])
