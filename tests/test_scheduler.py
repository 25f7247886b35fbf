"""The scheduler's promises, checked with a worker that notices every wrong block (see
symbolic_worker)."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, StateSpec
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.kv_cache import HeldBlocks
from aioinfer.scheduler.request import NULL_BLOCK, ForkGroup, Request, Status
from aioinfer.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.symbolic_worker import VOCABULARY, SymbolicWorker, expected_output


def make_request(name: str, prompt: list[int], new: int, **fields) -> Request:
    tokens = array("i", prompt)
    return Request(
        name, tokens, len(tokens), SamplingParams(temperature=0.0), len(tokens) + new, **fields
    )


FULL = KVGroup(AttentionSpec(1, 1), (0,))
STATE = KVGroup(StateSpec(8), (2,))


def windowed(window: int) -> KVGroup:
    return KVGroup(AttentionSpec(1, 1, window), (1,))


class Harness:
    """A scheduler and a symbolic worker, stepped by hand as the engine steps them."""

    def __init__(self, *, depth: int = 2, **limits):
        """`num_blocks` may be one number, of each group."""
        groups = limits.setdefault("groups", (FULL,))
        if isinstance(limits.setdefault("num_blocks", 64), int):
            limits["num_blocks"] = (limits["num_blocks"],) * len(groups)
        defaults = {
            "block_size": 4,
            "max_num_seqs": 8,
            "token_budget": 64,
            "prefill_cap": 64,
        }
        self.limits = SchedulerLimits(**{**defaults, **limits})
        self.scheduler = Scheduler(self.limits)
        limits_ = self.limits
        self.worker = SymbolicWorker(
            limits_.groups,
            limits_.num_blocks,
            limits_.block_size,
            limits_.max_num_seqs,
            limits_.token_budget,
        )
        self.depth = depth
        self.plans: list[StepPlan] = []

    def post(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.plans.append(plan)
        self._check_owned(plan)
        self.worker.post(plan)
        return True

    def _check_owned(self, plan: StepPlan) -> None:
        """Checks that every row's request owns all blocks that the row reads: what the plan frees,
        it does not read."""
        requests = {request.slot: request for request in self.scheduler.running}
        size = self.limits.block_size
        for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True):
            for group, table in zip(self.limits.groups, requests[slot].blocks, strict=True):
                first = 0 if group.window is None else max(0, start - group.window + 1) // size
                last = (start + length - 1) // size if group.keeps_tokens else 0
                assert last < len(table)
                assert NULL_BLOCK not in table[first : last + 1], "a row reads a freed block"

    def turn(self) -> None:
        """Takes a result if the pipeline is full or nothing can be planned, as the engine does."""
        while self.scheduler.num_in_flight < self.depth and self.post():
            pass
        if self.worker.results:
            self.scheduler.update(self.worker.results.popleft())
        self.scheduler.check_integrity()

    def run(self, limit: int = 10_000) -> int:
        for turns in range(limit):
            if self.scheduler.is_idle and not self.worker.results:
                assert self.scheduler.kv_cache.num_free == sum(self.limits.num_blocks)
                return turns
            self.turn()
        raise AssertionError(f"not idle after {limit} turns: {list(self.scheduler.requests())}")

    def add(self, *requests: Request) -> None:
        for request in requests:
            assert self.scheduler.fits(request.max_len)
            self.scheduler.add(request)


def assert_complete(request: Request) -> None:
    assert request.status is Status.FINISHED
    assert request.finish_reason in ("stop", "length")
    assert request.tokens[request.prompt_len :].tolist() == expected_output(request)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_outputs_do_not_depend_on_the_schedule(depth, block_size):
    harness = Harness(depth=depth, block_size=block_size, num_blocks=512 // block_size)
    requests = [make_request(str(i), list(range(i, i + 5 + 3 * i)), 3 + i) for i in range(12)]
    harness.add(*requests)
    harness.run()
    for request in requests:
        assert_complete(request)
    assert len({tuple(r.tokens[r.prompt_len :]) for r in requests}) > 6


def test_chunked_prefill_keeps_the_budget():
    harness = Harness(token_budget=16, prefill_cap=16)
    request = make_request("long", list(range(100)), 4)
    harness.add(request)
    harness.run()
    assert_complete(request)
    assert request.num_prefill_steps == 7
    assert [p.num_tokens for p in harness.plans[:7]] == [16] * 6 + [4]


def test_prefill_cap_holds_beside_decodes_only():
    harness = Harness(token_budget=64, prefill_cap=8, num_blocks=256)
    first = make_request("first", list(range(60)), 40)
    harness.add(first)
    harness.turn()
    assert harness.plans[0].num_tokens == 60
    harness.add(make_request("second", list(range(100, 150)), 2))
    harness.run()
    beside = [p for p in harness.plans[1:] if len(p.slots) == 2 and p.lengths.max() > 1]
    assert len(beside) == 7
    assert all(p.lengths.max() <= 8 for p in beside)


def test_a_request_whose_last_token_is_on_its_way_is_no_decode():
    harness = Harness(token_budget=64, prefill_cap=8, num_blocks=256)
    harness.add(*(make_request(str(i), list(range(60 * i, 60 * i + 60)), 1) for i in range(4)))
    harness.run()
    assert [p.num_tokens for p in harness.plans] == [64, 64, 64, 48]


def test_prefix_cache_hit_leaves_one_token_to_compute():
    harness = Harness()
    prompt = list(range(32))
    first, again = make_request("first", prompt, 4), make_request("again", prompt, 4)
    longer = make_request("longer", [*prompt, 1, 2, 3], 4)
    harness.add(first)
    harness.run()
    harness.add(again, longer)
    harness.run()
    assert (first.num_cached, again.num_cached, longer.num_cached) == (0, 28, 32)
    for request in (first, again, longer):
        assert_complete(request)


def test_a_plan_carries_a_bounded_number_of_prompt_tokens(monkeypatch):
    monkeypatch.setattr("aioinfer.scheduler.scheduler.MAX_ADMITTED_TOKENS", 50)
    harness = Harness(num_blocks=256, token_budget=512, prefill_cap=512)
    requests = [make_request(str(i), [i] * 30, 2) for i in range(6)]
    harness.add(*requests)
    harness.run()
    assert [len(p.admissions) for p in harness.plans if p.admissions] == [2, 2, 2]
    for request in requests:
        assert_complete(request)


def test_prefix_caching_can_be_off():
    harness = Harness(prefix_caching=False)
    prompt = list(range(32))
    requests = [make_request(str(i), prompt, 4) for i in range(2)]
    harness.add(requests[0])
    harness.run()
    harness.add(requests[1])
    harness.run()
    assert requests[1].num_cached == 0
    assert_complete(requests[1])


def test_different_roots_do_not_share():
    harness = Harness()
    prompt = list(range(32))
    harness.add(make_request("first", prompt, 4))
    harness.run()
    other = make_request("other", prompt, 4, hash_root=b"another tenant")
    harness.add(other)
    harness.run()
    assert other.num_cached == 0


def test_generated_blocks_enter_the_prefix_cache():
    harness = Harness()
    first = make_request("first", list(range(8)), 24)
    harness.add(first)
    harness.run()
    follow_up = make_request("follow-up", [*first.tokens.tolist(), 7, 8, 9], 4)
    harness.add(follow_up)
    harness.run()
    # the last token was never computed, so its block may be lacking
    assert follow_up.num_cached >= 28
    assert_complete(follow_up)


def test_preemption_recomputes_and_resumes():
    harness = Harness(num_blocks=16, prefix_caching=False)
    requests = [make_request(str(i), [i] * 8, 40) for i in range(4)]
    harness.add(*requests)
    harness.run()
    for request in requests:
        assert_complete(request)
    assert harness.scheduler.stats.preemptions >= 3
    assert requests[0].num_preemptions == 0, "the oldest is never preempted"


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 7, 8, 33])
@pytest.mark.parametrize("caching", [True, False])
def test_siblings_share_the_prompt_and_copy_its_last_block(prompt_len, caching):
    harness = Harness(num_blocks=128, prefix_caching=caching)
    group = ForkGroup()
    siblings = [
        make_request(str(i), list(range(prompt_len)), 12, seed=i, group=group) for i in range(4)
    ]
    harness.add(*siblings)
    harness.turn()
    harness.turn()
    full = (prompt_len - 1) // 4
    assert harness.plans[0].num_tokens == prompt_len
    assert [s.blocks[0][:full] for s in siblings] == [siblings[0].blocks[0][:full]] * 4
    assert len({s.blocks[0][full] for s in siblings}) == 4
    harness.run()
    for sibling in siblings:
        assert_complete(sibling)
    assert len({tuple(s.tokens) for s in siblings}) > 1
    assert harness.worker.num_copies == (0 if (prompt_len - 1) % 4 == 0 else 3)


def test_siblings_outlive_an_aborted_leader():
    harness = Harness(token_budget=8, prefill_cap=8)
    group = ForkGroup()
    siblings = [make_request(str(i), list(range(30)), 6, seed=i, group=group) for i in range(3)]
    harness.add(*siblings)
    harness.turn()
    harness.scheduler.finish(siblings[0], "abort")
    harness.run()
    for sibling in siblings[1:]:
        assert_complete(sibling)


def test_a_stop_known_late_wastes_one_row_only():
    request = make_request("stops", [1, 2, 3], 50)
    output = expected_output(request)
    request.end_tokens = frozenset([output[3]])
    harness = Harness()
    harness.add(request)
    harness.run()
    assert request.finish_reason == "stop"
    assert request.stop_reason == output[3]
    assert request.tokens[3:].tolist() == output[: output.index(output[3]) + 1]
    assert harness.scheduler.stats.wasted_rows == 1


def test_a_length_limit_is_never_overscheduled():
    harness = Harness()
    harness.add(make_request("short", [1, 2, 3], 5))
    harness.run()
    assert harness.scheduler.stats.wasted_rows == 0
    assert [p.num_tokens for p in harness.plans] == [3, 1, 1, 1, 1]


def test_priority_goes_first_and_is_preempted_last():
    harness = Harness(by_priority=True, max_num_seqs=1)
    low, high = (
        make_request("low", [1, 2], 4, priority=5),
        make_request("high", [3, 4], 4, priority=-1),
    )
    middle = make_request("middle", [5, 6], 4, priority=0)
    harness.add(low, middle, high)
    order = []
    while not harness.scheduler.is_idle:
        harness.turn()
        order += [r.request_id for r in harness.scheduler.running if r.request_id not in order]
    assert order == ["high", "middle", "low"]


def test_priority_is_ignored_under_fcfs():
    harness = Harness(max_num_seqs=1)
    harness.add(
        make_request("first", [1], 2, priority=9), make_request("second", [2], 2, priority=0)
    )
    harness.turn()
    assert [r.request_id for r in harness.scheduler.running] == ["first"]


def test_a_failed_row_ends_its_request_alone():
    harness = Harness()
    bad, good = make_request("bad", list(range(9)), 9), make_request("good", list(range(20, 29)), 9)
    harness.add(bad, good)
    harness.post()
    result = harness.worker.results.popleft()
    tokens = result.tokens.copy()
    tokens[0] = -1
    output = harness.scheduler.update(StepResult(result.step_id, tokens))
    assert output.tokens[0] == -1
    assert bad.finish_reason == "error"
    harness.run()
    assert_complete(good)
    assert harness.scheduler.kv_cache.count_cached(bad.block_hashes) == 0, (
        "blocks of a failed request must not be found again"
    )


def test_results_out_of_order_are_refused():
    harness = Harness()
    harness.add(make_request("one", [1, 2], 4))
    harness.post()
    with pytest.raises(AssertionError, match="came where"):
        harness.scheduler.update(StepResult(7, np.zeros(1, np.int32)))


GROUPS = st.one_of(
    st.just((FULL,)),
    st.lists(
        st.one_of(st.just(FULL), st.integers(1, 30).map(windowed), st.just(STATE)),
        min_size=1,
        max_size=3,
    ).map(tuple),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_traffic(data):
    """Random groups of layers, arrivals, forks, aborts, held blocks and pool sizes: every request
    ends as if it had run alone, no row reads a freed block, and nothing leaks."""
    draw = data.draw
    block_size = draw(st.sampled_from([1, 2, 4, 16]), "block_size")
    budget = draw(st.integers(1, 40), "budget")
    groups = draw(GROUPS, "groups")
    least = [group.max_blocks(40, block_size, budget) for group in groups]
    harness = Harness(
        depth=draw(st.sampled_from([1, 2]), "depth"),
        block_size=block_size,
        groups=groups,
        num_blocks=tuple(draw(st.integers(n, 3 * n), "num_blocks") for n in least),
        max_num_seqs=draw(st.integers(1, 6), "max_num_seqs"),
        token_budget=budget,
        prefill_cap=draw(st.integers(1, budget), "prefill_cap"),
        prefix_caching=draw(st.booleans(), "caching"),
        by_priority=draw(st.booleans(), "by_priority"),
    )
    requests: list[Request] = []
    aborted: set[Request] = set()
    held: list[HeldBlocks] = []
    for number in range(draw(st.integers(1, 12), "arrivals")):
        prompt = [draw(st.integers(0, 2)) for _ in range(draw(st.integers(1, 20)))]
        ends = frozenset(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=4)))
        group = ForkGroup() if (siblings := draw(st.sampled_from([1, 1, 3]))) > 1 else None
        for sibling in range(siblings):
            request = make_request(
                f"{number}.{sibling}", prompt, draw(st.integers(1, 20)), seed=sibling,
                end_tokens=ends, group=group,
                priority=draw(st.integers(0, 3)),
            )  # fmt: skip
            harness.add(request)
            requests.append(request)
        for _ in range(draw(st.integers(0, 6))):
            _turn_and_check_order(harness)
            if draw(st.integers(0, 9)) == 0:
                victim = draw(st.sampled_from(requests))
                if victim.status is not Status.FINISHED:
                    harness.scheduler.finish(victim, "abort")
                    aborted.add(victim)
            if harness.scheduler.running and draw(st.integers(0, 9)) == 0:
                held.append(
                    harness.scheduler.hold(draw(st.sampled_from(harness.scheduler.running)))
                )
    for blocks in held:
        harness.scheduler.release(blocks)
    harness.run()
    for request in requests:
        if request not in aborted:
            assert_complete(request)


def _turn_and_check_order(harness: Harness) -> None:
    """Turns once; whoever was admitted must go before everybody who still waits, siblings of a busy
    leader excepted."""
    before = set(harness.scheduler.running)
    harness.turn()
    admitted = [r for r in harness.scheduler.running if r not in before]
    waiting = [
        r
        for r in harness.scheduler.requests()
        if r.slot < 0 and not r.group and not r.num_preemptions
    ]
    for request in admitted:
        assert all(request.key < w.key for w in waiting), "somebody overtook"
