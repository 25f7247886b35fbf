"""Which engine takes a request, by the state of real schedulers whose workers are symbolic."""

from __future__ import annotations

import random
from collections import Counter
from weakref import ref

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioinfer.cluster.router import REQUEST_COST
from aioinfer.engine import router as router_module
from aioinfer.engine.router import Route, Router
from aioinfer.scheduler.block_pool import extend_hashes, root_hash
from aioinfer.scheduler.request import Request
from tests.symbolic_worker import VOCABULARY
from tests.test_forks import Search
from tests.test_scheduler import Harness, assert_complete, make_request

BLOCK = 16


class Fleet:
    """Engines without text, and the router before them."""

    def __init__(self, count: int, **limits: int):
        defaults = {
            "num_blocks": 4096, "block_size": BLOCK, "max_num_seqs": 256, "token_budget": 8192,
            "prefill_cap": 8192,
        }  # fmt: skip
        self.engines = [Harness(**(defaults | limits)) for _ in range(count)]
        self.schedulers = [engine.scheduler for engine in self.engines]
        self.router = Router(self.schedulers)
        self.block_size = self.schedulers[0].limits.block_size

    def hashes(self, prompt: list[int]) -> list[bytes]:
        hashes: list[bytes] = []
        extend_hashes(hashes, make_request("", prompt, 1).tokens, self.block_size, root_hash())
        return hashes

    def route(self, prompt: list[int], n: int = 1) -> Route:
        return self.router.route(len(prompt), self.hashes(prompt), n)

    def submit(self, prompt: list[int], new: int = 8, n: int = 1) -> tuple[int, Request]:
        """Queues a request as the frontend does; returns its engine, too."""
        route = self.route(prompt, n)
        request = make_request(
            "", prompt, new, block_hashes=self.hashes(prompt), num_expected=route.num_tokens
        )
        self.router.promise(route, request)
        self.engines[route.engine].add(request)
        return route.engine, request

    def put(self, engine: int, prompt: list[int], new: int = 8) -> Request:
        """Queues a request on a given engine, past the router."""
        request = make_request("", prompt, new)
        self.engines[engine].add(request)
        return request

    def run(self) -> None:
        for engine in self.engines:
            engine.run()


