"""Which requests go into which step of a pipeline with several stages."""

from __future__ import annotations

from itertools import pairwise

import pytest

from aioinfer.scheduler.request import Request
from tests.test_scheduler import Harness, assert_complete, make_request


class Pipeline(Harness):
    """Notes which requests each step samples, and that a token is never needed before the last
    stage has sampled it, unless nothing else could have been computed."""

    def __init__(self, num_stages: int, *, plan_ahead: bool = True, **limits: int):
        depth = num_stages + plan_ahead
        limits = {"max_num_seqs": 64, "token_budget": 512, "prefill_cap": 512} | limits
        super().__init__(
            depth=depth, num_stages=num_stages, plan_ahead=plan_ahead, num_blocks=512, **limits
        )
        self.sampled: list[list[Request]] = []
        self.num_early = 0

    def post(self) -> bool:
        before = {r: (r.num_pending, r.sampled_step) for r in self.scheduler.running}
        if not super().post():
            return False
        self.sampled.append(list(self.scheduler._posted.last.sampled))
        rows = [before[r] for r in self.sampled[-1] if r in before]
        assert all(pending < 2 for pending, _ in rows), "two tokens are unknown already"
        due = len(self.sampled) - 1 - self.limits.num_stages
        early = [step > due for pending, step in rows if pending]
        assert not any(early) or all(early)
        self.num_early += any(early)
        return True


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_requests_that_come_together_are_divided_evenly(num_stages: int) -> None:
    pipeline = Pipeline(num_stages)
    requests = [make_request(str(number), [number, 1, 2], 20) for number in range(13)]
    pipeline.add(*requests)
    pipeline.run()
    for request in requests:
        assert_complete(request)
    sizes = [len(step) for step in pipeline.sampled]
    assert sizes[0] == 13, "the prompts"
    share = -(-13 // num_stages)
    assert max(sizes[1:]) == share
    rounds = sizes[1 : 1 + 15 * num_stages]
    for start in range(0, len(rounds), num_stages):
        assert sum(rounds[start : start + num_stages]) == 13, "each is in one step of a round"
    assert pipeline.num_early <= num_stages, "only until they are divided"


def test_others_that_come_and_go_leave_the_steps_even() -> None:
    pipeline = Pipeline(2)
    requests: list[Request] = []
    for number in range(120):
        if len(pipeline.scheduler.running) < 16:
            requests.append(make_request(str(number), [number, 1, 2], 9 + number * 7 % 23))
            pipeline.add(requests[-1])
        pipeline.step()
    full = pipeline.sampled[40:]
    pipeline.run()
    for request in requests:
        assert_complete(request)
    assert sum(abs(len(a) - len(b)) for a, b in pairwise(full)) <= 2 * len(full)


def test_a_request_alone_is_planned_ahead_as_with_one_stage() -> None:
    pipeline = Pipeline(3)
    request = make_request("alone", [1, 2, 3], 12)
    pipeline.add(request)
    pipeline.step()
    assert (len(pipeline.plans), request.num_pending) == (2, 1)
    pipeline.run()
    assert_complete(request)
    assert pipeline.num_early == 11


def test_a_prompts_chunks_follow_each_other_at_once() -> None:
    pipeline = Pipeline(3, token_budget=12)
    pipeline.add(make_request("long", list(range(14)), 3))
    while pipeline.scheduler.num_in_flight < pipeline.depth:
        assert pipeline.post()
    assert [plan.lengths.tolist() for plan in pipeline.plans] == [[4], [4], [4], [2]]
    pipeline.run()


def test_without_planning_ahead_a_request_is_in_one_step_at_a_time() -> None:
    pipeline = Pipeline(2, plan_ahead=False)
    requests = [make_request(str(number), [number, 1], 8) for number in range(4)]
    pipeline.add(*requests)
    while not pipeline.scheduler.is_idle:
        pipeline.step()
        assert all(request.num_pending <= 1 for request in requests)
    assert pipeline.num_early == 0
    # no request sat out, and nobody was alone for long
    assert len(pipeline.plans) <= 2 * 8 + 2
    for request in requests:
        assert_complete(request)


class TimedPipeline(Pipeline):
    """Keeps the times at which each stage would be done with each step, if a row took it 1 us and a
    step 100 us beside; plans and results take no time."""

    def __init__(self, num_stages: int):
        super().__init__(num_stages)
        self.free_at = [0.0] * num_stages
        self.results_at: list[float] = []
        self.busy = self.now = 0.0

    def post(self) -> bool:
        before = {r: r.sampled_step for r in self.scheduler.running if r.num_pending}
        if not super().post():
            return False
        tokens_at = [self.results_at[before[r]] for r in self.sampled[-1] if r in before]
        at = max([self.now, *tokens_at])
        took = 100.0 + self.plans[-1].num_tokens
        for stage, free_at in enumerate(self.free_at):
            self.free_at[stage] = at = max(at, free_at) + took
        self.results_at.append(at)
        self.busy += took
        return True

    def step(self) -> None:
        if self.worker.results:
            self.now = max(self.now, self.results_at[len(self.plans) - len(self.worker.results)])
        super().step()


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_are_busy(num_stages: int) -> None:
    """Requests of different lengths that come and go: bubbles are less than a tenth."""
    pipeline = TimedPipeline(num_stages)
    requests: list[Request] = []
    for _ in range(400):
        while len(pipeline.scheduler.running) + pipeline.scheduler.num_waiting < 64:
            number = len(requests)
            requests.append(make_request(str(number), [number, 1, 2], 5 + number * 7 % 29))
            pipeline.add(requests[-1])
        pipeline.step()
    assert pipeline.busy / pipeline.results_at[-1] > 0.9


@pytest.mark.parametrize("num_stages", [2, 3])
def test_prompts_are_divided_among_the_stages(num_stages: int) -> None:
    """The steps in flight take the budget together, so that the last stage soon has work."""
    pipeline = Pipeline(num_stages, token_budget=300, prefill_cap=300)
    pipeline.add(*(make_request(str(number), [number] * 60, 4) for number in range(10)))
    assert pipeline.post()
    assert pipeline.plans[0].num_tokens == 300 // num_stages
    pipeline.run()
