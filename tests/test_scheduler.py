"""The scheduler's promises, checked with a worker that notices every wrong block (see
symbolic_worker)."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from unittest import mock
from weakref import ref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioinfer.config import CacheConfig, Config, ModelConfig
from aioinfer.errors import IntegrityError
from aioinfer.features.kv_store.planning import Planning as KVStorePlanning
from aioinfer.features.masks.planning import Constrained, Planning
from aioinfer.ipc.kv_spec import NULL_BLOCK, AttentionSpec, KVGroup, StateSpec
from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.masks import ConstrainedRows
from aioinfer.ipc.plan import GROWTH_BYTES, ROW_BYTES, FreedSlots, StepPlan, StepResult
from aioinfer.ipc.request_record import RECORD, AppendedTokens
from aioinfer.ipc.ring import Ring
from aioinfer.sampling_params import MAX_END_TOKENS, MAX_LOGIT_BIAS, SamplingParams
from aioinfer.scheduler import group_blocks
from aioinfer.scheduler.features import StepFeature, StepFeatures
from aioinfer.scheduler.handover import Handover
from aioinfer.scheduler.kv_connector import DiskLimits
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.peer_connector import PeerLimits
from aioinfer.scheduler.prefix_loads import PrefixLoads
from aioinfer.scheduler.request import Finish, Flow, ForkGroup, Request, RequestStatus
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.scheduler.step_planner import StepPlanner, _Begun
from aioinfer.scheduler.steps import StepOutput
from tests.symbolic_worker import VOCABULARY, SymbolicWorker, complete, expected_output


def make_request(name: str, prompt: list[int], new: int, **fields) -> Request:
    tokens = array("i", prompt)
    params = fields.pop("params", SamplingParams(temperature=0.0))
    return Request(name, tokens, len(tokens), params, len(tokens) + new, **fields)


FULL = KVGroup(AttentionSpec(1, 1), (0,))


def windowed(window: int) -> KVGroup:
    return KVGroup(AttentionSpec(1, 1, window), (1,))


#: Layers with a state, of two tensors.
STATES = tuple(KVGroup(StateSpec((size,), "float32"), (2,)) for size in (1, 2))


class ListedMasks(Planning):
    """Lists the constrained rows of steps, and fills no masks."""

    def __init__(self):
        super().__init__(None)

    def take(self, rows, result, output):
        return output


def disk_of(groups: Sequence[KVGroup], num_files: int) -> DiskLimits:
    """Returns a disk without files, of so many for each group at most."""
    return DiskLimits([num_files] * len(groups), [()] * len(groups))


class StoreTransfers(KVStorePlanning):
    """The transfers of the store of KV, without an engine."""

    def __init__(self, scheduler: Callable[[], Scheduler]):
        config = Config(model=ModelConfig(path=""), cache=CacheConfig(host_bytes=1))
        super().__init__(SimpleNamespace(scheduler=scheduler, config=config))


#: The use of a constrained request, of `ListedMasks`.
CONSTRAINED = (Constrained(None),)


class RandomLookahead(StepFeature):
    """Asks for random numbers of lookahead rows."""

    name = "random_lookahead"
    looks_ahead = True

    def __init__(self, seed: int = 1, most: int = 4):
        super().__init__(None)
        self.chance = random.Random(seed)
        self.most = most
        self.outcomes: list[tuple[int, int]] = []

    def lookahead(self, decodes):
        return {r: self.chance.randrange(self.most + 1) for r in decodes}

    def take_lookahead(self, request, rows, kept):
        assert 0 <= kept <= rows > 0
        self.outcomes.append((rows, kept))


class Harness:
    """A scheduler and a symbolic worker, stepped by hand as the engine steps them."""

    def __init__(
        self,
        *,
        depth: int = 2,
        features: Sequence[StepFeature] = (),
        draft_quality: float = 0.5,
        **limits,
    ):
        """`num_blocks` may be one number, of each group. `features`: beside `ListedMasks`."""
        self.draft_quality = draft_quality
        groups = limits.setdefault("groups", (FULL,))
        if isinstance(limits.setdefault("num_blocks", 64), int):
            limits["num_blocks"] = (limits["num_blocks"],) * len(groups)
        defaults = {"block_size": 4, "max_num_seqs": 8, "token_budget": 64, "prefill_cap": 64}
        self.limits = SchedulerLimits(**{**defaults, **limits})
        self.now = 0.0
        store = StoreTransfers(lambda: self.scheduler)
        features = StepFeatures([*features, ListedMasks(), store])
        self.scheduler = Scheduler(self.limits, lambda: self.now, features)
        self.worker = self.new_worker()
        self.depth = depth
        self.plans: list[StepPlan] = []

    def new_worker(self) -> SymbolicWorker:
        limits = self.limits
        return SymbolicWorker(
            limits.groups, limits.num_blocks, limits.block_size, limits.max_num_seqs,
            limits.token_budget, self.draft_quality, limits.num_stored,
        )  # fmt: skip

    def restart(self) -> None:
        """Loses the worker with all that it holds and all results on their way, and goes on with a
        new one."""
        self.worker = self.new_worker()
        self.scheduler.restart(self.limits, list(self.scheduler.requests()))
        self.scheduler.check_integrity()

    def post(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.plans.append(plan)
        self._check_owned(plan)
        self.worker.post(plan)
        self._check_tiles(plan)
        return True

    def _check_tiles(self, plan: StepPlan) -> None:
        """Checks that the tiles of attention in which the windows of the rows begin hold nothing of
        other requests."""
        requests = {request.slot: request for request in self.scheduler.running}
        size, slots = self.limits.block_size, self.limits.max_num_seqs
        tile = max(1, group_blocks.MAX_ATTENTION_TILE // size)
        for slot, start in zip(plan.slots, plan.starts, strict=True):
            for number, group in enumerate(self.limits.groups):
                if group.window is not None and not group.keeps_states:
                    first = max(0, start - group.window + 1) // size
                    table = self.worker.tables[number * slots + slot]
                    for index in range(first - first % tile, first):
                        assert table[index] in requests[slot].blocks[number], (
                            "attention reads along what another request may write"
                        )

    def _check_owned(self, plan: StepPlan) -> None:
        """Checks that every row's request owns all blocks that the row reads: what the plan frees,
        it does not read."""
        requests = {request.slot: request for request in self.scheduler.running}
        size = self.limits.block_size
        admitted = {admission.slot for admission in plan.admissions}
        begins: dict[int, int] = {}  # of the first row of each slot
        for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True):
            tables = zip(self.limits.groups, requests[slot].blocks, strict=True)
            for number, (group, table) in enumerate(tables):
                first = 0 if group.window is None else max(0, start - group.window + 1) // size
                last = (start + length - 1) // size
                assert last < len(table)
                used = table[first : last + 1]
                begin = begins.setdefault(slot, start)
                keeps_inputs = slot not in admitted and self.worker.state_lens[slot] >= 0
                if group.keeps_states and keeps_inputs:
                    # the state in memory, which may be in a block that was moved to the next entry
                    entry = (self.worker.state_lens[slot] - 1) // size
                    known = self.worker.tables[number * self.limits.max_num_seqs + slot]
                    used = [table[last], known[entry] if known[entry] in table else NULL_BLOCK]
                elif group.keeps_states:
                    first = max(0, begin - 1) // size
                    is_moved = begin and begin % size == 0 and table[first] == NULL_BLOCK
                    used = [table[last], table[first if begin and not is_moved else last]]
                assert NULL_BLOCK not in used, "a row reads a freed block"

    def step(self) -> None:
        """Takes a result if the pipeline is full or nothing can be planned, as the engine does."""
        while self.scheduler.num_in_flight < self.depth and self.post():
            pass
        if self.worker.results:
            self.now += self.step_s()
            self.update()
        else:
            assert self.scheduler.is_idle, "no result is due that has another step planned"
        self.scheduler.check_integrity()

    def update(self) -> StepOutput:
        """Takes the result of the oldest posted step."""
        return self.scheduler.update(self.worker.results.popleft())

    def step_s(self) -> float:
        """What the oldest posted step took, in seconds of the scheduler's clock."""
        return 0.001

    def run(self, limit: int = 10_000) -> int:
        for steps in range(limit):
            if self.scheduler.is_idle and not self.worker.results:
                assert self.scheduler.kv_cache.num_free == sum(self.limits.num_blocks)
                return steps
            self.step()
        raise AssertionError(f"not idle after {limit} steps: {list(self.scheduler.requests())}")

    def add(self, *requests: Request) -> None:
        for request in requests:
            assert self.scheduler.fits(request.max_len)
            self.scheduler.add(request)

    def end(self, *requests: Request) -> None:
        """Runs until all is idle, and checks that these requests are complete."""
        self.run()
        for request in requests:
            assert_complete(request)

    def serve(self, *requests: Request) -> None:
        self.add(*requests)
        self.end(*requests)


