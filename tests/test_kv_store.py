"""The store of KV behind the pools: what is saved and loaded, and that a LOADING request owns its
blocks."""

from __future__ import annotations

import pytest

from aioinfer.errors import IntegrityError
from aioinfer.features.kv_store.sections import KVMoves
from aioinfer.ipc.kv_spec import KVGroup, blocks_in
from aioinfer.scheduler.handover import Handover
from aioinfer.scheduler.kv_connector import DiskConnector, DiskLimits
from aioinfer.scheduler.peer_connector import PeerLimits
from aioinfer.scheduler.request import ForkGroup, Request, RequestStatus
from aioinfer.scheduler.stored_blocks import StoredBlocks
from tests.test_scheduler import (
    FULL,
    STATES,
    Harness,
    assert_complete,
    disk_of,
    make_request,
    windowed,
)

GROUPS = [(FULL,), (FULL, windowed(6)), (FULL, *STATES), STATES]


def make_harness(groups: tuple[KVGroup, ...] = (FULL,), **limits: object) -> Harness:
    """Blocks of 4 tokens; the device has room for a request of 60 tokens, the host for many."""
    blocks = 4 if groups == STATES else 18
    given = {"num_blocks": blocks, "num_stored": (200,) * len(groups)} | limits
    return Harness(groups=groups, **given)


def prompt_of(number: int, length: int = 40) -> list[int]:
    return [(number * 7 + n * 3) % 41 for n in range(length)]


def displace(harness: Harness, count: int = 3) -> None:
    """Has other requests take all blocks of the device."""
    for number in range(count):
        harness.serve(make_request(f"other {number}", prompt_of(20 + number, 60), 8))


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize("groups", GROUPS)
def test_a_conversation_goes_on_with_blocks_of_the_host(groups: tuple[KVGroup, ...]) -> None:
    harness = make_harness(groups)
    first = make_request("first", prompt_of(0), 11)
    harness.serve(first)
    displace(harness)
    assert harness.scheduler.kv_cache.prefixes.count_cached(first.block_hashes) == 0
    second = make_request("second", [*first.tokens, *prompt_of(1, 9)], 5)
    harness.serve(second)
    assert second.num_cached == 48, "the keys of 50 of 51 tokens were computed"
    assert harness.worker.num_loads > 0
    assert harness.scheduler.stats.loaded_tokens == 48


def test_without_places_nothing_is_sent() -> None:
    harness = make_harness(num_stored=())
    harness.serve(make_request("first", prompt_of(0), 11))
    displace(harness)
    harness.serve(again := make_request("again", prompt_of(0), 11))
    assert again.num_cached == 0
    assert harness.worker.num_saves == harness.worker.num_loads == 0


def test_blocks_of_the_device_are_shared_and_the_others_loaded() -> None:
    harness = make_harness(num_blocks=40)
    harness.serve(make_request("first", prompt_of(0, 60), 4))
    displace(harness, 2)  # the ends of prompts leave first
    cached = harness.scheduler.kv_cache.leading_pool.count_cached(
        make_request_hashes(harness, prompt_of(0, 60))
    )
    assert 0 < cached < 14
    harness.serve(again := make_request("again", prompt_of(0, 60), 4))
    assert again.num_cached == 56
    assert harness.worker.num_loads == 14 - cached


def make_request_hashes(harness: Harness, prompt: list[int]) -> list[bytes]:
    request = make_request("asks", prompt, 1)
    harness.scheduler.kv_cache.prefixes.find(request)
    return request.block_hashes


def test_a_block_is_saved_once_and_the_least_used_loses_its_place() -> None:
    harness = make_harness(num_stored=(20,))
    for _ in range(3):
        harness.serve(make_request("again", prompt_of(0), 4))
    assert (harness.worker.num_saves, harness.worker.num_loads) == (10, 0)
    harness.serve(make_request("other", prompt_of(1, 60), 4))
    stored = harness.scheduler.kv_cache.store.groups[0]
    assert len(stored) == 20
    assert [h in stored for h in make_request_hashes(harness, prompt_of(0))] == [True] * 5 + (
        [False] * 5
    ), "the head of a prefix stays longest"


