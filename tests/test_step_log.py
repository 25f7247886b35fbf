"""The log of steps: what it keeps of a step, and of which steps."""

from __future__ import annotations

import numpy as np
import pytest

from aioinfer.engine.metrics import LOG_LENGTH, StepLog, StepRecord
from aioinfer.ipc.plan import StepPlan, StepResult
from tests.plans import make_plan


def plan(step_id: int, lengths: list[int], samples: list[int]) -> StepPlan:
    rows = enumerate(zip(lengths, samples, strict=True))
    return make_plan(step_id, [(slot, 0, length, samples) for slot, (length, samples) in rows])


def result(step_id: int, sampled: int = 1) -> StepResult:
    return StepResult(step_id, np.zeros(sampled, np.int32), busy_ns=3_000_000, take_ns=4_000)


@pytest.fixture
def log() -> StepLog:
    return StepLog()


def test_what_is_kept_of_a_step(log: StepLog) -> None:
    with log.watched():
        # two decodes, a prompt's end, and one token of a prompt
        log.record_plan(plan(5, [1, 1, 30, 1], [1, 1, 1, 0]), 10e-6, 20e-6)
        log.record_plan(plan(6, [1], [1]), 0, 0)
        assert log.since(-1) == []
        log.record_result(result(5, 3), 30e-6, 40e-6)
        assert log.since(-1) == [
            StepRecord(
                5, 31, 2, 3, worker_us=3000, result_us=4, update_us=30, plan_us=10, post_us=20,
                emit_us=40,
            ),
        ]  # fmt: skip


def test_steps_that_were_posted_before_are_left_out(log: StepLog) -> None:
    with log.watched():
        log.record_result(result(1), 0, 0)
        log.record_plan(plan(3, [1], [1]), 0, 0)
        log.record_result(result(2), 0, 0)
        log.record_result(result(3), 0, 0)
        assert [step.step_id for step in log.since(-1)] == [3]


def test_the_last_watcher_takes_the_log_along(log: StepLog) -> None:
    with log.watched():
        with log.watched():
            log.record_plan(plan(0, [1], [1]), 0, 0)
            log.record_result(result(0), 0, 0)
            log.record_plan(plan(1, [1], [1]), 0, 0)
        assert log.since(-1)
    assert not log.num_watchers
    with log.watched():
        log.record_result(result(1), 0, 0)
        assert log.since(-1) == []


def test_the_log_is_bounded_and_read_piece_by_piece(log: StepLog) -> None:
    with log.watched():
        for step_id in range(300):
            log.record_plan(plan(step_id, [1], [1]), 0, 0)
            log.record_result(result(step_id), 0, 0)
        assert [step.step_id for step in log.since(-1)] == list(range(300 - LOG_LENGTH, 300))
        assert [step.step_id for step in log.since(297)] == [298, 299]
        assert log.since(299) == []
