"""The log of steps, and what steps take, learned from those that were measured."""

from __future__ import annotations

import random

import numpy as np
import pytest

from aioinfer.engine.metrics import LOG_LENGTH, StepLog, StepRecord
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.scheduler.step_time import StepTimes, StepWork
from tests.plans import make_plan
from tests.timed_worker import eight_billion


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


def random_work(rng: random.Random) -> StepWork:
    decodes = rng.randint(0, 128)
    tokens = rng.choice([0, 64, 256, 1000, 2048, 4096]) if decodes else 2048
    start = rng.choice([0, 0, 1000, 20_000])
    return StepWork(
        decodes, decodes * rng.randint(100, 4000), tokens, tokens * (start + tokens / 2)
    )


def learn(times: StepTimes, rng: random.Random, steps: int, factor: float = 1.0) -> list[float]:
    """Measures random steps; returns the relative errors of their predictions."""
    errors = []
    for _ in range(steps):
        work = random_work(rng)
        error = times.learn(work, factor * eight_billion(work) * rng.uniform(0.97, 1.03))
        if error is not None:
            errors.append(abs(error))
    return sorted(errors)


@pytest.mark.parametrize("unit", [0.1, 1.0, 300.0])
def test_a_law_is_learned_from_a_hundred_steps(unit: float) -> None:
    times, rng = StepTimes(), random.Random(1)
    assert times.predict(StepWork(1, 100)) == 0.0
    learn(times, rng, 100, unit)
    errors = learn(times, rng, 300, unit)
    assert errors[150] < 0.04
    assert errors[285] < 0.15
    assert min(times.costs) >= 0.0


def test_slow_first_steps_and_outliers_spoil_nothing() -> None:
    times, rng = StepTimes(), random.Random(2)
    for _ in range(4):  # compiled
        times.learn(StepWork(4, 400, 512, 512 * 256), 3.0)
    learn(times, rng, 100)
    before = times.predict(StepWork(32, 32_000, 2048, 2048 * 1024))
    for _ in range(3):
        times.learn(StepWork(32, 32_000, 2048, 2048 * 1024), 1.5)
    after = times.predict(StepWork(32, 32_000, 2048, 2048 * 1024))
    assert after == pytest.approx(before, rel=0.3)
    assert before == pytest.approx(eight_billion(StepWork(32, 32_000, 2048, 2**21)), rel=0.1)


def test_a_change_of_the_machine_is_learned() -> None:
    times, rng = StepTimes(), random.Random(3)
    learn(times, rng, 500)
    learn(times, rng, 60, 2.0)
    errors = learn(times, rng, 200, 2.0)
    assert errors[100] < 0.05


def test_what_is_not_measured_is_not_forgotten() -> None:
    times, rng = StepTimes(), random.Random(4)
    learn(times, rng, 300)
    before = times.prefill_seconds(2048, 0)
    for _ in range(4000):
        rows = rng.randint(1, 64)
        work = StepWork(rows, 1000 * rows)
        times.learn(work, eight_billion(work))
    assert times.prefill_seconds(2048, 0) == pytest.approx(before, rel=0.1)


def test_tokens_within_a_time_are_the_inverse_of_their_time() -> None:
    times, rng = StepTimes(), random.Random(5)
    learn(times, rng, 300)
    for start in (0, 1000, 100_000):
        for tokens in (16, 1000, 8000):
            seconds = times.prefill_seconds(tokens, start)
            assert times.prefill_tokens_within(seconds, start) == pytest.approx(tokens)
    assert times.prefill_tokens_within(-1.0, 0) == 0.0
    assert StepTimes().prefill_tokens_within(1.0, 0) == float("inf")