def assert_complete(request: Request) -> None:
    assert request.status is RequestStatus.FINISHED
    assert request.finish_reason in ("stop", "length")
    assert request.tokens[request.prompt_len :].tolist() == expected_output(request)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, windowed(5)), (FULL, *STATES)])
def test_lookahead_changes_no_output(depth, quality, groups):
    ahead = RandomLookahead()
    harness = Harness(
        depth=depth, groups=groups, num_blocks=40, max_lookahead=9, features=[ahead],
        draft_quality=quality,
    )  # fmt: skip
    requests = [
        make_request(str(i), list(range(i, i + 5 + 3 * i)), 3 + 4 * i, end_tokens=frozenset({i, 9}))
        for i in range(9)
    ]
    harness.serve(*requests)
    assert not any(request.num_lookahead for request in requests)
    asked = sum(rows for rows, _ in ahead.outcomes)
    kept = sum(kept for _, kept in ahead.outcomes)
    assert kept == harness.worker.num_kept
    assert asked > 40
    assert (
        kept <= asked / 5 if not quality else kept == asked if quality == 1.0 else 0 < kept < asked
    )
    plans = [plan for plan in harness.plans if plan.section(LookaheadRows) is not None]
    assert max(int((plan.section(LookaheadRows).offsets > 0).sum()) for plan in plans) == 9
    assert any(not plan.section(LookaheadRows).settled.all() for plan in plans) == (depth > 1)


