"""The step loop over a worker that computes nothing: its order, and what it reports to client and
metrics about the end of a sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest

from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import Delta
from aioinfer.ipc.heartbeat import Heartbeat
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.ipc.ring import Ring
from aioinfer.sampling_params import SamplingParams
from bench_loop import make_frontend

PROMPT = [5] * 20
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    frontend = await make_frontend(2, 0.0)
    yield frontend
    await frontend.close()


async def complete(
    frontend: Frontend, params: SamplingParams, *, plans_ahead: bool = True
) -> Delta:
    """Returns all deltas of a sequence, merged."""
    output = await frontend.submit(PROMPT, params)
    if not plans_ahead:  # what a request that is made so begins with
        request = output.sequences[0].request
        request.plans_ahead, request.plan_limit = False, 0
    whole = await anext(output)
    async for delta in output:
        whole.merge(delta)
    request = output.sequences[0].request
    assert (request.finish_reason, request.stop_reason) == (whole.finish_reason, whole.stop_reason)
    return whole


async def test_a_step_is_posted_before_the_text_of_an_earlier_one_is_emitted(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_posted, posted_at_token = 0, []
    engine = frontend.engines[0]
    post: Callable[[StepPlan], None] = engine._executor.post

    def count(plan: StepPlan) -> None:
        nonlocal num_posted
        num_posted += 1
        post(plan)

    class Recorder:
        def push(self, *_: object) -> bool:
            posted_at_token.append(num_posted)
            return True

    monkeypatch.setattr(engine._executor, "post", count)
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


def take_three(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each row of a step bring three tokens, as speculation will."""
    executor = frontend.engines[0]._executor

    def post(plan: StepPlan) -> None:
        rows = plan.samples.astype(bool)
        first = (plan.starts + plan.lengths)[rows] + 7919 * plan.slots[rows]
        places = first[:, None] + np.arange(3)
        tokens = executor.text[places % len(executor.text)]
        result = StepResult(plan.step_id, tokens, np.full(len(tokens), 3, np.int32))
        asyncio.get_running_loop().call_soon(executor._on_result, result)

    monkeypatch.setattr(executor, "post", post)


async def test_rows_of_several_tokens_give_the_text_of_rows_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frontend = await make_frontend(2, 0.0)
    params = replace(GREEDY, max_tokens=14)
    whole = await complete(frontend, params)
    by_stop = replace(params, stop=(whole.text[9:12],))
    by_token = replace(params, stop_token_ids=(whole.token_ids[7],), include_stop=True)
    by_both = replace(params, stop=(frontend.tokenizer.decode(whole.token_ids[13:14]),))
    late = replace(by_stop, min_tokens=12)
    expected = [await complete(frontend, given) for given in (by_stop, by_token, by_both, late)]
    assert [delta.finish_reason for delta in expected[:3]] == ["stop"] * 3
    take_three(frontend, monkeypatch)
    assert await complete(frontend, params, plans_ahead=False) == whole
    for given, delta in zip((by_stop, by_token, by_both, late), expected, strict=True):
        assert await complete(frontend, given, plans_ahead=False) == delta
    assert frontend.engines[0].is_idle
    frontend.engines[0].scheduler.check_integrity()
    await frontend.close()


async def test_steps_are_counted_beyond_31_bits(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty days of steps: their numbers cross real rings and the heartbeat."""
    engine, plans, results, heartbeat = frontend.engines[0], Ring(1), Ring(1), Heartbeat(1)
    post, deliver = engine._executor.post, engine._executor._on_result
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

    monkeypatch.setattr(engine._executor, "post", through_ring)
    monkeypatch.setattr(engine._executor, "_on_result", back_through_ring)
    engine.scheduler._step_id = 2**31 - 3
    with engine.metrics.steps.watched():
        assert (await complete(frontend, GREEDY)).finish_reason == "length"
        logged = [step.step_id for step in engine.metrics.steps.since(-1)]
    assert seen == logged == list(range(2**31 - 3, 2**31 + 3))
    for shared in (plans, results, heartbeat):
        shared.close()
