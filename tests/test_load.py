"""What a scheduler reports of itself, in the course of requests."""

from __future__ import annotations

from aioinfer.gateway.reporter import load_of, take_changes
from tests.test_scheduler import FULL, STATES, Harness, make_request

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