def test_lookahead_preempts_no_request_and_stops_before_the_last_token():
    harness = Harness(
        num_blocks=6, max_lookahead=8, features=[RandomLookahead(most=8)], draft_quality=1.0
    )
    requests = [make_request(str(i), [i] * 5, 7) for i in range(2)]
    harness.serve(*requests)
    assert harness.scheduler.stats.preemptions == 0
    assert harness.scheduler.stats.wasted_rows == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_begins_with_a_state_that_was_written(depth):
    """The states behind kept drafts are written one step later; where a request ends, never."""
    num_cached = []
    for seed in range(4):
        for length in range(1, 18):
            harness = Harness(
                depth=depth, groups=(FULL, *STATES), max_lookahead=8, draft_quality=0.9,
                features=[RandomLookahead(seed, 5)],
            )  # fmt: skip
            first = make_request("first", [1, 2, 3, 4, 5, 6], length)
            harness.serve(first)
            second = make_request("second", [*first.tokens, 7], 3)
            harness.serve(second)
            num_cached.append(len(first.tokens) - second.num_cached)
    assert max(num_cached) < 13
    assert min(num_cached) == 1


def test_a_block_with_a_wrong_draft_is_not_found_in_the_cache():
    """The last token of a full block is known before its key is computed."""
    for abort_after in range(1, 12):
        harness = Harness(
            depth=1, max_lookahead=8, features=[RandomLookahead(abort_after, 8)], draft_quality=0.5
        )
        first = make_request("first", [1, 2, 3], 30)
        harness.add(first)
        for _ in range(abort_after):
            harness.step()
        harness.scheduler.finish(first, "abort")
        again = make_request("again", first.tokens[: first.prompt_len + 25].tolist(), 5)
        harness.serve(again)


def test_chunked_prefill_keeps_the_budget():
    harness = Harness(token_budget=16, prefill_cap=16)
    request = make_request("long", list(range(100)), 4)
    harness.serve(request)
    assert request.num_prefill_steps == 7
    assert [p.num_tokens for p in harness.plans[:7]] == [16] * 6 + [4]


def test_prefill_cap_holds_beside_decodes_only():
    harness = Harness(token_budget=64, prefill_cap=8, num_blocks=256)
    first = make_request("first", list(range(60)), 40)
    harness.add(first)
    harness.step()
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
    harness.serve(first)
    harness.add(again, longer)
    harness.end(first, again, longer)
    assert (first.num_cached, again.num_cached, longer.num_cached) == (0, 28, 32)


@pytest.mark.parametrize("generates", [False, True])
def test_a_row_of_one_token_reads_no_key_that_another_one_writes_in_the_same_step(generates):
    """The last token of a block is computed by a row of its own, of a prompt or of a text."""
    harness = Harness(token_budget=7, prefill_cap=7, depth=1)
    prompt = list(range(7)) if generates else list(range(8))
    first = make_request("first", prompt, 4)
    harness.add(first)
    harness.step()
    longer = make_request("longer", [*first.tokens.tolist()[:8], 1], 4)
    harness.add(longer)
    harness.end(first, longer)
    assert longer.num_cached == 4
    beside = harness.plans[1]
    assert beside.starts.tolist() == [7, 4]
    assert beside.lengths.tolist() == [1, 5]


