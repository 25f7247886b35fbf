"""Shared memory is the owner's alone."""

from __future__ import annotations

import os
import stat

from aioinfer.ipc.anonymous_file import anonymous_file
from aioinfer.ipc.heartbeat import Heartbeat
from aioinfer.ipc.ring import Ring
from aioinfer.ipc.stack_dump import StackDump


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
