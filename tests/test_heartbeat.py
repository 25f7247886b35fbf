"""The heartbeat says what a rank of another process is doing, and for how long."""

from __future__ import annotations

import os
import re

from torch import multiprocessing

from aioinfer.executor.heartbeat import Heartbeat


def test_states_of_several_ranks() -> None:
    heartbeat = Heartbeat(70)  # more than a page of them
    assert heartbeat.describe(0) == "rank 0 has begun no step"
    heartbeat.begin(69, 0)
    assert re.fullmatch(r"rank 69 was executing step 0, last heartbeat 0\.\d s ago", heartbeat.describe(69))
    heartbeat.finish(69, 0)
    assert re.fullmatch(r"rank 69 was waiting for a plan after step 0, last heartbeat 0\.\d s ago", heartbeat.describe(69))
    assert heartbeat.describe(68) == "rank 68 has begun no step"
    heartbeat.close()


def test_a_step_that_begins_before_the_last_one_is_finished() -> None:
    heartbeat = Heartbeat(1)
    heartbeat.begin(0, 4)
    heartbeat.begin(0, 5)
    heartbeat.finish(0, 4)
    assert "executing step 5" in heartbeat.describe(0)
    heartbeat.finish(0, 5)
    assert "waiting for a plan after step 5" in heartbeat.describe(0)
    heartbeat.close()


def begin_from_elsewhere(heartbeat: Heartbeat) -> None:
    heartbeat.begin(1, 17)


def test_another_process_is_seen() -> None:
    before = len(os.listdir("/dev/shm"))
    heartbeat = Heartbeat(2)
    process = multiprocessing.get_context("spawn").Process(target=begin_from_elsewhere, args=(heartbeat,))
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert "rank 1 was executing step 17" in heartbeat.describe(1)
    process.close()
    heartbeat.close()
    heartbeat.close()
    assert len(os.listdir("/dev/shm")) == before
