"""The step loop over a worker that computes nothing: its order, and what it reports to client and
metrics about the end of a sequence."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from weakref import ref

import pytest

from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import Delta, KnownDelta, RequestOutput
from aioinfer.engine.recovery import RestartPolicy
from aioinfer.errors import GenerationError
from aioinfer.executor.base import Executor
from aioinfer.ipc.heartbeat import Heartbeat
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.ipc.ring import Ring
from aioinfer.sampling_params import BeamSearch, SamplingParams
from aioinfer.scheduler.request import RequestStatus
from bench_loop import EchoExecutor, make_frontend
from tests.executor_runs import tiny_config, tiny_llama
from tests.waiting import until

PROMPT = [5] * 20
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    frontend = await make_frontend(2, 0.0)
    yield frontend
    await frontend.close()


async def complete(frontend: Frontend, params: SamplingParams) -> Delta:
    """Returns all deltas of a sequence, merged."""
    output = await frontend.submit(PROMPT, params)
    (whole,) = await output.collect()
    assert output.sequences[0].finish_reason == whole.finish_reason
    return whole


async def test_a_step_is_posted_before_the_text_of_an_earlier_one_is_emitted(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_posted, posted_at_token = 0, []
    engine = frontend.engines[0]
    post: Callable[[StepPlan], None] = engine._workers.executor.post

    def count(plan: StepPlan) -> None:
        nonlocal num_posted
        num_posted += 1
        post(plan)

    class Recorder:
        def push(self, *_: object) -> bool:
            posted_at_token.append(num_posted)
            return True

    monkeypatch.setattr(engine._workers.executor, "post", count)
    (await frontend.submit(PROMPT, GREEDY)).attach(Recorder())
    await frontend.drain(5)
    # when the text of step N is emitted, steps N + 1 and N + 2 are with the workers
    assert posted_at_token == [3, 4, 5, 6, 6, 6]
    assert engine.metrics.phases["plan"].count == engine.metrics.phases["update"].count == 6


async def test_a_stop_string_on_the_last_token_is_one_end_for_client_and_metrics(
    frontend: Frontend,
) -> None:
    finished = frontend.engines[0].metrics.finished
    whole = await complete(frontend, GREEDY)
    assert (whole.finish_reason, finished["length"], finished["stop"]) == ("length", 1, 0)
    stop = whole.text[-2:]
    assert stop not in whole.text[:-2], "the text does not do for this test"
    stopped = await complete(frontend, replace(GREEDY, stop=(stop,)))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == whole.token_ids, "it ended before its length"
    assert stopped.text == whole.text[:-2]
    assert (finished["length"], finished["stop"]) == (1, 1)


async def test_a_stop_string_that_includes_the_end_token_is_one_end_for_client_and_metrics(
    frontend: Frontend,
) -> None:
    whole = await complete(frontend, GREEDY)
    end_token = whole.token_ids[3]
    assert end_token not in whole.token_ids[:3]
    text = frontend.tokenizer.decode(whole.token_ids[:4])
    params = replace(GREEDY, stop_token_ids=(end_token,), include_stop=True)
    ended = await complete(frontend, params)
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", end_token, text)
    stop = text[-2:]
    assert stop not in text[:-2], "the text does not do for this test"
    ended = await complete(frontend, replace(params, stop=(stop,)))
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", stop, text)


async def test_a_request_whose_text_fails_ends_alone(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = [await frontend.submit([number + 5] * 20, GREEDY) for number in range(2)]
    monkeypatch.setattr(bad.sequences[0], "_detokenizer", object(), raising=False)
    with pytest.raises(Exception, match="could not be turned into text"):
        async for _ in bad:
            pass
    assert [delta.finish_reason async for delta in good][-1] == "length"
    assert frontend.is_healthy()
    finished = frontend.engines[0].metrics.finished
    assert (finished["error"], finished["length"]) == (1, 1)


LONG = replace(GREEDY, max_tokens=500)


async def until_generating(frontend: Frontend) -> None:
    await until(lambda: frontend.engines[0].metrics.generation_tokens >= 20)


async def collect(output: RequestOutput) -> str:
    """Returns the finish reason, or the error."""
    try:
        async for delta in output:
            reason = delta.finish_reason
    except GenerationError as error:
        return str(error)
    return str(reason)


@pytest.mark.slow
async def test_checks_of_sound_records_change_nothing(frontend: Frontend) -> None:
    engine = frontend.engines[0]
    outputs = [await frontend.submit([number + 5] * 20, LONG) for number in range(4)]
    tasks = [asyncio.create_task(collect(output)) for output in outputs]
    checks = 0
    while not engine.is_idle:
        engine.check_records()
        checks += 1
        await asyncio.sleep(0)
    assert checks > 100
    assert await asyncio.gather(*tasks) == ["length"] * 4
    assert engine.metrics.violations == 0


async def test_a_request_that_no_queue_holds_is_ended(
    frontend: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    engine = frontend.engines[0]
    lost, other = [await frontend.submit([number + 5] * 20, LONG) for number in range(2)]
    await until_generating(frontend)
    engine.scheduler.finish(lost.sequences[0].request, "abort")  # behind the engine's back
    engine.check_records()
    assert await collect(lost) == "the server has lost the request"
    assert caplog.text.count("was in no queue") == 1
    assert await collect(other) == "length"
    engine.check_records()
    assert engine.metrics.violations == 1
    assert engine.metrics.finished["error"] == 1


async def test_a_beam_with_its_last_token_is_not_lost(tmp_path: Path) -> None:
    """Of two slots another request has one: the second beam begins when the first has ended."""
    settings = {"model.tokenizer": "none", "scheduler.max_num_seqs": 2}
    config = tiny_config(tiny_llama(tmp_path), executor="inline", **settings)
    frontend = await Frontend.launch(config)
    engine = frontend.engines[0]
    other = await frontend.submit([5] * 20, replace(GREEDY, max_tokens=80))
    await until_generating(frontend)
    params = replace(GREEDY, ignore_eos=False, max_tokens=1, n=2, beam_search=BeamSearch(2))
    search = await frontend.submit([9] * 20, params)
    first, second = (sequence.request for sequence in search.sequences)
    waits = False
    while not search.is_finished:
        ended = [beam.status is RequestStatus.FINISHED for beam in (first, second)]
        waits |= ended == [True, False]
        engine.check_records()
        await asyncio.sleep(0)
    found = await search.collect()
    assert [len(delta.token_ids) for delta in found] == [1, 1]
    assert (waits, engine.metrics.violations, other.is_finished) == (True, 0, False)
    await frontend.close()


async def test_a_closed_engine_keeps_no_request(tmp_path: Path) -> None:
    """Neither its queues nor a posted step, whose result has not come: else all pictures of its
    requests would be kept with a model that is closed and still referred to."""
    config = tiny_config(tiny_llama(tmp_path), executor="inline", **{"model.tokenizer": "none"})
    frontend = await Frontend.launch(config)
    engine = frontend.engines[0]
    params = replace(GREEDY, max_tokens=50)
    kinds = [
        params, replace(params, logprobs=3), replace(params, allowed_token_ids=(3, 4, 5)),
        replace(params, n=2, beam_search=BeamSearch(2)),
    ]  # fmt: skip
    outputs = [await frontend.submit([number] * 20, kind) for number in range(3) for kind in kinds]
    await until_generating(frontend)
    await until(lambda: engine.scheduler.num_in_flight and engine.scheduler.num_waiting)
    outputs[0].abort()  # of a posted step
    kept = [ref(each.request) for output in outputs for each in output.sequences]
    await frontend.close()
    del outputs
    gc.collect()
    assert [each() for each in kept] == [None] * 15


async def test_a_closed_engine_keeps_no_request_of_a_posted_step(frontend: Frontend) -> None:
    """All have ended; what the cache holds can still be read."""
    scheduler = frontend.engines[0].scheduler
    cached = scheduler.kv_cache
    output = await frontend.submit(PROMPT, LONG)
    await until_generating(frontend)
    output.abort()
    assert scheduler.num_in_flight
    kept = ref(output.sequences[0].request)
    await frontend.close()
    del output
    gc.collect()
    assert kept() is None
    assert scheduler.kv_cache is cached
    scheduler.check_integrity()


async def test_an_output_that_a_stop_string_has_ended_is_restored(frontend: Frontend) -> None:
    """From tokens: the text ends before the stop string, of which earlier tokens have a part."""
    whole = await complete(frontend, GREEDY)
    stop = whole.text[-4:-1]
    params = replace(GREEDY, stop=(stop,))
    stopped = await complete(frontend, params)
    known = [KnownDelta(0, stopped.token_ids, None, stopped.finish_reason, stopped.stop_reason)]
    restored = [delta async for delta in await frontend.submit(PROMPT, params, known=known)]
    assert stopped.stop_reason == stop
    assert [delta.text for delta in restored] == [stopped.text]


async def test_a_request_that_nobody_reads_is_ended(frontend: Frontend) -> None:
    engine = frontend.engines[0]
    request = (await frontend.submit([5] * 20, LONG)).sequences[0].request
    await until_generating(frontend)
    del engine.requests.sequences[request]
    engine.check_records()
    assert (request.finish_reason, engine.metrics.violations) == ("abort", 2)
    assert engine.metrics.open_requests == set()
    engine.scheduler.check_integrity()


async def test_wrong_records_of_blocks_end_what_runs_and_nothing_else(
    frontend: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    engine = frontend.engines[0]
    outputs = [await frontend.submit([number + 5] * 20, LONG) for number in range(4)]
    await until_generating(frontend)
    assert len(engine.scheduler.running) == engine.scheduler.num_waiting == 2
    engine.scheduler.kv_cache.pools[0]._references[77] += 1
    engine.check_records()
    engine.scheduler.check_integrity()
    results = await asyncio.gather(*map(collect, outputs))
    assert ["were wrong" in result for result in results] == [True, True, False, False]
    assert results[2:] == ["length", "length"]
    assert caplog.text.count("a check of the records failed") == 1
    assert engine.metrics.violations == 1
    engine.scheduler.check_integrity()


async def test_records_are_checked_while_there_are_requests(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioinfer.engine.recovery._CHECK_EVERY_S", 0.01)
    engine, seen = frontend.engines[0], []
    records = engine._record_check
    check = records.check
    monkeypatch.setattr(records, "check", lambda: (seen.append(engine.is_idle), check()))
    await asyncio.gather(
        *[
            collect(await frontend.submit([number + 5] * 20, replace(LONG, max_tokens=1900)))
            for number in range(2)
        ]
    )
    async with asyncio.timeout(20):
        while not seen or not seen[-1]:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.005)
    assert False in seen, "not while there were requests"
    assert engine._record_check.next_check is None, "an idle engine has no timer"
    checks = len(seen)
    await asyncio.sleep(0.1)
    assert len(seen) == checks
    assert engine.metrics.violations == 0


class Failing:
    """Takes the place of an executor's `post`, or of a detokenizer, and fails after some calls."""

    def __init__(self, calls: int, then: Callable[..., object]):
        self._calls, self._then = calls, then

    def __call__(self, *arguments: object) -> object:
        self._calls -= 1
        if self._calls < 0:
            raise RuntimeError("a fault of the test")
        return self._then(*arguments)


