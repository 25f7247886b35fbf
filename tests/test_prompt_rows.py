"""What a request asks of its prompt's rows, and what the scheduler makes of it; the frame of
results on the ring."""

from __future__ import annotations

from array import array

import numpy as np

from aioinfer.engine.prompt_outputs import PromptOutputs
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.ipc.prompt_rows import (
    LAST,
    MAX_POOLED_BYTES,
    MAX_STATE_BYTES,
    MEAN,
    PooledRows,
    PooledStates,
    PromptLogprobRows,
    PromptLogprobs,
    TokenStateRows,
    TokenStates,
)
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.prompt_rows import PromptPool, PromptRows, PromptScores, PromptStates
from aioinfer.scheduler.request import ForkGroup, Request
from aioinfer.scheduler.scheduler import Scheduler


def make_scheduler(**fields: int) -> Scheduler:
    limits = {"block_size": 4, "max_num_seqs": 8, "token_budget": 16, "prefill_cap": 16}
    return Scheduler(SchedulerLimits(num_blocks=(64,), **limits | fields))


def make_request(length: int, rows: PromptRows | None, max_tokens: int = 1) -> Request:
    prompt = array("i", range(length))
    params = SamplingParams(max_tokens=max_tokens)
    return Request("r", prompt, length, params, length + max_tokens, prompt_rows=rows)


def travel(plan: StepPlan) -> StepPlan:
    return StepPlan.decode(b"".join(plan.encode()))


def run_step(scheduler: Scheduler, outputs: PromptOutputs) -> StepPlan:
    """Plans a step, and answers it: the logprob of position p is -p, a pooled state is its row."""
    plan = scheduler.schedule()
    assert plan is not None
    outputs.expect(plan.step_id, scheduler.last_scored, scheduler.last_pooled)
    plan = travel(plan)
    scored, pooled = plan.section(PromptLogprobRows), plan.section(PooledRows)
    result = StepResult(plan.step_id, np.zeros(int(plan.samples.sum()), np.int32))
    if scored is not None:
        start_of = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
        found = np.concatenate(
            [
                np.arange(start_of[slot], start_of[slot] + count)
                for slot, count in zip(scored.slots.tolist(), scored.counts.tolist(), strict=True)
            ]
        )
        tops = np.tile(found[:, None], int(scored.num_top.max()))
        result.sections = [
            PromptLogprobs(
                -found.astype(np.float32), found.astype(np.int32), tops.astype(np.int32),
                -tops.astype(np.float32),
            )
        ]  # fmt: skip
    if pooled is not None and pooled.ends.any():
        states = np.arange(int(pooled.ends.sum()), dtype=np.float32)[:, None]
        result.sections = [*result.sections, PooledStates(np.repeat(states, 3, axis=1))]
    result = StepResult.decode(b"".join(bytes(part) for part in result.encode()))
    scheduler.update(result)
    outputs.accept(result)
    scheduler.check_integrity()
    return plan


def test_scores_come_back_chunk_by_chunk() -> None:
    scheduler, outputs = make_scheduler(), PromptOutputs()
    prompt = array("i", range(40))
    scores, others = PromptScores.of(prompt, 2), PromptScores.of(prompt[:9], 1)
    scheduler.add(make_request(40, scores))
    scheduler.add(make_request(9, others))
    scheduler.add(make_request(9, None))
    counts = []
    while not scheduler.is_idle:
        section = run_step(scheduler, outputs).section(PromptLogprobRows)
        counts.append([] if section is None else section.counts.tolist())
    assert counts == [[16], [16], [7, 8], []]
    for found in (scores, others):
        assert found.is_done
        assert found.logprobs.tolist() == [-float(p) for p in range(len(found.logprobs))]
        assert found.ranks.tolist() == found.top_tokens[:, 0].tolist()
    assert scores.top_tokens.shape == (39, 2)
    assert others.top_logprobs.shape == (8, 1)


