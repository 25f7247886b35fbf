"""Snapshots of states: which are kept, found, waited for and evicted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.ipc.kv_spec import NULL_BLOCK, KVGroup
from aioinfer.scheduler.block_pool import root_hash
from aioinfer.scheduler.request import Request, RequestStatus
from aioinfer.scheduler.snapshots import (
    MIN_SHARED_BLOCKS,
    SeenPrefixes,
    SnapshotPool,
    StateBlocks,
)
from tests.test_scheduler import FULL, STATES, Harness, make_request

GROUPS = [(FULL, *STATES), STATES[:1]]
SHARED = [number * 7 % 41 for number in range(64)]


def make_harness(groups: tuple[KVGroup, ...] = GROUPS[0], **limits: object) -> Harness:
    """Blocks of 4 tokens."""
    given = {"token_budget": 32, "prefill_cap": 32, "num_blocks": 256} | limits
    return Harness(groups=groups, **given)


def run(harness: Harness, *requests: Request) -> list[int]:
    """Runs requests that are there at the same time; returns how many tokens each found."""
    harness.serve(*requests)
    return [request.num_cached for request in requests]


def kept(harness: Harness, tokens: list[int]) -> list[int]:
    """Returns after how many blocks of `tokens` a snapshot is kept."""
    request = make_request("asks", tokens, 1)
    cache = harness.scheduler.kv_cache
    cache.prefixes.find(request)
    pool = cache.pools[-1]
    return [n for n, block_hash in enumerate(request.block_hashes, 1) if pool.has(block_hash)]


def sharing(number: int) -> list[Request]:
    """Returns requests whose prompts differ behind `SHARED`."""
    return [make_request(str(n), [*SHARED, *[70 + n] * 9], 3) for n in range(number)]


# ---------------------------------------------------------------- which are kept


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("budget", [5, 32, 200])
def test_the_ends_of_a_prompt_and_of_its_answer_are_kept(
    groups: tuple[KVGroup, ...], budget: int
) -> None:
    harness = make_harness(groups, token_budget=budget, prefill_cap=budget)
    request = make_request("one", SHARED[:42], 30)
    run(harness, request)
    # 42 tokens of prompt end in the eleventh block, and the last of 72 tokens is never computed
    assert kept(harness, list(request.tokens)) == [10, 17]


@pytest.mark.parametrize("groups", GROUPS)
def test_the_place_where_prompts_part_is_kept(groups: tuple[KVGroup, ...]) -> None:
    harness = make_harness(groups)
    prompts = [[*SHARED[:30], *[50 + number] * 20] for number in range(3)]
    found = [run(harness, make_request(str(n), prompt, 3)) for n, prompt in enumerate(prompts)]
    assert found == [[0], [0], [28]]
    assert kept(harness, SHARED[:30]) == [7]


def test_a_first_token_in_common_is_not_kept() -> None:
    """Nor a block: most prompts begin with a few tokens of their chat template."""
    harness = make_harness()
    for number in range(3):
        assert run(harness, make_request(str(number), [*SHARED[:4], *[50 + number] * 20], 3)) == [0]
    assert kept(harness, SHARED[:4]) == []


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("more", range(1, 9))
def test_the_next_turn_begins_behind_the_last_answer(
    groups: tuple[KVGroup, ...], more: int
) -> None:
    harness = make_harness(groups)
    first = make_request("first", SHARED[:30], 20)
    run(harness, first)
    second = make_request("second", [*first.tokens, *[45] * more], 5)
    computed = len(first.tokens) - 1
    assert run(harness, second) == [computed // 4 * 4]


def test_a_preempted_request_goes_on_at_its_last_block_boundary() -> None:
    harness = make_harness()
    request = make_request("one", SHARED[:30], 20)
    harness.add(request)
    while request.num_output < 13:
        harness.step()
    harness.scheduler._running.preempt(request)
    while request.status is RequestStatus.WAITING:
        harness.step()
    assert request.num_computed >= 40
    harness.end(request)


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    harness = make_harness(prefix_caching=False)
    request = make_request("one", SHARED[:42], 30)
    assert run(harness, request, make_request("two", SHARED[:42], 3)) == [0, 0]
    assert kept(harness, list(request.tokens)) == []
    assert max(len(plan.table_blocks[plan.table_blocks >= 0]) for plan in harness.plans) < 99


# ---------------------------------------------------------------- waiting for one


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("budget", [16, 33, 500])
def test_what_waiting_prompts_share_is_computed_once(
    groups: tuple[KVGroup, ...], budget: int
) -> None:
    harness = make_harness(groups, token_budget=budget, prefill_cap=budget)
    assert run(harness, *sharing(8)) == [0, *[64] * 7]


def test_equal_prompts_of_one_plan_do_not_share_a_state_that_it_computes() -> None:
    """Not even where it is too short for being waited for: the symbolic worker checks."""
    harness = make_harness()
    assert run(harness, *(make_request(str(n), SHARED[:6], 3) for n in range(3))) == [0, 0, 0]
    assert run(harness, make_request("later", SHARED[:6], 3)) == [4]


def test_a_request_does_not_wait_for_one_that_was_aborted() -> None:
    harness = make_harness(token_budget=8, prefill_cap=8)
    first, second = sharing(2)
    harness.add(first, second)
    harness.step()
    harness.scheduler.finish(first, "abort")
    harness.end(second)
    assert second.num_cached > 0


def test_another_salt_waits_for_nothing() -> None:
    harness = make_harness(token_budget=16, prefill_cap=16)
    first, second = sharing(2)
    second.hash_root = root_hash(b"another")
    assert run(harness, first, second) == [0, 0]


def test_others_are_not_held_up_by_many_that_wait_for_a_state() -> None:
    """A plan looks at as many of them as there are slots."""
    harness = make_harness(max_num_seqs=4, token_budget=8, prefill_cap=8)
    assert run(harness, *sharing(30)) == [0, *[64] * 29]


# ---------------------------------------------------------------- eviction


def test_the_snapshot_that_saves_least_is_evicted_first() -> None:
    pool = SnapshotPool(4)
    blocks = pool.allocate(4)
    for block, saved in zip(blocks, [300, 100, 200, 100], strict=True):
        pool.keep(block, bytes([block]), saved)
        pool.release([block])
    assert pool.allocate(3) == [blocks[1], blocks[3], blocks[2]]
    assert pool.has(bytes([blocks[0]]))


def test_what_was_not_used_for_long_is_evicted_though_it_saves_more() -> None:
    pool = SnapshotPool(2)
    old, new = pool.allocate(2)
    pool.keep(old, b"old", 250)
    pool.release([old])
    for number in range(3):
        pool.keep(new, bytes([number]), 100)
        pool.release([new])
        (new,) = pool.allocate(1)
    assert not pool.has(b"old")


def test_a_snapshot_that_one_request_alone_began_with_goes_first() -> None:
    pool = SnapshotPool(3)
    blocks = pool.allocate(3)
    for block, times in zip(blocks, (0, 1, 2), strict=True):
        pool.keep(block, bytes([block]), 100)
        pool.release([block])
        for _ in range(times):
            pool.share([block])
            pool.release([block])
            pool.demote(block)
    assert pool.allocate(1) == [blocks[1]]
    assert pool.allocate(1) == [blocks[0]]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_prompt_gives_way_to_the_last_answers_of_others(at_once: bool) -> None:
    """Four conversations in turn, of which two run at once, in a pool with a state for each, one
    for what all share, and two more for each that runs."""
    blocks, slots = (9, 2) if at_once else (7, 1)
    harness = make_harness(num_blocks=(256, blocks, blocks), max_num_seqs=slots)
    talks = [[*SHARED[:20], *[50 + n] * 24] for n in range(4)]
    for turn in range(4):
        requests = [make_request(f"{n}-{turn}", tokens, 30) for n, tokens in enumerate(talks)]
        found = run(harness, *requests)
        if turn:
            assert found == [(len(tokens) - 9) // 4 * 4 for tokens in talks]
        for number, request in enumerate(requests):
            talks[number] = [*request.tokens, *[70 + number] * 8]


def test_a_request_does_not_want_what_it_began_behind() -> None:
    """A waiting prompt shares less with it than it had found."""
    harness = make_harness()
    first = make_request("first", [*SHARED[:24], *[50] * 20], 9)
    run(harness, first)
    second = make_request("second", [*first.tokens, *[51] * 20], 3)
    other = make_request("other", [*SHARED[:24], *[60] * 20], 3)
    harness.add(second, other)
    harness.step()
    assert second.num_cached == 52
    assert second.snapshots == [13, 18]
    harness.end(other)


def test_a_superseded_snapshot_is_dropped_unless_it_is_used_or_elsewhere() -> None:
    pool = SnapshotPool(3)
    blocks = pool.allocate(3)
    hashes = b"one", b"two", b"three"
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.keep(block, block_hash, 4)
        pool.release([block])
    pool.share(blocks[1:2])
    pool.drop(b"one", blocks[0])
    pool.drop(b"two", blocks[1])
    pool.drop(b"three", blocks[0])
    assert [pool.has(block_hash) for block_hash in hashes] == [False, True, True]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("steps", [0, 12])
def test_the_end_of_a_prompt_stays_though_another_request_goes_on_from_there(
    groups: tuple[KVGroup, ...], steps: int
) -> None:
    """Whether the prompts are computed together, or one begins with the other's last state."""
    harness = make_harness(groups, block_size=1, token_budget=2, prefill_cap=2)
    first = make_request("first", SHARED[:10], 20)
    harness.add(first)
    for _ in range(steps):
        harness.step()
    second = make_request("second", [*first.tokens, 55], 1)
    harness.add(second)
    harness.end(first, second)
    again = make_request("again", [*second.tokens[:-2], 99], 1)
    assert run(harness, again) == [second.prompt_len - 1]


