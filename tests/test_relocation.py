"""Requests of an engine that dies go on with another, with the output of an undisturbed run.

The workers are symbolic: a row that attends to anything but its own prefix is found at once.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import Config, load_config
from aioinfer.engine.engine import Engine
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import Delta, KnownDelta, RequestOutput
from aioinfer.errors import EngineDeadError, GenerationError, OverloadedError, RequestError
from aioinfer.executor.base import ProgressCallback, WorkerReport
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Flow, Request, RequestStatus
from bench_loop import CONFIG, ONE_GROUP
from tests.executor_runs import planning_ahead
from tests.symbolic_worker import VOCABULARY, SymbolicWorker, complete

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 32, 60
PARAMS = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)


class SymbolicExecutor:
    """A symbolic worker that answers in a later turn of the event loop, until it is killed."""

    def __init__(self, config: Config):
        limits = config.scheduler
        self._worker = SymbolicWorker(
            (ONE_GROUP,), (NUM_BLOCKS,), BLOCK_SIZE, limits.max_num_seqs,
            limits.max_num_batched_tokens,
        )  # fmt: skip
        self._is_dead = False
        self.on_post: Callable[[], object] = lambda: None

    async def start(
        self,
        on_result: Callable[[StepResult], None],
        on_failure: Callable[[Exception], None],
        on_progress: ProgressCallback,
    ) -> WorkerReport:
        self._on_result, self._on_failure = on_result, on_failure
        return WorkerReport("none", "none", 0, 0, BLOCK_SIZE, (ONE_GROUP,), (NUM_BLOCKS,), MAX_LEN)

    def post(self, plan: StepPlan) -> None:
        self.on_post()
        self._worker.post(plan)
        asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        if not self._is_dead:
            self._on_result(self._worker.results.popleft())

    def kill(self) -> None:
        self._is_dead = True
        self._on_failure(EngineDeadError("worker 0 was killed\nwith a traceback"))

    async def shutdown(self) -> None:
        self._is_dead = True


class Fleet:
    """A frontend over engines with symbolic workers; an engine dies with its first loss."""

    def __init__(self, frontend: Frontend, executors: list[SymbolicExecutor]):
        self.frontend, self.executors = frontend, executors
        self.engines = frontend.engines

    @classmethod
    async def launch(cls, engines: int, **settings: Any) -> Fleet:
        ahead = planning_ahead(settings)
        usual = {
            "parallel.data_parallel_size": engines, "parallel.restart_workers": 0,
            "model.tokenizer": "none", "model.max_model_len": MAX_LEN, "scheduler.max_num_seqs": 4,
            "scheduler.max_num_batched_tokens": 24,
        }  # fmt: skip
        changes = {name.replace("__", "."): value for name, value in settings.items()}
        config = await asyncio.to_thread(load_config, CONFIG, usual | changes)
        executors = [SymbolicExecutor(config) for _ in range(engines)]
        with ahead:
            frontend = Frontend(config, executors, lambda number: SymbolicExecutor(config))
            await frontend.start(await asyncio.to_thread(resolve_model, config.model))
        return cls(frontend, executors)

    async def submit(self, prompt: list[int], **fields: Any) -> RequestOutput:
        flow = fields.pop("flow", Flow())
        return await self.frontend.submit(prompt, replace(PARAMS, **fields), flow=flow)

    def home(self, output: RequestOutput) -> Engine:
        """Returns the engine that has an unfinished request."""
        request = next(s.request for s in output.sequences if s.request.finish_reason is None)
        (engine,) = (e for e in self.engines if request in set(e.scheduler.requests()))
        return engine

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110  # no event
                await asyncio.sleep(0)

    async def close(self) -> None:
        for engine in self.engines:
            assert engine.is_idle
            assert engine.metrics.open_requests == set()
            engine.check_records()
            assert engine.metrics.violations == 0
        await self.frontend.close()


async def collect(output: RequestOutput) -> list[list[int]]:
    """Returns the tokens of each sequence. Raises the error that ends the request."""
    tokens: list[list[int]] = [[] for _ in range(output.params.n)]
    async for delta in output:
        tokens[delta.index] += delta.token_ids
    return tokens


def expected(output: RequestOutput) -> list[list[int]]:
    prompt = output.prompt_token_ids
    ends = frozenset(output.params.stop_token_ids)
    return [
        complete(prompt, sequence.request.max_len, ends, sequence.request.seed)
        for sequence in output.sequences
    ]


async def test_whatever_state_they_are_in_requests_go_on_with_the_same_tokens() -> None:
    fleet = await Fleet.launch(2)
    outputs = [await fleet.submit([number + 1] * 6) for number in range(12)]
    readers = [asyncio.create_task(collect(output)) for output in outputs]
    seeds = [output.sequences[0].request.seed for output in outputs]
    assert len(set(seeds)) == 12, "drawn, since they bring none"
    dead, other = fleet.engines
    await fleet.until(lambda: dead.metrics.generation_tokens > 30)
    states = {s.request.status for output in outputs for s in output.sequences}
    assert states == {RequestStatus.RUNNING, RequestStatus.WAITING}
    num_open = len(dead.requests.sequences)
    fleet.executors[0].kill()
    assert (dead.is_idle, dead.metrics.moved, dead.metrics.interrupted) == (True, num_open, 4)
    assert len(other.requests.sequences) == 12, "none of the other engine's has ended yet"
    assert dead.scheduler.is_idle
    assert dead.scheduler.kv_cache.usage == 0
    first = [r for r in sorted(other.scheduler.requests()) if r.num_interruptions]
    never_ran = [r for r in other.scheduler.requests() if r.num_cached < 0]
    assert max(first) < min(never_ran), "whoever has begun goes on first"
    assert await asyncio.gather(*readers) == [expected(output) for output in outputs]
    assert [output.sequences[0].request.seed for output in outputs] == seeds
    assert dead.metrics.finished["error"] == other.metrics.finished["error"] == 0
    assert sum(e.metrics.finished["length"] for e in fleet.engines) == 12
    assert sum(e.metrics.generation_tokens for e in fleet.engines) == 12 * 30
    assert sum(e.metrics.prompt_tokens for e in fleet.engines) == 12 * 6
    assert sum(e.metrics.queue_time.count for e in fleet.engines) == 12
    assert sum(e.metrics.time_to_first_token.count for e in fleet.engines) == 12
    await fleet.close()


async def test_the_sequences_of_a_request_stay_together_and_an_abort_reaches_them() -> None:
    fleet = await Fleet.launch(3)
    output = await fleet.submit([7] * 9, n=3)
    await fleet.until(lambda: output.sequences[2].request.num_output > 3)
    number = fleet.home(output).number
    fleet.executors[number].kill()
    new = fleet.home(output)
    assert new.number != number
    assert len(new.requests.sequences) == 3
    await fleet.until(lambda: output.sequences[0].request.num_output > 8)
    output.abort()
    assert new.is_idle
    assert new.metrics.finished["abort"] == 3
    await fleet.close()


async def test_requests_that_the_queue_has_no_room_for_end() -> None:
    fleet = await Fleet.launch(2, scheduler__max_waiting_requests=2)
    outputs = [await fleet.submit([number + 1] * 6) for number in range(12)]
    readers = [asyncio.create_task(collect(output)) for output in outputs]
    await fleet.until(lambda: fleet.engines[0].metrics.generation_tokens > 4)
    homes = [fleet.home(output).number for output in outputs]
    fleet.executors[0].kill()
    results = await asyncio.gather(*readers, return_exceptions=True)
    refused = [result for result in results if isinstance(result, OverloadedError)]
    assert len(refused) == 6
    assert str(refused[0]).startswith("engine 0: worker 0 was killed; 2 requests wait")
    kept = [number for number, result in enumerate(results) if isinstance(result, list)]
    assert [results[number] for number in kept] == [expected(outputs[n]) for n in kept]
    assert all(number in kept for number, home in enumerate(homes) if home == 1)
    assert fleet.engines[0].metrics.finished["error"] == 6
    await fleet.close()


async def test_the_text_of_a_step_that_was_taken_goes_out_before_the_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step cannot be posted: the tokens of the former one are taken, and not emitted."""
    monkeypatch.setattr("aioinfer.engine.emission._PORTION", 1)
    fleet = await Fleet.launch(2)
    outputs = [await fleet.submit([number + 1] * 6) for number in range(6)]
    readers = [asyncio.create_task(collect(output)) for output in outputs]
    await fleet.until(lambda: fleet.engines[0].metrics.generation_tokens > 4)

    def fail() -> None:
        raise RuntimeError("a fault of the test")

    fleet.executors[0].on_post = fail
    assert await asyncio.gather(*readers) == [expected(output) for output in outputs]
    assert fleet.engines[0].metrics.moved == 3
    await fleet.close()


