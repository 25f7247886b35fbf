"""The stacks of a process's threads, which the process itself writes when it gets a signal.

`faulthandler` does it in the signal's handler, in C: it needs neither the interpreter's lock nor
the main thread, so a process that hangs in a library or waits for a GPU answers, too. One that is
stopped, or in a system call that cannot be interrupted, does not. Stacks are names of files and
functions and numbers of lines; no value of a variable is among them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from aioinfer.ipc.anonymous_file import AnonymousFile

_SIGNAL = signal.SIGUSR1
_MAX_BYTES = 1 << 20


class StackDump(AnonymousFile):
    """The stacks of one process, in anonymous memory that it shares with whoever asks for them."""

    def __init__(self) -> None:
        super().__init__("aioinfer-stacks")

    def register(self) -> None:
        """Has this process write its stacks whenever they are requested. Until then a request ends
        it."""
        faulthandler.register(_SIGNAL, file=self._fd, all_threads=True, chain=False)

    def request(self, pid: int) -> None:
        """Asks process `pid`, which has registered, for its stacks. Does not wait for them."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)

    def write_own(self) -> None:
        """Writes the stacks of this process."""
        faulthandler.dump_traceback(file=self._fd, all_threads=True)

    def read(self) -> str:
        """Returns what has been written so far, or an empty text."""
        return os.pread(self._fd, _MAX_BYTES, 0).decode(errors="replace")
