"""Forked requests in the scheduler (`Scheduler.fork`): whatever they go on from, and whenever they
are preempted, each row reads the keys of its own sequence (see `symbolic_worker`), every search
ends, and all blocks and slots become free."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioinfer.ipc.kv_spec import NULL_BLOCK
from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.request_record import AppendedTokens
from aioinfer.sampling_params import BeamSearch, SamplingParams
from aioinfer.scheduler.features import StepFeature
from aioinfer.scheduler.request import ForkGroup, Request, RequestStatus, Use
from tests.symbolic_worker import SymbolicWorker, extend
from tests.test_scheduler import FULL, STATES, Harness, assert_complete, make_request, windowed


class Search:
    """Sequences of one prompt that take `length` rounds: in each of them all sample a token, and
    then go on from each other at random."""

    def __init__(self, name: str, prompt: list[int], length: int, width: int, priority: int = 0):
        group = ForkGroup() if width > 1 else None
        params = SamplingParams(beam_search=BeamSearch(width))
        self.num_rounds = 0
        self.is_aborted = False
        self.arrived: set[Request] = set()
        self.beams = [
            Request(
                f"{name}.{number}", array("i", prompt), len(prompt), params, len(prompt) + length,
                group=group, uses=(Beam(self),), priority=priority,
            )
            for number in range(width)
        ]  # fmt: skip
        for request in self.beams:
            request.plan_limit = len(prompt) + 1

    @property
    def is_over(self) -> bool:
        return all(request.status is RequestStatus.FINISHED for request in self.beams)


class Beam(Use):
    """A sequence of a search."""

    __slots__ = ("search",)
    feature: ClassVar[str] = "random_search"

    def __init__(self, search: Search):
        self.search = search

    def covers(self, start, end, samples):
        return samples


class RandomSearches(StepFeature):
    """Decides at random how the sequences of searches go on.

    Chosen tokens are often equal, so that several sequences have equal tokens. With `rewinds` they
    now and then go on from fewer tokens than they have.
    """

    name = "random_search"

    def __init__(self, rng: np.random.Generator, *, chains: bool = False, rewinds: bool = False):
        super().__init__(None)
        self.rng, self.chains, self.rewinds = rng, chains, rewinds
        self.harness: ForkHarness
        self.num_ends = 0

    def take(self, rows, result, output):
        for row in rows:
            search, request = row.use.search, row.request
            if search.is_aborted:
                continue
            assert request not in search.arrived, "a sequence has two rows in a round"
            search.arrived.add(request)
            if search.arrived == set(search.beams):
                search.arrived.clear()
                self._advance(search)
        return output

    def _advance(self, search: Search) -> None:
        search.num_rounds += 1
        beams, rng = search.beams, self.rng
        if search.is_over:
            self.num_ends += 1
            return
        length = len(beams[0].tokens) - 1
        if self.rewinds and length > beams[0].prompt_len and rng.random() < 0.3:
            length = int(rng.integers(beams[0].prompt_len, length))
        width = len(beams)
        parents = self._parents(width, is_first=search.num_rounds == 1)
        before = [request.tokens.tolist() for request in beams]
        known: dict[int, list[int]] = {}
        for number in range(width):
            parent, token = parents[number], int(rng.integers(0, 3))
            source = known.get(parent, before[parent])
            self.harness.scheduler.fork(beams[number], beams[parent], length, token)
            known[number] = [*source[:length], token]
            assert beams[number].tokens.tolist() == known[number]
            assert beams[number].num_pending == 0

    def _parents(self, width: int, *, is_first: bool) -> list[int]:
        """Returns which sequence each one goes on from. Without `chains`, one that others go on
        from goes on from itself."""
        if is_first:
            return [0] * width
        if self.chains:
            return self.rng.integers(0, width, width).tolist()
        alive = sorted({*self.rng.integers(0, width, width).tolist()})
        return [i if i in alive else int(self.rng.choice(alive)) for i in range(width)]

    def drop(self, request):
        assert request.status is RequestStatus.FINISHED


class ForkWorker(SymbolicWorker):
    """Knows the tokens of forked requests: a plan brings those alone that are computed next, which
    is all that a worker reads. It is checked that these are right."""

    forked: dict[int, Request]

    def post(self, plan: StepPlan) -> None:
        appended = plan.section(AppendedTokens)
        if appended is not None:  # the slot may hold the tokens of another sequence, or more
            for slot, position in zip(appended.slots, appended.positions, strict=True):
                if slot in self.forked:
                    self.tokens[slot] += [-1] * max(0, int(position - len(self.tokens[slot])))
        super().post(plan)

    def _copy(self, plan: StepPlan) -> None:
        """Between the tokens that a plan brings, and its rows."""
        super()._copy(plan)
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True)
        for slot, start, length in rows:
            if (request := self.forked.get(slot)) is not None:
                expected, known = request.tokens.tolist(), self.tokens[slot]
                span = slice(start, start + length)
                assert known[span] == expected[span], "a token that is computed next is wrong"
                self.tokens[slot] = expected


class CheckedHarness(Harness):
    """Checks after each step that the blocks of all running requests hold their own keys.

    Attributes:
        use: of the requests that are forked.
        worker_type: of the worker.
    """

    use: ClassVar[type[Use]] = Beam
    worker_type: ClassVar[type[ForkWorker]] = ForkWorker

    def new_worker(self) -> SymbolicWorker:
        worker = super().new_worker()
        worker.__class__ = self.worker_type
        worker.forked = {}
        return worker

    def post(self) -> bool:
        posted = super().post()
        if posted:
            for request in self.scheduler.running:
                self._check_contents(request)
        return posted

    def _check_owned(self, plan: StepPlan) -> None:
        running = self.scheduler.running
        self.worker.forked = {r.slot: r for r in running if r.use(self.use) is not None}
        super()._check_owned(plan)

    def _check_contents(self, request: Request) -> None:
        """Checks that the blocks of a request hold its own keys, as far as they are computed."""
        size, prefix = self.limits.block_size, 0
        prefixes = [prefix := extend(prefix, token) for token in request.tokens]
        for number, table in enumerate(request.blocks):
            entries = self.worker.tables[number * self.limits.max_num_seqs + request.slot]
            keeps_states = self.limits.groups[number].keeps_states
            for position in range(min(request.num_computed, len(prefixes))):
                block = table[position // size]
                if keeps_states and position + 1 not in (
                    request.num_computed, (position // size + 1) * size
                ):  # fmt: skip
                    continue  # a state is of the last token
                if block != NULL_BLOCK:
                    assert entries[position // size] == block, "a worker has another block"
                    found = self.worker.caches[number][block][
                        0 if keeps_states else position % size
                    ]
                    assert found == prefixes[position], f"{request.request_id} at {position}"


class ForkHarness(CheckedHarness):
    """Runs searches beside other requests."""

    def __init__(self, seed: int = 0, *, chains: bool = False, rewinds: bool = False, **limits):
        rng = np.random.default_rng(seed)
        self.searches = RandomSearches(rng, chains=chains, rewinds=rewinds)
        self.searches.harness = self
        super().__init__(features=[self.searches], **limits)

    def add_search(self, search: Search) -> None:
        first = search.beams[0]
        assert self.scheduler.fits_forks(first.prompt_len, first.max_len, len(search.beams))
        for request in search.beams:
            self.scheduler.add(request)


def assert_over(search: Search) -> None:
    assert search.is_over
    assert {request.finish_reason for request in search.beams} == {"length"}
    for request in search.beams:
        assert len(request.tokens) == request.max_len


@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_forks_read_their_own_keys(block_size, prefix_caching, depth, chains):
    harness = ForkHarness(
        chains=chains, depth=depth, block_size=block_size, num_blocks=1024 // block_size,
        max_num_seqs=16, prefix_caching=prefix_caching,
    )  # fmt: skip
    others = [make_request(str(i), list(range(i, i + 9)), 20) for i in range(3)]
    searches = [Search(f"s{i}", list(range(7 + i)), 12, 2 + i) for i in range(3)]
    harness.add(*others)
    for search in searches:
        harness.add_search(search)
    harness.run()
    for search in searches:
        assert_over(search)
        assert search.num_rounds == 12
        assert all(request.num_preemptions == 0 for request in search.beams)
    for other in others:
        assert_complete(other)
    assert harness.scheduler.stats.wasted_rows == 0
    # the prompts once each, its last token for each sequence, and one token a sequence and round
    expected = sum(other.prompt_len + 19 for other in others) + sum(
        search.beams[0].prompt_len + 12 * len(search.beams) - 1 for search in searches
    )
    computed = sum(plan.num_tokens for plan in harness.plans)
    if prefix_caching and block_size < 8:
        assert computed <= expected, "the prompts begin alike"
    else:
        assert computed == expected


def test_a_fork_shares_full_blocks_and_copies_the_last():
    harness = ForkHarness(depth=1, block_size=4, num_blocks=64)
    search = Search("one", list(range(10)), 8, 4)
    harness.add_search(search)
    harness.step()
    harness.step()
    assert search.num_rounds == 1
    harness.post()
    tables = [request.blocks[0] for request in search.beams]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 4
    assert len({table[2] for table in tables}) == 4
    plan = harness.plans[2]
    assert plan.copy_sources.tolist() == [tables[0][2]] * 3
    assert plan.copy_targets.tolist() == [table[2] for table in tables[1:]]
    assert plan.lengths.tolist() == [1] * 4, "nothing of the prompt is computed twice"
    assert not plan.admissions
    appended = plan.section(AppendedTokens)
    assert appended.positions.tolist() == [10] * 4
    assert appended.tokens.tolist() == [request.tokens[10] for request in search.beams]
    assert appended.counted.tolist() == [1] * 4
    assert harness.scheduler.kv_cache.num_free == 64 - 2 - 4


def test_a_sequence_that_is_to_be_forked_has_no_rows_meanwhile():
    """A search whose first sequence alone has a slot waits, and samples nothing ahead."""
    harness = ForkHarness(depth=2, num_blocks=64, max_num_seqs=2, token_budget=8, prefill_cap=8)
    other = make_request("other", list(range(50, 60)), 30)
    search = Search("one", list(range(10)), 6, 2)
    harness.add(other)
    harness.add_search(search)
    while other.status is not RequestStatus.FINISHED:
        harness.step()
        assert search.num_rounds == 0
    assert search.beams[0].num_output == 1
    assert search.beams[0].is_idle
    harness.end(other)
    assert_over(search)


def test_searches_of_which_none_has_all_of_its_slots_end():
    """Four slots for three searches of three sequences: idle ones make room for each other."""
    harness = ForkHarness(max_num_seqs=4, num_blocks=256)
    searches = [Search(name, [1, 2, 3, number], 9, 3) for number, name in enumerate("abc")]
    for beams in zip(*(search.beams for search in searches), strict=True):
        for request in beams:  # the first of each, the second of each
            harness.scheduler.add(request)
    harness.run()
    for search in searches:
        assert_over(search)
    assert harness.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_search_that_has_begun_ends_while_no_other_is_admitted(num_steps: int):
    """All of its sequences get slots then, from each other and from idle ones of other searches."""
    harness = ForkHarness(max_num_seqs=4, num_blocks=256, token_budget=8, prefill_cap=8)
    searches = [Search(name, [1, 2, 3, number], 9, 3) for number, name in enumerate("abcde")]
    for beams in zip(*(search.beams for search in searches[:3]), strict=True):
        harness.add(*beams)
    harness.add(*searches[3].beams, *searches[4].beams)
    for _ in range(num_steps):
        harness.step()
    scheduler = harness.scheduler
    begun = [search for search in searches if search.beams[0].has_begun]
    assert 0 < len(begun) < len(searches)
    scheduler.set_admission(is_open=False)
    while any(request.has_begun for request in scheduler.requests()):
        harness.step()
    for search in begun:
        assert_over(search)
    assert scheduler.num_waiting == 3 * (len(searches) - len(begun))
    scheduler.set_admission(is_open=True)
    harness.run()
    for search in searches:
        assert_over(search)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_one_idle_sequence_makes_room_for_a_request_that_goes_before(prefix_caching):
    """It alone has a slot, its search waits for a sequence that waits behind a request of higher
    priority, and this one needs all blocks."""
    harness = ForkHarness(num_blocks=8, block_size=4, max_num_seqs=2, prefix_caching=prefix_caching)
    small = make_request("small", [7] * 4, 20, priority=0)
    search = Search("one", list(range(6)), 6, 2, priority=1)
    harness.add(small)
    harness.add_search(search)
    while search.beams[0].num_output == 0:
        harness.step()
    large = make_request("large", list(range(10, 39)), 3, priority=-1)
    harness.add(large)
    harness.end(small)
    assert_complete(large)
    assert_over(search)


def test_a_sequence_that_preempts_itself_beside_idle_ones_comes_back():
    """With a token a step, the first sequence takes the last block and is idle when the second one
    needs a block: no result is on its way that would have another step planned."""
    harness = ForkHarness(
        depth=1, num_blocks=7, block_size=4, token_budget=1, prefill_cap=1, max_num_seqs=2
    )
    harness.searches._parents = lambda width, is_first: [*range(width)]  # nothing is shared again
    search = Search("one", list(range(8)), 8, 2)
    first, second = search.beams
    harness.add_search(search)
    while search.num_rounds < 2:
        harness.step()
    harness.restart()
    while not first.is_idle:
        harness.step()
    assert second.slot < 0
    harness.scheduler.kv_cache.reset_prefix_cache()  # the second one computes the prompt as well
    harness.run()
    assert second.num_preemptions > 0
    assert_over(search)


@pytest.mark.parametrize("most", [65_536, 20])
def test_table_entries_of_forks_are_bounded(monkeypatch, most):
    """A sequence that would send more is preempted: its entries count as those of an admission."""
    monkeypatch.setattr("aioinfer.scheduler.running.MAX_FORKED_ENTRIES", most)
    harness = ForkHarness(num_blocks=1024, block_size=1, max_num_seqs=8)
    search = Search("wide", list(range(5)), 30, 6)

    def parents(width: int, is_first: bool) -> list[int]:
        """Four go on from the first for eight rounds, then from the second, and so on."""
        return [0] * width if is_first else [0, 1, *[search.num_rounds // 8 % 2] * 4]

    harness.searches._parents = parents
    harness.add_search(search)
    harness.run()
    assert_over(search)
    entries = max(len(plan.table_rows) for plan in harness.plans if not plan.admissions)
    preemptions = harness.scheduler.stats.preemptions
    assert (entries <= 20 + 6, preemptions > 0) == (most == 20, most == 20)


GROUPS = st.sampled_from(
    [(FULL,), (FULL, windowed(5)), (windowed(9),), (windowed(3), FULL), (FULL, *STATES), STATES]
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_mix_of_searches_and_requests(data):
    """Random widths, lengths, pools, slots, budgets, priorities, aborts, lost workers and
    preemptions: every search ends."""
    draw = data.draw
    block_size = draw(st.sampled_from([1, 2, 4, 8, 16]), "block_size")
    groups = draw(GROUPS, "groups")
    budget = draw(st.sampled_from([1, 3, 8, 32]), "budget")
    stages, ahead = draw(st.sampled_from([1, 1, 2, 3]), "stages"), draw(st.booleans(), "ahead")
    tight = draw(st.booleans(), "tight")
    low, high = (30, 60) if tight else (60, 200)
    harness = ForkHarness(
        draw(st.integers(0, 2**32), "seed"), chains=draw(st.booleans(), "chains"),
        rewinds=draw(st.booleans(), "rewinds"), depth=stages + ahead, num_stages=stages,
        plan_ahead=ahead, groups=groups, block_size=block_size,
        num_blocks=draw(st.integers(low, high), "blocks") // block_size + draw(st.integers(1, 8)),
        max_num_seqs=draw(st.integers(1, 8), "max_num_seqs"),
        token_budget=budget,
        prefill_cap=draw(st.integers(1, budget), "prefill_cap"),
        prefix_caching=draw(st.booleans(), "caching"),
    )  # fmt: skip
    most = draw(st.sampled_from([4, 40, 16_384]), "entries")
    with mock.patch("aioinfer.scheduler.running.MAX_FORKED_ENTRIES", most):
        _check_any_mix(harness, draw)


def _check_any_mix(harness: ForkHarness, draw) -> None:
    scheduler = harness.scheduler
    requests: list[Request] = []
    searches: list[Search] = []
    for number in range(draw(st.integers(1, 7), "arrivals")):
        prompt = list(range(draw(st.integers(1, 20))))
        new, priority = draw(st.integers(1, 12)), draw(st.integers(0, 2))
        if draw(st.booleans()):
            width = draw(st.integers(1, 4))
            if scheduler.fits_forks(len(prompt), len(prompt) + new, width):
                searches.append(Search(f"s{number}", prompt, new, width, priority))
                harness.add_search(searches[-1])
        elif scheduler.fits(len(prompt) + new):
            requests.append(make_request(str(number), prompt, new, seed=number, priority=priority))
            scheduler.add(requests[-1])
        for _ in range(draw(st.integers(0, 8))):
            harness.step()
            _disturb(harness, requests, searches, draw)
    harness.run(3000)
    for request in requests:
        if request.finish_reason != "abort":
            assert_complete(request)
    for search in searches:
        if not search.is_aborted:
            assert_over(search)


def _disturb(
    harness: ForkHarness, requests: Sequence[Request], searches: Sequence[Search], draw
) -> None:
    """Sometimes aborts a request or a search, loses the workers, or empties the prefix index."""
    what = draw(st.integers(0, 29))
    if what == 0 and requests:
        harness.scheduler.finish(draw(st.sampled_from(requests)), "abort")
    elif what == 1 and searches:
        search = draw(st.sampled_from(searches))
        search.is_aborted = True
        for request in search.beams:
            harness.scheduler.finish(request, "abort")
    elif what == 2:
        harness.restart()
    elif what == 3:
        harness.scheduler.kv_cache.reset_prefix_cache()
    harness.scheduler.check_integrity()
