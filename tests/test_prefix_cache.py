"""Hashes of KV blocks, blocks that are found by their first tokens, and prompts that begin alike at
the same time: what they share is computed once.

Blocks of a prompt enter the prefix cache with the plan that computes them, and a waiting request is
admitted only when the running ones have got what they want of the step. So whoever comes second
finds what the first has computed so far, and comes in when the first one is planned."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, StateSpec
from aioinfer.scheduler.block_pool import MIN_COPIED_TOKENS, PartialBlocks, extend_hashes, root_hash
from aioinfer.scheduler.kv_cache import KVCacheManager
from aioinfer.scheduler.request import Request, RequestStatus
from aioinfer.worker import kv_tensors
from aioinfer.worker.kv_tensors import KVTensors
from tests.test_kv_cache import make_request as make_long_request
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


def hashes_of(tokens: list[int], block_size: int = 4, root: bytes | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, array("i", tokens), block_size, root_hash() if root is None else root)
    return hashes


def test_only_full_blocks_have_hashes():
    assert [len(hashes_of(list(range(n)))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_a_hash_depends_on_everything_before_it():
    one, other = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([0, 2, 3, 4, 5, 6, 7, 8])
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert hashes_of([1, 2, 3, 4, 9, 9, 9, 9])[0] == one[0]


def test_extending_gives_the_same_as_hashing_anew():
    tokens = array("i", range(20))
    hashes: list[bytes] = []
    for length in (3, 9, 10, 20):
        extend_hashes(hashes, tokens[:length], 4, root_hash())
    assert hashes == hashes_of(list(range(20)))


def test_extra_keys_part_what_may_not_be_shared():
    assert hashes_of([1, 2, 3, 4]) != hashes_of([1, 2, 3, 4], root=root_hash(b"tenant"))


#: Of the harness: longer than what is worth a copy.
BLOCK = 32


def encode(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


# -------------------------------------------------------------------- which block


def test_the_block_with_most_of_the_tokens_is_found() -> None:
    blocks = PartialBlocks()
    for name, shared in ((b"a", 20), (b"b", 30), (b"c", 25)):
        blocks.add(name, b"parent", encode([*TEXT[:shared], *[99] * (40 - shared)]))
    assert blocks.find(b"parent", encode(TEXT[:40])) == (b"b", 30)
    assert blocks.find(b"parent", encode(TEXT[:27])) == (b"b", 27)
    assert blocks.find(b"another", encode(TEXT[:40])) == (b"", 0)
    blocks.remove(b"b")
    blocks.remove(b"b")
    assert blocks.find(b"parent", encode(TEXT[:40])) == (b"c", 25)
    for name in (b"a", b"c"):
        blocks.remove(name)
    assert len(blocks) == 0
    assert blocks.find(b"parent", encode(TEXT[:40])) == (b"", 0)


def test_few_tokens_are_not_worth_a_copy() -> None:
    blocks = PartialBlocks()
    blocks.add(b"a", b"parent", encode(TEXT[:40]))
    enough, few = TEXT[:MIN_COPIED_TOKENS], TEXT[: MIN_COPIED_TOKENS - 1]
    assert blocks.find(b"parent", encode([*enough, 77])) == (b"a", MIN_COPIED_TOKENS)
    assert blocks.find(b"parent", encode([*few, 77, 77])) == (b"", 0)
    assert blocks.find(b"parent", encode(few)) == (b"", 0)


# -------------------------------------------------------------------- requests


@pytest.mark.parametrize("groups", [(FULL,), (FULL, windowed(40)), (windowed(50), windowed(7))])
def test_a_prompt_begins_with_a_copy(groups: tuple[KVGroup, ...]) -> None:
    harness = Harness(
        block_size=BLOCK, num_blocks=64, token_budget=256, prefill_cap=256, groups=groups
    )
    first = make_request("first", [*TEXT[:120], *[50] * 20], 4)
    harness.serve(first)
    again = make_request("again", [*TEXT[:120], *[51] * 20], 4)
    harness.add(again)
    harness.end(first, again)
    assert (first.num_cached, again.num_cached) == (0, 120)
    assert harness.worker.num_copies == len(groups)
    assert computed_of_prompts(harness) == 140 + 20


def test_of_a_prompt_that_is_known_to_its_end_one_token_is_computed() -> None:
    harness = Harness(block_size=BLOCK, num_blocks=64, token_budget=256, prefill_cap=256)
    requests = [make_request(str(number), TEXT[: 4 * BLOCK], 3) for number in range(2)]
    for request in requests:
        harness.serve(request)
    assert requests[1].num_cached == 4 * BLOCK - 1


def test_another_salt_copies_nothing() -> None:
    harness = Harness(block_size=BLOCK, num_blocks=64, token_budget=256, prefill_cap=256)
    requests = [make_request(str(number), [*TEXT[:60], number], 3) for number in range(2)]
    requests[1].hash_root = root_hash(b"another")
    for request in requests:
        harness.serve(request)
    assert (requests[1].num_cached, harness.worker.num_copies) == (0, 0)


def test_nothing_is_copied_that_the_same_step_computes() -> None:
    """Copies come before what a step computes, so the second prompt computes the tokens itself; it
    shares the full block before them. A third one, a step later, copies."""
    harness = Harness(block_size=BLOCK, num_blocks=64, token_budget=512, prefill_cap=512)
    requests = [make_request(str(n), [*TEXT[:50], *[50 + n] * 20], 3) for n in range(3)]
    harness.add(*requests[:2])
    assert harness.post()
    harness.add(requests[2])
    harness.end(*requests)
    assert [request.num_cached for request in requests] == [0, BLOCK, 50]


def test_a_request_that_needs_all_blocks_begins_with_a_copy() -> None:
    """The block that is copied from may be among those that the request gets."""
    harness = Harness(block_size=BLOCK, num_blocks=4, token_budget=256, prefill_cap=256)
    first = make_request("first", TEXT[:100], 4)
    second = make_request("second", [*TEXT[:50], *[50] * 60], 4)
    for request in (first, second):
        harness.serve(request)
    assert second.num_cached == 50


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_outputs_are_right_whatever_is_copied(data: st.DataObject) -> None:
    """Prompts are prefixes of one text with an end of their own; blocks are short enough that they
    are evicted and requests preempted."""
    draw = data.draw
    windows = draw(st.lists(st.integers(2, 80), max_size=2), "windows")
    harness = Harness(
        depth=draw(st.sampled_from([1, 2]), "depth"),
        block_size=draw(st.sampled_from([20, BLOCK]), "block size"),
        num_blocks=draw(st.integers(14, 40), "blocks"),
        token_budget=draw(st.integers(20, 300), "budget"),
        prefill_cap=draw(st.integers(20, 300), "cap"),
        groups=(FULL, *map(windowed, windows)),
    )
    requests = add_drawn_requests(draw, harness, most=12, own=40, new=40)
    harness.end(*requests)


# -------------------------------------------------------------------- groups


def test_a_block_that_one_group_is_computing_is_not_copied() -> None:
    """The first group has kept it; the second has lost it and is recomputing it."""
    cache = KVCacheManager([FULL, windowed(20)], [20, 20], BLOCK, max_chunk=256)
    first, second, third = (make_long_request(name, 2 * BLOCK + 5) for name in "abc")
    third.tokens[BLOCK + 20] = 1  # in its second block
    for request in (first, second):
        cache.publish()
        prefix = cache.prefixes.find(request)
        cache.admit(request, prefix, len(request.tokens))
        request.num_computed = len(request.tokens)
        cache.commit(request)
        if request is first:
            cache.publish()
            assert cache.prefixes.find(third).num_tokens == BLOCK + 20
            cache.free(first)
            cache.pools[1].forget_all()
            assert cache.prefixes.find(third).num_tokens == 0
    assert cache.prefixes.find(third).num_tokens == BLOCK
    cache.publish()
    assert cache.prefixes.find(third).num_tokens == BLOCK + 20


def test_evicted_blocks_leave_no_tokens_behind() -> None:
    cache = KVCacheManager([FULL], [8], BLOCK, max_chunk=1024)
    for number in range(20):
        request = make_long_request(str(number), 4 * BLOCK + 3)
        request.tokens[0] = 1000 + number
        cache.publish()
        cache.admit(request, cache.prefixes.find(request), len(request.tokens))
        request.num_computed = len(request.tokens)
        cache.commit(request)
        cache.free(request)
    cache.publish()
    partial = cache.leading_pool.partial
    assert partial is not None
    assert len(partial) == cache.num_cached <= 8
    cache.reset_prefix_cache()
    assert len(partial) == 0


def test_blocks_too_short_for_a_copy_are_not_indexed() -> None:
    cache = KVCacheManager([FULL], [8], MIN_COPIED_TOKENS, max_chunk=1024)
    assert cache.leading_pool.partial is None


# -------------------------------------------------------------------- the copies themselves


@pytest.mark.parametrize("limit", [1, 1 << 10, 1 << 20])
def test_many_blocks_are_copied_layer_by_layer(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is copied to may be copied from in the same plan: its former content counts."""
    monkeypatch.setattr(kv_tensors, "_MAX_COPY_BYTES", limit)
    groups = [KVGroup(AttentionSpec(2, 4), (0, 1, 2)), KVGroup(AttentionSpec(1, 4, 8), (3,))]
    kv = KVTensors(groups, [6, 4], 16, torch.float32, torch.device("cpu"))
    for tensor in kv.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in kv.tensors]
    kv.copy_blocks([3, 1], torch.tensor([0, 1, 2, 3]).int(), torch.tensor([1, 2, 5, 0]).int())
    for tensor, old, places in zip(
        kv.tensors, before, ([0, 0, 1, 3, 4, 2], [3, 1, 2, 3]), strict=True
    ):
        assert torch.equal(tensor, old[:, :, places])


def test_states_are_copied_and_zeroed_in_their_own_dtype() -> None:
    groups = [KVGroup(AttentionSpec(2, 4), (1,)), KVGroup(StateSpec((3, 2), "float32"), (0, 2))]
    kv = KVTensors(groups, [3, 4], 16, torch.bfloat16, torch.device("cpu"))
    keys, states = kv.tensors
    assert (keys.shape, keys.dtype) == ((2, 1, 3, 16, 2, 4), torch.bfloat16)
    assert (states.shape, states.dtype) == ((2, 4, 3, 2), torch.float32)
    states.copy_(torch.randn(states.shape))
    old = states.clone()
    kv.copy_blocks([0, 2], torch.tensor([0, 3]).int(), torch.tensor([1, 0]).int())
    assert torch.equal(states, old[:, [3, 0, 2, 3]])
    kv.zero(2)
    assert torch.equal(states[:, 2:], old[:, 2:])
    assert not states[:, :2].any()