def test_a_hit_on_the_device_counts_as_use_of_the_host() -> None:
    harness = make_harness(num_stored=(20,), num_blocks=40)
    harness.serve(make_request("first", prompt_of(0, 17), 4))
    for number in range(1, 6):
        harness.serve(make_request("again", prompt_of(0, 17), 1))
        harness.serve(make_request("other", prompt_of(number, 24), 4))
    stored = harness.scheduler.kv_cache.store.groups[0]
    assert all(h in stored for h in make_request_hashes(harness, prompt_of(0, 17))[:4])


def test_cleared_caches_find_nothing() -> None:
    harness = make_harness()
    harness.serve(make_request("first", prompt_of(0), 4))
    harness.scheduler.kv_cache.reset_prefix_cache()
    harness.serve(again := make_request("again", prompt_of(0), 4))
    assert again.num_cached == 0


# ---------------------------------------------------------------- LOADING


def begin_load(harness: Harness, load_steps: int) -> tuple[Request, Request]:
    """Returns a request that decodes and one that is LOADING beside it."""
    harness.serve(make_request("first", prompt_of(0), 4))
    displace(harness)
    harness.worker.load_steps = lambda: load_steps
    decoding, loading = make_request("decodes", [1, 2], 28), make_request("loads", prompt_of(0), 4)
    harness.add(decoding)
    harness.step()
    harness.add(loading)
    harness.step()
    assert loading.status is RequestStatus.LOADING
    return decoding, loading


def test_others_decode_while_a_request_loads() -> None:
    harness = make_harness()
    decoding, loading = begin_load(harness, 6)
    before = decoding.num_output
    assert loading.blocks, "it owns its blocks"
    while loading.status is RequestStatus.LOADING:
        harness.step()
    assert decoding.num_output - before >= 6
    harness.end(decoding)
    assert loading.num_cached == 36
    assert_complete(loading)


def test_the_last_load_is_waited_for_when_nothing_else_runs() -> None:
    harness = make_harness()
    decoding, loading = begin_load(harness, 1000)
    harness.scheduler.finish(decoding, "abort")
    harness.run(200)
    assert_complete(loading)


def test_a_request_may_end_while_it_loads() -> None:
    harness = make_harness()
    decoding, loading = begin_load(harness, 6)
    harness.scheduler.finish(loading, "abort")
    assert not loading.blocks
    harness.scheduler.check_integrity()
    harness.serve(again := make_request("again", prompt_of(0), 4))
    assert again.num_cached == 36
    assert_complete(decoding)


def test_a_request_that_loads_begins_anew_when_the_device_is_emptied() -> None:
    harness = make_harness()
    decoding, loading = begin_load(harness, 20)
    while harness.worker.results:
        harness.update()
    harness.scheduler.release_blocks()
    assert (decoding.status, loading.status) == (RequestStatus.WAITING,) * 2
    harness.scheduler.check_integrity()
    assert harness.scheduler.kv_cache.prefixes.count_cached(loading.block_hashes) == 0
    for cache in harness.worker.caches:
        cache[:] = [[0] * len(block) for block in cache]
    harness.worker.load_steps = lambda: 0
    harness.end(decoding, loading)
    assert loading.num_cached == 36, "the store has kept its blocks"


def test_what_is_on_its_way_when_caches_are_cleared_is_not_found() -> None:
    harness = make_harness()
    decoding, loading = begin_load(harness, 6)
    harness.scheduler.kv_cache.reset_prefix_cache()
    harness.end(decoding)
    assert loading.num_cached == 0
    assert_complete(loading)


def test_a_second_request_of_the_same_prefix_shares_the_load() -> None:
    harness = make_harness()
    _, loading = begin_load(harness, 6)
    harness.add(second := make_request("second", prompt_of(0), 4, seed=1))
    harness.end(loading)
    assert harness.worker.num_loads == 9
    assert_complete(second)
    assert second.num_cached == 36


def test_the_workers_may_be_lost_while_a_request_loads() -> None:
    harness = make_harness()
    decoding, loading = begin_load(harness, 6)
    harness.restart()
    assert loading.status is RequestStatus.WAITING
    harness.end(decoding)
    assert loading.num_cached == 0, "the host's memory is the worker's"
    assert_complete(loading)