def tokens(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def test_with_one_engine_all_requests_go_to_it() -> None:
    fleet = Fleet(1)
    assert fleet.submit(tokens(64, 1))[0] == 0
    assert fleet.route(tokens(64, 1)) == Route(0)
    assert not fleet.router._promises[0]._owners


def test_equal_engines_are_used_round_robin() -> None:
    fleet = Fleet(3)
    engines = []
    for seed in range(7):
        engines.append(fleet.submit(tokens(10, seed))[0])
        fleet.run()
    assert engines == [0, 1, 2, 0, 1, 2, 0]


def test_requests_spread() -> None:
    fleet = Fleet(4)
    engines = [fleet.submit(tokens(40, seed))[0] for seed in range(10)]
    assert engines == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_of_equal_costs_the_fewest_requests_win() -> None:
    fleet = Fleet(2)
    for seed in range(2):
        fleet.put(0, tokens(20, seed), 100)
    fleet.engines[0].post()
    fleet.put(1, tokens(REQUEST_COST, 9))
    assert [scheduler.num_prefill_tokens for scheduler in fleet.schedulers] == [0, REQUEST_COST]
    assert fleet.route(tokens(20, 5)).engine == 1


def test_a_beam_search_counts_as_many_requests_as_it_has_beams() -> None:
    fleet = Fleet(2)
    beams = Search("search", [1, 2, 3], 8, 4).beams
    for beam in beams:
        beam.uses = ()  # no feature is to take its rows
    fleet.engines[0].add(*beams)
    for number in range(3):
        fleet.put(1, [number])
    assert fleet.route([5]).engine == 1


def test_what_is_yet_to_prefill_counts_until_it_is_planned() -> None:
    fleet = Fleet(2, token_budget=1024, prefill_cap=1024)
    fleet.put(0, tokens(4000, 1))
    assert [fleet.submit(tokens(500, seed))[0] for seed in range(3)] == [1, 1, 1]
    scheduler = fleet.schedulers[0]
    assert scheduler.num_prefill_tokens == 4000
    fleet.engines[0].post()
    assert scheduler.num_prefill_tokens == 4000 - 1024
    fleet.engines[0].run()
    assert scheduler.num_prefill_tokens == 0
    assert fleet.route(tokens(500, 9)).engine == 0


def test_a_prefix_is_followed_to_its_cache() -> None:
    fleet = Fleet(3)
    conversations = [tokens(90 + 40 * number, number) for number in range(3)]
    homes = []
    for prompt in conversations:
        homes.append(fleet.submit(prompt)[0])
        fleet.run()
    assert homes == [0, 1, 2]
    for round_number in range(4):
        for number in random.Random(round_number).sample(range(3), 3):
            conversations[number] += tokens(25, 100 * round_number + number)
            engine, request = fleet.submit(conversations[number])
            assert engine == homes[number]
            expected = request.num_expected
            assert expected >= (len(conversations[number]) - 25) // BLOCK * BLOCK - BLOCK
            fleet.run()
            assert request.num_cached >= expected


def test_the_longer_prefix_wins() -> None:
    fleet = Fleet(2)
    whole = tokens(300, 1)
    fleet.put(0, whole[:100])
    fleet.put(1, whole[:200])
    fleet.run()
    route = fleet.route(whole)
    found = (route.engine, route.num_blocks, route.num_tokens)
    assert found == (1, 200 // BLOCK, 200 // BLOCK * BLOCK)


def test_a_prompt_that_is_cached_to_its_end_has_one_token_left() -> None:
    fleet = Fleet(2)
    prompt = tokens(10 * BLOCK, 1)
    fleet.put(1, prompt)
    fleet.run()
    assert fleet.route(prompt) == Route(1, 10, 10 * BLOCK - 1)


@pytest.mark.parametrize(("prefix", "stays"), [(64 * BLOCK, True), (16 * BLOCK, False)])
def test_load_is_weighed_against_the_prefix(prefix: int, stays: bool) -> None:
    fleet = Fleet(2)
    prompt = tokens(prefix, 1)
    fleet.put(0, prompt)
    fleet.run()
    busy = [fleet.put(0, tokens(20, seed), 200) for seed in range(10, 13)]
    fleet.engines[0].step()
    assert all(request.slot >= 0 for request in busy)
    assert (2 * prefix > 3 * REQUEST_COST) is stays
    assert fleet.route([*prompt, 1]).engine == (0 if stays else 1)
    fleet.run()
    assert fleet.route([*prompt, 1]).engine == 0


# ---------------------------------------------------------------- bursts


def test_a_small_burst_stays_together() -> None:
    """The prefix is in no cache when its second request comes."""
    fleet = Fleet(4)
    prefix = tokens(2000, 1)
    submitted = [fleet.submit(prefix + tokens(30, seed)) for seed in range(5)]
    assert len({engine for engine, _ in submitted}) == 1
    fleet.run()
    assert sum(scheduler.stats.prefix_hit for scheduler in fleet.schedulers) == 4 * (
        2000 // BLOCK * BLOCK
    )
    for _, request in submitted:
        assert_complete(request)


def test_a_large_burst_spreads_and_each_engine_computes_the_prefix_once() -> None:
    fleet = Fleet(4)
    prefix = tokens(2000, 1)
    counts = Counter(fleet.submit(prefix + tokens(30, seed))[0] for seed in range(100))
    assert all(20 <= count <= 30 for count in counts.values()), counts
    yet_to_prefill = [scheduler.num_prefill_tokens for scheduler in fleet.schedulers]
    assert max(yet_to_prefill) < 2000 + 30 * (30 + BLOCK)
    fleet.run()
    assert sum(scheduler.stats.prefix_hit for scheduler in fleet.schedulers) == 96 * (
        2000 // BLOCK * BLOCK
    )


def test_a_promise_that_is_broken_counts_no_more() -> None:
    fleet = Fleet(2)
    prompt = tokens(1000, 1)
    engine, request = fleet.submit(prompt)
    assert fleet.route(prompt).num_blocks == 1000 // BLOCK
    fleet.schedulers[engine].finish(request, "abort")
    assert fleet.route(prompt) == Route(1 - engine)


def test_a_promise_that_was_kept_leaves_the_word_to_the_cache() -> None:
    fleet = Fleet(2, num_blocks=70)
    prompt = tokens(1000, 1)
    engine, _ = fleet.submit(prompt)
    fleet.run()
    fleet.put(engine, tokens(1000, 2))  # takes nearly all blocks
    fleet.run()
    cached = fleet.schedulers[engine].kv_cache.prefixes.count_cached(fleet.hashes(prompt))
    assert cached < 1000 // BLOCK
    assert fleet.router._promises[engine].count(fleet.hashes(prompt), cached) == cached


def test_a_promise_does_not_keep_its_request() -> None:
    fleet = Fleet(2)
    engine, oldest = fleet.submit(tokens(20 * BLOCK, 1))
    _, request = fleet.submit(tokens(20 * BLOCK, 1) + tokens(2 * BLOCK, 2))  # follows the oldest
    assert len(fleet.router._promises[engine]._owners) == 22
    gone = ref(request)
    fleet.schedulers[engine].finish(request, "abort")
    del request
    assert gone() is None
    assert fleet.route(oldest.tokens.tolist() + tokens(2 * BLOCK, 2)).num_blocks == 20


def test_promises_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_PROMISED", 40)
    fleet = Fleet(2)
    requests = [fleet.submit(tokens(20 * BLOCK, seed))[1] for seed in range(8)]
    assert [len(promises._owners) for promises in fleet.router._promises] == [40, 40]
    fleet.run()
    last = fleet.submit(tokens(BLOCK, 99))
    assert [owner() for owner in fleet.router._promises[last[0]]._owners.values()] == [last[1]], (
        "what was kept goes with the next"
    )
    for request in requests:
        assert_complete(request)


# ---------------------------------------------------------------- room


def test_a_free_slot_goes_before_a_prefix() -> None:
    fleet = Fleet(2, max_num_seqs=4)
    prompt = tokens(2000, 1)
    fleet.put(0, prompt)
    fleet.run()
    assert fleet.route(prompt).engine == 0
    for seed in range(3):
        fleet.put(0, tokens(20, seed), 100)
    assert fleet.route(prompt).engine == 0
    assert fleet.route(prompt, n=2).engine == 1
    fleet.put(0, tokens(20, 9), 100)
    assert fleet.route(prompt).engine == 1
    for seed in range(4):
        fleet.put(1, tokens(20, seed), 100)
    assert fleet.route(prompt).engine == 0, "where all are full, the cost counts"


def test_free_blocks_go_before_a_prefix() -> None:
    fleet = Fleet(2, num_blocks=100)
    prompt = tokens(60 * BLOCK, 1)
    fleet.put(0, prompt[: 30 * BLOCK])
    fleet.run()
    assert fleet.route(prompt).engine == 0
    fleet.put(0, tokens(50 * BLOCK, 2), 100)
    assert fleet.route(prompt).engine == 1, "waiting requests need their blocks, too"
    fleet.engines[0].step()
    assert fleet.route(prompt).engine == 1


def test_without_prefix_caching_the_load_decides() -> None:
    fleet = Fleet(2, prefix_caching=False)
    prompt = tokens(500, 1)
    fleet.put(0, tokens(20, 2))
    assert fleet.router.route(len(prompt), []) == Route(1)


def test_routing_changes_nothing_in_the_pool() -> None:
    fleet = Fleet(2, num_blocks=64)
    prompts = [tokens(5 * BLOCK, seed) for seed in range(4)]
    for prompt in prompts:
        fleet.put(0, prompt)
    fleet.run()
    (pool,) = fleet.schedulers[0].kv_cache.pools

    def state() -> tuple[object, ...]:
        lists = list(pool._free), list(pool._references), list(pool._hash_of)
        return *lists, list(pool._cached.items()), pool.num_free_cached

    before = state()
    assert pool._cached
    for prompt in prompts:
        assert fleet.route(prompt).num_tokens > 0
    assert state() == before


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_traffic_keeps_schedulers_consistent_and_all_requests_end(
    data: st.DataObject,
) -> None:
    fleet = Fleet(3, num_blocks=40, block_size=4, max_num_seqs=3, token_budget=24, prefill_cap=16)
    stems = [tokens(30, seed) for seed in range(2)]
    requests: list[tuple[int, Request]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["submit", "submit", "step", "abort"]))
        if action == "submit":
            stem = data.draw(st.sampled_from(stems))[: data.draw(st.integers(0, 30))]
            requests.append(
                fleet.submit(
                    stem + tokens(data.draw(st.integers(1, 12)), len(requests)),
                    data.draw(st.integers(1, 12)),
                )
            )
        elif action == "step":
            fleet.engines[data.draw(st.integers(0, 2))].step()
        elif requests:
            engine, request = data.draw(st.sampled_from(requests))
            fleet.schedulers[engine].finish(request, "abort")
            fleet.schedulers[engine].check_integrity()
    fleet.run()
    assert [scheduler.num_prefill_tokens for scheduler in fleet.schedulers] == [0, 0, 0]
    for _, request in requests:
        if request.finish_reason != "abort":
            assert_complete(request)
