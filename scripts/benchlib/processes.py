"""Figures of processes from Linux's `/proc`, for the scripts that measure them, with no package
beyond the server's own."""

from __future__ import annotations

import os
import re
from pathlib import Path

#: Of the text of /proc/PID/stat behind the name: the parent, and user and system time in ticks.
_PARENT, _USER, _SYSTEM = 1, 11, 12


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat behind the name, which may hold blanks. Raises `OSError`
    if there is no such process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants(pid: int) -> list[int]:
    """Returns the ids of all descendants of a process, ascending."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                children.setdefault(int(_stat(int(entry.name))[_PARENT]), []).append(
                    int(entry.name)
                )
            except OSError:  # ended meanwhile
                continue
    found, rest = [], [pid]
    while rest:
        rest = [child for parent in rest for child in children.get(parent, [])]
        found += rest
    return sorted(found)


def worker_processes(pid: int) -> list[int]:
    """Returns the ids of the workers of a server, ascending; their names say what they are."""
    return [each for each in descendants(pid) if _name(each).startswith("aioinfer-w")]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:  # ended meanwhile
        return ""


def cpu_seconds(pid: int) -> float:
    """Returns the user and system time of a process."""
    fields = _stat(pid)
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")


def status_sum(pid: int, *names: str) -> int:
    """Returns the sum of some numbers of /proc/PID/status, such as `Threads`, or `VmRSS` in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(map(int, re.findall(rf"^(?:{'|'.join(names)}):\s+(\d+)", status, re.MULTILINE)))


def open_files(pid: int) -> list[str]:
    """Returns the targets of the file descriptors of a process."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found
