"""Anonymous files in memory, which processes share by inheriting their descriptors.

- `AnonymousFile`: their base class.
- `RendezvousFile`: where the ranks of one host find each other, for torch's `FileStore`. A
  `TCPStore` listens on a port that every user of the host can connect to, without authentication;
  this file has no name, so no other user can open it (`/proc/PID/fd` is closed to them), and
  nothing of it is left behind, whatever ends the processes. Ranks on several hosts need a
  `TCPStore`: `RankSpec.master_address` names it.
- `StackDump`: the stacks of a process's threads, which the process itself writes when it gets a
  signal. `faulthandler` does it in the signal's handler, in C: it needs neither the interpreter's
  lock nor the main thread, so a process that hangs in a library or waits for a GPU answers, too.
  A process that is stopped, or in a system call that cannot be interrupted, does not. Stacks are
  names of files and functions and numbers of lines; no value of a variable is among them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections import Counter
from multiprocessing import reduction
from typing import Any, Self


def anonymous_file(name: str, size: int = 0) -> int:
    """Returns the descriptor of a new file in memory, `size` bytes of zeros, that nothing but its
    descriptors refers to. `name` is for lists of open files only.

    Its mode lets the owner alone read and write it. The kernel makes such files readable by all
    users, and relies on `/proc/PID/fd` being closed to other users.
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


class RendezvousFile(AnonymousFile):
    """The file of one world of ranks; for one start of them."""

    def __init__(self) -> None:
        super().__init__("aioinfer-rendezvous")

    @property
    def path(self) -> str:
        """A path by which this process can open the file, and no other."""
        return f"/proc/self/fd/{self._fd}"


class RendezvousFiles:
    """The rendezvous files of worlds that span several engines. At its n-th start, an engine's
    ranks meet the ranks of all other engines at their n-th starts."""

    def __init__(self, num_engines: int):
        self._num_engines = num_engines
        self._starts: Counter[int] = Counter()
        self._files: dict[int, RendezvousFile] = {}

    def next(self, engine: int) -> RendezvousFile:
        """Returns the file for the next start of an engine, which closes it."""
        start = self._starts[engine]
        self._starts[engine] += 1
        if start not in self._files:
            self._files[start] = RendezvousFile()
        file = self._files[start].duplicate()
        if all(self._starts[each] > start for each in range(self._num_engines)):
            self._files.pop(start).close()
        return file


_SIGNAL = signal.SIGUSR1
_MAX_BYTES = 1 << 20


class StackDump(AnonymousFile):
    """The stacks of one process, in anonymous memory that it shares with the processes that ask for
    them."""

    def __init__(self) -> None:
        super().__init__("aioinfer-stacks")

    def register(self) -> None:
        """Makes this process write its stacks whenever they are requested. Before this call a
        request ends the process."""
        faulthandler.register(_SIGNAL, file=self._fd, all_threads=True, chain=False)

    def request(self, pid: int) -> None:
        """Asks process `pid`, which has registered, for its stacks. Does not wait for them."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)

    def write_own(self) -> None:
        """Writes the stacks of this process."""
        faulthandler.dump_traceback(file=self._fd, all_threads=True)

    def read(self) -> str:
        """Returns the stacks written so far, or an empty text."""
        return os.pread(self._fd, _MAX_BYTES, 0).decode(errors="replace")
