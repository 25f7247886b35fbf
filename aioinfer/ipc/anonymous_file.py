"""Anonymous files in memory, which processes share by inheriting their descriptors."""

from __future__ import annotations

import os


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
