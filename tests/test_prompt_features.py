"""The features of a prompt's rows (log-probabilities, pooled states, states of all tokens,
progress): which rows they list in plans, and what becomes of their results."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from aioinfer.errors import RequestError
from aioinfer.features.pooled_states import planning as pooled_states
from aioinfer.features.pooled_states.planning import PromptPool
from aioinfer.features.pooled_states.sections import LAST, MEAN, PooledRows, PooledStates
from aioinfer.features.prompt_logprobs import planning as prompt_logprobs
from aioinfer.features.prompt_logprobs.planning import PromptScores
from aioinfer.features.prompt_logprobs.sections import (
    MAX_LOGPROB_BYTES,
    PromptLogprobRows,
    PromptLogprobs,
    logprob_bytes,
)
from aioinfer.features.prompt_progress import planning as prompt_progress
from aioinfer.features.prompt_progress.planning import PromptProgress
from aioinfer.features.token_states import planning as token_states
from aioinfer.features.token_states.planning import MAX_REQUEST_STATE_BYTES, PromptStates
from aioinfer.features.token_states.sections import MAX_STATE_BYTES, TokenStateRows, TokenStates
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.sampling_params import ALL_TOKENS, SamplingParams
from aioinfer.scheduler.features import MAX_RESULT_BYTES, StepFeatures, SubmittedRequest
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import ForkGroup, Request, Use
from aioinfer.scheduler.scheduler import Scheduler

HALVES = (prompt_logprobs, pooled_states, token_states, prompt_progress)


def make_scheduler(**fields: int) -> Scheduler:
    limits = {"block_size": 4, "max_num_seqs": 8, "token_budget": 16, "prefill_cap": 16}
    features = StepFeatures([half.Planning(None) for half in HALVES])
    return Scheduler(SchedulerLimits(num_blocks=(64,), **limits | fields), features=features)


def make_request(length: int, *uses: Use, max_tokens: int = 1) -> Request:
    prompt = array("i", range(length))
    params = SamplingParams(max_tokens=max_tokens)
    return Request("r", prompt, length, params, length + max_tokens, uses=uses)


def travel(plan: StepPlan) -> StepPlan:
    return StepPlan.decode(b"".join(plan.encode()))


def run_step(scheduler: Scheduler) -> StepPlan:
    """Plans a step, and answers it: the logprob of position p is -p, a pooled state is its row."""
    plan = scheduler.schedule()
    assert plan is not None
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
    scheduler.check_integrity()
    return plan


def test_scores_come_back_chunk_by_chunk() -> None:
    scheduler = make_scheduler()
    prompt = array("i", range(40))
    scores, others = PromptScores(prompt, 2), PromptScores(prompt[:9], 1)
    scheduler.add(make_request(40, scores))
    scheduler.add(make_request(9, others))
    scheduler.add(make_request(9))
    counts = []
    while not scheduler.is_idle:
        section = run_step(scheduler).section(PromptLogprobRows)
        counts.append([] if section is None else section.counts.tolist())
    assert counts == [[16], [16], [8, 7], []], "rows that sample nothing come first"
    for found in (scores, others):
        assert found.is_done
        assert found.logprobs.tolist() == [-float(p) for p in range(len(found.logprobs))]
        assert found.ranks.tolist() == found.top_tokens[:, 0].tolist()
    assert scores.top_tokens.shape == (39, 2)
    assert others.top_logprobs.shape == (8, 1)


def test_states_of_tokens_fit_a_result() -> None:
    """A step computes no more tokens of such requests than its result has room for."""
    width = MAX_STATE_BYTES // (4 * 6)  # six tokens a step
    scheduler = make_scheduler()
    states = [PromptStates(length, width) for length in (9, 5)]
    for each in states:
        scheduler.add(make_request(len(each.states), each))
    scheduler.add(make_request(9))
    counts = []
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        assert plan is not None
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
        scheduler.check_integrity()
    assert counts == [[6], [3, 3], [2]]
    assert all(each.is_done for each in states)
    assert [each.states[:, 0].tolist() for each in states] == [
        [float(p) for p in range(length)] for length in (9, 5)
    ]


def test_the_prefix_cache_skips_no_row_that_is_wanted() -> None:
    scheduler = make_scheduler()
    prompt = array("i", range(12))
    wanted: list[Use | None] = [
        None, PromptScores(prompt, 1), PromptPool("last", 12, 3), PromptPool("mean", 12, 3),
        PromptProgress(12), None,
    ]  # fmt: skip
    cached = []
    for use in wanted:
        request = make_request(12, *([] if use is None else [use]))
        scheduler.add(request)
        while not scheduler.is_idle:
            run_step(scheduler)
        cached.append(request.num_cached)
        assert use is None or use.is_done
    assert cached == [0, 0, 8, 0, 8, 8]


def test_siblings_wait_for_the_scores_of_their_prompt() -> None:
    scheduler = make_scheduler()
    scores = PromptScores(array("i", range(20)), 1)
    group = ForkGroup(awaited=[scores])
    siblings = [make_request(20, *([] if i else [scores]), max_tokens=3) for i in range(3)]
    for each in siblings:
        each.group = group
        scheduler.add(each)
    while not scores.is_done:
        assert [each.slot >= 0 for each in siblings[1:]] == [False, False]
        run_step(scheduler)
    while not scheduler.is_idle:
        run_step(scheduler)
    assert [each.num_output for each in siblings] == [3, 3, 3]
    assert [each.num_cached for each in siblings] == [0, 19, 19]


def test_states_of_running_requests_fit_into_a_result() -> None:
    scheduler = make_scheduler()
    hidden_size = MAX_RESULT_BYTES // 4 // 3
    pools = [PromptPool("mean" if i % 2 else "last", 2, hidden_size) for i in range(7)]
    for pool in pools:
        scheduler.add(make_request(2, pool))
    sizes = []
    while not scheduler.is_idle:
        section = run_step(scheduler).section(PooledRows)
        assert section is not None
        sizes.append(section.poolings.tolist())
    assert sizes == [[LAST, MEAN, LAST], [MEAN, LAST, MEAN], [LAST]]
    assert [int(pool.state[0]) for pool in pools if pool.state is not None] == [
        0, 1, 2, 0, 1, 2, 0,
    ]  # fmt: skip


def test_a_preempted_prompt_wants_what_has_not_come() -> None:
    scores = PromptScores(array("i", range(20)), 1)
    found = PromptLogprobs(
        np.zeros(8, np.float32), np.ones(8, np.int32), np.zeros((8, 1), np.int32),
        np.zeros((8, 1), np.float32),
    )  # fmt: skip
    scores.take(0, found, 0, 8)
    assert (scores.max_cached, scores.count(8, 20)) == (8, 11)
    assert [scores.covers(0, end, False) for end in (8, 9)] == [False, True]
    assert not scores.covers(19, 20, True), "no token of the prompt follows"
    scores.take(12, found, 0, 7)  # a gap: what lies before it is still wanted
    assert (scores.max_cached, scores.is_done) == (8, False)
    scores.take(8, found, 0, 4)
    assert scores.max_cached == 12


def test_several_features_of_one_request() -> None:
    """Log-probabilities, a pooled state and states of tokens at a time, in chunks."""
    scheduler = make_scheduler(token_budget=5)
    prompt = array("i", range(12))
    scores, pool, progress = PromptScores(prompt, 1), PromptPool("mean", 12, 3), PromptProgress(12)
    scheduler.add(make_request(12, scores, pool, progress))
    computed = []
    while not scheduler.is_idle:
        run_step(scheduler)
        computed.append((scores.num_scored, progress.num_computed, pool.is_done))
    assert computed == [(5, 5, False), (10, 10, False), (11, 12, True)]


def test_progress_is_reported_and_never_goes_back() -> None:
    reports: list[int] = []
    progress = PromptProgress(20, lambda: reports.append(progress.num_computed))
    for end in (8, 16, 8, 16, 20, 21):
        progress.take(end)
    assert reports == [8, 16, 20]
    covered = [progress.covers(start, start + 4, False) for start in (0, 19, 20)]
    assert covered == [True, True, False]


def submitted(length: int = 12, **fields: object) -> SubmittedRequest:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return SubmittedRequest(params, array("i", range(length)), None, 500, 64, 512, lambda: None)


def test_uses_of_a_request() -> None:
    """Only the first sequence has outputs of the prompt."""

    def uses(index: int = 0, **fields: object) -> list[type[Use]]:
        found = (half.Planning.use_of(submitted(**fields), index) for half in HALVES)
        return [type(use) for use in found if use is not None]

    assert uses() == []
    assert uses(prompt_logprobs=2) == [PromptScores]
    assert uses(reports_progress=True) == [PromptProgress]
    assert uses(pooling="mean") == [PromptPool]
    assert uses(pooling=ALL_TOKENS) == [PromptStates]
    for fields in ({"prompt_logprobs": 2}, {"pooling": "mean"}, {"reports_progress": True}):
        assert uses(1, **fields) == []


def test_too_much_is_refused() -> None:
    scores = prompt_logprobs.Planning.use_of(submitted(prompt_logprobs=-1), 0)
    assert isinstance(scores, PromptScores)
    assert scores.num_top == 500
    most = MAX_LOGPROB_BYTES // logprob_bytes(500)
    large = submitted(prompt_logprobs=-1)
    with pytest.raises(RequestError, match="too many for steps of") as caught:
        prompt_logprobs.Planning.use_of(
            SubmittedRequest(large.params, large.tokens, None, 500, 64, most + 1), 0
        )
    assert caught.value.param == "prompt_logprobs"
    length = MAX_REQUEST_STATE_BYTES // (4 * 64)
    assert token_states.Planning.use_of(submitted(length, pooling=ALL_TOKENS), 0) is not None
    with pytest.raises(RequestError, match=r"hidden states of .* are too many"):
        token_states.Planning.use_of(submitted(length + 1, pooling=ALL_TOKENS), 0)