def test_a_load_that_was_given_up_before_it_was_sent_leaves_nothing() -> None:
    harness = make_harness()
    harness.serve(make_request("first", prompt_of(0), 4))
    displace(harness)
    harness.add(loading := make_request("loads", prompt_of(0), 4))
    scheduler, store = harness.scheduler, harness.scheduler.kv_cache.store
    scheduler._planner.plan(1_000, 0)  # and the plan is not posted
    assert loading.status is RequestStatus.LOADING
    scheduler.finish(loading, "abort")
    assert not store.has_loads
    assert not store._begun
    assert not store._arriving


def test_rebuilt_records_keep_requests_that_load() -> None:
    harness = make_harness()
    decoding, loading = begin_load(harness, 6)
    harness.scheduler.rebuild([loading], [decoding])
    assert decoding.finish_reason == "error"
    harness.end(loading)


def test_siblings_wait_for_the_leader_that_loads() -> None:
    harness = make_harness()
    decoding, loading = begin_load(harness, 1)
    harness.scheduler.finish(loading, "abort")
    group = ForkGroup()
    siblings = [make_request(f"{n}", prompt_of(0), 4, seed=n, group=group) for n in range(3)]
    harness.add(*siblings)
    harness.end(*siblings, decoding)
    assert {request.num_cached for request in siblings} == {36, 39}


# ---------------------------------------------------------------- preemption


@pytest.mark.parametrize("groups", GROUPS[:3])
def test_a_preempted_request_is_swapped_in(groups: tuple[KVGroup, ...]) -> None:
    """Its blocks are on the host by then, those of output included: only the tokens behind its last
    full block are computed again."""
    harness = make_harness(groups)
    first = make_request("first", prompt_of(0, 20), 44)
    second = make_request("second", prompt_of(1, 20), 30, priority=1)
    harness.add(first, second)
    while not second.num_preemptions:
        harness.step()
    known = len(second.tokens)
    assert second.num_output >= 10
    while second.status is not RequestStatus.RUNNING:
        harness.step()
    assert harness.scheduler.stats.loads == 1
    assert second.num_computed >= known - 4
    harness.end(first, second)


# ---------------------------------------------------------------- the records


def test_a_block_is_saved_with_the_next_plan_unless_it_is_lost() -> None:
    stored = StoredBlocks(100)
    for number in range(40):
        stored.note(b"%d" % number, number)
    assert not stored.has_due, "the step that computes them is not posted"
    assert not list(stored.take_saves(0))
    stored.publish()
    stored.publish()  # nothing was planned meanwhile
    stored.lose(b"1")
    assert [move.block for move in stored.take_saves(0)] == [0, *range(2, 40)]
    assert not stored.has_due


def test_a_long_prompt_is_saved_whole_at_once() -> None:
    """Its blocks are the next to leave the device: 150 of 160 blocks, and then 150 others."""
    harness = make_harness(num_blocks=160, num_stored=(400,), token_budget=1000, prefill_cap=1000)
    for number in (0, 1):
        harness.serve(make_request(f"{number}", prompt_of(number, 600), 1))
        assert harness.post(), "a plan without rows, when nothing else is to do"
        harness.update()
        assert not harness.post()
    harness.serve(again := make_request("again", prompt_of(0, 600), 1))
    assert again.num_cached == 596


def test_a_lost_place_is_found() -> None:
    harness = make_harness()
    harness.serve(make_request("first", prompt_of(0), 4))
    stored = harness.scheduler.kv_cache.store.groups[0]
    stored._free.pop()
    with pytest.raises(IntegrityError, match="a place of the KV store"):
        harness.scheduler.check_integrity()


def test_a_request_that_waits_for_no_load_is_found() -> None:
    harness = make_harness()
    _, loading = begin_load(harness, 6)
    harness.scheduler.kv_cache.store.abandon(loading)
    with pytest.raises(IntegrityError, match="waits for no load"):
        harness.scheduler.check_integrity()


def test_the_host_is_divided_like_the_device() -> None:
    assert blocks_in(0, (10, 4), 100) == ()
    assert blocks_in(250, (10, 4), 100) == (25, 10)


# ---------------------------------------------------------------- the disk


@pytest.mark.parametrize("is_published", [False, True])
def test_a_block_that_is_computed_while_it_is_read_has_one_place(is_published: bool) -> None:
    """Its read ends before it is saved."""
    stored, block_hash = StoredBlocks(4), b"x" * 16
    place = stored.begin_read()
    stored.note(block_hash, 7)
    if is_published:
        stored.publish()
    stored.end_read(block_hash, place, is_whole=True)
    stored.check_integrity({block_hash: 7})
    stored.publish()
    assert [move.block for move in stored.take_saves(0)] == [7]
    stored.check_integrity({block_hash: 7})
    assert len(stored) == 1


