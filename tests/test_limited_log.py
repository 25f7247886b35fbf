"""At most one line in some seconds, and none of the events is lost."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from aioinfer.process_log import LimitedLog
from tests.waiting import until

LOGGER = logging.getLogger("tests.limited_log")


async def test_events_are_logged_together(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(LOGGER, "odd things", interval_s=0.2)
    for number in range(1000):
        log.count(f"of {number}")
    assert caplog.messages == ["odd things: 1, the last of 0"]
    await until(lambda: len(caplog.messages) >= 2)
    assert caplog.messages[1] == "odd things: 999, the last of 999"
    log.close()


async def test_nothing_is_lost_or_logged_twice(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(LOGGER, "odd things", interval_s=0.05)
    for _ in range(20):
        log.count("")
        await asyncio.sleep(0.01)
    log.close()
    log.close()
    numbers = [int(re.findall(r"\d+", message)[0]) for message in caplog.messages]
    assert sum(numbers) == 20
    assert 0 not in numbers


async def test_after_a_quiet_time_the_first_event_is_logged_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = LimitedLog(LOGGER, "odd things", interval_s=0.01)
    log.count("first")
    await asyncio.sleep(0.2)
    assert len(caplog.messages) == 1
    log.count("second")
    assert len(caplog.messages) == 2
    log.close()
