"""Beams in the scheduler: whatever they go on from, and whenever they are preempted, each row reads
its own beam's keys and nobody else's (see `symbolic_worker`), and everything is given back."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioinfer.ipc.plan import StepPlan
from aioinfer.sampling_params import BeamSearch, SamplingParams
from aioinfer.scheduler.request import Beam, BeamGroup, ForkGroup, Request, Status
from tests.symbolic_worker import SymbolicWorker
from tests.test_scheduler import FULL, Harness, assert_complete, make_request, windowed


def make_beams(name: str, prompt: list[int], new: int, width: int) -> Request:
    """Returns the leader of a search whose beams get `new` tokens."""
    group = ForkGroup() if width > 1 else None
    params = SamplingParams(beam_search=BeamSearch(width))
    requests = [
        Request(name, array("i", prompt), len(prompt), params, len(prompt) + new, group=group)
        for _ in range(width)
    ]
    beams = BeamGroup([Beam(request) for request in requests], num_candidates=width)
    for request in requests:
        request.beams, request.plan_limit = beams, 0
    return requests[0]


class BeamWorker(SymbolicWorker):
    """Knows the beams' tokens: a plan brings those alone that are computed next, which is all that
    a worker reads. It is checked that these are right."""

    beams: dict[int, Request]

    def _execute(self, plan: StepPlan):
        self.plan = plan
        return super()._execute(plan)

    def _copy(self, plan: StepPlan) -> None:
        """Between what a plan brings and its rows."""
        super()._copy(plan)
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True)
        for slot, start, length in rows:
            if (request := self.beams.get(slot)) is not None:
                expected, known = request.tokens.tolist(), self.tokens[slot]
                span = slice(start, start + length)
                assert known[span] == expected[span], "a token that is computed next is wrong"
                self.tokens[slot] = expected

    def post(self, plan: StepPlan) -> None:
        for section in plan.sections:
            if type(section).__name__ == "ForcedTokens":  # the slot holds another beam's tokens
                for slot, position in zip(section.slots, section.positions, strict=True):
                    if slot in self.beams:
                        missing = position - len(self.tokens[slot])
                        self.tokens[slot] += [-1] * max(0, int(missing))
        super().post(plan)


class BeamHarness(Harness):
    """Plays the engine's part: decides at random how beams go on."""

    def __init__(self, rng: np.random.Generator, **limits):
        super().__init__(**limits)
        self.rng = rng
        self.rows: dict[Request, tuple[int, set[Request]]] = {}
        self.num_rounds: dict[Request, int] = {}

    def new_worker(self) -> BeamWorker:
        worker = super().new_worker()
        worker.__class__ = BeamWorker
        worker.beams = {}
        return worker

    def _check_owned(self, plan: StepPlan) -> None:
        beams = [
            beam.request
            for leader in self.scheduler.running
            for beam in (leader.beams.beams if leader.beams is not None else ())
        ]
        self.worker.beams = {request.slot: request for request in beams}
        running = self.scheduler.running
        self.scheduler._running.requests = [*running, *beams]
        super()._check_owned(plan)
        self.scheduler._running.requests = running

    def _check_tiles(self, plan: StepPlan) -> None:
        running = self.scheduler.running
        self.scheduler._running.requests = [*running, *self.worker.beams.values()]
        super()._check_tiles(plan)
        self.scheduler._running.requests = running

    def step(self) -> None:
        while self.scheduler.num_in_flight < self.depth and self.post():
            pass
        if self.worker.results:
            output = self.scheduler.update(self.worker.results.popleft())
            for _, request in output.beam_rows:
                self.take(request)
        self.scheduler.check_integrity()

    def take(self, request: Request) -> None:
        group = request.beams
        leader, width = group.leader, len(group.beams)
        number, arrived = self.rows.get(leader, (group.num_detached, set()))
        arrived = arrived if number == group.num_detached else set()
        assert request not in arrived, "a beam has two rows in a round"
        arrived.add(request)
        self.rows[leader] = group.num_detached, arrived
        rounds = self.num_rounds.get(leader, 0)
        if len(arrived) < (width if rounds else 1):
            return
        assert rounds or arrived == {leader}
        arrived.clear()
        if rounds + 1 == leader.max_len - leader.prompt_len:
            self.scheduler.finish(leader, "length")
            return
        self.num_rounds[leader] = rounds + 1
        alive = sorted({0} if not rounds else {*self.rng.integers(0, width, width).tolist()})
        parents = [i if i in alive else int(self.rng.choice(alive)) for i in range(width)]
        tokens = self.rng.integers(0, 50, width).tolist()
        before = [b.request.tokens.tolist() for b in group.beams]
        self.scheduler.advance(group, parents, tokens)
        for beam, parent, token in zip(group.beams, parents, tokens, strict=True):
            assert beam.request.tokens.tolist() == [*before[parent], token]

    def add_beams(self, leader: Request) -> None:
        assert self.scheduler.fits_request(leader)
        self.scheduler.add(leader)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_read_their_own_keys(depth, prefix_caching, block_size):
    harness = BeamHarness(
        rng(),
        depth=depth,
        block_size=block_size,
        num_blocks=512 // block_size,
        max_num_seqs=16,
        prefix_caching=prefix_caching,
    )
    others = [make_request(str(i), list(range(i, i + 9)), 20) for i in range(3)]
    leaders = [make_beams(f"s{i}", list(range(7 + i)), 12, 2 + i) for i in range(3)]
    harness.add(*others)
    for leader in leaders:
        harness.add_beams(leader)
    harness.run()
    for leader in leaders:
        assert (leader.status, leader.num_output) == (Status.FINISHED, 11)
    for other in others:
        assert_complete(other)
    assert harness.scheduler.stats.wasted_rows == 0