def make_disk_harness(groups: tuple[KVGroup, ...] = (FULL,), num_files: int = 500) -> Harness:
    """The host has room for the blocks of one request and a half."""
    places = tuple(8 if group.keeps_states else 30 for group in groups)
    return make_harness(groups, num_stored=places, disk=disk_of(groups, num_files))


@pytest.mark.parametrize("groups", GROUPS)
def test_a_conversation_goes_on_with_blocks_of_the_disk(groups: tuple[KVGroup, ...]) -> None:
    harness = make_disk_harness(groups)
    harness.worker.load_steps = lambda: 2
    first = make_request("first", prompt_of(0), 11)
    harness.serve(first)
    displace(harness, 9)
    second = make_request("second", [*first.tokens, *prompt_of(1, 9)], 5)
    harness.serve(second)
    assert second.num_cached == 48
    assert harness.worker.num_reads > 0


@pytest.mark.parametrize(
    ("groups", "num_cached"), [((FULL,), 24), ((FULL, windowed(6)), 24), ((FULL, *STATES), 0)]
)
def test_of_a_long_prefix_as_much_is_read_as_the_host_has_room_for(
    groups: tuple[KVGroup, ...], num_cached: int
) -> None:
    """Half of the host's 12 places: 6 of 10 blocks. Of states none is before the prompt's end."""
    places = (12,) * len(groups)
    harness = make_harness(groups, num_stored=places, disk=disk_of(groups, 500))
    harness.serve(make_request("first", prompt_of(0), 4))
    displace(harness, 9)
    harness.serve(again := make_request("again", prompt_of(0), 4))
    assert again.num_cached == num_cached


def test_a_file_that_is_gone_is_a_miss_once() -> None:
    harness = make_disk_harness()
    harness.serve(make_request("first", prompt_of(0), 4))
    displace(harness, 9)
    broken = sorted(harness.worker.files)[:60]
    for name in broken:
        del harness.worker.files[name]
    harness.serve(again := make_request("again", prompt_of(0), 4))
    assert again.num_cached < 36
    displace(harness, 9)
    harness.serve(third := make_request("third", prompt_of(0), 4))
    assert third.num_cached == 36, "what was computed again was written again"


def test_the_disk_is_bounded() -> None:
    harness = make_disk_harness(num_files=40)
    for number in range(12):
        harness.serve(make_request(f"{number}", prompt_of(number), 4))
    (disk,) = harness.scheduler.kv_cache.store.connectors
    assert len(disk.files[0]) == 40
    assert len(harness.worker.files) <= 40


def test_one_block_is_read() -> None:
    harness = make_disk_harness()
    harness.serve(make_request("first", prompt_of(0, 5), 1))
    displace(harness, 9)
    harness.serve(again := make_request("again", prompt_of(0, 5), 1))
    assert (again.num_cached, harness.worker.num_reads) == (4, 1)


def test_what_is_used_stays_on_the_host_and_on_the_disk() -> None:
    """A block that is computed again is used, too; on the host and on the disk the least recently
    used one leaves."""
    first, second, third = (bytes([number]) for number in range(3))
    disk = DiskConnector(DiskLimits(num_files=(2,), files=((),)))
    assert [disk.keep(0, each) for each in (first, second, first)] == [True, True, False]
    disk.use(0, first)
    assert disk.keep(0, third)
    assert (list(disk.files[0]), disk.take_deletes()) == ([first, third], [(0, second)])
    without = DiskConnector(DiskLimits(num_files=(0,), files=((),)))
    assert (without.keep(0, first), without.take_deletes()) == (False, [])
    host = StoredBlocks(2)
    for step in ((first, second), (first, third)):
        for each in step:
            host.note(each, 0)
        host.publish()
        list(host.take_saves(0))
    assert [each in host for each in (first, second, third)] == [True, False, True]


def test_a_cleared_disk_has_no_files() -> None:
    harness = make_disk_harness()
    harness.serve(make_request("first", prompt_of(0), 4))
    assert harness.worker.files
    harness.scheduler.kv_cache.reset_prefix_cache()
    harness.serve(make_request("other", prompt_of(1, 3), 4))
    assert len(harness.worker.files) == 1, "of the other request"