@pytest.mark.parametrize("groups", GROUPS)
def test_decodes_go_on_without_preemption_while_no_block_of_a_state_is_free(
    groups: tuple[KVGroup, ...],
) -> None:
    """Six requests of 3 tokens get to their blocks' ends at the same time, with seven blocks."""
    blocks = tuple(7 if group.keeps_states else 256 for group in groups)
    harness = make_harness(groups, num_blocks=blocks)
    requests = [make_request(str(n), [n, 1, 2], 40, seed=n) for n in range(6)]
    run(harness, *requests)
    assert harness.scheduler.stats.preemptions == 0


def test_a_state_that_a_fork_reads_is_not_overwritten() -> None:
    """Without a free block a request writes its next state over the last one: not while another
    request begins with it."""
    pool = SnapshotPool(1)
    states = StateBlocks([(0, STATES[0], pool)], 4, prefix_caching=True)
    leader, fork = (make_request(name, SHARED[:5], 9) for name in ("leader", "fork"))
    leader.blocks = [[]]
    states.grow(leader, 1)
    leader.num_blocks, leader.num_computed = 1, 4
    assert states.can_grow(leader, 1)
    fork.blocks = [list(leader.blocks[0])]
    states.share(fork)
    fork.num_blocks, fork.num_computed = 1, 4
    assert not states.can_grow(leader, 1)
    assert not states.can_grow(fork, 1)
    states.free(fork, fork.blocks)
    assert states.can_grow(leader, 1)
    states.grow(leader, 1)
    assert leader.blocks == [[NULL_BLOCK, 0]]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_use_of_a_pool_evicts_by_value(data: st.DataObject) -> None:
    draw = data.draw
    pool = SnapshotPool(draw(st.integers(1, 5)))
    owned: list[int] = []
    for number in range(60):
        action = draw(st.integers(0, 5))
        if action <= 1 and pool.num_free:
            empty = pool.num_free - pool.num_free_cached
            values = [
                pool._value[block] for block in pool._free if pool._hash_of[block] is not None
            ]
            (block,) = pool.allocate(1)
            assert empty or pool._value[block] == min(values)
            owned.append(block)
        elif action == 2 and owned:
            block = draw(st.sampled_from(owned))
            if pool._hash_of[block] is None:
                pool.keep(block, bytes([number]), draw(st.integers(0, 9)))
        elif action == 3 and owned:
            pool.release([owned.pop(draw(st.integers(0, len(owned) - 1)))])
        elif action == 5 and pool.num_free_cached:
            pool.demote(draw(st.sampled_from(list(pool._free))))
        elif action == 4 and (hashes := pool.hashes()):
            found = pool.lookup([draw(st.sampled_from(hashes))])
            pool.share(found)
            owned += found
        pool.check_integrity([[block] for block in owned])
        assert len(pool._heap) <= 2 * pool.num_blocks


