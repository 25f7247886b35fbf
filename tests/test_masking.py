"""The masks of an engine's steps: in which order plans and masks are posted, and that plain
requests are served beside a slow constraint's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import RequestOutput
from aioinfer.errors import GenerationError
from aioinfer.features.masks.planning import PlainFiller
from aioinfer.features.masks.planning import Planning as Masks
from aioinfer.sampling_params import SamplingParams
from bench_loop import make_frontend
from tests.automata import Residues, accepts, constrain

VOCAB_SIZE = 49_152
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    frontend = await make_frontend(8, 0.0)
    yield frontend
    await frontend.close()


def record_posts(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that grows by each plan and each notice that is posted."""
    executor, posts = frontend.engines[0]._workers.executor, []

    def recorded(name: str, method: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(argument: Any) -> None:
            posts.append(f"{name} {getattr(argument, 'step_id', argument)}")
            method(argument)

        return call

    monkeypatch.setattr(executor, "post", recorded("plan", executor.post))
    monkeypatch.setattr(executor, "post_masks", recorded("masks", executor.post_masks))
    return posts


async def tokens_of(output: RequestOutput) -> list[int]:
    return [token async for delta in output for token in delta.token_ids]


async def submit(
    frontend: Frontend, count: int, params: SamplingParams = PARAMS
) -> list[list[int]]:
    outputs = [await frontend.submit([5] * 20, params) for _ in range(count)]
    return [await tokens_of(output) for output in outputs]


@pytest.mark.parametrize("count", [1, 5])
async def test_masks_follow_their_plan_and_precede_the_next(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """On the event loop for few rows, in a thread for more."""
    posts, threads = record_posts(frontend, monkeypatch), set()

    class Noting(Residues):
        def fill(self, mask: Any) -> None:
            threads.add(threading.current_thread().name.partition("_")[0])
            super().fill(mask)

    constrain(frontend, lambda sequence: Noting(VOCAB_SIZE))
    for tokens in await submit(frontend, count):
        assert len(tokens) == 6
        assert accepts(tokens, VOCAB_SIZE)
    steps = len(posts) // 2
    assert steps >= 6
    assert posts == [f"{what} {step}" for step in range(steps) for what in ("plan", "masks")]
    assert threads == ({"MainThread"} if count == 1 else {"masks"})
    metrics = frontend.engines[0].metrics
    assert metrics.counts["constrained_rows"] == 6 * count
    assert metrics.observed["mask_fill_seconds"].count == steps


async def test_a_step_is_posted_before_the_tokens_of_the_one_before_are_known(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constrained rows are planned ahead like others: only their masks wait."""
    executor, known = frontend.engines[0]._workers.executor, {}
    post = executor.post

    def note(plan: Any) -> None:
        known[plan.step_id] = len(automaton.tokens)
        post(plan)

    monkeypatch.setattr(executor, "post", note)
    automaton = Residues(VOCAB_SIZE)
    constrain(frontend, lambda sequence: automaton)
    await submit(frontend, 1)
    assert known == {0: 0, 1: 0, 2: 1, 3: 2, 4: 3, 5: 4}


async def test_steps_without_constrained_rows_have_no_masks(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    posts = record_posts(frontend, monkeypatch)
    constrain(frontend, lambda sequence: None)
    await submit(frontend, 2)
    assert posts
    assert not [post for post in posts if post.startswith("masks")]
    assert frontend.engines[0].metrics.counts["constrained_rows"] == 0


async def test_requests_come_and_go_while_masks_are_filled(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on meanwhile; nothing overtakes the masks; an aborted request takes no mask."""
    posts = record_posts(frontend, monkeypatch)
    begun, may_end, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    class Slow(PlainFiller):
        def fill(self, rows: Any, masks: Any) -> Any:
            if any(len(constraint.tokens) == 2 for constraint, _ in rows):
                loop.call_soon_threadsafe(begun.set)
                assert may_end.wait(30)
            return super().fill(rows, masks)

    frontend.engines[0].features.of(Masks).filler = Slow()
    is_constrained = True
    constrain(frontend, lambda sequence: Residues(VOCAB_SIZE) if is_constrained else None)
    outputs = [await frontend.submit([5] * 20, PARAMS) for _ in range(4)]
    readers = [asyncio.create_task(tokens_of(output)) for output in outputs]
    await begun.wait()
    waiting = posts[-1]
    assert waiting.startswith("plan")
    is_constrained = False
    plain = await frontend.submit([5] * 20, PARAMS)
    outputs[0].abort()
    for _ in range(20):
        await asyncio.sleep(0)
    assert posts[-1] == waiting
    may_end.set()
    assert len(await tokens_of(plain)) == 6
    lengths = [len(await reader) for reader in readers]
    assert lengths[0] < 6
    assert lengths[1:] == [6, 6, 6]
    assert posts[posts.index(waiting) + 1] == waiting.replace("plan", "masks")


@pytest.mark.parametrize("count", [2, 4])
async def test_a_filler_that_fails_ends_the_requests_of_its_rows(
    frontend: Frontend, count: int
) -> None:
    class Failing(PlainFiller):
        def fill(self, rows: Any, masks: Any) -> Any:
            raise RuntimeError("no memory")

    frontend.engines[0].features.of(Masks).filler = Failing()
    automata = iter([Residues(VOCAB_SIZE)] * count + [None])
    constrain(frontend, lambda sequence: next(automata))
    outputs = [await frontend.submit([5] * 20, PARAMS) for _ in range(count + 1)]
    for output in outputs[:-1]:
        with pytest.raises(GenerationError, match="could not be applied: RuntimeError"):
            await tokens_of(output)
    assert len(await tokens_of(outputs[-1])) == 6
    assert frontend.is_healthy()


@pytest.mark.slow
async def test_an_end_token_under_a_constraint_is_no_text(frontend: Frontend) -> None:
    """And the last token of a complete output is."""
    constrain(frontend, lambda sequence: Residues(VOCAB_SIZE, modulus=40_000, length=3))
    ((first, second, third),) = await submit(frontend, 1)
    output = await frontend.submit([5] * 20, PARAMS)
    deltas = [delta async for delta in output]
    text = "".join(delta.text for delta in deltas)
    tokenizer = frontend.require_tokenizer()
    assert text == tokenizer.decode([first, second, third])
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    output = await frontend.submit([5] * 20, replace(PARAMS, stop_token_ids=(third,)))
    deltas = [delta async for delta in output]
    assert "".join(delta.text for delta in deltas) == tokenizer.decode([first, second])
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", third)


async def test_each_engine_fills_the_masks_of_its_own_requests() -> None:
    frontend = await make_frontend(8, 0.0, {"parallel.data_parallel_size": 2})
    try:
        constrain(frontend, lambda sequence: Residues(VOCAB_SIZE))
        outputs = [await frontend.submit([5] * 20, PARAMS) for _ in range(8)]
        for tokens in await asyncio.gather(*(tokens_of(output) for output in outputs)):
            assert len(tokens) == 6
            assert accepts(tokens, VOCAB_SIZE)
        rows = [engine.metrics.counts["constrained_rows"] for engine in frontend.engines]
        assert rows == [24, 24]
    finally:
        await frontend.close()
