"""Anonymous files in memory, which processes share by inheriting their descriptors."""

from __future__ import annotations

import os
from multiprocessing import reduction
from typing import Any, Self


def anonymous_file(name: str, size: int = 0) -> int:
    """Returns the descriptor of a new file in memory, `size` bytes of zeros, that nothing but its
    descriptors refers to. `name` is for lists of open files only.

    Its mode lets the owner alone read and write it. The kernel makes such files readable by
    everybody, and relies on `/proc/PID/fd` being closed to other users.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size)
    return fd


class AnonymousFile:
    """An anonymous file of several processes.

    It can be pickled only for a process that is being spawned, which inherits the descriptor.
    """

    def __init__(self, name: str):
        """Makes the file; see `anonymous_file`."""
        self._fd = anonymous_file(name)

    def duplicate(self) -> Self:
        """Returns the same file with a descriptor of its own."""
        other = self.__class__.__new__(self.__class__)
        other._fd = os.dup(self._fd)
        return other

    def close(self) -> None:
        """Closes the descriptor. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fd = state["fd"].detach()
