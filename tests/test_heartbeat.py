"""The heartbeat shows what a rank of another process is doing, and for how long; the monitor knows
whether that process runs at all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import multiprocessing

from aioinfer.ipc import heartbeat as heartbeat_module
from aioinfer.ipc.heartbeat import Heartbeat, ProcessMonitor
from tests.waiting import new_shared_files, shared_files


def test_states_of_several_ranks() -> None:
    heartbeat = Heartbeat(70)  # more than a page of them
    assert heartbeat.describe(0) == "rank 0 has begun no step"
    heartbeat.begin(69, 0)
    assert re.fullmatch(
        r"rank 69 was executing step 0, last heartbeat 0\.\d s ago", heartbeat.describe(69)
    )
    heartbeat.finish(69, 0)
    assert re.fullmatch(
        r"rank 69 was waiting for a plan after step 0, last heartbeat 0\.\d s ago",
        heartbeat.describe(69),
    )
    assert heartbeat.describe(68) == "rank 68 has begun no step"
    heartbeat.close()


def test_ranks_of_another_host_by_its_clock() -> None:
    """Its times are made this host's; ranks that have recorded nothing stay so."""
    there, here = Heartbeat(4), Heartbeat(4)
    there.begin(2, 7)
    there.finish(2, 7)
    here.begin(0, 8)
    here.mirror([2, 3], there.read([2, 3]), behind_ns=-5_000_000_000)
    assert here.has_finished(2, 7)
    assert not here.has_finished(2, 8)
    assert not here.has_finished(3, 0)
    assert re.fullmatch(
        r"rank 2 was waiting for a plan after step 7, last heartbeat 5\.\d s ago", here.describe(2)
    )
    assert here.describe(3) == "rank 3 has begun no step"
    assert here.describe(0).startswith("rank 0 was executing step 8")
    with pytest.raises(ValueError, match="reshape"):
        here.mirror([2], there.read([2, 3]), 0)
    there.close()
    here.close()


def test_names_and_busy_time() -> None:
    heartbeat = Heartbeat(2, ["0 (stage 0)", "1 (stage 1)"])
    assert heartbeat.describe(1) == "rank 1 (stage 1) has begun no step"
    heartbeat.add_busy(1, 700)
    heartbeat.add_busy(1, 50)
    assert (heartbeat.busy_ns(0), heartbeat.busy_ns(1)) == (0, 750)
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


def test_a_device_that_hangs_is_told_from_a_host_that_does() -> None:
    heartbeat = Heartbeat(1)
    heartbeat.begin(0, 4)
    assert "executing step 4, last" in heartbeat.describe(0), "nothing is known of a device yet"
    heartbeat.launch(0, 4)
    ago = r"for 0\.\d s\), last heartbeat 0\.\d s ago"
    assert re.search(
        rf"executing step 4 \(the device has not finished step 4 {ago}", heartbeat.describe(0)
    )
    heartbeat.begin(0, 5)
    assert "executing step 5 (the host has not launched it), last" in heartbeat.describe(0)
    heartbeat.launch(0, 5)
    assert re.search(
        rf"executing step 5 \(the device has not finished step 4 {ago}", heartbeat.describe(0)
    )
    heartbeat.finish(0, 4)
    assert re.search(
        rf"executing step 5 \(the device has not finished step 5 {ago}", heartbeat.describe(0)
    )
    heartbeat.finish(0, 5)
    assert "waiting for a plan after step 5, last" in heartbeat.describe(0)
    heartbeat.close()