def test_a_request_may_end_while_files_are_read() -> None:
    harness = make_disk_harness()
    harness.serve(make_request("first", prompt_of(0), 4))
    displace(harness, 9)
    harness.worker.load_steps = lambda: 5
    decoding, loading = make_request("decodes", [1, 2], 28), make_request("loads", prompt_of(0), 4)
    harness.add(decoding)
    harness.step()
    harness.add(loading)
    harness.step()
    assert loading.status is RequestStatus.LOADING
    assert not loading.blocks
    harness.scheduler.finish(loading, "abort")
    harness.end(decoding)


def test_places_that_files_are_read_into_stay_reserved_when_records_are_rebuilt() -> None:
    harness = make_disk_harness()
    harness.serve(make_request("first", prompt_of(0), 4))
    displace(harness, 9)
    harness.worker.load_steps = lambda: 8
    harness.add(decoding := make_request("decodes", [1, 2], 28))
    harness.step()
    harness.add(loading := make_request("loads", prompt_of(0), 4))
    harness.post()
    assert loading.status is RequestStatus.LOADING
    harness.scheduler.rebuild([loading], [decoding])
    stored = harness.scheduler.kv_cache.store.groups[0]
    assert stored._num_reading == 9
    reserved = {place for _, place, _ in next(iter(harness.worker.reads.values()))[1]}
    assert reserved.isdisjoint(stored._free)
    harness.end(loading)
    displace(harness, 9)
    assert stored._num_reading == 0
    harness.serve(again := make_request("again", prompt_of(0), 4))
    assert again.num_cached == 36, "the files are known as before"


def test_files_are_read_again_for_a_request_whose_workers_were_lost() -> None:
    harness = make_disk_harness()
    harness.add(request := make_request("first", prompt_of(0), 4))
    request.asked_connectors = 1
    request.detach()
    assert not request.asked_connectors


# ---------------------------------------------------------------- other servers


def make_pair(groups: tuple[KVGroup, ...]) -> tuple[Harness, Harness, Request]:
    """Returns a server that has computed a prompt, one that may read its blocks, and a request that
    begins like the prompt on the second."""
    peers = PeerLimits("peer:1", 0, 1)
    first, second = (make_harness(groups, peers=peers) for _ in range(2))
    first.serve(done := make_request("prefill", prompt_of(0), 1))
    assert first.post(), "its blocks are saved, though nothing else is to do"
    first.update()
    handover = first.scheduler.kv_cache.store.offer(done)
    second.worker.offered = first.worker.offered
    request = make_request("decode", prompt_of(0), 4)
    request.handover = handover
    return first, second, request


@pytest.mark.parametrize("groups", GROUPS)
def test_a_prompt_that_another_server_computed_is_read(groups: tuple[KVGroup, ...]) -> None:
    _, second, request = make_pair(groups)
    second.serve(request)
    assert request.num_cached == 36
    assert second.worker.num_reads > 0
    found = (plan.section(KVMoves) for plan in second.plans)
    (moves,) = (each for each in found if each is not None and len(each.reads))
    assert moves.source_of(int(moves.reads[0, 2])) == "peer:1"


def test_what_has_left_the_other_server_is_computed() -> None:
    _, second, request = make_pair((FULL,))
    names = sorted(second.worker.offered)
    del second.worker.offered[names[len(names) // 2]]
    second.serve(request)
    assert request.num_cached < 36
    second.serve(again := make_request("again", prompt_of(0), 4))
    assert again.num_cached == 36


def test_a_server_with_another_number_of_ranks_is_not_asked() -> None:
    _, second, request = make_pair((FULL,))
    request.handover = Handover("peer:1", 0, 2, request.handover.held)
    second.serve(request)
    assert request.num_cached == second.worker.num_reads == 0


def test_a_cleared_cache_is_offered_no_more() -> None:
    first, _, _ = make_pair((FULL,))
    done = make_request("asks", prompt_of(0), 1)
    first.scheduler.kv_cache.prefixes.find(done)
    store = first.scheduler.kv_cache.store
    assert store.offer(done) is not None
    first.scheduler.kv_cache.reset_prefix_cache()
    assert store.offer(done) is None
    assert store.take_deletes() == [(1, -1, bytes(16))]
