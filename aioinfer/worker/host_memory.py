"""Memory of the host: how much of it this process may have, and what the C library does with freed
memory.

`memory` compares the weights and the KV cache of a worker on a CPU with it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

# of malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = 2**31 - 1
_KEPT_ALLOCATION_BYTES = 2**30


def machine_memory() -> int:
    """Returns the bytes of memory that the machine has, or that its control groups (a container's
    limit, say) let this process have."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _control_groups())])


def available_memory() -> int:
    """Returns the bytes of memory that this process can still take, in the machine and in its
    control groups, where cached files give way."""
    free = [limit - used for limit, used in _control_groups()]
    with open("/proc/meminfo", encoding="ascii") as lines:
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return max(0, min([machine_memory(), *free]))


def _control_groups(
    memberships: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """Yields (limit, use without cached files) of each control group that bounds the memory of this
    process, in bytes: its own and those above, by version 2 or version 1 of the interface."""
    try:
        lines = memberships.read_text("utf-8").splitlines()
    except OSError:  # no such thing in this kernel
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = mount, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            root = mount / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        # in a container the path may be the host's, of which only the root is here
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (found := _read_group(folder, *names)):
                yield found


def _read_group(folder: Path, limit: str, use: str, prefix: str) -> tuple[int, int] | None:
    """Returns limit and use of a control group, None for one that has no limit or cannot be read.
    `prefix` marks the figures that include the groups below."""
    try:
        # version 2 writes "max" where there is no limit
        bound, used = (int((folder / name).read_text("ascii")) for name in (limit, use))
        figures = dict(
            line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines()
        )
    except (OSError, ValueError):
        return None
    cached = sum(int(figures.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return bound, max(0, used - cached)


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory for the allocations that follow.

    glibc otherwise returns large freed blocks to the kernel, and a step's intermediate tensors then
    cost a page fault for each 4 KiB again in every layer. Without glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_ALLOCATION_BYTES)