def test_a_plan_carries_a_bounded_number_of_bytes(monkeypatch):
    """Here two requests of 30 tokens fill it."""
    size = RECORD.itemsize + 30 * 4 + 8 * GROWTH_BYTES
    monkeypatch.setattr("aioinfer.scheduler.plan_builder.MAX_ADMITTED_BYTES", 2 * size)
    harness = Harness(num_blocks=256, token_budget=512, prefill_cap=512)
    requests = [make_request(str(i), [i] * 30, 2) for i in range(6)]
    harness.serve(*requests)
    assert [len(p.admissions) for p in harness.plans if p.admissions] == [2, 2, 2]


def test_a_request_longer_than_a_plan_should_be_goes_alone(monkeypatch):
    monkeypatch.setattr("aioinfer.scheduler.plan_builder.MAX_ADMITTED_BYTES", 100)
    harness = Harness(num_blocks=256, token_budget=512, prefill_cap=512)
    harness.add(*(make_request(str(i), [i] * 30, 2) for i in range(3)))
    harness.run()
    assert [len(p.admissions) for p in harness.plans if p.admissions] == [1, 1, 1]


@pytest.mark.parametrize("lists", ["logit_bias", "end_tokens"])
def test_all_lists_of_an_admission_count(lists, monkeypatch):
    """Requests at the bounds of what they may bring are admitted over several steps, and no plan is
    longer than was counted."""
    monkeypatch.setattr("aioinfer.scheduler.plan_builder.MAX_ADMITTED_BYTES", 20_000)
    harness = Harness(max_num_seqs=64, num_blocks=512, token_budget=1024, prefill_cap=1024)
    requests = []
    for number in range(40):
        bias = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0) if lists == "logit_bias" else {}
        ends = (
            frozenset(range(1000, 1000 + MAX_END_TOKENS)) if lists == "end_tokens" else frozenset()
        )
        params = SamplingParams(temperature=0, logit_bias=bias, min_tokens=1)
        request = make_request(str(number), [number], 1, params=params, end_tokens=ends)
        requests.append(request)
    harness.serve(*requests)
    assert sum(len(plan.admissions) for plan in harness.plans) == 40
    sizes = [sum(map(len, plan.encode())) for plan in harness.plans]
    assert max(sizes) < 20_000 + 64 * (ROW_BYTES + GROWTH_BYTES) + 200
    each = 8 * MAX_LOGIT_BIAS if lists == "logit_bias" else 4 * MAX_END_TOKENS
    assert len([p for p in harness.plans if p.admissions]) >= 40 * each // 20_000


def test_the_sequences_of_a_request_bring_their_lists_once():
    """n = 128 with as many biases as may be: one plan that is no longer than a megabyte."""
    harness = Harness(max_num_seqs=128, num_blocks=4096, token_budget=8192, prefill_cap=8192)
    params = SamplingParams(
        n=128, logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0), min_tokens=1
    )
    group, ends = ForkGroup(), frozenset(range(1000, 1000 + MAX_END_TOKENS))
    siblings = [
        make_request(
            str(i), list(range(99)), 2, seed=i, group=group, params=params, end_tokens=ends
        )
        for i in range(128)
    ]
    harness.serve(*siblings)
    assert [len(p.admissions) for p in harness.plans if p.admissions] == [1, 127]
    admissions = harness.plans[1].admissions
    lists = (admissions.tokens, admissions.bias_ids, admissions.banned_ids)
    assert [len(values) for values in lists] == [99, MAX_LOGIT_BIAS, MAX_END_TOKENS]
    assert sum(map(len, harness.plans[1].encode())) < 2**20


def test_step_ids_go_past_2_to_the_31_through_a_ring():
    harness, ring = Harness(), Ring(1)
    harness.scheduler._step_id = 2**31 - 2
    harness.add(make_request("one", [1, 2, 3], 6))
    plans = []
    while not harness.scheduler.is_idle:
        plan = harness.scheduler.schedule()
        if plan is not None:
            ring.write(plan.encode())
            plans.append(StepPlan.decode(bytes(ring.read(0))))
            ring.release(0)
            harness.worker.post(plans[-1])
        if harness.worker.results:
            ring.write(harness.worker.results.popleft().encode())
            result = StepResult.decode(ring.read(0))
            ring.release(0)
            harness.scheduler.update(result)
    ring.close()
    assert [plan.step_id for plan in plans] == [2**31 - 2 + step for step in range(6)]


def test_slots_with_penalties_are_named_as_vacated():
    """With the next plan, once for each request; slots without are not named."""
    harness = Harness()
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    with_penalty = make_request("with", [1, 2, 3], 2, params=params)
    without = make_request("without", [4, 5, 6], 2)
    longer = make_request("longer", [7, 8, 9], 9)
    harness.add(with_penalty, without, longer)
    slot = None
    while not harness.scheduler.is_idle:
        harness.step()
        slot = slot if with_penalty.slot < 0 else with_penalty.slot
    freed_slots = [
        p.section(FreedSlots) for p in harness.plans if p.section(FreedSlots) is not None
    ]
    assert [section.slots.tolist() for section in freed_slots] == [[slot]]