async def test_a_step_whose_text_cannot_be_emitted_ends_the_requests_that_have_begun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine dies while it emits: what is left of the emission belongs to no step any more."""
    fleet = await Fleet.launch(2)
    engine = fleet.engines[0]
    outputs = [await fleet.submit([number + 1] * 6, max_tokens=9 + number) for number in range(6)]
    ended, *begun = (output for output in outputs if fleet.home(output) is engine)
    forget = engine.requests.forget

    def fail_once(request: Request, outcome: str) -> None:
        monkeypatch.setattr(engine.requests, "forget", forget)
        raise RuntimeError("a fault of the test")

    monkeypatch.setattr(engine.requests, "forget", fail_once)
    results = await asyncio.gather(*map(collect, outputs), return_exceptions=True)
    assert results[outputs.index(ended)] == expected(ended), "it has all of its text"
    for output, result in zip(outputs, results, strict=True):
        if output in begun:
            assert "cannot be resumed: engine 0: tokens could not be emitted" in str(result)
        else:
            assert result == expected(output)
    assert engine.is_idle
    assert fleet.frontend.is_healthy()
    assert "Exception in callback" not in caplog.text
    await fleet.close()


async def test_a_request_that_ran_at_two_deaths_ends() -> None:
    fleet = await Fleet.launch(3)
    output = await fleet.submit([7] * 9)
    reader = asyncio.create_task(collect(output))
    for number in (0, 1):
        tokens = output.sequences[0].request.num_output
        await fleet.until(lambda tokens=tokens: output.sequences[0].request.num_output > tokens + 2)
        fleet.executors[fleet.home(output).number].kill()
        assert output.is_finished == bool(number)
    with pytest.raises(
        GenerationError, match=r"cannot be resumed: engine \d: worker 0 was killed$"
    ):
        await reader
    assert fleet.frontend.is_healthy()
    await fleet.close()


@pytest.mark.parametrize("seed", range(12))
async def test_random_traffic(seed: int) -> None:
    """Random arrivals, sequences, flows, stops, aborts and deaths of engines: whatever is not
    aborted or at fault twice ends as if it had run alone."""
    draw = random.Random(seed)
    fleet = await Fleet.launch(draw.randint(2, 4), scheduler__plan_ahead=draw.random() < 0.7)
    outputs: list[RequestOutput] = []
    aborted: set[RequestOutput] = set()
    readers: list[asyncio.Task[list[list[int]]]] = []
    for _ in range(draw.randint(5, 30)):
        ends = tuple(draw.sample(range(VOCABULARY), draw.randint(0, 2)))
        output = await fleet.submit(
            [draw.randint(0, 2) for _ in range(draw.randint(1, 25))],
            n=draw.choice([1, 1, 3]),
            seed=draw.choice([None, 5]),
            max_tokens=draw.randint(1, 30),
            stop_token_ids=ends,
            flow=Flow(draw.choice("ab"), draw.choice([1.0, 3.0])),
        )
        outputs.append(output)
        readers.append(asyncio.create_task(collect(output)))
        for _ in range(draw.randint(0, 6)):
            await asyncio.sleep(0)
        living = [e for e in fleet.engines if e.dead_reason is None]
        engine = draw.choice(living)
        if draw.random() < 0.1:
            aborted.add(victim := draw.choice(outputs))
            victim.abort(RequestError("aborted"))
        if len(living) > 1 and draw.random() < 0.15:
            fleet.executors[engine.number].kill()
            assert engine.is_idle
        for engine in fleet.engines:
            engine.check_records()
    async with asyncio.timeout(20):
        results = await asyncio.gather(*readers, return_exceptions=True)
    for output, result in zip(outputs, results, strict=True):
        if isinstance(result, list):
            assert result == expected(output)
        elif isinstance(result, GenerationError):
            assert max(s.request.num_interruptions for s in output.sequences) == 2
        else:
            assert output in aborted, repr(result)
    for engine in fleet.engines:
        assert engine.scheduler.kv_cache.num_free == NUM_BLOCKS
    finished = sum(sum(engine.metrics.finished.values()) for engine in fleet.engines)
    assert finished == sum(output.params.n for output in outputs)
    await fleet.close()


async def test_where_no_engine_is_left_all_requests_end_for_that_reason() -> None:
    fleet = await Fleet.launch(2)
    outputs = [await fleet.submit([number + 1] * 6) for number in range(10)]
    readers = [asyncio.create_task(collect(output)) for output in outputs]
    await fleet.until(lambda: all(e.metrics.generation_tokens > 30 for e in fleet.engines))
    for executor in fleet.executors:
        executor.kill()
    for result in await asyncio.gather(*readers, return_exceptions=True):
        assert isinstance(result, EngineDeadError)
        assert str(result).startswith("engine 1: worker 0 was killed")
    assert not fleet.frontend.is_healthy()
    await fleet.close()


@pytest.mark.parametrize("n", [1, 3])
async def test_another_server_goes_on_behind_what_the_client_has(n: int) -> None:
    """From wherever the first server was lost: the client has each token once, its reader gets what
    the client has in the same deltas, and sequences that have ended stay so."""
    first, second = await Fleet.launch(1), await Fleet.launch(1)
    prompt = [7] * 9
    ends, goes_on, *_ = (complete(prompt, 29, frozenset(), 5 + index) for index in range(3))
    stop = next(token for token in ends[3:] if token not in goes_on)
    fields = {"n": n, "seed": 5, "stop_token_ids": (stop,), "max_tokens": 20}
    output = await first.submit(prompt, **fields)
    sent = [KnownDelta(*_fields(delta)) async for delta in output]
    wanted = expected(output)
    assert {delta.finish_reason for delta in sent} == {None, "stop", "length"} or n == 1
    for cut in [*range(0, len(sent), 5), len(sent)]:
        params = replace(PARAMS, **fields)
        again = await second.frontend.submit(prompt, params, known=sent[:cut])
        deltas = [delta async for delta in again]
        restored = [delta for delta in deltas if delta.is_restored]
        assert [KnownDelta(*_fields(delta)) for delta in restored] == sent[:cut]
        tokens: list[list[int]] = [[] for _ in range(n)]
        for delta in deltas:
            tokens[delta.index] += delta.token_ids
        assert tokens == wanted
        assert again.generated() == [array("i", each) for each in wanted]
        assert sum(delta.finish_reason is not None for delta in deltas) == n
    again = await second.frontend.submit(prompt, params, known=sent[:5])
    assert [delta.token_ids for delta in await again.collect()] == wanted
    await first.close()
    await second.close()


def _fields(delta: Delta) -> tuple[Any, ...]:
    return delta.index, delta.token_ids, 0, delta.finish_reason, delta.stop_reason
