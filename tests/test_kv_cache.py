"""The KV cache manager: tables of several groups, windows, prefixes and forks."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.ipc.kv_spec import NULL_BLOCK, AttentionSpec, KVGroup
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.kv_cache import KVCacheManager
from aioinfer.scheduler.request import Request

FULL = KVGroup(AttentionSpec(1, 1), (0,))


def windowed(window: int) -> KVGroup:
    return KVGroup(AttentionSpec(1, 1, window), (1,))


def make_cache(*groups: KVGroup, num_blocks: int = 50, chunk: int = 8, **options) -> KVCacheManager:
    """Returns a manager of blocks of 4 tokens."""
    return KVCacheManager(groups, [num_blocks] * len(groups), 4, max_chunk=chunk, **options)


def make_request(name: str, length: int) -> Request:
    tokens = array("i", range(length))
    return Request(name, tokens, length, SamplingParams(), length + 100)


def compute(cache: KVCacheManager, request: Request, length: int | None = None) -> None:
    """Has a request's tokens computed in one step, from what is cached of them on."""
    prefix = cache.prefixes.find(request)
    length = len(request.tokens) if length is None else length
    cache.admit(request, prefix, length)
    request.num_computed = length
    cache.commit(request)


def test_every_group_has_a_table_of_its_own() -> None:
    cache = make_cache(FULL, windowed(6))
    first, second = make_request("first", 9), make_request("second", 3)
    for request in (first, second):
        compute(cache, request)
    assert [len(table) for table in first.blocks] == [3, 3]
    assert [len(table) for table in second.blocks] == [1, 1]
    cache.grow(first, 2)
    assert [len(table) for table in first.blocks] == [5, 5]
    assert first.num_blocks == 5
    for one, other in zip(first.blocks, second.blocks, strict=True):
        assert not set(one) & set(other)
    cache.check_integrity([first, second])
    for request in (first, second):
        cache.free(request)
    assert cache.num_free == cache.num_blocks == 100


