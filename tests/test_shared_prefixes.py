"""Prompts that begin alike and are there at the same time: what they share is computed once.

Blocks of a prompt enter the prefix cache with the plan that computes them, and a waiting request is
admitted only when the running ones have got what they want of the step. So whoever comes second
finds what the first has computed so far, and comes in when the first one's prompt is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.ipc.kv_spec import KVGroup
from aioinfer.scheduler.block_pool import root_hash
from aioinfer.scheduler.request import Request, RequestStatus
from tests.test_scheduler import FULL, Harness, make_request, windowed

SHARED = list(range(1, 97))
#: Prompts of tests by examples begin with some of it.
TEXT = [(number * number) % 43 for number in range(200)]


def computed_of_prompts(harness: Harness) -> int:
    """Returns how many tokens the plans have computed that are no decodes."""
    return sum(
        int(length)
        for plan in harness.plans
        for length, samples in zip(plan.lengths, plan.samples, strict=True)
        if length > 1 or not samples
    )


def add_drawn_requests(
    draw: Callable[..., Any], harness: Harness, *, most: int, own: int, new: int
) -> list[Request]:
    """Adds requests with steps between them, and returns them: 2 to `most`, which begin with 1 to
    200 tokens of `TEXT`, go on with 1 to `own` of their own, and get `new`."""
    requests = []
    for number in range(draw(st.integers(2, most), "requests")):
        prompt = TEXT[: draw(st.integers(1, len(TEXT)), "length")]
        prompt += [50 + number] * draw(st.integers(1, own), "own")
        requests.append(make_request(str(number), prompt, new))
        harness.add(requests[-1])
        for _ in range(draw(st.integers(0, 4))):
            harness.step()
    return requests


def pair(own: int = 5) -> list[Request]:
    return [make_request(str(i), [*SHARED, *[200 + i] * own], 3) for i in range(2)]


def run_pair(harness: Harness, requests: list[Request]) -> int:
    harness.serve(*requests)
    return computed_of_prompts(harness)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, windowed(10)), (windowed(7),)])
@pytest.mark.parametrize("budget", [16, 33, 60, 512])
def test_what_two_prompts_share_is_computed_once(budget: int, groups: tuple[KVGroup, ...]) -> None:
    harness = Harness(token_budget=budget, prefill_cap=budget, num_blocks=256, groups=groups)
    assert run_pair(harness, pair()) == len(SHARED) + 2 * 5


@pytest.mark.parametrize("plans_ahead", [True, False])
def test_it_is_computed_once_beside_decodes_and_by_time(plans_ahead: bool) -> None:
    """Here the first prompt gets less than the step's budget: 512 tokens or more, aligned."""
    harness = Harness(
        depth=2 if plans_ahead else 1, token_budget=8192, prefill_cap=8192, num_blocks=4096,
        block_size=16, paces_prefill=True, target_itl_s=0.012,
    )  # fmt: skip
    times = harness.scheduler.pacing.times
    times.costs, times.is_known = [0.001, 0.001, 0.0, 0.0, 1e-5, 1e-9], True
    times.learn = lambda work, seconds: None  # type: ignore[method-assign]
    harness.add(make_request("decoding", [7] * 40, 60))
    harness.step()
    harness.step()
    before = computed_of_prompts(harness)
    shared = [number % 40 for number in range(4000)]
    requests = [make_request(str(i), [*shared, 41 + i, 43], 2) for i in range(3)]
    harness.serve(*requests)
    assert requests[0].num_prefill_steps > 3
    assert computed_of_prompts(harness) - before == len(shared) + 3 * 2
    assert [request.num_cached for request in requests] == [0, 4000, 4000]


def test_the_second_goes_on_where_an_aborted_first_has_ended() -> None:
    harness = Harness(token_budget=32, prefill_cap=32, num_blocks=256)
    first, second = pair()
    harness.add(first, second)
    harness.step()
    assert second.status is RequestStatus.WAITING
    harness.scheduler.finish(first, "abort")
    harness.end(second)
    assert 0 < second.num_cached < len(SHARED)
    assert computed_of_prompts(harness) == len(SHARED) + 5


def test_the_second_goes_on_where_a_preempted_first_was() -> None:
    harness = Harness(token_budget=32, prefill_cap=32, num_blocks=40)
    old = make_request("old", [9] * 8, 80)
    harness.add(old)
    harness.step()
    requests = pair()
    harness.add(*requests)
    harness.end(old, *requests)
    assert requests[1].num_cached >= len(SHARED)


def test_another_salt_shares_nothing() -> None:
    harness = Harness(token_budget=32, prefill_cap=32, num_blocks=256)
    requests = pair()
    requests[1].hash_root = root_hash(b"another")
    assert run_pair(harness, requests) == 2 * (len(SHARED) + 5)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_is_computed_twice_while_blocks_last(data) -> None:
    """Prompts are prefixes of one text with an end of their own; each block of it is computed once,
    and each prompt computes its last tokens itself."""
    draw = data.draw
    size = draw(st.sampled_from([4, 16]), "block_size")
    harness = Harness(
        token_budget=draw(st.integers(20, 200), "budget"),
        prefill_cap=draw(st.integers(8, 200), "cap"),
        num_blocks=512,
        block_size=size,
        max_num_seqs=8,
    )
    requests = add_drawn_requests(draw, harness, most=8, own=1, new=3)
    harness.end(*requests)
    ends = sum(len(r.tokens[: r.prompt_len]) % size or size for r in requests)
    assert computed_of_prompts(harness) <= 200 + ends + size * len(requests)
