"""Where the ranks of one host find each other: an anonymous file for torch's `FileStore`.

A `TCPStore` listens on a port that every user of the host can connect to, without authentication.
This file has no name, so nobody else can open it (`/proc/PID/fd` is closed to other users), and
nothing of it is left behind, whatever ends the processes. Ranks on several hosts need a
`TCPStore`: `RankSpec.master_address` names it.
"""

from __future__ import annotations

import os
from multiprocessing import reduction
from typing import Any

from aioinfer.ipc.anonymous_file import anonymous_file


class MeetingFile:
    """The file of one world of ranks; for one start of them.

    It can be pickled only for a process that is being spawned, which inherits the descriptor.
    """

    def __init__(self) -> None:
        self._fd = anonymous_file("aioinfer-meeting")

    @property
    def path(self) -> str:
        """A path by which this process can open the file, and no other."""
        return f"/proc/self/fd/{self._fd}"

    def close(self) -> None:
        """Closes the descriptor. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fd = state["fd"].detach()