@pytest.fixture
async def renewed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Frontend]:
    """A frontend whose executors are replaced by ones that answer the same."""
    monkeypatch.setattr("aioinfer.engine.recovery._FIRST_DELAY_S", 0.0)
    frontend = await make_frontend(2, 0.0)
    engine = frontend.engines[0]
    first: EchoExecutor = engine._workers.executor

    def new_executor() -> EchoExecutor:
        executor = EchoExecutor(frontend.config, 0.0)
        executor.text = first.text
        return executor

    engine.recovery.new_executor, engine.recovery.policy = new_executor, RestartPolicy(3)
    yield frontend
    await frontend.close()


async def test_a_step_that_cannot_be_posted_is_planned_again(
    renewed: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(LONG, max_tokens=50)
    executor = renewed.engines[0]._workers.executor
    monkeypatch.setattr(executor, "post", Failing(10, executor.post))
    for whole in await asyncio.gather(*[complete(renewed, params) for _ in range(3)]):
        assert (whole.finish_reason, len(whole.token_ids)) == ("length", 50)
        assert whole.text == renewed.require_tokenizer().decode(whole.token_ids)
    assert renewed.engines[0].metrics.restarts == 1
    assert renewed.engines[0].metrics.interrupted == 2
    renewed.engines[0].scheduler.check_integrity()


async def test_restarts_that_are_put_off_do_not_count(renewed: Frontend) -> None:
    """Else a model that makes way for others while its workers come back would end the server."""
    recovery = renewed.engines[0].recovery
    make, started = recovery.new_executor, asyncio.Event()
    assert make is not None

    async def never_start(*_: object) -> NoReturn:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    def new_executor() -> Executor:
        executor = make()
        executor.start = never_start  # type: ignore[method-assign]
        return executor

    recovery.new_executor = new_executor
    renewed.engines[0].handle_loss(GenerationError("lost"))
    for _ in range(4):  # more often than restarts are allowed
        await started.wait()
        started.clear()
        assert recovery.policy.num_restarts == 1
        await recovery.defer()
    await recovery.defer()  # also before it begins
    recovery.new_executor = make
    assert (await complete(renewed, GREEDY)).finish_reason == "length"
    assert recovery.policy.num_restarts == 1


async def test_requests_whose_text_is_lost_end_and_those_that_wait_go_on(
    renewed: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = renewed.engines[0]
    outputs = [await renewed.submit([number + 5] * 20, LONG) for number in range(4)]
    monkeypatch.setattr(engine.scheduler, "update", Failing(10, engine.scheduler.update))
    take = engine._workers.executor._on_result

    def take_as_executors_do(result: StepResult) -> None:
        try:
            take(result)
        except RuntimeError as error:
            monkeypatch.undo()
            engine.recovery.handle_loss(error)

    engine._workers.executor._on_result = take_as_executors_do
    results = await asyncio.gather(*map(collect, outputs))
    assert ["cannot be resumed: a fault" in result for result in results[:2]] == [True, True]
    assert results[2:] == ["length", "length"]
    assert (renewed.is_healthy(), engine.metrics.restarts) == (True, 1)


async def test_steps_are_counted_beyond_31_bits(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty days of steps: their numbers cross real rings and the heartbeat."""
    engine, plans, results, heartbeat = frontend.engines[0], Ring(1), Ring(1), Heartbeat(1)
    post, deliver = engine._workers.executor.post, engine._workers.executor._on_result
    seen = []

    def through_ring(plan: StepPlan) -> None:
        plans.write(plan.encode())
        assert plans.announced(0) == 1
        plan = StepPlan.decode(bytes(plans.read(0)))
        plans.release(0)
        heartbeat.begin(0, plan.step_id)
        post(plan)

    def back_through_ring(result: StepResult) -> None:
        heartbeat.finish(0, result.step_id)
        assert heartbeat.laggards(result.step_id) == [0], "it has finished, and the result is lost"
        results.write(result.encode())
        assert results.announced(0) == 1
        result = StepResult.decode(bytes(results.read(0)))
        results.release(0)
        seen.append(result.step_id)
        deliver(result)

    monkeypatch.setattr(engine._workers.executor, "post", through_ring)
    monkeypatch.setattr(engine._workers.executor, "_on_result", back_through_ring)
    engine.scheduler._step_id = 2**31 - 3
    with engine.metrics.steps.watched():
        assert (await complete(frontend, GREEDY)).finish_reason == "length"
        logged = [step.step_id for step in engine.metrics.steps.since(-1)]
    assert seen == logged == list(range(2**31 - 3, 2**31 + 3))
    for shared in (plans, results, heartbeat):
        shared.close()
