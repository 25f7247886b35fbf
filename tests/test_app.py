"""The life of the server, without a model; `functional/test_lifecycle.py` has it with one."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from aioinfer.api import app
from aioinfer.config import load_config
from aioinfer.engine.frontend import Frontend
from aioinfer.errors import ConfigError

CONFIG = load_config(None, {"model.path": "nowhere"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_loading_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    ended = asyncio.Event()

    async def launch(*_: Any) -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(Frontend, "launch", launch)
    before = signal.getsignal(signal.SIGTERM)
    assert await asyncio.wait_for(app.serve(CONFIG), 5) == 0
    assert ended.is_set()
    assert signal.getsignal(signal.SIGTERM) == before


async def test_a_failure_to_load_is_raised_and_signals_are_by_default_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers, while_loading = (signal.SIGTERM, signal.SIGINT), []

    async def launch(*_: Any) -> None:
        while_loading.extend(map(signal.getsignal, numbers))
        raise ConfigError("there is no such model")

    monkeypatch.setattr(Frontend, "launch", launch)
    default = [signal.SIG_DFL, signal.default_int_handler]
    with pytest.raises(ConfigError, match="no such model"):
        await app.serve(CONFIG)
    assert not set(while_loading) & set(default)
    assert list(map(signal.getsignal, numbers)) == default


async def test_a_hangup_reads_the_keys_again_and_ends_nothing() -> None:
    reloaded = asyncio.Event()

    async def reload() -> None:
        reloaded.set()

    stop = app._StopSignals()
    try:
        stop.on_hangup(reload)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(reloaded.wait(), 5)
            reloaded.clear()
        assert not stop.first.is_set()
    finally:
        stop.close()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