def test_prefix_caching_can_be_off():
    harness = Harness(prefix_caching=False)
    prompt = list(range(32))
    requests = [make_request(str(i), prompt, 4) for i in range(2)]
    harness.add(requests[0])
    harness.run()
    harness.serve(requests[1])
    assert requests[1].num_cached == 0


def test_different_roots_do_not_share():
    harness = Harness()
    prompt = list(range(32))
    harness.add(make_request("first", prompt, 4))
    harness.run()
    other = make_request("other", prompt, 4, hash_root=b"another tenant")
    harness.serve(other)
    assert other.num_cached == 0


def test_generated_blocks_enter_the_prefix_cache():
    harness = Harness()
    first = make_request("first", list(range(8)), 24)
    harness.serve(first)
    follow_up = make_request("follow-up", [*first.tokens.tolist(), 7, 8, 9], 4)
    harness.serve(follow_up)
    # the last token was never computed, so its block may be lacking
    assert follow_up.num_cached >= 28


def test_preemption_recomputes_and_resumes():
    harness = Harness(num_blocks=16, prefix_caching=False)
    requests = [make_request(str(i), [i] * 8, 40) for i in range(4)]
    harness.serve(*requests)
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
    harness.step()
    harness.step()
    full = (prompt_len - 1) // 4
    assert harness.plans[0].num_tokens == prompt_len
    assert [s.blocks[0][:full] for s in siblings] == [siblings[0].blocks[0][:full]] * 4
    assert len({s.blocks[0][full] for s in siblings}) == 4
    harness.end(*siblings)
    assert len({tuple(s.tokens) for s in siblings}) > 1
    assert harness.worker.num_copies == (0 if (prompt_len - 1) % 4 == 0 else 3)


def test_a_stop_known_late_wastes_one_row_only():
    request = make_request("stops", [1, 2, 3], 50)
    output = expected_output(request)
    request.end_tokens = frozenset([output[3]])
    harness = Harness()
    harness.serve(request)
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


def test_priority_goes_first():
    harness = Harness(max_num_seqs=1)
    low, high = (
        make_request("low", [1, 2], 4, priority=5),
        make_request("high", [3, 4], 4, priority=-1),
    )
    middle = make_request("middle", [5, 6], 4, priority=0)
    harness.add(low, middle, high)
    order = []
    while not harness.scheduler.is_idle:
        harness.step()
        order += [r.request_id for r in harness.scheduler.running if r.request_id not in order]
    assert order == ["high", "middle", "low"]


@pytest.mark.parametrize("low_first", [True, False])
def test_low_priority_is_preempted_first_whoever_came_first(low_first):
    harness = Harness(num_blocks=12, prefix_caching=False)
    low = make_request("low", [1] * 8, 30, priority=5)
    high = make_request("high", [2] * 8, 30, priority=-1)
    harness.add(*((low, high) if low_first else (high, low)))
    harness.end(low, high)
    assert low.num_preemptions > 0
    assert high.num_preemptions == 0


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
    harness.end(good)
    assert harness.scheduler.kv_cache.prefixes.count_cached(bad.block_hashes) == 0, (
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
        st.one_of(st.just(FULL), st.integers(1, 30).map(windowed)), min_size=1, max_size=3
    ).map(tuple),
    st.sampled_from([(FULL, *STATES), STATES[:1], (FULL, windowed(7), *STATES)]),
)
# ---------------------------------------------------------------- waiting requests


def test_requests_that_are_aborted_while_they_wait_are_not_kept():
    harness = Harness(max_num_seqs=1)
    harness.add(make_request("runs", [1, 2], 100))
    harness.step()
    first, *others = [make_request(str(number), [1] * 50, 5, priority=0) for number in range(8)]
    harness.add(first, *others)
    aborted = []
    for number in range(200):
        request = make_request("aborted", [1] * 50, 5, priority=number % 3)
        harness.add(request)
        harness.scheduler.finish(request, "abort")
        harness.scheduler.check_integrity()
        aborted.append(ref(request))
    del request
    kept = [request for request in (each() for each in aborted) if request is not None]
    assert len(kept) <= harness.scheduler.num_waiting == 8
    harness.run()
    assert all(request.finish_reason == "length" for request in (first, *others))


