"""Tokens of many streams are emitted in portions, between which the event loop does other things: nothing else may change by it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioinfer.engine import engine as engine_module
from aioinfer.sampling_params import SamplingParams
from bench_loop import make_engine

STREAMS = 40


async def complete(params: SamplingParams, engine: Any, prompt: int) -> tuple[str, int, str | None, int | str | None]:
    text, tokens, reason, stop = "", 0, None, None
    async for delta in await engine.submit([prompt + 5] * 8, params):
        assert reason is None, "something came behind the end"
        text += delta.text
        tokens += len(delta.token_ids)
        reason, stop = delta.finish_reason, delta.stop_reason
    return text, tokens, reason, stop


async def complete_all(delay_s: float) -> list[tuple[str, int, str | None, int | str | None]]:
    """Returns text, tokens and end of streams of several lengths, some of which run into a stop string."""
    engine = await make_engine(STREAMS, delay_s)
    kinds = [
        SamplingParams(max_tokens=30 + i, ignore_eos=True, stop=("Boxkämpfer", "языки", "булок") if i % 3 else ()) for i in range(STREAMS)
    ]
    try:
        return list(await asyncio.gather(*(complete(params, engine, i) for i, params in enumerate(kinds))))
    finally:
        engine.scheduler.check_integrity()
        assert engine.scheduler.is_idle
        await engine.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.002])
async def test_portions_change_nothing(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    whole = await complete_all(delay_s)
    assert {reason for _, _, reason, _ in whole} == {"stop", "length"}
    for portion in (1, 7):
        monkeypatch.setattr(engine_module, "_PORTION", portion)
        assert await complete_all(delay_s) == whole


async def test_the_loop_has_its_turn_between_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step's tokens are emitted, what was ready before goes first."""
    monkeypatch.setattr(engine_module, "_PORTION", 4)
    engine = await make_engine(STREAMS, 0.02)
    order: list[int] = []

    class Recorder:
        def __init__(self, number: int):
            self.number = number

        def take(self, index: int, text: str, reason: str | None, stop_reason: int | str | None) -> bool:
            if not order:
                asyncio.get_running_loop().call_soon(order.append, -1)
            order.append(self.number)
            return True

    for number in range(STREAMS):
        (await engine.submit([number + 5], SamplingParams(max_tokens=1, ignore_eos=True))).attach(Recorder(number))
    await engine.drain(5)
    assert order == [0, 1, 2, 3, -1, *range(4, STREAMS)]
    await engine.close()
