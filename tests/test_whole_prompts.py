"""The scheduler of a model without a KV cache: every prompt is computed whole, in one step."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.config import load_config
from aioinfer.engine.served_model import Pooling
from aioinfer.errors import ConfigError, RequestError
from aioinfer.executor.capacity import settle_capacity
from aioinfer.features.pooled_states.planning import Planning as PooledStatesPlanning
from aioinfer.features.pooled_states.planning import PromptPool
from aioinfer.features.token_states.planning import Planning as TokenStatesPlanning
from aioinfer.features.token_states.planning import PromptStates
from aioinfer.features.token_states.sections import MAX_STATE_BYTES
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.scheduler.features import StepFeatures, SubmittedRequest
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request, RequestStatus
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.worker.worker import LoadReport

BUDGET, SLOTS, HIDDEN = 40, 5, 4


def make_scheduler() -> Scheduler:
    limits = SchedulerLimits(
        num_blocks=(), groups=(), block_size=16, max_num_seqs=SLOTS, token_budget=BUDGET,
        prefill_cap=BUDGET,
    )  # fmt: skip
    features = StepFeatures([PooledStatesPlanning(None), TokenStatesPlanning(None)])
    return Scheduler(limits, features=features)


def make_request(
    number: int, length: int, *, takes_all: bool = False, hidden: int = HIDDEN
) -> Request:
    use = PromptStates(length, hidden) if takes_all else PromptPool("mean", length, hidden)
    params = Pooling().params("all" if takes_all else "mean", takes_all=True)
    tokens = array("i", range(length))
    return Request(str(number), tokens, length, params, length + 1, uses=(use,))


def compute(plan: StepPlan) -> StepResult:
    """Returns the result of a model without a head."""
    return StepResult(plan.step_id, np.zeros(int(plan.samples.sum()), np.int32), [])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, BUDGET), st.integers(0, 3)), min_size=1, max_size=25),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_prompts_are_computed_whole_and_in_order(
    arrivals: list[tuple[int, int]], depth: int, rng: object
) -> None:
    scheduler = make_scheduler()
    requests = [make_request(number, length) for number, (length, _) in enumerate(arrivals)]
    waiting, posted, computed = list(zip(requests, arrivals, strict=True)), [], []
    while waiting or posted or not scheduler.is_idle:
        while waiting and (waiting[0][1][1] or scheduler.is_idle):
            scheduler.add(waiting.pop(0)[0])
        if len(posted) < depth and (plan := scheduler.schedule()) is not None:
            scheduler.confirm_post()
            assert int(plan.lengths.sum()) <= BUDGET
            assert not plan.starts.any()
            assert plan.samples.all()
            assert not len(plan.table_rows)
            computed += plan.lengths.tolist()
            posted.append(plan)
        elif posted:
            scheduler.update(compute(posted.pop(0)))
        elif waiting:
            scheduler.add(waiting.pop(0)[0])
        scheduler.check_integrity()
    assert sorted(computed) == sorted(length for length, _ in arrivals)
    assert all(request.status is RequestStatus.FINISHED for request in requests)
    assert all(request.finish_reason == "length" for request in requests)
    assert scheduler.stats.preemptions == 0


def test_what_does_not_fit_waits_for_the_next_step() -> None:
    scheduler = make_scheduler()
    for number, length in enumerate((30, 20, 5)):
        scheduler.add(make_request(number, length))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert (first.lengths.tolist(), second.lengths.tolist()) == ([30], [20, 5])


def test_a_prompt_is_at_most_as_long_as_a_step() -> None:
    scheduler = make_scheduler()
    assert scheduler.fits(BUDGET + 1)  # its last token is never computed
    assert not scheduler.fits(BUDGET + 2)


def test_hidden_states_of_all_tokens_come_back_together() -> None:
    of_25_tokens = MAX_STATE_BYTES // (4 * 25)  # so wide that a result has room for no more
    for hidden, expected in ((HIDDEN, [10, 10, 10]), (of_25_tokens, [10, 10])):
        scheduler = make_scheduler()
        for number in range(3):
            scheduler.add(make_request(number, 10, takes_all=True, hidden=hidden))
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.lengths.tolist() == expected
    size = MAX_STATE_BYTES // (4 * 8)
    params = Pooling().params("all", takes_all=True)
    for is_whole, length in ((True, 8), (False, 9)):
        submitted = SubmittedRequest(
            params, array("i", [0] * length), None, 9, size, BUDGET, is_whole=is_whole
        )
        assert TokenStatesPlanning.use_of(submitted, 0) is not None
    submitted = SubmittedRequest(params, array("i", [0] * 9), None, 9, size, 40, is_whole=True)
    with pytest.raises(RequestError, match="at most 8 hidden states"):
        TokenStatesPlanning.use_of(submitted, 0)


def test_the_length_of_a_step_limits_the_length_of_prompts() -> None:
    report = LoadReport(
        device="cpu", dtype="float32", weights_bytes=1, block_size=16, groups=(), block_bytes=(),
        num_blocks=(), model_max_len=1000, vocab_size=9,
    )  # fmt: skip
    few = {"model.path": "m", "scheduler.max_num_batched_tokens": 600}
    capacity = settle_capacity(load_config(None, few), [report])
    assert (capacity.num_blocks, capacity.max_model_len) == ((), 600)
    assert "raise scheduler.max_num_batched_tokens" in capacity.reason
    with pytest.raises(ConfigError, match="a step computes 600 tokens of one request"):
        settle_capacity(load_config(None, few | {"model.max_model_len": 700}), [report])
    assert settle_capacity(load_config(None, {"model.path": "m"}), [report]).max_model_len == 1000
