"""Finds worker processes, which have names of their own, and processes that have not ended."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


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


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns the processes that are neither gone nor zombies."""

    def lives(process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if lives(process)]