def test_states_of_tokens_fit_a_result() -> None:
    """A step computes no more tokens of such requests than its result has room for."""
    width = MAX_STATE_BYTES // (4 * 6)  # six tokens a step
    scheduler, outputs = make_scheduler(), PromptOutputs()
    states = [PromptStates.of(length, width) for length in (9, 5)]
    for rows in (*states, None):
        scheduler.add(make_request(9 if rows is None else len(rows.states), rows))
    counts = []
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        assert plan is not None
        outputs.expect(
            plan.step_id, scheduler.last_scored, scheduler.last_pooled, scheduler.last_stated
        )
        section = travel(plan).section(TokenStateRows)
        result = StepResult(plan.step_id, np.zeros(int(plan.samples.sum()), np.int32))
        if section is not None:
            counts.append(section.counts.tolist())
            start_of = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
            rows = zip(section.slots.tolist(), section.counts.tolist(), strict=True)
            positions = [start_of[slot] + place for slot, count in rows for place in range(count)]
            found = np.repeat(np.array(positions, np.float32)[:, None], width, axis=1)
            result.sections = [TokenStates(found)]
        scheduler.update(result)
        outputs.accept(result)
        scheduler.check_integrity()
    assert counts == [[6], [3, 3], [2]]
    assert all(each.is_done for each in states)
    assert [each.states[:, 0].tolist() for each in states] == [
        [float(p) for p in range(length)] for length in (9, 5)
    ]


def test_the_prefix_cache_skips_no_row_that_is_wanted() -> None:
    scheduler, outputs = make_scheduler(), PromptOutputs()
    prompt = array("i", range(12))
    wanted: list[PromptRows | None] = [
        None, PromptScores.of(prompt, 1), PromptPool("last", 12, 3), PromptPool("mean", 12, 3),
        None,
    ]  # fmt: skip
    cached = []
    for rows in wanted:
        request = make_request(12, rows)
        scheduler.add(request)
        while not scheduler.is_idle:
            run_step(scheduler, outputs)
        cached.append(request.num_cached)
        assert rows is None or rows.is_done
    assert cached == [0, 0, 8, 0, 8]


def test_siblings_wait_for_the_scores_of_their_prompt() -> None:
    scheduler, outputs = make_scheduler(), PromptOutputs()
    scores = PromptScores.of(array("i", range(20)), 1)
    group = ForkGroup(prompt_rows=scores)
    siblings = [make_request(20, None, 3) for _ in range(3)]
    siblings[0].prompt_rows = scores
    for each in siblings:
        each.group = group
        scheduler.add(each)
    while not scores.is_done:
        assert [each.slot >= 0 for each in siblings[1:]] == [False, False]
        run_step(scheduler, outputs)
    while not scheduler.is_idle:
        run_step(scheduler, outputs)
    assert [each.num_output for each in siblings] == [3, 3, 3]
    assert [each.num_cached for each in siblings] == [0, 19, 19]


def test_states_of_running_requests_fit_into_a_result() -> None:
    scheduler, outputs = make_scheduler(), PromptOutputs()
    hidden_size = MAX_POOLED_BYTES // 4 // 3
    pools = [PromptPool("mean" if i % 2 else "last", 2, hidden_size) for i in range(7)]
    for pool in pools:
        scheduler.add(make_request(2, pool))
    sizes = []
    while not scheduler.is_idle:
        section = run_step(scheduler, outputs).section(PooledRows)
        assert section is not None
        sizes.append(section.poolings.tolist())
    assert sizes == [[LAST, MEAN, LAST], [MEAN, LAST, MEAN], [LAST]]
    assert [int(pool.state[0]) for pool in pools if pool.state is not None] == [
        0, 1, 2, 0, 1, 2, 0,
    ]  # fmt: skip


def test_a_preempted_prompt_wants_what_has_not_come() -> None:
    scores = PromptScores.of(array("i", range(20)), 1)
    found = PromptLogprobs(
        np.zeros(8, np.float32), np.ones(8, np.int32), np.zeros((8, 1), np.int32),
        np.zeros((8, 1), np.float32),
    )  # fmt: skip
    scores.take(0, found, 0, 8)
    assert (scores.max_prefix(), scores.count(0, 8), scores.count(8, 20)) == (8, 0, 11)
    scores.take(12, found, 0, 7)  # a gap: what lies before it is still wanted
    assert (scores.max_prefix(), scores.is_done) == (8, False)
    scores.take(8, found, 0, 4)
    assert scores.max_prefix() == 12