def test_a_fork_shares_full_blocks_and_copies_the_last():
    harness = BeamHarness(rng(), depth=1, block_size=4, num_blocks=64)
    leader = make_beams("one", list(range(10)), 8, 4)
    harness.add_beams(leader)
    harness.step()
    harness.post()
    tables = [beam.request.blocks[0] for beam in leader.beams.beams]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 4
    assert len({table[2] for table in tables}) == 4
    plan = harness.plans[1]
    assert plan.copy_sources.tolist() == [tables[0][2]] * 3
    assert plan.lengths.tolist() == [1] * 4, "nothing of the prompt is computed twice"
    assert not plan.admissions, "the records came with the prompt"
    assert harness.scheduler.kv_cache.num_free == 64 - 2 - 4


def test_a_group_gets_all_of_its_slots_or_none():
    """Two groups that need three of five slots each run one after the other."""
    harness = BeamHarness(rng(), max_num_seqs=5)
    first, second = (make_beams(name, [1, 2, 3], 6, 3) for name in "ab")
    harness.add_beams(first)
    harness.add_beams(second)
    while first.status is not Status.FINISHED:
        harness.step()
        if first.status is not Status.FINISHED:
            assert second.slot < 0 or second.status is Status.FINISHED
    harness.run()
    assert second.status is Status.FINISHED


def test_a_search_counts_as_many_times_as_it_has_beams():
    harness = BeamHarness(rng(), max_num_seqs=5)
    scheduler = harness.scheduler
    for name in "ab":
        harness.add_beams(make_beams(name, [1, 2, 3], 6, 3))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 6)
    assert (scheduler.num_waiting_tokens, scheduler.num_waiting_of("")) == (18, 6)
    harness.step()
    assert (scheduler.num_running, scheduler.num_free_slots) == (3, 2)
    assert (scheduler.num_waiting, scheduler.num_waiting_of("")) == (3, 3)
    harness.run()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_beams_are_preempted_together_and_share_again_what_they_have_in_common():
    harness = BeamHarness(rng(), num_blocks=24, block_size=4, max_num_seqs=8, prefix_caching=False)
    first = make_request("first", list(range(40)), 40)
    leader = make_beams("beams", list(range(100, 116)), 12, 3)
    harness.add(first)
    harness.add_beams(leader)
    harness.run()
    assert leader.num_preemptions > 0
    assert leader.num_output == 11
    assert_complete(first)


def test_a_group_needs_no_more_bytes_of_a_plan_than_there_are(monkeypatch):
    monkeypatch.setattr("aioinfer.scheduler.plan_builder.MAX_ADMITTED_BYTES", 600)
    harness = BeamHarness(rng(), num_blocks=512, block_size=1, token_budget=256, prefill_cap=256)
    leader = make_beams("wide", list(range(40)), 6, 6)
    harness.add_beams(leader)
    harness.run()
    assert leader.num_output == 5
    assert max(len(plan.table_rows) for plan in harness.plans[1:]) < 2 * 50


def test_beams_go_on_with_new_workers():
    harness = BeamHarness(rng(), num_blocks=64)
    leader = make_beams("one", list(range(10)), 12, 4)
    harness.add_beams(leader)
    for _ in range(8):
        harness.step()
    assert leader.num_output > 2
    harness.restart()
    harness.run()
    assert leader.num_output == 11


GROUPS = st.sampled_from([(FULL,), (FULL, windowed(5)), (windowed(9),)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_mix_of_searches_and_requests(data):
    """Random widths, lengths, pools, budgets, aborts and preemptions."""
    groups = data.draw(GROUPS)
    block_size = data.draw(st.sampled_from([1, 2, 4, 8]))
    harness = BeamHarness(
        np.random.default_rng(data.draw(st.integers(0, 2**32))),
        depth=data.draw(st.sampled_from([1, 2])),
        groups=groups,
        block_size=block_size,
        num_blocks=data.draw(st.integers(60, 200)) // block_size + 8,
        max_num_seqs=data.draw(st.integers(4, 10)),
        token_budget=(budget := data.draw(st.sampled_from([3, 8, 32]))),
        prefill_cap=budget,
        prefix_caching=data.draw(st.booleans()),
    )
    requests: list[Request] = []
    for number in range(data.draw(st.integers(1, 6))):
        prompt = list(range(data.draw(st.integers(1, 20))))
        new = data.draw(st.integers(1, 16))
        if data.draw(st.booleans()):
            request = make_beams(str(number), prompt, new, data.draw(st.integers(1, 4)))
            fits = harness.scheduler.fits_request(request)
        else:
            request = make_request(str(number), prompt, new, seed=number)
            fits = harness.scheduler.fits(request.max_len)
        if fits:
            harness.scheduler.add(request)
            requests.append(request)
        for _ in range(data.draw(st.integers(0, 6))):
            harness.step()
        if requests and data.draw(st.integers(0, 5)) == 0:
            harness.scheduler.finish(data.draw(st.sampled_from(requests)), "abort")
            harness.scheduler.check_integrity()
    harness.run()
    for request in requests:
        if request.finish_reason == "abort":
            continue
        if request.beams is None:
            assert_complete(request)
        else:
            assert request.num_output == request.max_len - request.prompt_len - 1