def test_how_long_a_device_is_at_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end of the former one, or from its launch where the device was idle before."""
    now_s = 1000.0
    monkeypatch.setattr(heartbeat_module.time, "monotonic_ns", lambda: int(now_s * 1e9))
    heartbeat = Heartbeat(1)
    for step in (7, 8):
        heartbeat.begin(0, step)
        heartbeat.launch(0, step)
    now_s = 1002.0
    heartbeat.finish(0, 7)
    now_s = 1012.0
    assert "the device has not finished step 8 for 10.0 s), last heartbeat 10.0 s" in (
        heartbeat.describe(0)
    )
    heartbeat.finish(0, 8)
    now_s = 2000.0
    for step in (9, 10):
        heartbeat.begin(0, step)
        heartbeat.launch(0, step)
    now_s = 2030.0
    assert "executing step 10 (the device has not finished step 9 for 30.0 s)" in (
        heartbeat.describe(0)
    )
    heartbeat.close()


def begin_from_elsewhere(heartbeat: Heartbeat) -> None:
    heartbeat.begin(1, 17)


def test_another_process_is_seen() -> None:
    before = shared_files()
    heartbeat = Heartbeat(2)
    process = multiprocessing.get_context("spawn").Process(
        target=begin_from_elsewhere, args=(heartbeat,)
    )
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert "rank 1 was executing step 17" in heartbeat.describe(1)
    process.close()
    heartbeat.close()
    heartbeat.close()
    assert new_shared_files(before) == set()


def test_who_keeps_a_step_from_its_end() -> None:
    heartbeat = Heartbeat(3)
    assert heartbeat.laggards(0) == [0, 1, 2]
    heartbeat.begin(0, 0)
    heartbeat.begin(2, 0)
    assert heartbeat.laggards(0) == [1]
    heartbeat.begin(1, 0)
    heartbeat.finish(1, 0)
    heartbeat.begin(1, 1)
    assert heartbeat.laggards(0) == [0, 2]
    assert heartbeat.laggards(1) == [0, 2]
    heartbeat.finish(0, 0)
    heartbeat.finish(2, 0)
    assert heartbeat.laggards(0) == [0, 1, 2], "the result was lost"
    heartbeat.close()


SLEEPS = "import sys; print('up', flush=True); sys.stdin.read()"
KEEPS_THE_INTERPRETER = "print('up', flush=True); sum(range(10**12))"
#: What a spawned process is given to open is a pipe without a writer: its parent cannot be
#: interrupted until it is open.
HANGS_IN_A_CALL = """
import os, sys
os.mkfifo(sys.argv[1])
print('up', flush=True)
open_fifo = (os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_RDONLY, 0)
os.posix_spawn('/bin/true', ['true'], {}, file_actions=[open_fifo])
"""
CHECK_EVERY_S, STOPPED_AFTER_S = 0.05, 0.4


@contextmanager
def script(text: str, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has said that it is up."""
    process = subprocess.Popen(
        [sys.executable, "-Sc", text, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        try:
            yield process
        finally:
            process.kill()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Returns when the process has stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def watch(
    processes: list[subprocess.Popen[bytes]],
    seconds: float,
    before_each_check: Callable[[], None] = lambda: None,
) -> dict[int, str]:
    """Monitors processes for some time, and returns those that are found stopped, by number."""
    monitor = ProcessMonitor(CHECK_EVERY_S, STOPPED_AFTER_S)
    for process in processes:
        monitor.watch(process.pid)
    deadline, stopped = time.monotonic() + seconds, {}
    while not stopped and time.monotonic() < deadline:
        before_each_check()
        monitor.check()
        stopped = monitor.find_stopped("TD")
        time.sleep(CHECK_EVERY_S)
    monitor.close()
    monitor.close()
    return stopped


def test_a_process_that_waits_or_computes_is_not_found() -> None:
    with script(SLEEPS) as sleeper, script(KEEPS_THE_INTERPRETER) as computer:
        assert watch([sleeper, computer], 2 * STOPPED_AFTER_S) == {}


def test_a_stopped_process_is_found() -> None:
    with script(SLEEPS) as sleeper, script(SLEEPS) as stopped:
        stop(stopped)
        began = time.monotonic()
        assert watch([sleeper, stopped], 20) == {
            1: "has not run for 0 s: it is stopped, as by SIGSTOP"
        }
        assert time.monotonic() - began >= STOPPED_AFTER_S


def test_a_process_in_a_call_that_cannot_be_interrupted_is_found(tmp_path: Path) -> None:
    with script(HANGS_IN_A_CALL, tmp_path / "fifo") as hung:
        assert watch([hung], 20) == {
            0: "has not run for 0 s: it hangs in a system call that cannot be interrupted"
        }
        os.close(os.open(tmp_path / "fifo", os.O_WRONLY))  # lets the spawned process go


@pytest.mark.parametrize("text", [SLEEPS, KEEPS_THE_INTERPRETER])
def test_a_process_that_is_stopped_again_and_again_is_not_found(text: str) -> None:
    """Every check finds it stopped; between some of them it runs for a moment."""
    states = []

    with script(text) as process:

        def pulsate() -> None:
            if len(states) % 2:
                process.send_signal(signal.SIGCONT)
                os.waitpid(process.pid, os.WCONTINUED)
            if len(states) % 2 or not states:
                stop(process)
            states.append(Path(f"/proc/{process.pid}/stat").read_text().split()[2])

        assert watch([process], 3 * STOPPED_AFTER_S, pulsate) == {}
    assert len(states) > 4
    assert set(states) == {"T"}


def test_a_late_check_begins_anew() -> None:
    """As when this process was stopped together with the others, and is continued before them."""
    with script(SLEEPS) as process:
        stop(process)
        monitor = ProcessMonitor(CHECK_EVERY_S, STOPPED_AFTER_S)
        monitor.watch(process.pid)
        for _ in range(2):
            monitor.check()
            assert monitor.find_stopped("T") == {}
            checked_at = time.monotonic()
            time.sleep(1.5 * STOPPED_AFTER_S)
        monitor.check()
        assert monitor.resumed_at > checked_at + STOPPED_AFTER_S
        monitor.close()


def test_states_that_do_not_count_and_processes_that_are_gone() -> None:
    with script(SLEEPS) as process:
        stop(process)
        monitor = ProcessMonitor(CHECK_EVERY_S, 0)
        monitor.watch(process.pid)
        for _ in range(3):
            monitor.check()
        assert monitor.find_stopped("D") == {}
        assert list(monitor.find_stopped("T")) == [0]
    monitor.check()
    monitor.check()
    assert monitor.find_stopped("TD") == {}
    monitor.close()