@pytest.mark.parametrize("groups", [(FULL,), (FULL, windowed(5)), (FULL, *STATES)])
def test_requests_that_have_ended_are_not_kept(groups):
    """What was noted for the next plan goes with them: it may be made hours later, and until then a
    request would keep its pictures."""
    for num_steps in range(1, 24):
        harness = Harness(groups=groups, max_num_seqs=2, token_budget=6, prefill_cap=6)
        requests = [make_request(str(number), [number] * 9, 20) for number in range(3)]
        harness.add(*requests)
        for _ in range(num_steps):
            harness.step()
        for request in requests:
            harness.scheduler.finish(request, "abort")
        while harness.worker.results:
            harness.update()
        kept = [ref(request) for request in requests]
        del request, requests
        assert [each() for each in kept] == [None] * 3, num_steps


# ---------------------------------------------------------------- constrained requests


def test_a_plan_lists_the_sampled_rows_of_constrained_requests():
    """By their places in the result, also of a prompt's last chunk and after a preemption."""
    harness = Harness(num_blocks=9, token_budget=6)
    requests = [
        make_request(str(number), [number] * 7, 9, uses=CONSTRAINED if number != 1 else ())
        for number in range(3)
    ]
    harness.add(*requests)
    scheduler, num_listed, seen = harness.scheduler, 0, set()
    while not scheduler.is_idle:
        while scheduler.num_in_flight < 2 and harness.post():
            listed = harness.plans[-1].section(ConstrainedRows)
            rows = [] if listed is None else listed.rows.tolist()
            sampled = scheduler._posted.last.sampled
            assert rows == [i for i, request in enumerate(sampled) if request.uses]
            num_listed += len(rows)
            seen.add((len(rows), len(sampled)))
        scheduler.update(harness.worker.results.popleft())
        scheduler.check_integrity()
    for request in requests:
        assert_complete(request)
    assert scheduler.stats.preemptions > 0
    assert num_listed == 2 * 9
    assert {(1, 1), (1, 2)} <= seen


@pytest.mark.parametrize("depth", [1, 2])
def test_appended_tokens_are_computed_in_one_row(depth: int) -> None:
    """Behind a prompt of five tokens: the row that was posted ahead samples the first of them in
    vain, and nothing else."""
    harness = Harness(depth=depth)
    request = make_request("appended", [1, 2, 3, 4, 5], 12, uses=CONSTRAINED)
    harness.add(request)
    harness.step()
    expected = expected_output(request)
    assert (request.num_output, request.num_pending) == (1, depth - 1)
    assert harness.scheduler.append(request, expected[1:6]) == (5, None)
    assert (request.num_output, request.num_pending) == (6, 0)
    harness.scheduler.check_integrity()
    harness.end(request)
    rows = [(int(p.starts[0]), int(p.lengths[0])) for p in harness.plans]
    # with depth 1 the first token is still to be computed, too
    after = [(6, 5)] if depth == 2 else [(5, 6)]
    assert rows == [(0, 5), (5, 1)][:depth] + after + [(at, 1) for at in range(11, 16)]
    (appended,) = [s for p in harness.plans if (s := p.section(AppendedTokens)) is not None]
    assert appended.tokens.tolist() == expected[1:6]
    assert appended.positions.tolist() == [6, 7, 8, 9, 10]
    assert appended.counted.tolist() == [0 if depth == 2 else 1, 1, 1, 1, 1]
    assert harness.scheduler.stats.wasted_rows == depth - 1


def test_a_request_ends_within_its_appended_tokens() -> None:
    expected = complete([1, 2, 3], 99, frozenset(), 0)
    end = next(i for i in range(3, 90) if expected[i] not in expected[:i])
    stops = make_request("stops", [1, 2, 3], 90, end_tokens=frozenset([expected[end]]))
    short = make_request("short", [1, 2, 3], 4)
    harness = Harness(num_blocks=256)
    harness.add(stops, short)
    harness.step()
    found = harness.scheduler.append(stops, expected[1 : end + 5])
    assert found == (end, Finish("stop", expected[end]))
    assert harness.scheduler.append(short, expected[1:60]) == (3, Finish("length"))
    assert (stops.finish_reason, stops.stop_reason) == ("stop", expected[end])
    assert (short.finish_reason, short.num_output) == ("length", 4)
    harness.scheduler.check_integrity()
    harness.run()
    assert all(plan.section(AppendedTokens) is None for plan in harness.plans)


