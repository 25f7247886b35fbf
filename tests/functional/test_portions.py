"""Tokens of many streams are emitted in portions, between which the event loop does other things:
nothing else may change by it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioinfer.engine import emission
from aioinfer.sampling_params import SamplingParams
from bench_loop import make_frontend

STREAMS = 40


async def complete(
    params: SamplingParams, frontend: Any, prompt: int
) -> tuple[str, int, str | None, int | str | None]:
    text, tokens, reason, stop = "", 0, None, None
    async for delta in await frontend.submit([prompt + 5] * 8, params):
        assert reason is None, "something came behind the end"
        text += delta.text
        tokens += len(delta.token_ids)
        reason, stop = delta.finish_reason, delta.stop_reason
    return text, tokens, reason, stop


async def complete_all(delay_s: float) -> list[tuple[str, int, str | None, int | str | None]]:
    """Returns text, tokens and end of streams of several lengths, some of which run into a stop
    string."""
    frontend = await make_frontend(STREAMS, delay_s)
    kinds = [
        SamplingParams(
            max_tokens=30 + i,
            ignore_eos=True,
            stop=("Boxkämpfer", "языки", "булок") if i % 3 else (),
        )
        for i in range(STREAMS)
    ]
    try:
        return list(
            await asyncio.gather(*(complete(params, frontend, i) for i, params in enumerate(kinds)))
        )
    finally:
        frontend.engines[0].scheduler.check_integrity()
        assert frontend.engines[0].scheduler.is_idle
        await frontend.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.002])
async def test_portions_change_nothing(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    whole = await complete_all(delay_s)
    assert {reason for _, _, reason, _ in whole} == {"stop", "length"}
    for portion in (1, 7):
        monkeypatch.setattr(emission, "_PORTION", portion)
        assert await complete_all(delay_s) == whole


async def test_the_event_loop_runs_other_callbacks_between_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a step's tokens are emitted, what was ready before goes first."""
    monkeypatch.setattr(emission, "_PORTION", 4)
    frontend = await make_frontend(STREAMS, 0.02)
    order: list[int] = []

    class Recorder:
        def __init__(self, number: int):
            self.number = number

        def push(
            self,
            index: int,
            text: str,
            token: int,
            reason: str | None,
            stop_reason: int | str | None,
        ) -> bool:
            if not order:
                asyncio.get_running_loop().call_soon(order.append, -1)
            order.append(self.number)
            return True

    for number in range(STREAMS):
        (await frontend.submit([number + 5], SamplingParams(max_tokens=1, ignore_eos=True))).attach(
            Recorder(number)
        )
    await frontend.drain(5)
    assert order == [0, 1, 2, 3, -1, *range(4, STREAMS)]
    await frontend.close()