# ---------------------------------------------------------------- where prompts part


def test_seen_prefixes_are_forgotten_in_the_order_of_their_last_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioinfer.scheduler.snapshots._MAX_SEEN", 3)
    seen = SeenPrefixes()
    hashes = [bytes([n]) for n in range(5)]
    seen.add(hashes[:3])
    assert seen.count(hashes, 5, 0) == 3
    assert seen.count(hashes, 2, 0) == 2
    assert seen.count(hashes, 5, 3) == 3
    seen.add([b"other", b"more"])
    assert seen.count(hashes[:2], 2, 0) == 0
    assert seen.count(hashes, 5, 0) == 3


# ---------------------------------------------------------------- anything


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_prompts_that_begin_alike(data: st.DataObject) -> None:
    """Outputs are right, whatever is shared, chunked, preempted and evicted, and two prompts that
    are equal but for their last token share all blocks while there is room."""
    draw = data.draw
    size = draw(st.sampled_from([1, 2, 4, 16]), "block_size")
    harness = make_harness(
        draw(st.sampled_from(GROUPS), "groups"),
        block_size=size,
        token_budget=draw(st.integers(1, 90), "budget"),
        prefill_cap=90,
        num_blocks=draw(st.sampled_from([140 // size + 1, 1000]), "blocks"),
        max_num_seqs=draw(st.integers(1, 6), "slots"),
    )
    requests: list[Request] = []
    for number in range(draw(st.integers(2, 9), "requests")):
        base = draw(st.sampled_from([SHARED, *(list(r.tokens) for r in requests)]))[:90]
        cut = draw(st.integers(1, len(base)), "cut")
        own = [50 + number] * draw(st.integers(0, 6), "own")
        requests.append(make_request(str(number), [*base[:cut], *own], draw(st.integers(1, 30))))
        harness.add(requests[-1])
        for _ in range(draw(st.integers(0, 9), "steps")):
            harness.step()
    harness.end(*requests)
    if harness.limits.num_blocks[0] == 1000:
        prompt = list(requests[-1].tokens[: requests[-1].prompt_len])
        found = run(harness, make_request("again", [*prompt[:-1], 99], 1))
        shared = (len(prompt) - 1) // size
        # so few blocks need not have a snapshot of their own
        assert found == [shared * size] or shared < MIN_SHARED_BLOCKS
