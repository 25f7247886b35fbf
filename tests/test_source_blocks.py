"""The blocks of sources: one a request, shared by the source's key, whatever the tokens are."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from aioinfer.ipc.kv_spec import NULL_BLOCK, AttentionSpec, KVGroup, SourceSpec, group_layers
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.block_pool import root_hash
from aioinfer.scheduler.kv_cache import KVCacheManager
from aioinfer.scheduler.request import Request, Source

SIZE = 4
GROUPS = group_layers([(AttentionSpec(1, 1), SourceSpec(1, 1, 100))])


def make_cache(blocks: int = 50, sources: int = 3, **options: bool) -> KVCacheManager:
    return KVCacheManager(GROUPS, [blocks, sources], SIZE, max_chunk=8, **options)


def make_request(key: bytes, length: int, *, number: int = 0) -> Request:
    """Returns a request with a source; `number` tells tokens apart."""
    tokens = array("i", range(number, number + length))
    request = Request("a", tokens, length, SamplingParams(), length + 100)
    request.source, request.hash_root = Source(key, None), root_hash(key)
    return request


def admit(cache: KVCacheManager, request: Request) -> bool:
    """Has a request computed in one step. Returns whether its source is written."""
    prefix = cache.prefixes.find(request)
    assert cache.can_admit(prefix, request.total)
    cache.admit(request, prefix, request.total)
    request.num_computed = request.total
    cache.commit(request)
    assert request.source is not None
    writes, request.source.is_unwritten = request.source.is_unwritten, False
    return writes


def test_a_block_holds_a_source_of_any_length() -> None:
    group = KVGroup(SourceSpec(2, 8, 100), (0,))
    assert [group.max_blocks(n, 16, 64) for n in (1, 1000)] == [1, 1]
    assert group.max_tokens(1, 16, 64) is None
    assert group.bytes_per_block(16, 2) == 128 * 2 * 2 * 8 * 2
    assert [each.keeps_source for each in GROUPS] == [False, True]


def test_requests_with_one_source_share_its_block() -> None:
    cache = make_cache()
    first, second, other = (
        make_request(b"a", 9),
        make_request(b"a", 5, number=99),
        make_request(b"b", 9),
    )
    assert [admit(cache, each) for each in (first, second, other)] == [True, False, True]
    tables = [each.blocks[1] for each in (first, second, other)]
    assert tables[0][0] == tables[1][0] != tables[2][0]
    assert all(entry == NULL_BLOCK for table in tables for entry in table[1:])
    assert [len(table) for table in tables] == [3, 2, 3]
    cache.grow(second, 2)
    assert second.blocks[1] == [tables[0][0], *[NULL_BLOCK] * 3]
    cache.check_integrity([first, second, other])
    for request in (first, second, other):
        cache.free(request)
        assert request.source is not None
        assert not request.source.is_held
    cache.check_integrity([])
    assert not admit(cache, make_request(b"a", 2))


def test_tokens_are_found_though_their_source_has_left_the_cache() -> None:
    cache = make_cache(sources=2)
    first = make_request(b"a", 9)
    admit(cache, first)
    cache.free(first)
    for key in (b"b", b"c"):
        request = make_request(key, 3)
        assert admit(cache, request)
        cache.free(request)
    again = make_request(b"a", 9)
    assert cache.prefixes.find(again).num_tokens == 8
    assert admit(cache, again)
    assert cache.prefixes.find(make_request(b"d", 9)).num_tokens == 0
    cache.check_integrity([again])


def test_what_cannot_be_trusted_is_written_again() -> None:
    cache = make_cache()
    request = make_request(b"a", 9)
    admit(cache, request)
    cache.forget(request)
    assert admit(cache, make_request(b"a", 9))
    cache.reset_prefix_cache()
    assert admit(cache, make_request(b"a", 9))


def test_without_a_prefix_cache_each_request_has_its_own() -> None:
    cache = make_cache(prefix_caching=False)
    first, second = make_request(b"a", 9), make_request(b"a", 9)
    assert admit(cache, first)
    assert admit(cache, second)
    assert first.blocks[1][0] != second.blocks[1][0]
    cache.check_integrity([first, second])


def test_forks_share_the_block_of_their_leader() -> None:
    for caching in (True, False):
        cache = make_cache(prefix_caching=caching)
        leader = make_request(b"a", 10)
        admit(cache, leader)
        fork = make_request(b"a", 10)
        prefix = cache.fork(leader, 9)
        assert prefix is not None
        assert [group for group, _ in prefix.copied] == [0]
        cache.admit(fork, prefix, 10)
        assert fork.blocks[1][0] == leader.blocks[1][0]
        cache.check_integrity([leader, fork])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20), st.booleans()), max_size=60))
def test_no_block_is_lost(steps: list[tuple[int, int, bool]]) -> None:
    """Requests of five sources come and go, whatever their lengths are."""
    cache, running = make_cache(blocks=20, sources=3), list[Request]()
    for key, length, frees in steps:
        if frees and running:
            cache.free(running.pop(length % len(running)))
        else:
            request = make_request(bytes([key]), length)
            if cache.can_admit(cache.prefixes.find(request), request.total):
                admit(cache, request)
                running.append(request)
        cache.check_integrity(running)
    for request in running:
        cache.free(request)
    cache.check_integrity([])
    assert cache.num_free == 23
