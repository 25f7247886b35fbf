"""Whether a prefix is copied or computed, by measured rates."""

from __future__ import annotations

from itertools import count

import pytest

from aioinfer.scheduler.copy_rates import MIN_TOKENS, TRY_EVERY, Rate
from aioinfer.scheduler.kv_store import KVStore
from tests.test_kv_store import displace, make_harness, prompt_of
from tests.test_scheduler import make_request


def rate_of(per_s: float) -> Rate:
    rate = Rate()
    for second in range(3):
        rate.add(int(per_s), second, second + 1)
    return rate


def test_overlapping_work_counts_once() -> None:
    rate = Rate()
    rate.add(1000, 0.0, 1.0)
    rate.add(1000, 0.0, 2.0)
    rate.add(1000, 1.5, 1.9)  # within the second
    assert rate.per_s == pytest.approx(1000.0)


def test_small_amounts_tell_nothing() -> None:
    rate = Rate()
    rate.add(MIN_TOKENS - 1, 0.0, 1.0)
    assert rate.per_s is None
    assert rate.pays(rate_of(1e9))


def test_both_ways_are_tried_before_they_are_compared() -> None:
    copying = rate_of(1000)
    assert not copying.pays(Rate())
    assert copying.pays(Rate()), "computing was too little to be measured"


def test_the_slower_way_is_tried_now_and_then() -> None:
    slow, fast = rate_of(1000), rate_of(2000)
    assert fast.pays(slow)
    assert [slow.pays(fast) for _ in range(2 * TRY_EVERY)].count(True) == 2


@pytest.mark.parametrize(("per_s", "found"), [(10_000, 36), (500, 0)])
def test_a_prefix_is_computed_where_that_is_faster(per_s: float, found: int) -> None:
    harness = make_harness()
    harness.serve(make_request("first", prompt_of(0), 4))
    displace(harness)
    rates = harness.scheduler.kv_cache.store.rates
    rates.loads, rates.prefill = rate_of(per_s), rate_of(1000)
    harness.serve(again := make_request("again", prompt_of(0), 4))
    assert again.num_cached == found


def test_steps_and_loads_are_measured() -> None:
    harness = make_harness(num_blocks=160, num_stored=(600,), token_budget=1000, prefill_cap=1000)
    for number in (0, 1, 0):
        harness.serve(make_request(f"{number}", prompt_of(number, 600), 3))
    rates = harness.scheduler.kv_cache.store.rates
    assert rates.prefill.per_s == pytest.approx(600 / 0.001, rel=0.5)
    assert rates.loads.per_s is not None


def test_a_load_is_as_fast_as_its_copies() -> None:
    """However long it waited for steps."""
    times = iter([1.0, 5.0])
    store = KVStore((8,), count(), clock=lambda: next(times))
    store.load(make_request("one", prompt_of(0), 4), [], 1000)
    store.finish(0, seconds=0.01)
    assert store.rates.loads.per_s == pytest.approx(100_000)
