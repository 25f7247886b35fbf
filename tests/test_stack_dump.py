"""Stacks that another process writes when it is asked, without what its variables hold."""

from __future__ import annotations

import threading
import time
from typing import Any

from torch import multiprocessing

from aioinfer.ipc.stack_dump import StackDump


def wait_in_two_threads(stacks: StackDump, ready: Any) -> None:
    stacks.register()
    prompt = "a secret prompt"
    threading.Thread(target=hold_the_lock, args=(prompt, ready), daemon=True).start()
    time.sleep(60)


def hold_the_lock(prompt: str, ready: Any) -> None:
    ready.set()
    sum(range(10**12))  # a call in C that does not let other threads run


def test_a_process_that_is_busy_in_c_gives_the_stacks_of_all_threads() -> None:
    stacks, context = StackDump(), multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=wait_in_two_threads, args=(stacks, ready), daemon=True)
    process.start()
    assert ready.wait(30)
    time.sleep(0.2)
    assert stacks.read() == ""
    stacks.request(process.pid or 0)
    deadline = time.monotonic() + 20
    while not ("hold_the_lock" in stacks.read() and "wait_in_two_threads" in stacks.read()):
        assert time.monotonic() < deadline, stacks.read()
        time.sleep(0.01)
    assert "secret" not in stacks.read()
    assert process.is_alive()
    process.kill()
    process.join()
    stacks.request(process.pid or 0)
    process.close()
    stacks.close()
    stacks.close()


def test_its_own() -> None:
    stacks = StackDump()
    stacks.write_own()
    assert "test_its_own" in stacks.read()
    stacks.close()