def test_a_sequence_owns_no_more_blocks_of_a_window_than_it_reads() -> None:
    cache = make_cache(FULL, windowed(6))
    request = make_request("one", 4)
    compute(cache, request)
    for position in range(4, 60):
        if position == 4 * request.num_blocks:
            cache.free_unread(request, position)
            cache.grow(request, 1)
        request.num_computed = position + 1
        table = request.blocks[1]
        read = range((position - 5) // 4 if position > 5 else 0, position // 4 + 1)
        assert all(table[index] != NULL_BLOCK for index in read)
        assert sum(block != NULL_BLOCK for block in table) <= 3
        cache.check_integrity([request])
    assert len(set(request.blocks[0])) == 15, "where all tokens are attended to, all blocks stay"


def test_freed_blocks_behind_a_window_are_found_until_they_are_reused() -> None:
    cache = make_cache(windowed(5), num_blocks=8)
    request = make_request("long", 28)
    compute(cache, request)
    cache.free_unread(request, 28)
    assert request.blocks[0][:6] == [NULL_BLOCK] * 6
    assert cache.num_free == 7
    again = make_request("again", 13)
    assert cache.prefixes.find(again).num_blocks == 3
    cache.grow(request, 7)
    assert cache.prefixes.find(again).num_blocks == 0


def test_a_hit_needs_all_blocks_of_full_attention_and_the_last_of_a_window() -> None:
    cache = make_cache(FULL, windowed(6))
    first = make_request("first", 24)
    compute(cache, first)
    second = make_request("second", 25)
    prefix = cache.prefixes.find(second)
    assert (prefix.num_tokens, prefix.num_blocks) == (24, 6)
    assert prefix.blocks == [first.blocks[0], [NULL_BLOCK] * 4 + first.blocks[1][4:]]
    full, window = cache.pools
    window.forget(first.block_hashes[1:2])
    assert cache.prefixes.find(second).num_blocks == 6, "before the window nothing is read"
    window.forget(first.block_hashes[4:5])
    assert cache.prefixes.find(second).num_blocks == 4
    full.forget(first.block_hashes[3:4])
    assert cache.prefixes.find(second).num_blocks == 1
    assert cache.prefixes.count_cached(first.block_hashes) == 1


@given(data=st.data())
def test_a_hit_is_the_longest_that_all_groups_can_serve(data: st.DataObject) -> None:
    draw = data.draw
    windows = draw(st.lists(st.none() | st.integers(1, 17), min_size=1, max_size=3))
    groups = [FULL if window is None else windowed(window) for window in windows]
    cache = make_cache(*groups)
    length = draw(st.integers(0, 10))
    first = make_request("first", 4 * length + 1)
    compute(cache, first)
    known = []
    for pool in cache.pools:
        kept = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        pool.forget(h for h, keep in zip(first.block_hashes, kept, strict=True) if not keep)
        known.append(kept)

    def served(blocks: int) -> bool:
        return all(
            all(kept[0 if window is None else max(0, 4 * blocks - window + 1) // 4 : blocks])
            for window, kept in zip(windows, known, strict=True)
        )

    longest = max(blocks for blocks in range(length + 1) if served(blocks))
    assert cache.prefixes.count_cached(first.block_hashes) == longest
    assert cache.prefixes.find(make_request("second", 4 * length + 1)).num_blocks == longest


def test_a_fork_shares_full_blocks_and_copies_the_last_in_every_group() -> None:
    cache = make_cache(FULL, windowed(6))
    leader = make_request("leader", 15)
    compute(cache, leader)
    prefix = cache.fork(leader, 14)
    assert prefix is not None
    assert (prefix.num_tokens, prefix.num_blocks) == (14, 3)
    full, window = leader.blocks
    assert prefix.blocks == [full[:3], [NULL_BLOCK] * 2 + window[2:3]]
    assert prefix.copied == [(0, full[3]), (1, window[3])]
    aligned = cache.fork(leader, 12)
    assert aligned is not None
    assert aligned.copied == []


def test_no_fork_where_the_leader_freed_what_is_needed() -> None:
    cache = make_cache(FULL, windowed(6))
    leader = make_request("leader", 15)
    compute(cache, leader, 30)
    cache.free_unread(leader, 17)
    assert cache.fork(leader, 17) is not None, "token 17 reads tokens 12 to 16"
    assert cache.fork(leader, 16) is None, "token 16 reads token 11, too"


def test_an_admission_counts_what_it_takes_off_the_free_lists() -> None:
    cache = make_cache(FULL, windowed(6), num_blocks=10)
    first = make_request("first", 24)
    compute(cache, first)
    again = make_request("again", 40)
    prefix = cache.prefixes.find(again)
    assert (prefix.num_blocks, cache.num_free) == (6, 8)
    assert cache.can_admit(prefix, 40), "6 blocks are shared, 4 are free"
    assert not cache.can_admit(prefix, 41)
    assert not cache.can_grow(first, 5)
    assert cache.fits(40)
    assert not cache.fits(41)
    cache.free(first)
    assert cache.can_admit(prefix, 40), "6 free ones are shared, 4 are allocated"
    assert not cache.can_admit(prefix, 41)


def test_a_window_has_room_for_requests_of_any_length() -> None:
    cache = make_cache(windowed(6), num_blocks=5)
    assert cache.fits(10**9)
    assert cache.has_room(10**9)
    one = make_request("one", 8)
    compute(cache, one)
    assert cache.has_room(12)
    assert not cache.has_room(10**9)


def test_usage_is_that_of_the_fullest_group() -> None:
    cache = KVCacheManager([FULL, windowed(6)], [40, 10], 4, max_chunk=8)
    compute(cache, make_request("one", 16))
    assert cache.usage == pytest.approx(0.4)
    assert (cache.num_blocks, cache.num_free, cache.num_cached) == (50, 42, 8)
    assert cache.num_free_cached == 0


def test_what_a_request_computed_can_be_forgotten_even_behind_its_window() -> None:
    cache = make_cache(FULL, windowed(5))
    request = make_request("wrong", 24)
    compute(cache, request)
    cache.free_unread(request, 24)
    cache.forget(request)
    assert cache.num_cached == 0
    cache.free(request)
    cache.check_integrity([])
    compute(cache, make_request("right", 24))
    cache.reset_prefix_cache()
    assert cache.num_cached == 0


def test_what_goes_on_behind_blocks_of_an_emptied_cache_is_not_cached() -> None:
    cache = make_cache(FULL)
    request = make_request("old", 24)
    compute(cache, request)
    cache.reset_prefix_cache()
    fork = make_request("fork", 24)
    prefix = cache.fork(request, 16)
    assert prefix is not None
    cache.admit(fork, prefix, 24)
    fork.num_computed = 24
    cache.commit(fork)
    cache.replace(request, prefix)
    request.num_computed = 16
    cache.commit(request)
    assert cache.num_cached == 0
    for each in (request, fork):
        cache.free(each)
    compute(cache, make_request("new", 24))
    assert cache.num_cached > 0


def test_the_integrity_check_notices_a_freed_block_that_is_read_and_a_lost_one() -> None:
    cache = make_cache(FULL, windowed(6))
    request = make_request("one", 16)
    compute(cache, request)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        cache.check_integrity([])
    cache.pools[1].release([request.blocks[1][2]])
    request.blocks[1][2] = NULL_BLOCK
    with pytest.raises(AssertionError, match="lacks a block that it reads"):
        cache.check_integrity([request])


def test_entries_that_a_tile_reads_behind_the_window_name_a_block_of_the_request() -> None:
    cache = make_cache(FULL, windowed(6))
    request = make_request("one", 33)
    compute(cache, request)
    assert list(cache.take_replacement_blocks()) == [], "nothing is freed yet"
    cache.free_unread(request, 33)
    owned = request.blocks[1][7]
    assert request.blocks[1][:7] == [NULL_BLOCK] * 7
    assert list(cache.take_replacement_blocks()) == [
        (request, 1, index, owned) for index in range(7)
    ]
    assert list(cache.take_replacement_blocks()) == [], "they are sent once"
    again = make_request("again", 33)
    compute(cache, again)
    assert list(cache.take_replacement_blocks()) == [
        (again, 1, index, again.blocks[1][6]) for index in range(6)
    ]
    assert cache.max_replacement_blocks == 15, "64 tokens are 16 blocks"


def test_no_entry_stands_in_while_a_request_owns_no_block_of_the_window() -> None:
    cache = make_cache(windowed(1))
    request = make_request("one", 8)
    compute(cache, request)
    cache.free_unread(request, 8)
    assert request.blocks == [[NULL_BLOCK] * 2]
    assert list(cache.take_replacement_blocks()) == []
    cache.grow(request, 1)
    block = request.blocks[0][2]
    assert list(cache.take_replacement_blocks()) == [(request, 0, 0, block), (request, 0, 1, block)]
