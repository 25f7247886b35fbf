"""Files without a name: their mode, ranks that find each other through one, and a process's stacks
in one."""

from __future__ import annotations

import os
import stat
import threading
import time
from typing import Any

import pytest
from torch import multiprocessing
from torch.distributed import FileStore

from aioinfer.ipc.anonymous_file import RendezvousFile, StackDump, anonymous_file
from aioinfer.ipc.heartbeat import Heartbeat
from aioinfer.ipc.ring import Ring


def mode(fd: int) -> int:
    return stat.S_IMODE(os.fstat(fd).st_mode)


def test_it_has_its_size_and_no_name() -> None:
    fd = anonymous_file("test", 4096)
    assert os.fstat(fd).st_size == 4096
    assert os.fstat(fd).st_nlink == 0
    assert not os.get_inheritable(fd)
    assert os.pread(fd, 4096, 0) == bytes(4096)
    os.close(fd)


def test_all_shared_memory_is_readable_by_the_owner_alone() -> None:
    ring, heartbeat, stacks = Ring(2), Heartbeat(2), StackDump()
    assert [mode(fd) for fd in (ring._memory_fd, heartbeat._fd, stacks._fd)] == [0o600] * 3
    for shared in (ring, heartbeat, stacks):
        shared.close()


def meet(rendezvous: RendezvousFile, rank: int, found: Any) -> None:
    store = FileStore(rendezvous.path, 2)
    store.set(f"rank {rank}", str(os.getpid()))
    found.put((rank, int(store.get(f"rank {1 - rank}"))))


@pytest.mark.slow
def test_two_processes_meet() -> None:
    rendezvous, context = RendezvousFile(), multiprocessing.get_context("spawn")
    status = os.fstat(rendezvous._fd)
    assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o600)
    found = context.Queue()
    processes = [context.Process(target=meet, args=(rendezvous, rank, found)) for rank in range(2)]
    for process in processes:
        process.start()
    others = dict(found.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert others == {0: processes[1].pid, 1: processes[0].pid}
    found.close()
    rendezvous.close()
    rendezvous.close()


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
