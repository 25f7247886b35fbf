"""Ranks find each other through a file that has no name."""

from __future__ import annotations

import os
import stat
from typing import Any

from torch import multiprocessing
from torch.distributed import FileStore

from aioinfer.ipc.meeting_file import MeetingFile


def meet(meeting: MeetingFile, rank: int, found: Any) -> None:
    store = FileStore(meeting.path, 2)
    store.set(f"rank {rank}", str(os.getpid()))
    found.put((rank, int(store.get(f"rank {1 - rank}"))))


def test_two_processes_meet() -> None:
    meeting, context = MeetingFile(), multiprocessing.get_context("spawn")
    status = os.fstat(meeting._fd)
    assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o600)
    found = context.Queue()
    processes = [context.Process(target=meet, args=(meeting, rank, found)) for rank in range(2)]
    for process in processes:
        process.start()
    others = dict(found.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert others == {0: processes[1].pid, 1: processes[0].pid}
    found.close()
    meeting.close()
    meeting.close()
