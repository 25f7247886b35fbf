"""The step loop over a worker that computes nothing: its order, and what it tells client and
metrics about the end of a sequence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import Delta
from aioinfer.ipc.plan import StepPlan
from aioinfer.sampling_params import SamplingParams
from bench_loop import make_frontend

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