def test_a_plan_takes_so_many_appended_tokens_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioinfer.scheduler.running.MAX_APPENDED_TOKENS", 8)
    harness = Harness()
    requests = [make_request(str(number), [number] * 3, 30) for number in range(3)]
    harness.add(*requests)
    harness.step()
    taken = [
        harness.scheduler.append(request, expected_output(request)[1:6])[0] for request in requests
    ]
    assert taken == [5, 0, 0]
    harness.end(*requests)


# ---------------------------------------------------------------- rows of several tokens


@pytest.mark.parametrize("steps", range(12))
def test_after_a_loss_of_workers_requests_end_as_they_would_have(steps: int) -> None:
    harness = Harness(max_num_seqs=2, num_blocks=12)
    group = ForkGroup()
    requests = [
        make_request(str(number), [prompt] * 9, 8, seed=number, group=group if prompt else None)
        for number, prompt in enumerate([0, 0, 2, 2, 2])
    ]
    harness.add(*requests)
    for _ in range(steps):
        harness.step()
    ran = [request for request in requests if request.slot >= 0]
    known = [len(request.tokens) for request in requests]
    harness.restart()
    scheduler = harness.scheduler
    assert (scheduler.num_in_flight, scheduler.running) == (0, [])
    assert [len(request.tokens) for request in requests] == known
    assert scheduler.kv_cache.num_free_cached == 0
    assert harness.post()
    assert not ran or min(ran) in scheduler.running, "whoever came first goes first"
    harness.end(*requests)


def test_records_that_are_made_anew_keep_who_waits_and_drop_what_is_on_its_way() -> None:
    harness = Harness(max_num_seqs=2)
    requests = [make_request(str(number), [number] * 9, 8) for number in range(4)]
    harness.add(*requests)
    harness.post()
    harness.post()
    scheduler = harness.scheduler
    scheduler._running.free_slots.append(0)
    with pytest.raises(IntegrityError, match="a slot was lost or given twice"):
        scheduler.check_integrity()
    scheduler.rebuild(requests[2:], requests[:2])
    scheduler.check_integrity()
    assert [request.finish_reason for request in requests] == ["error", "error", None, None]
    harness.end(*requests[2:])
    assert scheduler.stats.wasted_rows == 4
    assert [request.num_output for request in requests[:2]] == [0, 0]
    assert harness.plans[2].section(FreedSlots).slots.tolist() == list(range(2))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_traffic(data):
    """Random groups of layers, numbers of stages, arrivals, flows, forks, blocked requests, rows of
    several tokens, aborts, held blocks, lost workers and pool sizes: every request ends as if it
    had run alone, no row reads a freed block, and nothing leaks."""
    draw = data.draw
    block_size = draw(st.sampled_from([1, 2, 4, 16]), "block_size")
    budget = draw(st.integers(1, 40), "budget")
    groups = draw(GROUPS, "groups")
    tile = draw(st.sampled_from([1, 8, group_blocks.MAX_ATTENTION_TILE]), "tile of attention")
    with mock.patch.object(group_blocks, "MAX_ATTENTION_TILE", tile):
        _check_random_traffic(draw, block_size, budget, groups)


