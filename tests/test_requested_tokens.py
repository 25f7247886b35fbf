"""Log-probabilities of sampled tokens in plans and results: which rows bring them, and how readers
get the likeliest tokens, all tokens, or the tokens that they name."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.features.logprobs.planning import Planning, ResultLogprobs, TokenLogprobs
from aioinfer.features.logprobs.sections import ALL, LogprobRows, Logprobs
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import MAX_RESULT_BYTES, StepFeatures, SubmittedRequest
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler


def make_scheduler(**fields: int) -> Scheduler:
    limits = {"block_size": 4, "max_num_seqs": 8, "token_budget": 16, "prefill_cap": 16}
    features = StepFeatures([Planning(None)])
    return Scheduler(SchedulerLimits(num_blocks=(64,), **limits | fields), features=features)


def make_request(prompt_len: int, max_tokens: int, use: TokenLogprobs | None) -> Request:
    prompt, params = array("i", range(prompt_len)), SamplingParams(max_tokens=max_tokens)
    uses = () if use is None else (use,)
    return Request("r", prompt, prompt_len, params, prompt_len + max_tokens, uses=uses)


def run(scheduler: Scheduler) -> list[tuple[StepPlan, LogprobRows | None]]:
    """Runs all requests; returns the plans as they travel, and their sections."""
    found = []
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        assert plan is not None
        plan = StepPlan.decode(b"".join(plan.encode()))
        found.append((plan, plan.section(LogprobRows)))
        scheduler.update(StepResult(plan.step_id, np.zeros(int(plan.samples.sum()), np.int32)))
        scheduler.check_integrity()
    return found


def test_a_reader_gets_what_it_asked_for() -> None:
    """The rows of a result that have log-probabilities are 0, 2, 3 and 5."""
    whole = np.array([-3.0, -1.0, -2.0, -1.0], np.float32)
    found = Logprobs(
        np.array([0, 2, 3, 5], np.int32),
        np.array([-1.0, -2.0, -1.5, -4.0], np.float32),
        np.array([[1, 3], [1, 3], [3, 1], [0, 2]], np.int32),
        np.array([[-1.0, -1.1], [-1.0, -1.1], [-0.5, -1.5], [-0.25, -3.0]], np.float32),
        np.array([4, 2, 0, 0], np.int32),
        np.concatenate([whole, whole[[0, 2]]]),
    )
    result = StepResult(0, np.array([1, 9, 2, 1, 9, 3], np.int32), sections=[found])
    logprobs = ResultLogprobs.of_result(StepResult.decode(b"".join(result.encode())))
    assert logprobs is not None
    every = logprobs.of(0, 1, SamplingParams(logprobs=-1))
    assert every is not None
    assert (every.token_id, every.logprob, len(every.top)) == (1, -1.0, 4)
    assert list(every.top) == [(1, -1.0), (3, -1.0), (2, -2.0), (0, -3.0)]
    assert (every.top[0], every.top[1:3]) == ((1, -1.0), [(3, -1.0), (2, -2.0)])
    named = logprobs.of(2, 2, SamplingParams(logprob_token_ids=[0, 2, 0]))
    assert named is not None
    assert (named.logprob, named.top) == (-2.0, [(0, -3.0), (2, -2.0)])
    plain = logprobs.of(3, 1, SamplingParams(logprobs=1))
    assert plain is not None
    assert (plain.logprob, plain.top) == (-1.5, [(3, -0.5)])
    assert logprobs.of(1, 9, SamplingParams()) is None, "a row without log-probabilities"
    tokens, values = logprobs.likeliest(5)
    assert (tokens.tolist(), values.tolist()) == ([0, 2], [-0.25, -3.0])
    assert ResultLogprobs.of_result(StepResult(0, np.array([1], np.int32))) is None


def test_running_requests_fit_into_a_result() -> None:
    """Two of three: the third waits, and the rows of all requests are named."""
    scheduler = make_scheduler()
    size = MAX_RESULT_BYTES // 4 // 2 - 2
    whole = TokenLogprobs(0, whole=size)
    named = TokenLogprobs(0, np.arange(size, dtype=np.int32))
    for use in (whole, named, whole, None):
        scheduler.add(make_request(2, 2, use))
    seen = [
        (section.rows.tolist(), section.counts.tolist(), len(section.tokens))
        for _, section in run(scheduler)
        if section is not None
    ]
    both, last = ([0, 1], [ALL, size], size), ([0], [ALL], 0)
    assert seen == [both, both, last, last]


def test_plans_without_such_rows_have_no_section() -> None:
    """Of a prompt, the last chunk alone brings log-probabilities."""
    scheduler = make_scheduler(token_budget=8)
    scheduler.add(make_request(20, 3, TokenLogprobs(5)))
    scheduler.add(make_request(3, 9, None))
    seen = [None if s is None else (s.rows.tolist(), s.num_top.tolist()) for _, s in run(scheduler)]
    assert seen[:2] == [None, None]
    assert seen[2:5] == [([0], [5])] * 3
    assert set(seen[5:]) == {None}


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(-1, 9)), max_size=9))
def test_rows_are_ascending_and_of_the_requests_that_ask(asked: list[tuple[int, int, int]]) -> None:
    """`asked`: the length of the prompt and of the output, and how many of the likeliest tokens;
    -1 asks for no log-probabilities."""
    scheduler = make_scheduler(token_budget=7, max_num_seqs=4)
    requests = [
        make_request(length, new, None if top < 0 else TokenLogprobs(top))
        for length, new, top in asked
    ]
    for request in requests:
        scheduler.add(request)
    listed = 0
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        assert plan is not None
        section = plan.section(LogprobRows)
        expected = [
            (row, use.num_top)
            for row, request in enumerate(scheduler._posted.last.sampled)
            if request is not None and (use := request.use(TokenLogprobs)) is not None
        ]
        rows = [] if section is None else zip(section.rows, section.num_top, strict=True)
        assert list(rows) == expected
        listed += len(expected)
        scheduler.update(StepResult(plan.step_id, np.zeros(int(plan.samples.sum()), np.int32)))
    assert listed == sum(new for _, new, top in asked if top >= 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": 5}, (5, 0)),
        ({"logprobs": 0}, (0, 0)),
        ({"logprobs": -1}, (0, ALL)),
        ({"logprobs": 200}, (0, ALL)),
        ({"logprob_token_ids": [3, 4]}, (0, 2)),
    ],
)
def test_uses_of_a_request(fields: dict[str, object], expected: tuple[int, int] | None) -> None:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    for index in range(2):
        use = Planning.use_of(SubmittedRequest(params, array("i", [1]), None, 500, 64, 512), index)
        assert (None if use is None else (use.num_top, use.count)) == expected
        assert use is None or use.result_bytes == {0: 0, 2: 16, ALL: 8 + 4 * 500}[use.count]
