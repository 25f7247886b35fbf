"""Finds worker processes, which have names of their own, and processes that have not ended."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from aioinfer.engine.engine import Engine
from aioinfer.executor.host_ranks import HostRanks
from aioinfer.executor.worker_executor import WorkerExecutor


def is_worker(process: psutil.Process) -> bool:
    """Whether a process is a worker; False if it has ended meanwhile."""
    try:
        return process.name().startswith("aioinfer-w")
    except psutil.NoSuchProcess:
        return False


def worker_processes(pid: int | None = None) -> list[psutil.Process]:
    """Returns the workers below a process (this one by default), in the order of their ranks."""
    found = filter(is_worker, psutil.Process(pid).children(recursive=True))
    return sorted(found, key=lambda process: process.pid)


def worker_pid(engine: Engine) -> int:
    """Returns the process of the first rank of an engine whose ranks are on this host."""
    assert isinstance(engine.executor, WorkerExecutor)
    (host,) = engine.executor.hosts
    assert isinstance(host, HostRanks)
    pid = host._processes[0].pid
    assert pid is not None
    return pid


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns the processes that are neither gone nor zombies."""

    def lives(process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if lives(process)]