def _check_random_traffic(draw, block_size: int, budget: int, groups: tuple[KVGroup, ...]) -> None:
    minimum = [group.max_blocks(40, block_size, budget) for group in groups]
    stages, ahead = draw(st.sampled_from([1, 1, 2, 3]), "stages"), draw(st.booleans(), "ahead")
    harness = Harness(
        depth=stages + ahead,
        num_stages=stages,
        plan_ahead=ahead,
        block_size=block_size,
        groups=groups,
        num_blocks=tuple(draw(st.integers(n, 3 * n), "num_blocks") for n in minimum),
        max_num_seqs=draw(st.integers(1, 6), "max_num_seqs"),
        token_budget=budget,
        prefill_cap=draw(st.integers(1, budget), "prefill_cap"),
        paces_prefill=draw(st.booleans(), "paces"),
        target_itl_s=draw(st.sampled_from([None, 0.001, 0.01]), "target"),
        prefix_caching=draw(st.booleans(), "caching"),
        max_lookahead=0 if stages > 1 else draw(st.integers(0, 12), "lookahead"),
        features=[RandomLookahead(draw(st.integers(0, 9), "seed of the lookahead"))],
        draft_quality=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]), "drafts"),
        num_stored=draw(
            st.sampled_from([(), tuple(minimum), tuple(10 * n for n in minimum)]), "stored"
        ),
        disk=draw(st.sampled_from([None, disk_of(groups, 9), disk_of(groups, 99)]), "disk"),
        peers=draw(st.sampled_from([None, PeerLimits("peer:1", 0, 1)]), "peers"),
    )

    def delay_loads() -> None:
        harness.worker.load_steps = lambda: draw(st.integers(0, 3))
        harness.worker.is_broken = lambda: draw(st.integers(0, 5)) == 0

    delay_loads()
    if harness.limits.paces_prefill:
        harness.step_s = lambda: draw(st.sampled_from([0.0, 0.001, 0.002, 0.1]))
    flows = draw(st.integers(1, 3), "flows")
    requests: list[Request] = []
    aborted: set[Request] = set()
    for number in range(draw(st.integers(1, 12), "arrivals")):
        prompt = [draw(st.integers(0, 2)) for _ in range(draw(st.integers(1, 20)))]
        ends = frozenset(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=4)))
        group = ForkGroup() if (siblings := draw(st.sampled_from([1, 1, 3]))) > 1 else None
        for sibling in range(siblings):
            request = make_request(
                f"{number}.{sibling}", prompt, draw(st.integers(1, 20)), seed=sibling,
                end_tokens=ends, group=group,
                priority=draw(st.integers(0, 3)),
                flow=Flow(str(number % flows), 1.0 + number % flows),
                uses=CONSTRAINED if number % 3 == 0 else (),
            )  # fmt: skip
            request.retain_s = draw(st.sampled_from([0.0, 0.0, 300.0]))
            if draw(st.booleans()):
                offered = [[(0, draw(st.integers(0, 20)))] for _ in groups]
                request.handover = Handover("peer:1", 0, 1, offered)
            harness.add(request)
            requests.append(request)
        for _ in range(draw(st.integers(0, 6))):
            _step_and_check_order(harness)
            if draw(st.integers(0, 9)) == 0:
                victim = draw(st.sampled_from(requests))
                if victim.status is not RequestStatus.FINISHED:
                    harness.scheduler.finish(victim, "abort")
                    aborted.add(victim)
            if draw(st.integers(0, 19)) == 0:
                harness.restart()
                delay_loads()
            _append_some(harness, draw)
    harness.run()
    for request in requests:
        if request not in aborted:
            assert_complete(request)


def _append_some(harness: Harness, draw) -> None:
    """Sometimes takes what a running request is going to sample as appended."""
    may = [r for r in harness.scheduler.running if r.uses]
    if not may or draw(st.integers(0, 3)):
        return
    request = draw(st.sampled_from(may))
    if request.num_output and request.num_pending <= 1 + request.num_lookahead:
        wanted = expected_output(request)[request.num_output :][: draw(st.integers(1, 9))]
        kept = 0
        if request.num_lookahead:  # how many drafts the posted step has kept
            kept = harness.worker.next_start[request.slot] - len(request.tokens)
        if len(wanted) > kept:
            may_refuse = harness.limits.keeps_states and not request.num_pending
            taken, _ = harness.scheduler.append(request, wanted, kept)
            assert taken == len(wanted) or (may_refuse and not taken)
            harness.scheduler.check_integrity()


def _step_and_check_order(harness: Harness) -> None:
    """Steps once; a request that was admitted must go before all that still wait, but the ones that
    wait for another one's prompt, state or blocks."""
    before, await_blocks = set(harness.scheduler.running), set()
    begin_load = StepPlanner._begin_load

    def record(planner: StepPlanner, request: Request, loads: PrefixLoads) -> _Begun | None:
        begun = begin_load(planner, request, loads)
        if begun is _Begun.ELSEWHERE:
            await_blocks.add(request)
        return begun

    with mock.patch.object(StepPlanner, "_begin_load", record):
        harness.step()
    admitted = [r for r in harness.scheduler.running if r not in before]
    waiting = [
        r
        for r in harness.scheduler.requests()
        if r.status is RequestStatus.WAITING
        and not (r.group or r.num_preemptions or r.num_awaited or r in await_blocks)
    ]
    for request in admitted:
        assert all(request.key < w.key for w in waiting), "somebody overtook"


@pytest.mark.parametrize(
    ("decodes", "chunk"), [(4, 2044), (100, 1948), (128, 2048), (250, 2048), (256, 2048)]
)
def test_chunks_beside_decodes_fill_tiles(decodes: int, chunk: int) -> None:
    """As many tokens as fill whole tiles of 256 with the decodes, but where the last tile would be
    half full at least."""
    harness = Harness(
        max_num_seqs=512, num_blocks=4096, token_budget=8192, prefill_cap=2048, block_size=16
    )
    harness.add(*(make_request(str(number), [number, 1], 60) for number in range(decodes)))
    harness.step()
    harness.add(make_request("long", [7] * 9000, 4))
    harness.step()
    lengths = [plan.lengths.max() for plan in harness.plans if len(plan.slots) > decodes]
    assert lengths[0] == chunk
    harness.run()
